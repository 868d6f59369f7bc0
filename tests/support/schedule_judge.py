"""Whether an edited schedule still does the same as the original: outputs, states and placements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from commplan.ir import schedule as ir
from commplan.ir.plan import name_of
from commplan.ir.types import DType

from .schedule_oracle import MANTISSA, Array, Exactly, exact, masks

NOISE = 1e-11  # of float64, relative to the largest element
SCALES = (1.0, 2.0**17)  # the second is beyond what f16 holds
ROUNDS = 2  # every phase but `at start` runs so often


class Result(NamedTuple):
    """An output or a state as it leaves a phase."""

    placement: str
    leaves: tuple[tuple[str, DType, Array, Array | None], ...]  # path, dtype, data, mask without padding


Behavior = dict[tuple[Any, ...], Result | str]


def behavior(
    schedule: ir.Schedule, like: ir.Schedule, linear: frozenset[str], scale: float, rounding: bool = True
) -> Behavior:
    """The effects of `schedule`, called as `like`: results and errors by step and phase."""
    reference, runner = (Exactly(each, like.fns, linear, scale, rounding) for each in (like, schedule))
    entry = {value.id: value for value in like.entry}
    state = {name_of(ref): reference.entering(entry[ref]) for ref in like.states}
    result: Behavior = {("phases",): repr(sorted(_face(phase) for phase in schedule.phases))}
    result["axes",] = repr([(axis.name, axis.kind, axis.size) for axis in schedule.axes])
    for step in range(ROUNDS):
        for phase in like.phases:
            if step and phase.kind == "start":
                continue
            key = (step, phase.name)
            inputs = {name_of(ref): reference.entering(entry[ref], step) for ref in phase.inputs}
            try:
                outputs, after = runner.phase(phase.name, state, inputs)
                compiled = schedule.phase(phase.name)
                values = {value.id: value for value in (*schedule.entry, *compiled.values)}
                for binding in compiled.outputs:
                    value = values[binding.value]
                    result[(*key, "output", binding.name)] = _result(runner, value, outputs[binding.name])
                for binding in compiled.updates:
                    value = values[binding.value]
                    result[(*key, "state", binding.name)] = _result(runner, value, after[binding.name])
                state = after
            except Exception as error:  # noqa: BLE001 - whatever it raises, it does not do what it should
                result[(*key, "error")] = f"{type(error).__name__}: {str(error)[:200]}"
    return result


def _face(phase: ir.Phase) -> tuple[Any, ...]:
    outputs = sorted((binding.name, binding.source_only) for binding in phase.outputs)
    return phase.name, phase.kind, phase.period, outputs, sorted(binding.name for binding in phase.updates)


def _result(runner: Exactly, value: ir.Value, tree: Any) -> Result:
    arrays = [tree] if not value.leaves else runner.leaves(value, tree)
    leaves = value.leaves or (ir.Leaf("", (), DType.F64),)
    where = masks(runner.grid.sizes, value) or [None]
    placement = value.placement
    return Result(
        str((sorted(placement.per), sorted(placement.partial), placement.split, placement.server)),
        tuple(
            (leaf.path, leaf.dtype, np.asarray(array), mask)
            for leaf, array, mask in zip(leaves, arrays, where, strict=True)
        ),
    )


class Verdict(NamedTuple):
    """How two behaviors differ: `differs`, `rounds less` (the other leaves out casts to narrower types, and
    does the same otherwise), `rounds` (by less than the type of the result tells apart) or `same`; the first
    place, in words; the names of all outputs and states that differ."""

    level: str
    where: str = ""
    names: frozenset[str] = frozenset()

    def __or__(self, other: Verdict) -> Verdict:
        worse = max(self, other, key=lambda verdict: LEVELS.index(verdict.level))
        return Verdict(worse.level, worse.where, self.names | other.names)


LEVELS = ("same", "rounds", "rounds less", "differs")


def difference(first: Behavior, second: Behavior) -> Verdict:
    verdict = Verdict("same")
    for key in {**first, **second}:
        expected, actual = first.get(key), second.get(key)
        level = _compared(expected, actual)
        if level == "same":
            continue
        place = " ".join(map(str, key))
        where = f"{place}: {actual}" if isinstance(actual, str) and key[-1] == "error" else place
        now = Verdict(level, where, frozenset([key[-1]]) if len(key) == 4 else frozenset())
        verdict = verdict | now
    return verdict


def _compared(expected: Result | str | None, actual: Result | str | None) -> str:
    if not isinstance(expected, Result) or not isinstance(actual, Result):
        return "same" if expected == actual else "differs"
    if expected.placement != actual.placement or [x[:2] for x in expected.leaves] != [
        x[:2] for x in actual.leaves
    ]:
        return "differs"
    outcome = "same"
    for (_, dtype, a, mask), (_, _, b, _) in zip(expected.leaves, actual.leaves, strict=True):
        if a.shape != b.shape:
            return "differs"
        real = np.ones(a.shape, bool) if mask is None else np.broadcast_to(mask, a.shape)
        level = _apart_by(a[real], b[real], dtype)
        if level == "differs":
            return level
        outcome = level if level == "rounds" else outcome
    return outcome


def _apart_by(a: Array, b: Array, dtype: DType) -> str:
    if not dtype.is_float or object in (a.dtype, b.dtype):
        return "same" if np.array_equal(a, b) else "differs"
    a, b = a.astype(np.float64), b.astype(np.float64)
    equal = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(all="ignore"):
        off = np.max(np.where(equal, 0.0, np.nan_to_num(np.abs(a - b), nan=np.inf)), initial=0.0)
        size = np.max(np.abs(np.where(np.isfinite(a), a, 0.0)), initial=0.0)
    if off > max(2.0 ** -MANTISSA[dtype], NOISE) * size:
        return "differs"
    return "rounds" if off > NOISE * size else "same"


class Judge:
    """Compares edited schedules with the original."""

    def __init__(self, schedule: ir.Schedule, linear: Iterable[str]) -> None:
        self.schedule, self.linear = schedule, frozenset(linear)
        with exact():
            self.meant = [behavior(schedule, schedule, self.linear, scale) for scale in SCALES]

    @property
    def errors(self) -> list[str]:
        return [str(message) for key, message in self.meant[0].items() if key[-1] == "error"]

    def compare(self, other: ir.Schedule) -> Verdict:
        verdict = Verdict("same")
        for scale, meant in zip(SCALES, self.meant, strict=True):
            if verdict.level != "differs":
                with exact():
                    verdict |= difference(meant, behavior(other, self.schedule, self.linear, scale))
        if verdict.level == "differs" and (self._rounds_less(other) or self._exact_where_it_differs(other)):
            return verdict._replace(level="rounds less")
        return verdict

    def _exact_where_it_differs(self, other: ir.Schedule) -> bool:
        """Whether the results of `other` equal those of the schedule, or would equal them without
        rounding."""
        with exact():
            for scale, meant in zip(SCALES, self.meant, strict=True):
                plain = behavior(self.schedule, self.schedule, self.linear, scale, rounding=False)
                other_behavior = behavior(other, self.schedule, self.linear, scale)
                alike = ("same", "rounds")
                close = {key for key in plain if _compared(plain[key], other_behavior.get(key)) in alike}
                either = {key: plain[key] if key in close else item for key, item in meant.items()}
                if difference(either, other_behavior).level not in ("same", "rounds"):
                    return False
        return True

    def _rounds_less(self, other: ir.Schedule) -> bool:
        """Whether `other` differs only by casts to narrower types that it leaves out."""
        if not _roundings(other) < _roundings(self.schedule):
            return False
        if any(width < _widths(self.schedule).get(line, 0) for line, width in _widths(other).items()):
            return False
        with exact():
            first, second = (
                behavior(each, self.schedule, self.linear, 1.0, rounding=False)
                for each in (self.schedule, other)
            )
        return difference(first, second).level in ("same", "rounds")


def _roundings(schedule: ir.Schedule) -> Counter[tuple[Any, ...]]:
    """How often the ops of each line of the plan cast to each narrower type."""
    counts: Counter[tuple[Any, ...]] = Counter()
    for phase, op, values in _ops(schedule):
        if isinstance(op, ir.Cast) and op.operand in values:
            leaves = values[op.operand].leaves
            changes = {(leaf.dtype, dtype) for leaf, dtype in zip(leaves, op.types(leaves), strict=True)}
            for after in {b for a, b in changes if MANTISSA.get(b, 0) < MANTISSA.get(a, 99)}:
                counts[phase, op.span, after] += 1
    return counts


def _widths(schedule: ir.Schedule) -> dict[tuple[Any, ...], int]:
    """The narrowest type of the additions of each line of the plan."""
    narrowest: dict[tuple[Any, ...], int] = {}
    for phase, op, values in _ops(schedule):
        if isinstance(op, ir.LocalSum) or (isinstance(op, ir.Collective) and op.op is not None):
            leaves = values[op.operand].leaves if op.operand in values else ()
            widths = [MANTISSA.get(leaf.dtype, 99) for leaf in leaves]
            narrowest[phase, op.span] = min([narrowest.get((phase, op.span), 99), *widths])
    return narrowest


def _ops(schedule: ir.Schedule) -> Iterator[tuple[str, ir.Op, dict[str, ir.Value]]]:
    for phase in schedule.phases:
        values = {value.id: value for value in (*schedule.entry, *phase.values)}
        for op in phase.ops:
            yield phase.name, op, values
