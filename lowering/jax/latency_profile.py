"""Profile guided latency estimation (PGLE) for one compilation.

XLA's GPU scheduler receives the latency of each instruction, estimated for a machine or measured on one.
"""

from __future__ import annotations

import functools
import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from commplan import io
from commplan.diagnostics import Diagnostic, Note, Severity, fail
from commplan.lowering.audit.estimate import Machine, estimate
from commplan.lowering.audit.profile import profile
from commplan.lowering.audit.targets import rates, rates_of_kind
from commplan.lowering.audit.walk import audit_text
from commplan.lowering.compiler_options import Value
from commplan.lowering.jax._jit import PROFILE
from commplan.lowering.jax.link_order import in_order, link_order

ProfileSource = bool | str | Path | Machine
_MIN_NAMED_SHARE = 0.5  # of the collectives and products of a step, for a measured profile


class LatencyProfile(msgspec.Struct, frozen=True):
    """A source of latencies: estimated for `machine`, or `measured`.

    Attributes:
        source: A description that is the same on all processes with the same source.
        machine: The machine, for estimates.
        measured: The content of a profile file.
        unpipelined: The options that disable the pipelining of all-reduces. Empty if the plan does not
            pipeline them, or if the user has set that option.
    """

    source: str
    machine: Machine | None = None
    measured: bytes = b""
    unpipelined: Mapping[str, Value] = {}

    def recompile(self, plain: Any, again: Callable[..., Any]) -> Any:
        """Return the executable to run; see `_jit.with_profile`.

        With estimated latencies, several candidates are compiled, and the fastest by the same estimate is
        returned:

        - `plain`, and compiled with a profile;
        - if loops contain all-reduces, the same with `unpipelined`;
        - if exchanges and buckets share links, the same with the best order found.

        Warns (CP0860) if a measured profile covers little of the step.
        """
        if self.machine is None:
            self._check(plain.as_text())
            return again({PROFILE: self.measured})
        step = audit_text(plain.as_text())
        executables = [plain, again({PROFILE: profile(plain.as_text(), self.machine)})]
        looped = any(item.loops and item.kind == "all_reduce" for item in step.collectives)
        if looped and self.unpipelined:
            off = self.unpipelined
            executables.append(again(off))
            executables.append(again({**off, PROFILE: profile(executables[-1].as_text(), self.machine)}))
        order = link_order(plain.as_text(), self.machine)
        pinned = again({}, functools.partial(in_order, order=order)) if order else None
        if pinned is not None:
            times = profile(pinned.as_text(), self.machine, exchange_weight=1)
            executables += [pinned, again({PROFILE: times}, functools.partial(in_order, order=order))]
        return min(executables, key=self._seconds)

    def _seconds(self, executable: Any) -> float:
        assert self.machine is not None
        return estimate(audit_text(executable.as_text()), self.machine).total

    def _check(self, text: str) -> None:
        step = audit_text(text)
        names = [item.name for item in (*step.collectives, *step.products)]
        named = sum(map(self._names, names))
        if named < _MIN_NAMED_SHARE * len(names):
            _warn(
                f"{self.source} names {named} of the {len(names)} collectives and products of the step",
                "it was measured for another step, or with other versions or options: measure it again",
            )

    def _names(self, instruction: str) -> bool:
        """Whether the profile, as text or as a serialized message, contains this instruction."""
        name = instruction.encode()
        return b'"%s"' % name in self.measured or b"\n%c%s" % (min(len(name), 127), name) in self.measured


def latency_profile(source: ProfileSource, devices: Sequence[Any]) -> LatencyProfile | None:
    """The latency profile of `run.jit(.., pgle=source)`; None if there is none.

    Args:
        source: False for none, True for an estimate for these devices, a target such as "h100:4x8", a
            machine, or the path of a profile.
        devices: The devices in the mesh's row-major order. Devices other than GPUs cause a warning (CP0860).

    Raises:
        CommplanError: CP1150 for an unknown target or invalid rates. CP0859 for a file that is not a profile,
            and for True if the machine of the devices is unknown.
    """
    if source is False:
        return None
    kinds = {device.platform for device in devices} or {"cpu"}
    selected: LatencyProfile | None = None
    if isinstance(source, str | Path) and _is_path(source):
        selected = _measured(source)
    elif source is not True or kinds == {"gpu"}:
        machine = _machine_of(devices) if source is True else rates(source)  # pyright: ignore[reportArgumentType]
        selected = LatencyProfile(f"times estimated for {machine}", machine)
    if kinds == {"gpu"}:
        return selected
    _warn(
        f"run.jit has pgle={source!r}, but compiles for {' and '.join(sorted(kinds)).upper()} devices",
        "only XLA's scheduler for GPUs uses a profile: the step is compiled without one",
    )
    return None


def _is_path(path: str | Path) -> bool:
    return isinstance(path, Path) or "." in path or "/" in path


def _measured(path: str | Path) -> LatencyProfile:
    try:
        data = io.read(path, io.SCHEDULE)
    except OSError as error:
        fail("CP0859", f"{path} cannot be read: {error.strerror or error}", _FORMS)
    if b"costs {" not in data and not data.startswith(b"\n"):
        fail("CP0859", f"{path} is not a profile of instructions", _FORMS)
    digest = hashlib.sha256(data).hexdigest()[:16]
    return LatencyProfile(f"profile {Path(path).name} (sha256 {digest})", measured=data)


_FORMS = "expected a ProfiledInstructionsProto, as text or serialized, as JAX and XLA write it for PGLE"


def _machine_of(devices: Sequence[Any]) -> Machine:
    """The rates of `devices` by device kind. Consecutive devices of one process are a host."""
    kind = str(devices[0].device_kind) if devices else ""
    runs = [len(list(run)) for _, run in groupby(device.process_index for device in devices)]
    machine = rates_of_kind(kind, len(runs), runs[0]) if len(set(runs)) == 1 else None
    if machine is None or (len(runs) > 1 and runs[0] == 1):
        fail(
            "CP0859",
            f"pgle=True needs rates for {len(devices)} x {kind or 'unnamed devices'}, which are unknown",
            "name the machine: run.jit(step, pgle='h100:4x8'), hosts x devices per host, or pgle=Machine(..)",
        )
    return machine


def _warn(message: str, note: str) -> None:
    problem = Diagnostic("CP0860", message, None, (Note(note),), severity=Severity.WARNING)
    warnings.warn(str(problem), RuntimeWarning, 3)
