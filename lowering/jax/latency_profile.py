"""Profile guided latency estimation (PGLE) of one compilation: XLA's scheduler for GPUs is told what each
instruction of a step takes, as estimated for a machine or as measured on one."""

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

Given = bool | str | Path | Machine
_NAMED = 0.5  # of the collectives and products of a step, which a measured profile should name


class LatencyProfile(msgspec.Struct, frozen=True):
    """Where the times come from: estimated for `machine`, or `measured`, the bytes of a profile.

    source: in words, the same on all processes that are given the same. unpipelined: the options that switch
    off the pipelining of all-reduces; {} if the plan does not pipeline them, or the user has set that option.
    """

    source: str
    machine: Machine | None = None
    measured: bytes = b""
    unpipelined: Mapping[str, Value] = {}

    def recompile(self, plain: Any, again: Callable[..., Any]) -> Any:
        """The executable to run: see `_jit.with_profile`.

        With estimated times it is the one whose step is fastest by the same estimate, which may be `plain`;
        where loops have all-reduces, also compiled with `unpipelined`;
        where exchanges and buckets share links, also with these in the best order that is found.
        Warns (CP0860) where a measured profile names little of the step.
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
        if named < _NAMED * len(names):
            _warn(
                f"{self.source} names {named} of the {len(names)} collectives and products of the step",
                "it is of another step, or of a compilation by other versions or options: measure it anew",
            )

    def _names(self, instruction: str) -> bool:
        """Whether the profile has this instruction, be it text or a serialized message."""
        name = instruction.encode()
        return b'"%s"' % name in self.measured or b"\n%c%s" % (min(len(name), 127), name) in self.measured


def latency_profile(given: Given, devices: Sequence[Any]) -> LatencyProfile | None:
    """What `run.jit(.., pgle=given)` means for `devices`, in the mesh's row-major order; None for nothing.

    Warns (CP0860) for devices other than GPUs. Raises CP1150 for a target or rates that are none, CP0859 for
    a file that is no profile, and for True where the devices do not tell what machine they are.
    """
    if given is False:
        return None
    kinds = {device.platform for device in devices} or {"cpu"}
    own: LatencyProfile | None = None
    if isinstance(given, str | Path) and _is_path(given):
        own = _measured(given)
    elif given is not True or kinds == {"gpu"}:
        machine = _machine_of(devices) if given is True else rates(given)  # pyright: ignore[reportArgumentType]
        own = LatencyProfile(f"times estimated for {machine}", machine)
    if kinds == {"gpu"}:
        return own
    _warn(
        f"run.jit is given pgle={given!r}, and compiles for {' and '.join(sorted(kinds)).upper()} devices",
        "XLA's scheduler for GPUs alone reads a profile: the step is compiled without",
    )
    return None


def _is_path(given: str | Path) -> bool:
    return isinstance(given, Path) or "." in given or "/" in given


def _measured(given: str | Path) -> LatencyProfile:
    try:
        data = io.read(given, io.SCHEDULE)
    except OSError as error:
        fail("CP0859", f"{given} cannot be read: {error.strerror or error}", _FORMS)
    if b"costs {" not in data and not data.startswith(b"\n"):
        fail("CP0859", f"{given} is no profile of instructions", _FORMS)
    digest = hashlib.sha256(data).hexdigest()[:16]
    return LatencyProfile(f"profile {Path(given).name} (sha256 {digest})", measured=data)


_FORMS = "expected a ProfiledInstructionsProto, as text or serialized: what JAX and XLA write for PGLE"


def _machine_of(devices: Sequence[Any]) -> Machine:
    """The rates of `devices` by their kind; each run of those of one process is a host."""
    kind = str(devices[0].device_kind) if devices else ""
    runs = [len(list(run)) for _, run in groupby(device.process_index for device in devices)]
    machine = rates_of_kind(kind, len(runs), runs[0]) if len(set(runs)) == 1 else None
    if machine is None or (len(runs) > 1 and runs[0] == 1):
        fail(
            "CP0859",
            f"pgle=True does not tell what machine {len(devices)} x {kind or 'unnamed devices'} are",
            "say so: run.jit(step, pgle='h100:4x8'), hosts x devices per host, or pgle=Machine(..)",
        )
    return machine


def _warn(message: str, note: str) -> None:
    problem = Diagnostic("CP0860", message, None, (Note(note),), severity=Severity.WARNING)
    warnings.warn(str(problem), RuntimeWarning, 3)
