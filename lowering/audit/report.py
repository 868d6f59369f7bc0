"""The audit of a compiled step: every collective of the plan beside what became of it, and what it costs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, Literal, NamedTuple

import msgspec

from commplan.diagnostics import fail, plural
from commplan.ir.schedule import Schedule
from commplan.ir.types import timed
from commplan.lowering.audit.causes import Causes, compiled_otherwise
from commplan.lowering.audit.compare import Difference, Report, match
from commplan.lowering.audit.estimate import Estimate, Machine, estimate
from commplan.lowering.audit.expect import Expected, expected
from commplan.lowering.audit.layers import matched, of_layers
from commplan.lowering.audit.profile import EXCHANGE_WEIGHT, Shift, shifts
from commplan.lowering.audit.step import CompiledCollective, CompiledStep, Memory
from commplan.lowering.audit.tapped import of_taps
from commplan.lowering.audit.walk import audit_text

_MESH = re.compile(r"#sdy\.mesh<\[([^\]]*)\]")


class Row(msgspec.Struct, frozen=True):
    """Collectives in a row that are alike: `count` of them, what the plan has and what the compiled step has.

    expected: "" beside the plan; found: "" where it is missing. cause: "" where it is as planned.
    seconds, exposed: of all of them, as estimated; None without a machine.
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
    """What a compiled step has of its plan. `str` gives it as a table and sentences.

    phases: those looked at; skipped: the others, which the step does not call. memory: of one device; None
    where that is not known. pgle: of `run.jit(.., pgle=..)`, whether what it compiled has a profile, which
    it has where that is faster; None for another step.
    """

    plan: str
    phases: tuple[str, ...]
    skipped: tuple[str, ...]
    rows: tuple[Row, ...]
    differences: tuple[Difference, ...]
    machine: Machine | None = None
    estimate: Estimate | None = None
    profiled: Profiled | None = None
    memory: Memory | None = None
    pgle: bool | None = None

    @property
    def ok(self) -> bool:
        """Whether the step has the collectives of the plan and no others, compiled with a profile too."""
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
        return "\n".join([*lines, *self._memory(), *self._costs(), *self._profiled()])

    def data(self) -> dict[str, Any]:
        """The same for JSON."""
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
        return _aligned([row if self.estimate else row[:4] for row in cells])

    def _memory(self) -> list[str]:
        return [] if self.memory is None else ["", str(self.memory)]

    def _costs(self) -> list[str]:
        if self.estimate is None or self.machine is None:
            return []
        machine, seconds = self.machine, self.estimate
        waits = f"the compiled order waits {timed(seconds.exposed)} for {timed(seconds.communication)}"
        until = seconds.computation - seconds.after
        after = f" and {timed(seconds.after)} after it" if seconds.after else ""
        waits += f" of communication, beside {timed(until)} of computation{after}"
        return ["", f"{waits}: a step of {timed(seconds.total)}", f"estimated for {machine}"]

    def _profiled(self) -> list[str]:
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
        lines += _aligned([heads, *map(_shifted, moved)]) if moved else []
        new = [
            d for d in self.profiled.audit.differences if d.text not in {old.text for old in self.differences}
        ]
        return [*lines, *(["", "only with the profile:"] if new else []), *_reasons(new)]


class Profiled(msgspec.Struct, frozen=True):
    """The step compiled with a profile of estimated times: its own audit, and how its collectives differ from
    those of the step without one."""

    audit: Audit
    shifts: tuple[Shift, ...]

    def data(self) -> dict[str, Any]:
        """The same for JSON."""
        moved = [
            {
                "phase": shift.phase, "line": shift.line, "collective": shift.collective,
                "started": shift.started, "awaited": shift.awaited, "exposed": shift.exposed,
            }
            for shift in self.shifts
            if shift.moved
        ]  # fmt: skip
        own = {key: value for key, value in self.audit.data().items() if key != "profiled"}
        return {**own, "collectives": len(self.shifts), "moved": moved}


def audit(
    schedule: Schedule,
    compiled: str,
    traced: str,
    platform: Literal["cpu", "gpu"] = "cpu",
    profiled: str | None = None,
    memory: Memory | None = None,
    layers: Sequence[Schedule] = (),
    pgle: bool | None = None,
    programs: Sequence[Schedule] = (),
    *,
    mesh: Mapping[str, int] | None = None,
    phases: Sequence[str] = (),
    machine: Machine | None = None,
) -> Audit:
    """Compare the compiled text of a step with the schedule of its plan.

    traced: the text of the step as JAX hands it to XLA. mesh: sizes of the axes in the order in which devices
    are counted; by default as `traced` says, else as the plan does. phases: those to look for; by default
    those that the step calls, and `each step`. machine: to estimate with. profiled: the step compiled with a
    profile of what its instructions take on `machine`. memory: what the step takes of one device's. layers:
    schedules that `run.layers` may carry out in the step. pgle: see `Audit`. programs: schedules that JAX
    traced in the step: one that was compiled otherwise is a cause of differences.

    Raises CP1151 for a phase that the plan does not have.
    """
    step, asked = audit_text(compiled), audit_text(traced)
    called = dict.fromkeys(scope[0] for part in (asked, step) for f in part.collectives for scope in f.scopes)
    check_phases(schedule, phases)
    known = {phase.name: phase.kind == "step" for phase in schedule.phases}
    chosen = [*phases] or [*called, *(name for name, each in known.items() if each and name not in called)]
    sizes = _Mesh(mesh or _mesh_in(traced, schedule) or schedule.mesh_sizes)
    # A step may call phases of another program, which have no schedule here.
    wanted = {name: expected(schedule, name, sizes, platform) for name in chosen if name in known}
    called_items = [item for items in wanted.values() for item in items]
    own_layers = (layer for layer in layers if layer.plan == schedule.plan)
    layered = of_layers(asked, own_layers, called_items, sizes, platform)
    tapped = of_taps(asked, schedule, wanted, sizes, platform)
    lines = {item.scope for item in layered}
    unordered = (*layered, *(item for item in tapped if item.scope not in lines))
    report = _matched(wanted, unordered, step)
    planned = {id(collective) for collective in report.found}
    ignored = set(known) - set(wanted)
    unplanned = [
        collective
        for collective in step.collectives
        if id(collective) not in planned and not any(phase in ignored for phase, _ in collective.scopes)
    ]
    differences = Causes(report, asked, compiled_otherwise(schedule, programs)).all(unplanned)
    costs = estimate(step, machine) if machine else None
    rows = _rows(report, differences, costs)
    skipped = tuple(name for name in known if name not in wanted and not phases)
    result = Audit(
        schedule.plan, tuple(wanted), skipped, rows, differences, machine, costs, memory=memory, pgle=pgle
    )
    if profiled is None or costs is None:
        return result
    same: dict[str, Any] = {
        "layers": layers,
        "programs": programs,
        "mesh": mesh,
        "phases": phases,
        "machine": machine,
    }
    other = audit(schedule, profiled, traced, platform, **same)
    moved = shifts(step, audit_text(profiled), (costs, other.estimate or costs))
    return msgspec.structs.replace(result, profiled=Profiled(other, moved))


def check_phases(schedule: Schedule, phases: Sequence[str]) -> None:
    """Refuse names of phases that the plan does not have (CP1151)."""
    known = [phase.name for phase in schedule.phases]
    for name in phases:
        if name not in known:
            note = f"it has: {', '.join(known)}"
            fail("CP1151", f"plan `{schedule.plan}` has no phase `{name}`", note, file=schedule.file)


class _Mesh(NamedTuple):
    shape: Mapping[str, int]


def _mesh_in(traced: str, schedule: Schedule) -> dict[str, int] | None:
    """The axes of the mesh that the step runs on, in their order, where its text tells them."""
    for listed in _MESH.findall(traced.partition("\n")[0]):
        sizes = {name: int(size) for name, size in re.findall(r'"([^"]+)"=(\d+)', listed)}
        if schedule.mesh_sizes.items() <= sizes.items():
            return sizes
    return None


def _matched(
    wanted: Mapping[str, Sequence[Expected]], layered: Sequence[Expected], step: CompiledStep
) -> Report:
    """Each phase against its own collectives, since nothing orders one phase after another; those that XLA
    gives no name are looked at with the first phase that is not as planned. Lines that layers carry out are
    compared with `layered` alone, and so are those of taps."""
    lines = {item.scope for item in layered}
    wanted = {name: [item for item in items if item.scope not in lines] for name, items in wanted.items()}
    in_layers = [c for c in step.collectives if c.scopes and lines.issuperset(c.scopes)]
    named = [
        collective
        for collective in step.collectives
        if collective not in in_layers and any(scope[0] in wanted for scope in collective.scopes)
    ]
    nameless = [
        collective for collective in step.collectives if not any(o.op_name for o in collective.origins)
    ]
    mixed = any(len({phase for phase, _ in collective.scopes}) > 1 for collective in named)
    parts = [(item for items in wanted.values() for item in items)] if mixed else [*wanted.values()]
    places = {id(collective): place for place, collective in enumerate(step.collectives)}
    reports = [matched(layered, in_layers)]
    for items in map(tuple, parts):
        scopes = {item.phase for item in items}
        own = [collective for collective in named if mixed or collective.scopes[0][0] in scopes]
        report = match(items, own)
        if nameless and not report.ok:
            report = match(items, sorted([*own, *nameless], key=lambda collective: places[id(collective)]))
            nameless = []
        reports.append(report)
    return Report(
        tuple(item for report in reports for item in report.expected),
        tuple(item for report in reports for item in report.found),
        tuple(item for report in reports for item in report.differences),
        tuple(item for report in reports for item in report.matches),
    )


def _rows(report: Report, differences: Iterable[Difference], costs: Estimate | None) -> tuple[Row, ...]:
    waits = {wait.name: wait for wait in costs.waits} if costs else {}
    became: dict[int, tuple[Sequence[CompiledCollective], str]] = {
        id(e): ((f,), "") for e, f in report.matches
    }
    extra: list[Row] = []
    for difference in differences:
        became |= {id(item): (difference.found, difference.cause) for item in difference.expected}
        if not difference.expected:
            extra.append(_row(None, difference.found, difference.cause, waits))
    return _alike([*(_row(item, *became[id(item)], waits) for item in report.expected), *extra])


def _row(
    item: Expected | None, actual: Sequence[CompiledCollective], cause: str, waits: Mapping[str, Any]
) -> Row:
    scope = item.scope if item else next((s for f in actual for s in f.scopes), ("", 0))
    times = [waits[each.name] for each in actual if each.name in waits]
    costs = (sum(t.seconds for t in times), sum(t.exposed for t in times)) if times else (None, None)
    planned = str(item).rpartition(" (line")[0] if item else ""
    return Row(*scope, planned, "; ".join(map(str, actual)), cause, 1, *costs)


def _alike(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Rows that follow one another and say the same, as one."""
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


def _shifted(shift: Shift) -> tuple[str, ...]:
    def change(before: object, after: object) -> str:
        return f"{before}" if before == after else f"{before} -> {after}"

    started, awaited = change(*shift.started), change(*shift.awaited)
    products = f"{started} products", f"{awaited} products"
    return shift.phase, str(shift.line or ""), shift.collective, *products, change(*map(timed, shift.exposed))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (zip(row, widths, strict=True) for row in rows)
    return ["  " + "  ".join(cell.ljust(width) for cell, width in row).rstrip() for row in padded]


def _reasons(differences: Iterable[Difference]) -> list[str]:
    lines: list[str] = []
    alike = Counter((d.cause, _subject(d), d.reason) for d in differences)
    for (cause, subject, reason), count in alike.items():
        times = f"{count} x " if count > 1 else ""
        lines += ["", f"{cause}: {times}{subject}", f"    {reason}"]
    return lines


def _subject(difference: Difference) -> str:
    return re.sub(r" \([\w.-]+\)$", "", difference.text) if difference.kind == "extra" else difference.text


def _data_of(difference: Difference) -> dict[str, Any]:
    lines = [item.scope for item in difference.expected] or [s for f in difference.found for s in f.scopes]
    origins = [origin for collective in difference.found for origin in collective.origins]
    return {
        "kind": difference.kind, "cause": difference.cause, "reason": difference.reason,
        "text": difference.text, "beside": difference.beside,
        "lines": [{"phase": phase, "line": line} for phase, line in dict.fromkeys(lines)],
        "expected": [str(item) for item in difference.expected],
        "found": [collective.name for collective in difference.found],
        "origins": msgspec.to_builtins(origins),
    }  # fmt: skip
