"""Determines the causes of differences between a compiled step and its plan.

The program that JAX traced has the collectives that the step requests. A difference between it and the
compiled program is a change by XLA.

| cause | meaning |
|---|---|
| combined | XLA merged several collectives |
| split | XLA split a collective |
| folded | XLA removed it |
| reordered | XLA issues it in another position |
| loop | XLA issues it in another number of loops |
| retyped, regrouped, replaced | XLA changed the dtype, the ranks, or the kind of collective |
| copied | XLA issues it more than once |
| repeated | the step requests it more than once |
| absent | the step does not request it |
| recompiled | the step requests other collectives at this plan line |
| own | the step's own code requests it |
| autodiff | the derivative of a value that is replicated on all ranks: a sum over them |
| partitioner | inserted by XLA's partitioner, since operands and result are sharded differently |
| unknown | the HLO text does not contain the cause |
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from commplan.diagnostics import plural
from commplan.ir.schedule import Schedule, topologies_text
from commplan.ir.serialization.canonical_json import schedule_digest
from commplan.lowering.audit.compare import StepComparison, StepDifference, changed, same_ranks
from commplan.lowering.audit.expect import Expected
from commplan.lowering.collective_primitives import collective_kind
from commplan.lowering.hlo.step import CollectiveOrigin, CompiledCollective, CompiledStep

_FIELDS = {"dtype": "retyped", "groups": "regrouped"}  # the cause by the property that differs (`changed`)
# Reasons, as sentences of the report.
_FOLDED = "the step requests it, and XLA removed it: its result is unused, or known without communication"
_COPIED = "the step requests it once, and XLA issues it again: it unrolled or peeled a loop"
_RECOMPILED = "the step requests other collectives here: its program was compiled {}"
_SHAPES = "for other shapes, such as those of one layer under `run.tap`"
_AUTODIFF = (
    "summed by autodiff: {}: the parameter is the same on all ranks, so its gradient is a sum over"
    " them; differentiate with respect to `run.varying(params)`"
)
_PARTITIONER = "inserted by XLA's partitioner for {}: its operands are sharded differently from its result"


class Causes:
    """Determines the causes of the differences of one step.

    Args:
        report: The comparison.
        traced: The step as JAX passes it to XLA.
        compiled: How the compilation of the step's program differs from that of the schedule, for example
            "for topology `a`"; None if unknown or if it does not differ.

    Attributes:
        report: The comparison.
        recompiled: The reason of differences with cause `recompiled`.
        planned_counts: The number of planned collectives by phase and line.
        traced: The collectives that the step requests, by phase and line.
        outside_phases: The collectives that the step requests outside of phases.
    """

    def __init__(self, report: StepComparison, traced: CompiledStep, compiled: str | None = None) -> None:
        self.report = report
        unknown = f"from another plan, for another topology, or {_SHAPES}"
        self.recompiled = _RECOMPILED.format(compiled or unknown)
        self.planned_counts = Counter(item.scope for item in report.expected)
        self.traced = defaultdict[tuple[str, int], list[CompiledCollective]](list)
        for collective in traced.collectives:
            for scope in collective.scopes:
                self.traced[scope].append(collective)
        self.outside_phases = [collective for collective in traced.collectives if not collective.scopes]

    def all(self, additional: Iterable[CompiledCollective]) -> tuple[StepDifference, ...]:
        """All differences with their causes.

        Args:
            additional: The compiled collectives that the comparison does not contain. Each is a difference.
        """
        looped = (self._loop_difference(expected, collective) for expected, collective in self.report.matches)
        extra = (
            StepDifference("extra", f"{collective} ({collective.name})", (), (collective,))
            for collective in additional
        )
        differences = (*self.report.differences, *filter(None, looped), *extra)
        return tuple(self._with_cause(difference) for difference in differences)

    def _with_cause(self, difference: StepDifference) -> StepDifference:
        """The difference with its cause and the reason in words."""
        match difference.kind:
            case "missing":
                cause, reason = self._missing(difference.expected[0])
            case "extra":
                cause, reason = self._extra(difference.found[0])
            case "changed":
                cause, reason = self._describe_changes(difference.expected[0], difference.found[0])
            case "merged":
                return self._describe_merge(difference)
            case "split":
                kinds = ", ".join(collective.kind for collective in difference.found)
                cause, reason = "split", f"XLA made {kinds} of it"
            case "moved":
                if difference.cause:
                    return difference
                cause, reason = "reordered", "XLA issues it at another position than the schedule"
        return replace(difference, cause=cause, reason=reason, is_additional=cause in ("own", "partitioner"))

    def _missing(self, expected: Expected) -> tuple[str, str]:
        """The cause and the reason of a planned collective that is not compiled."""
        requests = len(self.traced[expected.scope])
        if not requests:
            call = f"the step does not request it: phase `{expected.phase}` is not called"
            return "absent", f"{call}, or nothing uses its outputs"
        is_recompiled = requests < self.planned_counts[expected.scope] or not self._requests(expected)
        return ("recompiled", self.recompiled) if is_recompiled else ("folded", _FOLDED)

    def _requests(self, expected: Expected) -> bool:
        """Whether the step has a collective of this size at the plan line."""
        return any(traced.count == expected.count for traced in self.traced[expected.scope])

    def _extra(self, actual: CompiledCollective) -> tuple[str, str]:
        """The cause and the reason of a collective that the plan does not have."""
        for phase, line in actual.scopes:
            requests = len(self.traced[phase, line])
            if requests <= self.planned_counts[phase, line]:
                return "copied", _COPIED
            if self.planned_counts[phase, line]:
                return "repeated", f"the step requests it more than once: it calls phase `{phase}` again"
            return "recompiled", self.recompiled
        origins = [o for o in actual.origins if o.op_name] or self._unnamed_origins(actual, actual.count)
        if not origins:
            return "unknown", "the HLO text does not name its origin"
        names = _list_origins(origins)
        if self._by_autodiff(actual, origins):
            return "autodiff", _AUTODIFF.format(names)
        if any(collective_kind(origin.primitive) for origin in origins):
            derived = "the derivative of " if any(map(_is_transposed, origins)) else ""
            return "own", f"issued by {derived}the step's own code: {names}"
        return "partitioner", _PARTITIONER.format(names)

    def _by_autodiff(self, actual: CompiledCollective, origins: Sequence[CollectiveOrigin]) -> bool:
        """Whether differentiation added a sum over ranks that the plan reduces over."""
        summed = any(_is_transposed(origin) and origin.primitive == "psum" for origin in origins)
        return summed and any(same_ranks(item, actual) for item in self.report.expected)

    def _describe_changes(self, expected: Expected, actual: CompiledCollective) -> tuple[str, str]:
        """The cause and the reason of a collective that is compiled with other properties."""
        requested = ((t.kind, t.dtypes, t.count, t.groups) for t in self.traced[expected.scope])
        same = (actual.kind, actual.dtypes, actual.count, actual.groups) in requested
        if same or (self.traced[expected.scope] and not self._requests(expected)):
            return "recompiled", self.recompiled
        fields = {name: after for name, _, after in changed(expected, actual)}
        name = next((name for name in ("dtype", "groups") if name in fields), "")
        words = {
            "dtype": f"XLA moves {', '.join(actual.dtypes)}, the plan moves {expected.dtype}",
            "groups": "other ranks participate",
        }
        return _FIELDS.get(name, "replaced"), words.get(name, f"XLA made {actual} of it")

    def _describe_merge(self, difference: StepDifference) -> StepDifference:
        """The difference of merged collectives with its cause and reason.

        If the merged collective has more elements than the planned ones, it also contains collectives of the
        step's own code. Their origins are those that XLA kept, or those of requests of that size.
        """
        expected, actual = difference.expected, difference.found[0]
        lines = sorted({item.span.line for item in expected})
        count = plural(len(expected), "collective")
        places = ", ".join(map(str, lines))
        reason = f"XLA combined {count} of line{'s' * (len(lines) > 1)} {places}"
        additional = actual.count - sum(item.count for item in expected)
        named_origins = [origin for origin in actual.origins if origin.op_name and not origin.scope]
        is_exact = bool(named_origins) and all(origin.source for origin in named_origins)
        origins = (
            (named_origins if is_exact else self._unnamed_origins(actual, additional) or named_origins)
            if additional
            else []
        )
        if additional:
            reason += f" with the step's own {_list_origins(origins) or f'{additional} elements'}"
        has_extra = len(expected) == 1 and bool(origins) and not self._by_autodiff(actual, origins)
        return replace(difference, cause="combined", reason=reason, is_additional=has_extra)

    def _unnamed_origins(self, actual: CompiledCollective, count: int) -> list[CollectiveOrigin]:
        """The origins of requests outside of phases that may be part of `actual`, `count` elements in total.

        They are selected in the order of the trace; empty if they do not add up to `count`.
        """
        origins: list[CollectiveOrigin] = []
        for traced in self.outside_phases:
            same_kind = (traced.kind, traced.op, traced.dtypes) == (actual.kind, actual.op, actual.dtypes)
            if same_kind and traced.count <= count:
                count -= traced.count
                origins += traced.origins
        return [] if count else origins

    def _loop_difference(self, expected: Expected, actual: CompiledCollective) -> StepDifference | None:
        """The difference if a matched collective is in more or fewer loops than in the traced step.

        None if it is not, or if the step does not request the line of the collective.
        """
        depths = {len(traced.loops) for traced in self.traced[expected.scope]}
        if not depths or len(actual.loops) in depths:
            return None
        inside = len(actual.loops) > max(depths)
        direction = "into a loop" if inside else "out of its loop"
        text = f"{expected} was moved {direction} ({actual.name})"
        return StepDifference("moved", text, (expected,), (actual,), "loop", f"XLA moved it {direction}")


def compiled_otherwise(schedule: Schedule, programs: Iterable[Schedule]) -> str | None:
    """Describe how the program of a step was compiled differently from `schedule`.

    Args:
        schedule: The schedule of the audit.
        programs: The schedules that the step traces. Those of plans with other names are ignored.

    Returns:
        The first difference of the first program, such as "for topology `a`, and the schedule of this audit
        for topology `b`". None if there is no program, if one of them is equal to `schedule`, or if the
        difference is unknown.
    """
    rivals = [program for program in programs if program.plan == schedule.plan]
    digest = schedule_digest(schedule)
    if not rivals or any(schedule_digest(program) == digest for program in rivals):
        return None
    program = rivals[0]
    topologies = topologies_text(program.topology, schedule.topology)
    if program.plan_digest != schedule.plan_digest:
        return f"from another plan called `{schedule.plan}`"
    if [value.leaves for value in program.entry] != [value.leaves for value in schedule.entry]:
        return _SHAPES
    if topologies is not None:
        return f"for {topologies[0]}, and the schedule of this audit for {topologies[1]}"
    if program.pipeline != schedule.pipeline:
        return f"by the passes {program.pipeline}, and the schedule of this audit by {schedule.pipeline}"
    return None


def _is_transposed(origin: CollectiveOrigin) -> bool:
    """Whether it belongs to a backward pass."""
    return "transpose(" in origin.op_name


def _list_origins(origins: Sequence[CollectiveOrigin]) -> str:
    counts = Counter(map(str, origins))
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
