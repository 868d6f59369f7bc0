"""The audit of a compiled step: every planned collective, its compiled form, and its estimated cost.

`audit` compares the phases with the step (`compare`), determines the causes of differences (`causes`) and
estimates times (`gpu.estimate`). `Audit` formats the result as text and as JSON.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import msgspec

from commplan.diagnostics import fail, plural
from commplan.ir.schedule import Schedule
from commplan.ir.types import timed
from commplan.lowering.audit.causes import Causes, compiled_otherwise
from commplan.lowering.audit.compare import StepComparison, StepDifference, match
from commplan.lowering.audit.expect import Expected, expected
from commplan.lowering.audit.layers import compare_unordered, layer_collectives
from commplan.lowering.audit.tapped import expected_of_taps
from commplan.lowering.gpu.estimate import Estimate, Machine, estimate
from commplan.lowering.gpu.profile import EXCHANGE_WEIGHT, CollectiveShift, shifts
from commplan.lowering.hlo.step import CompiledCollective, CompiledStep, Memory, StepText
from commplan.lowering.hlo.walk import audit_text

_MESH = re.compile(r"#sdy\.mesh<\[([^\]]*)\]")  # a mesh in the text that JAX passes to XLA


class Row(msgspec.Struct, frozen=True):
    """A row of the table: consecutive equal collectives.

    Attributes:
        phase: The phase; empty if no plan requested the collective.
        line: The plan line; 0 if no plan requested the collective.
        expected: The planned collective as text; empty if it is not part of the plan.
        found: The compiled collectives as text, separated by `; `; empty if missing.
        cause: One word, see `causes`; empty if it matches the plan.
        count: Number of collectives.
        seconds: Estimated seconds of all; None without a machine, or if missing.
        exposed: Estimated seconds of all for which the step waits; None if `seconds` is None.
    """

    phase: str
    line: int
    expected: str
    found: str
    cause: str
    count: int = 1
    seconds: float | None = None
    exposed: float | None = None


class Audit(msgspec.Struct, frozen=True):
    """The result of comparing a compiled step with its plan. `str` formats it as a table and sentences.

    Attributes:
        plan: Name of the plan.
        phases: The audited phases.
        skipped: Phases that are not audited because the step does not call them.
        rows: The collectives, first the planned ones in order, then the others.
        differences: The differences with their causes; empty if the step has exactly the plan's collectives.
        machine: The rates of the estimate; None if no estimate was requested.
        estimate: The estimated times; None without a machine.
        profiled: The step compiled with a profile; None without one, or without a machine.
        memory: Memory of one device; None if unknown.
        pgle: For `run.jit(.., pgle=..)`, whether a profile is used, which is the case if it makes the step
            faster; None for other steps.
    """

    plan: str
    phases: tuple[str, ...]
    skipped: tuple[str, ...]
    rows: tuple[Row, ...]
    differences: tuple[StepDifference, ...]
    machine: Machine | None = None
    estimate: Estimate | None = None
    profiled: Profiled | None = None
    memory: Memory | None = None
    pgle: bool | None = None

    @property
    def ok(self) -> bool:
        """Whether the step has exactly the plan's collectives, also if compiled with a profile."""
        return not self.differences and (self.profiled is None or self.profiled.audit.ok)

    def __str__(self) -> str:
        planned = sum(row.count for row in self.rows if not row.cause)
        head = f"plan {self.plan}: {plural(planned, 'collective')} as planned"
        head += f", {plural(len(self.differences), 'difference')}" if self.differences else ""
        if self.pgle is not None:
            why = "with a profile" if self.pgle else "without a profile, which makes it no faster"
            head += f"; compiled by run.jit {why} (pgle)"
        lines = [head, *self._table()]
        lines += [f"  not called: {', '.join(self.skipped)}"] if self.skipped else []
        lines += _reasons(self.differences)
        return "\n".join([*lines, *self._memory(), *self._costs(), *self._profile_lines()])

    def data(self) -> dict[str, Any]:
        """The audit as JSON data."""
        return {
            "phases": list(self.phases), "skipped": list(self.skipped), "ok": self.ok,
            "rows": msgspec.to_builtins(self.rows),
            "differences": [_data_of(difference) for difference in self.differences],
            "estimate": msgspec.to_builtins(self.estimate), "machine": self.machine and self.machine.data(),
            "profiled": self.profiled and self.profiled.data(), "memory": msgspec.to_builtins(self.memory),
            "pgle": self.pgle,
        }  # fmt: skip

    def _table(self) -> list[str]:
        if not self.rows:
            return [f"  no collectives in {', '.join(self.phases) or 'the step'}"]
        cells = [("phase", "line", "plan", "compiled", "takes", "waits"), *map(_cells, self.rows)]
        return _align([row if self.estimate else row[:4] for row in cells])

    def _memory(self) -> list[str]:
        return [] if self.memory is None else ["", str(self.memory)]

    def _costs(self) -> list[str]:
        if self.estimate is None or self.machine is None:
            return []
        machine, seconds = self.machine, self.estimate
        waits = f"the compiled order waits {timed(seconds.exposed)} for collectives"
        until = seconds.computation - seconds.after
        after = f" and {timed(seconds.after)} after it" if seconds.after else ""
        waits += f" that take {timed(seconds.communication)} one by one, next to"
        waits += f" {timed(until)} of computation{after}"
        return ["", f"{waits}: a step of {timed(seconds.total)}", f"estimated for {machine}"]

    def _profile_lines(self) -> list[str]:
        """The effect of a profile: times, shifts of collectives, and differences only with the profile."""
        if self.profiled is None or self.estimate is None or self.profiled.audit.estimate is None:
            return []
        before, after = self.estimate, self.profiled.audit.estimate
        times = "these times"
        if any(shift.kind == "all_to_all" for shift in self.profiled.shifts):
            times += f", {EXCHANGE_WEIGHT:g} times as long for an exchange"
        text = f"with a profile of {times} (PGLE) it waits {timed(after.exposed)} instead of "
        text += f"{timed(before.exposed)}, in a step of {timed(after.total)} instead of {timed(before.total)}"
        moved = [shift for shift in self.profiled.shifts if shift.moved]
        count = plural(len(self.profiled.shifts), "collective")
        lines = ["", text + f"; {len(moved) or 'none'} of {count} moved"]
        heads = ("phase", "line", "collective", "starts after", "awaited after", "waits")
        lines += _align([heads, *map(_describe_shifts, moved)]) if moved else []
        new = [
            d for d in self.profiled.audit.differences if d.text not in {old.text for old in self.differences}
        ]
        return [*lines, *(["", "only with the profile:"] if new else []), *_reasons(new)]


class Profiled(msgspec.Struct, frozen=True):
    """A step compiled with a profile of estimated times.

    Attributes:
        audit: The audit of this step.
        shifts: The collectives that the step has with and without the profile, including unmoved ones.
    """

    audit: Audit
    shifts: tuple[CollectiveShift, ...]

    def data(self) -> dict[str, Any]:
        """The audit as JSON data, with the number of collectives and the shifts of those that moved."""
        moved = [
            {
                "phase": shift.phase, "line": shift.line, "collective": shift.collective,
                "started": shift.started, "awaited": shift.awaited, "exposed": shift.exposed,
            }
            for shift in self.shifts
            if shift.moved
        ]  # fmt: skip
        fields = {key: value for key, value in self.audit.data().items() if key != "profiled"}
        return {**fields, "collectives": len(self.shifts), "moved": moved}


def audit(
    schedule: Schedule,
    text: StepText,
    *,
    mesh: Mapping[str, int] | None = None,
    phases: Sequence[str] = (),
    machine: Machine | None = None,
) -> Audit:
    """Compare a compiled step with the schedule of its plan.

    Args:
        schedule: The schedule.
        text: The compiled step. Schedules in it that were compiled differently are causes of differences.
        mesh: Sizes of the axes in the order of device numbering; None for those in the text, or if it has
            none, those of the plan.
        phases: Phases to audit; if empty, those that the step calls and those that run `each step`.
        machine: Rates for an estimate of times. If None, there is no estimate, and the step with a profile is
            ignored.

    Raises:
        CommplanError: CP1151 for a phase that the plan does not have; and the errors of `expected`.
        HloError: If a text of the step is not HLO.
    """
    step, traced_step = audit_text(text.compiled), audit_text(text.traced)
    called = dict.fromkeys(
        scope[0] for part in (traced_step, step) for f in part.collectives for scope in f.scopes
    )
    check_phases(schedule, phases)
    is_step = {phase.name: phase.kind == "step" for phase in schedule.phases}
    chosen = [*phases] or [
        *called,
        *(name for name, is_each_step in is_step.items() if is_each_step and name not in called),
    ]
    sizes = _Mesh(mesh or _mesh_in(text.traced, schedule) or schedule.mesh_sizes)

    # The planned collectives: of calls of phases, of layers and of taps.
    # The step may also call phases of other programs, whose schedules are unknown.
    names = [name for name in chosen if name in is_step]
    planned_items = {name: expected(schedule, name, sizes, text.platform) for name in names}
    called_items = [item for items in planned_items.values() for item in items]
    own_layers = (layer for layer in text.layers if layer.plan == schedule.plan)
    layered = layer_collectives(traced_step, own_layers, called_items, sizes, text.platform)
    tapped = expected_of_taps(traced_step, schedule, planned_items, sizes, text.platform)
    lines = {item.scope for item in layered}
    unordered = (*layered, *(item for item in tapped if item.scope not in lines))

    # The compiled collectives without a plan, except those of phases that are not audited, are differences.
    report = _compare_phases(planned_items, unordered, step)
    planned = {id(collective) for collective in report.found}
    ignored = set(is_step) - set(planned_items)
    unplanned = [
        collective
        for collective in step.collectives
        if id(collective) not in planned and not any(phase in ignored for phase, _ in collective.scopes)
    ]
    differences = Causes(report, traced_step, compiled_otherwise(schedule, text.programs)).all(unplanned)

    costs = estimate(step, machine) if machine else None
    rows = _rows(report, differences, costs)
    skipped = tuple(name for name in is_step if name not in planned_items and not phases)
    result = Audit(
        schedule.plan,
        tuple(planned_items),
        skipped,
        rows,
        differences,
        machine,
        costs,
        memory=text.memory,
        pgle=text.pgle,
    )
    if text.profiled is None or costs is None:
        return result

    with_profile = StepText(
        text.profiled, text.traced, text.platform, layers=text.layers, programs=text.programs
    )
    other = audit(schedule, with_profile, mesh=mesh, phases=phases, machine=machine)
    moved = shifts(step, audit_text(text.profiled), (costs, other.estimate or costs))
    return msgspec.structs.replace(result, profiled=Profiled(other, moved))


def check_phases(schedule: Schedule, phases: Sequence[str]) -> None:
    """Raise CP1151 for phases that the plan does not have."""
    names = [phase.name for phase in schedule.phases]
    for name in phases:
        if name not in names:
            note = f"it has: {', '.join(names)}"
            fail("CP1151", f"plan `{schedule.plan}` has no phase `{name}`", note, file=schedule.file)


class _Mesh(NamedTuple):
    """A `MeshLike`: the sizes of the axes in the order of device numbering."""

    shape: Mapping[str, int]


def _mesh_in(traced: str, schedule: Schedule) -> dict[str, int] | None:
    """The sizes of the axes of the step's mesh; None if the text has no mesh with the plan's axes."""
    for listed in _MESH.findall(traced.partition("\n")[0]):
        sizes = {name: int(size) for name, size in re.findall(r'"([^"]+)"=(\d+)', listed)}
        if schedule.mesh_sizes.items() <= sizes.items():
            return sizes
    return None


def _compare_phases(
    items_by_phase: Mapping[str, Sequence[Expected]], layered: Sequence[Expected], step: CompiledStep
) -> StepComparison:
    """Compare each phase with its collectives; phases are unordered with respect to each other.

    Collectives without names are compared with the first phase that has differences. If XLA merged
    collectives of several phases, all phases are compared together, in order. Plan lines executed by layers
    or taps are only compared with `layered`.

    Args:
        items_by_phase: The planned collectives of each phase when it is called.
        layered: The planned collectives of lines that layers or taps execute.
        step: The compiled step.
    """
    lines = {item.scope for item in layered}
    items_by_phase = {
        name: [item for item in items if item.scope not in lines] for name, items in items_by_phase.items()
    }
    in_layers = [c for c in step.collectives if c.scopes and lines.issuperset(c.scopes)]
    named_collectives = [
        collective
        for collective in step.collectives
        if collective not in in_layers and any(scope[0] in items_by_phase for scope in collective.scopes)
    ]
    nameless = [
        collective for collective in step.collectives if not any(o.op_name for o in collective.origins)
    ]
    is_mixed = any(len({phase for phase, _ in collective.scopes}) > 1 for collective in named_collectives)
    parts = (
        [(item for items in items_by_phase.values() for item in items)]
        if is_mixed
        else [*items_by_phase.values()]
    )
    positions = {id(collective): position for position, collective in enumerate(step.collectives)}
    reports = [compare_unordered(layered, in_layers)]
    for items in map(tuple, parts):
        scopes = {item.phase for item in items}
        phase_collectives = [
            collective for collective in named_collectives if is_mixed or collective.scopes[0][0] in scopes
        ]
        report = match(items, phase_collectives)
        if nameless and not report.ok:
            report = match(
                items,
                sorted([*phase_collectives, *nameless], key=lambda collective: positions[id(collective)]),
            )
            nameless = []
        reports.append(report)
    return StepComparison(
        tuple(item for report in reports for item in report.expected),
        tuple(item for report in reports for item in report.found),
        tuple(item for report in reports for item in report.differences),
        tuple(item for report in reports for item in report.matches),
    )


def _rows(
    report: StepComparison, differences: Iterable[StepDifference], costs: Estimate | None
) -> tuple[Row, ...]:
    """The rows of the planned collectives in order, then those of compiled collectives without a plan."""
    waits = {wait.name: wait for wait in costs.waits} if costs else {}
    # The compiled collectives and the cause of each planned one.
    outcomes: dict[int, tuple[Sequence[CompiledCollective], str]] = {
        id(item): ((collective,), "") for item, collective in report.matches
    }
    extra: list[Row] = []
    for difference in differences:
        outcomes |= {id(item): (difference.found, difference.cause) for item in difference.expected}
        if not difference.expected:
            extra.append(_row(None, difference.found, difference.cause, waits))
    return _merge_rows([*(_row(item, *outcomes[id(item)], waits) for item in report.expected), *extra])


def _row(
    item: Expected | None, actual: Sequence[CompiledCollective], cause: str, waits: Mapping[str, Any]
) -> Row:
    """The row of one planned collective, or of a compiled one without a plan (`item` is None)."""
    scopes = (scope for collective in actual for scope in collective.scopes)
    scope = item.scope if item else next(scopes, ("", 0))
    times = [waits[collective.name] for collective in actual if collective.name in waits]
    costs = (sum(t.seconds for t in times), sum(t.exposed for t in times)) if times else (None, None)
    planned = str(item).rpartition(" (line")[0] if item else ""
    return Row(*scope, planned, "; ".join(map(str, actual)), cause, 1, *costs)


def _merge_rows(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Merge consecutive equal rows."""
    merged: list[Row] = []
    for _, group in groupby(rows, lambda row: (row.phase, row.line, row.expected, row.found, row.cause)):
        first, *more = group
        costs: dict[str, float] = {}
        if first.seconds is not None and first.exposed is not None:
            costs["seconds"] = sum((row.seconds or 0.0 for row in more), first.seconds)
            costs["exposed"] = sum((row.exposed or 0.0 for row in more), first.exposed)
        merged.append(msgspec.structs.replace(first, count=1 + len(more), **costs))
    return tuple(merged)


def _cells(row: Row) -> tuple[str, ...]:
    times = f"{row.count} x " if row.count > 1 else ""
    costs = ["" if seconds is None else timed(seconds) for seconds in (row.seconds, row.exposed)]
    compiled = f"{row.cause}: {row.found}" if row.cause and row.found else row.cause or "as planned"
    planned, extra = (f"{times}{row.expected}", "") if row.expected else ("", times)
    return row.phase, str(row.line or ""), planned, f"{extra}{compiled}", *costs


def _describe_shifts(shift: CollectiveShift) -> tuple[str, ...]:
    def change(before: object, after: object) -> str:
        return f"{before}" if before == after else f"{before} -> {after}"

    started, awaited = change(*shift.started), change(*shift.awaited)
    products = f"{started} products", f"{awaited} products"
    return shift.phase, str(shift.line or ""), shift.collective, *products, change(*map(timed, shift.exposed))


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (zip(row, widths, strict=True) for row in rows)
    return ["  " + "  ".join(cell.ljust(width) for cell, width in row).rstrip() for row in padded]


def _reasons(differences: Iterable[StepDifference]) -> list[str]:
    """The lines that explain differences. Equal ones are counted."""
    lines: list[str] = []
    counts = Counter((d.cause, _subject(d), d.reason) for d in differences)
    for (cause, subject, reason), count in counts.items():
        times = f"{count} x " if count > 1 else ""
        lines += ["", f"{cause}: {times}{subject}", f"    {reason}"]
    return lines


def _subject(difference: StepDifference) -> str:
    """Its text. The name of an unplanned instruction is removed, so that equal ones are counted together."""
    return re.sub(r" \([\w.-]+\)$", "", difference.text) if difference.kind == "extra" else difference.text


def _data_of(difference: StepDifference) -> dict[str, Any]:
    lines = [item.scope for item in difference.expected] or [s for f in difference.found for s in f.scopes]
    origins = [origin for collective in difference.found for origin in collective.origins]
    return {
        "kind": difference.kind, "cause": difference.cause, "reason": difference.reason,
        "text": difference.text, "beside": difference.is_additional,
        "lines": [{"phase": phase, "line": line} for phase, line in dict.fromkeys(lines)],
        "expected": [str(item) for item in difference.expected],
        "found": [collective.name for collective in difference.found],
        "origins": msgspec.to_builtins(origins),
    }  # fmt: skip
