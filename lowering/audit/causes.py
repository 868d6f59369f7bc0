"""Why a compiled step differs from its plan: what JAX traced tells XLA's changes from what the step asks for.

| cause | |
|---|---|
| combined | XLA made one collective of several |
| split | XLA made several of one |
| folded | XLA removed it |
| reordered | XLA issues it in another place |
| loop | XLA issues it inside of another number of loops |
| retyped, regrouped, replaced | XLA moves another type, among other ranks, by another collective |
| copied | XLA issues it more than once |
| repeated | the step asks for it more than once |
| absent | the step does not ask for it |
| recompiled | the step asks for other collectives at this plan line |
| own | the step's own code asks for it |
| autodiff | the derivative with respect to a value that is the same on all ranks: a sum over them |
| partitioner | XLA's partitioner needs it: an operation's operands are sharded otherwise than its result |
| unknown | the text does not tell |
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from commplan.diagnostics import plural
from commplan.ir.schedule import Schedule, topologies_text
from commplan.ir.serialization.canonical_json import schedule_digest
from commplan.lowering.audit.compare import Difference, Report, changed, same_ranks
from commplan.lowering.audit.expect import Expected
from commplan.lowering.audit.step import CompiledCollective, CompiledStep, Origin

# The primitives of JAX that communicate.
_PRIMITIVES = frozenset(
    {
        "psum", "pmax", "pmin", "ppermute", "all_gather", "all_to_all", "reduce_scatter", "psum_scatter",
        "ragged_all_to_all", "pbroadcast", "unreduced_psum", "pgather",
    }
)  # fmt: skip
_FIELDS = {"dtype": "retyped", "groups": "regrouped"}
_FOLDED = "the step asks for it, and XLA removed it: nothing uses the result, or it is known without it"
_COPIED = "the step asks for it once, and XLA issues it again: it unrolled or peeled a loop"
_RECOMPILED = "the step asks for others here: its program was compiled {}"
_SHAPES = "for other shapes, such as those of one layer under `run.tap`"
_AUTODIFF = (
    "summed by autodiff: {}: what is differentiated is the same on all ranks, so its gradient is a sum over"
    " them; differentiate with respect to `run.varying(params)`"
)
_PARTITIONER = "inserted by XLA's partitioner for {}: its operands are sharded otherwise than its result"


class Causes:
    """Explains the differences of one step.

    traced: the same step as JAX hands it to XLA. compiled: how the step's program was compiled otherwise than
    the schedule, such as "for topology `a`", if that is known.
    """

    def __init__(self, report: Report, traced: CompiledStep, compiled: str | None = None) -> None:
        self.report = report
        unknown = f"from another plan, for another topology, or {_SHAPES}"
        self.recompiled = _RECOMPILED.format(compiled or unknown)
        self.wanted = Counter(item.scope for item in report.expected)
        self.traced = defaultdict[tuple[str, int], list[CompiledCollective]](list)
        for collective in traced.collectives:
            for scope in collective.scopes:
                self.traced[scope].append(collective)
        self.own = [collective for collective in traced.collectives if not collective.scopes]

    def all(self, unplanned: Iterable[CompiledCollective]) -> tuple[Difference, ...]:
        """Every difference with its cause; `beside` are the collectives without a plan line."""
        looped = (self._looped(expected, collective) for expected, collective in self.report.matches)
        extra = (
            Difference("extra", f"{collective} ({collective.name})", (), (collective,))
            for collective in unplanned
        )
        differences = (*self.report.differences, *filter(None, looped), *extra)
        return tuple(self._with_cause(difference) for difference in differences)

    def _with_cause(self, difference: Difference) -> Difference:
        match difference.kind:
            case "missing":
                cause, reason = self._missing(difference.expected[0])
            case "extra":
                cause, reason = self._extra(difference.found[0])
            case "changed":
                cause, reason = self._changed(difference.expected[0], difference.found[0])
            case "merged":
                return self._merged(difference)
            case "split":
                kinds = ", ".join(collective.kind for collective in difference.found)
                cause, reason = "split", f"XLA made {kinds} of it"
            case "moved":
                if difference.cause:
                    return difference
                cause, reason = "reordered", "XLA issues it in another place than the schedule has it in"
        return replace(difference, cause=cause, reason=reason, beside=cause in ("own", "partitioner"))

    def _missing(self, expected: Expected) -> tuple[str, str]:
        traced = len(self.traced[expected.scope])
        if not traced:
            call = f"the step does not ask for it: phase `{expected.phase}` is not called"
            return "absent", f"{call}, or nothing uses what it puts out"
        otherwise = traced < self.wanted[expected.scope] or not self._asks_for(expected)
        return ("recompiled", self.recompiled) if otherwise else ("folded", _FOLDED)

    def _asks_for(self, expected: Expected) -> bool:
        """Whether the step has a collective of that size at the plan line."""
        return any(traced.count == expected.count for traced in self.traced[expected.scope])

    def _extra(self, actual: CompiledCollective) -> tuple[str, str]:
        for phase, line in actual.scopes:
            traced = len(self.traced[phase, line])
            if traced <= self.wanted[phase, line]:
                return "copied", _COPIED
            if self.wanted[phase, line]:
                return "repeated", f"the step asks for it more than once: it calls phase `{phase}` again"
            return "recompiled", self.recompiled
        origins = [o for o in actual.origins if o.op_name] or self._unnamed(actual, actual.count)
        if not origins:
            return "unknown", "XLA gives it no name"
        names = _listed(origins)
        if self._by_autodiff(actual, origins):
            return "autodiff", _AUTODIFF.format(names)
        if any(origin.primitive in _PRIMITIVES for origin in origins):
            derived = "the derivative of " if any(map(_is_transposed, origins)) else ""
            return "own", f"issued by {derived}the step's own code: {names}"
        return "partitioner", _PARTITIONER.format(names)

    def _by_autodiff(self, actual: CompiledCollective, origins: Sequence[Origin]) -> bool:
        """Whether a sum over the ranks that the plan reduces over was added by differentiation."""
        summed = any(_is_transposed(origin) and origin.primitive == "psum" for origin in origins)
        return summed and any(same_ranks(item, actual) for item in self.report.expected)

    def _changed(self, expected: Expected, actual: CompiledCollective) -> tuple[str, str]:
        asked = ((t.kind, t.dtypes, t.count, t.groups) for t in self.traced[expected.scope])
        same = (actual.kind, actual.dtypes, actual.count, actual.groups) in asked
        if same or (self.traced[expected.scope] and not self._asks_for(expected)):
            return "recompiled", self.recompiled
        fields = {name: after for name, _, after in changed(expected, actual)}
        name = next((name for name in ("dtype", "groups") if name in fields), "")
        words = {
            "dtype": f"XLA moves {', '.join(actual.dtypes)} where the plan moves {expected.dtype}",
            "groups": "XLA has other ranks take part",
        }
        return _FIELDS.get(name, "replaced"), words.get(name, f"XLA made {actual} of it")

    def _merged(self, difference: Difference) -> Difference:
        expected, actual = difference.expected, difference.found[0]
        lines = sorted({item.span.line for item in expected})
        count, places = plural(len(expected), "collective"), ", ".join(map(str, lines))
        reason = f"XLA combined {count} of line{'s' * (len(lines) > 1)} {places}"
        rest = actual.count - sum(item.count for item in expected)
        named = [origin for origin in actual.origins if origin.op_name and not origin.scope]
        is_exact = bool(named) and all(origin.source for origin in named)
        origins = (named if is_exact else self._unnamed(actual, rest) or named) if rest else []
        if rest:
            reason += f" with the step's own {_listed(origins) or f'{rest} elements'}"
        has_extra = len(expected) == 1 and bool(origins) and not self._by_autodiff(actual, origins)
        return replace(difference, cause="combined", reason=reason, beside=has_extra)

    def _unnamed(self, actual: CompiledCollective, count: int) -> list[Origin]:
        """The origins of what the step asks for beside the plan, and makes `count` elements in all."""
        origins: list[Origin] = []
        for traced in self.own:
            alike = (traced.kind, traced.op, traced.dtypes) == (actual.kind, actual.op, actual.dtypes)
            if alike and traced.count <= count:
                count -= traced.count
                origins += traced.origins
        return [] if count else origins

    def _looped(self, expected: Expected, actual: CompiledCollective) -> Difference | None:
        """Where the match of a planned collective is in more or fewer loops than the step has it in."""
        depths = {len(traced.loops) for traced in self.traced[expected.scope]}
        if not depths or len(actual.loops) in depths:
            return None
        inside = len(actual.loops) > max(depths)
        where = "into a loop" if inside else "out of the loop that the step has it in"
        text = f"{expected} was moved {where} ({actual.name})"
        return Difference("moved", text, (expected,), (actual,), "loop", f"XLA moved it {where}")


def compiled_otherwise(schedule: Schedule, programs: Iterable[Schedule]) -> str | None:
    """How the first of `programs` was compiled otherwise than `schedule`; None if one of them is the same, or
    if the reason is unknown. programs: the schedules that a step traces."""
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


def _is_transposed(origin: Origin) -> bool:
    return "transpose(" in origin.op_name


def _listed(origins: Sequence[Origin]) -> str:
    counts = Counter(map(str, origins))
    return ", ".join(name if count == 1 else f"{count} x {name}" for name, count in counts.items())
