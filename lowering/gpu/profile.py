"""A profile of instruction times for XLA's latency-hiding scheduler, estimated or measured, and its effect.

Without a profile, the scheduler of XLA:GPU uses equal costs for all collectives and for all matrix products.
Profile guided latency estimation (PGLE) provides microseconds for each instruction, which JAX otherwise
measures in the first runs of a step. The profile is a `ProfiledInstructionsProto` in text form.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from commplan import io
from commplan.diagnostics import Diagnostic, Note, Severity, fail
from commplan.lowering.gpu.estimate import Estimate, Machine, estimate, seconds_of, seconds_of_work
from commplan.lowering.gpu.targets import rates, rates_of_kind
from commplan.lowering.hlo.reader import read_module
from commplan.lowering.hlo.step import CompiledCollective, CompiledStep
from commplan.lowering.hlo.walk import audit_text

EXCHANGE_WEIGHT = 2.0
"""Factor applied to the estimated time of an all-to-all. The scheduler works from the end of a step to its
beginning, and reserves more computation for overlap if the factor is larger. Among 1, 2 and 3, this factor
was the best or within 0.01 ms of it for expert exchange on 8, 32 and 128 H100 (`bench.compiled`)."""

ProfileChoice = bool | str | Path | Machine
"""The argument `pgle` of `run.jit`: a target or rates to estimate for, the file of a measured profile, True
to estimate for the devices of the mesh, or False for no profile."""

_NAMED = 0.5  # the least share of a step's collectives and products that a measured profile should name


def profile(compiled: str, machine: Machine) -> bytes:
    """Estimate the time of each instruction of a compiled step, for the compile option `fdo_profile`.

    Args:
        compiled: The text of the compiled step.
        machine: The rates to estimate with.

    Returns:
        A `ProfiledInstructionsProto` in text form.

    Raises:
        HloError: See `audit_text`.
    """
    step = audit_text(compiled)
    times = dict.fromkeys(_conditions(compiled), 0.0) | dict(_times(step, machine))
    for collective in step.collectives:
        if collective.kind == "all_to_all":
            times[collective.name] *= EXCHANGE_WEIGHT
    lines = (f'costs {{ name: "{name}" cost_us: {1e6 * seconds:.3f} }}\n' for name, seconds in times.items())
    return "".join(lines).encode()


def _conditions(compiled: str) -> Iterator[str]:
    """The instructions of loop conditions, whose time is negligible."""
    module = read_module(compiled)
    for computation in module.computations.values():
        for loop in computation.instructions:
            condition = (loop.attribute("condition") or "").lstrip("%") if loop.opcode == "while" else ""
            if condition:
                yield from (
                    instruction.scheduled_name for instruction in module.computations[condition].instructions
                )


def _times(step: CompiledStep, machine: Machine) -> Iterator[tuple[str, float]]:
    """Seconds of every product, move, collective and loop by name, inner loops before outer ones."""
    within = defaultdict[str, float](float)  # seconds of each computation, including its loops
    for work in (*step.products, *step.moves):
        seconds = seconds_of_work(work, machine)
        within[work.computation] += seconds
        yield work.name, seconds
    for collective in step.collectives:
        seconds = seconds_of(collective, machine)
        if collective.start == collective.done:
            within[collective.computation] += seconds
        yield collective.name, seconds
    for loop in reversed(step.loops):  # outer loops precede inner loops in `step.loops`
        seconds = (loop.trips or 1) * within[loop.body]
        within[loop.computation] += seconds
        yield loop.name, seconds


class CollectiveShift(msgspec.Struct, frozen=True):
    """A collective without and with a profile; pairs are (without, with).

    Attributes:
        phase: Phase of the plan; empty if not part of the plan.
        line: Plan line; 0 if not part of the plan.
        collective: Description of the collective without a profile.
        kind: See `CompiledCollective`.
        started: Number of products issued before its start.
        awaited: Number of products issued before its done.
        exposed: Estimated exposed seconds.
    """

    phase: str
    line: int
    collective: str
    kind: str
    started: tuple[int, int]
    awaited: tuple[int, int]
    exposed: tuple[float, float]

    @property
    def moved(self) -> bool:
        """Whether its start or done moved relative to products."""
        return self.started[0] != self.started[1] or self.awaited[0] != self.awaited[1]


def shifts(
    before: CompiledStep, after: CompiledStep, costs: tuple[Estimate, Estimate]
) -> tuple[CollectiveShift, ...]:
    """Compare the collectives of a step compiled without and with a profile.

    Args:
        before: The step compiled without a profile.
        after: The step compiled with a profile.
        costs: The estimates of both.

    Returns:
        One item for each collective that both steps have by the same name, in the order of `before`.
    """
    by_name = {collective.name: collective for collective in after.collectives}
    exposed = [{wait.name: wait.exposed for wait in cost.waits} for cost in costs]
    return tuple(
        _shift(before, collective, after, by_name[collective.name], exposed[0].get(collective.name, 0.0),
               exposed[1].get(collective.name, 0.0))
        for collective in before.collectives
        if collective.name in by_name
    )  # fmt: skip


def _shift(
    before: CompiledStep,
    first: CompiledCollective,
    after: CompiledStep,
    second: CompiledCollective,
    *exposed: float,
) -> CollectiveShift:
    starts = before.before(first), after.before(second)
    hidden = len(before.hidden(first)), len(after.hidden(second))
    awaited = starts[0] + hidden[0], starts[1] + hidden[1]
    phase, line = first.scopes[0] if first.scopes else ("", 0)
    return CollectiveShift(phase, line, str(first), first.kind, starts, awaited, (exposed[0], exposed[1]))


class LatencyProfile(msgspec.Struct, frozen=True):
    """A source of instruction times for `run.jit(.., pgle=..)`.

    Attributes:
        source: Description, equal on all processes that have the same profile.
        machine: The rates to estimate with; None for a measured profile.
        measured: The contents of the file of a measured profile; empty for an estimated one.
    """

    source: str
    machine: Machine | None = None
    measured: bytes = b""

    def recompile(self, plain: Any, again: Callable[[bytes], Any]) -> Any:
        """Return the executable to run.

        Estimated times are used only if the same estimate finds that they make the step faster. Warns
        (CP0860) if a measured profile names few instructions of the step.

        Args:
            plain: The executable compiled without a profile.
            again: A function that compiles the step with a profile and returns the executable.
        """
        if self.machine is None:
            self._check(plain.as_text())
            return again(self.measured)
        machine = self.machine
        executables = [plain, again(profile(plain.as_text(), machine))]
        return min(
            executables, key=lambda executable: estimate(audit_text(executable.as_text()), machine).total
        )

    def _check(self, text: str) -> None:
        """Warn if the profile names few of the collectives and products of a compiled step."""
        step = audit_text(text)
        names = [item.name for item in (*step.collectives, *step.products)]
        named = sum(map(self._names, names))
        if named < _NAMED * len(names):
            _warn(
                f"{self.source} names {named} of the {len(names)} collectives and products of the step",
                "it was measured for another step, or with other versions or options: measure it again",
            )

    def _names(self, instruction: str) -> bool:
        """Whether the profile, text or a serialized message, has this instruction.

        A serialized name follows its field tag and its length. Lengths above 127 take two bytes and are not
        found, which is enough for a warning.
        """
        name = instruction.encode()
        return b'"%s"' % name in self.measured or b"\n%c%s" % (min(len(name), 127), name) in self.measured


def latency_profile(choice: ProfileChoice, devices: Sequence[Any]) -> LatencyProfile | None:
    """Return the profile for `run.jit(.., pgle=choice)`, or None if the step is compiled without one.

    Warns (CP0860) for devices other than GPUs.

    Args:
        choice: The value of `pgle`.
        devices: The devices of the mesh, in row-major order.

    Raises:
        CommplanError: CP1150 for an unknown target or invalid rates; CP0859 for a file that is not a profile,
            and for True if the kind of machine does not follow from the devices.
    """
    if choice is False:
        return None
    kinds = {device.platform for device in devices} or {"cpu"}
    result: LatencyProfile | None = None
    if isinstance(choice, str | Path) and _is_path(choice):
        result = _read_measured(choice)
    elif choice is not True or kinds == {"gpu"}:
        machine = _machine_of(devices) if choice is True else rates(choice)  # pyright: ignore[reportArgumentType]
        result = LatencyProfile(f"times estimated for {machine}", machine)
    if kinds == {"gpu"}:
        return result
    _warn(
        f"run.jit has pgle={choice!r}, but compiles for {' and '.join(sorted(kinds)).upper()} devices",
        "only XLA's scheduler for GPUs uses a profile: the step is compiled without one",
    )
    return None


def _is_path(choice: str | Path) -> bool:
    """Whether it names a file rather than a target, such as `h100:4x8`."""
    return isinstance(choice, Path) or "." in choice or "/" in choice


def _read_measured(path: str | Path) -> LatencyProfile:
    """The measured profile of a file; raises CP0859. A serialized message begins with the tag of a field."""
    forms = "expected a ProfiledInstructionsProto, as text or serialized, as JAX and XLA write it for PGLE"
    try:
        data = io.read(path, io.SCHEDULE)
    except OSError as error:
        fail("CP0859", f"{path} cannot be read: {error.strerror or error}", forms)
    if b"costs {" not in data and not data.startswith(b"\n"):
        fail("CP0859", f"{path} is not a profile of instructions", forms)
    digest = hashlib.sha256(data).hexdigest()[:16]
    return LatencyProfile(f"profile {Path(path).name} (sha256 {digest})", measured=data)


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
