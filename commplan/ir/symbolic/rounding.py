"""Rounding: the casts that a schedule makes, and those that its plan allows.

A trace lists the events of a contribution in order:

    ("cast", from, to)   every element converted; omitted if the next cast reverts it exactly
    ("sum", axes)        summed over axes in the type of the last cast; listed only after an event that rounds
    ("scale", factor, type, axes)
                         multiplied by a number, in `type`, after the sums over `axes`. A mean of values
                         that are sent in another type is divided after each sum, by its number of ranks
                         and in its type, so that only means are sent on, not sums
    ("allow", axes, wire, accumulate, type, sends_sum, divides)
                         in the term of a plan, or of an operation that passes have not expanded: a value of
                         `type` is sent in `wire` and summed over `axes` in `accumulate`, and with `sends_sum`
                         the sum is sent in `wire` too; without axes it is only moved. With `divides` it
                         is a mean, and its factor follows
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from commplan.ir.hints import Hints
from commplan.ir.types import DType

# An event of a trace; see the module.
Event = tuple[Any, ...]
# The rounding of a contribution; empty if it is exact.
Trace = tuple[Event, ...]

# For each type, the types that hold all its values, as XLA converts them. No 64-bit types are included:
# without `jax_enable_x64` JAX computes in 32 bits, and XLA:CPU loses denormals in conversions from f32 to
# f64.
EXACT: dict[DType, frozenset[DType]] = {
    DType.BOOL: frozenset(dtype for dtype in DType if dtype.nbytes < 8),
    DType.U8: frozenset({DType.I32, DType.F32, DType.F16, DType.BF16}),
    DType.I8: frozenset({DType.I16, DType.I32, DType.F32, DType.F16, DType.BF16}),
    DType.I16: frozenset({DType.I32, DType.F32}),
    DType.U16: frozenset({DType.U32, DType.I32, DType.F32}),
    DType.BF16: frozenset({DType.F32}),
    DType.F16: frozenset({DType.F32}),
}


def allowed_event(
    axes: Iterable[str], dtype: DType, hints: Hints, *, sends_sum: bool | None = False, divides: bool = False
) -> Event | None:
    """The event for `wire` and `accumulate` of a stage, or None if values keep their type.

    Args:
        axes: The axes of the sum; none for a move.
        dtype: The type of the values.
        hints: The hints of the stage.
        sends_sum: Whether the sum is sent too; None if it may be.
        divides: Whether the sum is divided, by the ("scale", ..) event that follows.
    """
    names = tuple(sorted(axes))
    sent, added = hints.wire_types(dtype, adds=bool(names))
    added = added if names else sent
    if sent == added == dtype:
        return None
    return ("allow", names, sent, added, dtype, sends_sum and bool(names), divides and bool(names))


def holds(wide: DType, narrow: DType) -> bool:
    """Whether `wide` can represent every value of `narrow`."""
    return wide == narrow or wide in EXACT.get(narrow, frozenset())


def is_rounded(trace: Trace) -> bool:
    """Whether `trace` has casts, sums or allowed rounding, and not just factors."""
    return any(event[0] != "scale" for event in trace)


def cast(trace: Trace, before: DType, after: DType) -> Trace:
    """`trace` followed by a conversion from the type `before` to the type `after`."""
    if before == after:
        return trace
    if trace and trace[-1] == ("cast", after, before) and holds(before, after):
        return trace[:-1]  # there and back, with no operation in between
    return (*trace, ("cast", before, after))


def accepts(trace: Trace, expected: Trace, sizes: Mapping[str, int]) -> bool:
    """Whether the plan allows the events of a contribution.

    Allowed are casts to the wire type, to the accumulation type and back, at the sum or move that has these
    types, and sums in their accumulation type. Values that are added must be sent in the wire type; values
    that are only moved may be. Factors must be those of the plan, in the same type and after the same sums;
    factors of means follow each sum (see the module).

    Args:
        trace: The trace of a contribution in the schedule.
        expected: The trace of the same contribution in the plan.
        sizes: The number of ranks along each axis.
    """
    if trace == expected:
        return True
    stages, factors = _stages(expected)
    trace_factors: list[Event] = []
    place = 0  # the index of the current sum or move of the plan
    current: DType | None = None  # the type after the last cast
    narrow: set[DType] = set()  # the types of casts since the last sum
    events = iter(trace)
    for event in events:
        if event[0] == "scale":
            trace_factors.append(event)
            continue
        # A cast may belong to the current stage, to the next sum, or to a move in between, because values
        # that are moved may keep their type.
        end = place + 1
        while end < len(stages) and not stages[end].adds:
            end += 1
        near_stages = stages[place : end + 1]
        if event[0] == "cast":
            if not any(event[2] in stage.next_types or holds(event[2], event[1]) for stage in near_stages):
                return False
            current = event[2]
            narrow.add(event[2])
            stages[place].narrow.add(event[2])
            continue
        if event[0] == "allow" and not event[1]:
            if not any(event[2] in stage.types for stage in near_stages):
                return False
            stages[place].narrow.add(event[2])
            continue
        # A sum in the schedule: find the first sum of the plan over these axes, and compare the types.
        while place < len(stages) and not stages[place].axes.issuperset(event[1]):
            place += 1
        if place == len(stages):
            return False
        stage = stages[place]
        if event[0] == "allow" and event[2:5] != stage.types:
            return False
        if event[0] == "sum" and (
            current not in (None, stage.accumulate)
            or (stage.wire != stage.dtype and stage.wire not in narrow)
        ):
            return False
        if stage.divides:  # the next event must divide by the number of ranks
            factor = Fraction(1, math.prod(sizes[axis] for axis in event[1]))
            added = stage.accumulate if event[0] == "sum" else stage.dtype
            if next(events, ())[:3] != ("scale", factor, added):
                return False
        stage.axes.difference_update(event[1])
        narrow = {current} if current is not None else set()
        stage.narrow = {*narrow, *((stage.wire,) if event[0] == "allow" and event[5] else ())}
    if current is not None and stages and current != stages[-1].dtype:
        return False
    return sorted(trace_factors) == sorted(factors) and all(stage.done for stage in stages)


def _stages(plan_trace: Trace) -> tuple[list[_AllowedRounding], list[Event]]:
    """The sums and moves in the trace of a plan, and its factors except those of means."""
    stages: list[_AllowedRounding] = []
    factors: list[Event] = []
    for index, event in enumerate(plan_trace):
        if event[0] == "scale":
            if not index or not (plan_trace[index - 1][0] == "allow" and plan_trace[index - 1][6]):
                factors.append(event)
            continue
        dtype: DType = event[4] if event[0] == "allow" else stages[-1].dtype  # or a sum after a stage
        wire, accumulate, sends_sum = (
            (event[2], event[3], event[5]) if event[0] == "allow" else (dtype, dtype, False)
        )
        divides = event[0] == "allow" and event[6] and plan_trace[index + 1 : index + 2] != ()
        stages.append(_AllowedRounding(set(event[1]), wire, accumulate, dtype, sends_sum, divides))
    return stages, factors


class _AllowedRounding:
    """The types that a plan allows at one sum or move, and how far a trace has carried it out.

    Args:
        axes: The axes that are not summed over yet; empty for a move.
        wire: The wire type.
        accumulate: The accumulation type.
        dtype: The type of the result.
        sends_sum: Whether the sum is sent too; None if it may be.
        divides: Whether every sum is divided by its number of ranks.

    Attributes:
        adds: Whether it is a sum rather than a move.
        narrow: The types of the casts since the last sum that this stage allows.
    """

    def __init__(
        self,
        axes: set[str],
        wire: DType,
        accumulate: DType,
        dtype: DType,
        sends_sum: bool | None,
        divides: bool,
    ) -> None:
        self.adds, self.divides = bool(axes), divides
        self.axes, self.sends_sum = axes, sends_sum
        self.wire, self.accumulate, self.dtype = wire, accumulate, dtype
        self.narrow: set[DType] = set()

    @property
    def types(self) -> tuple[DType, DType, DType]:
        """The wire type, the accumulation type and the type of the result."""
        return self.wire, self.accumulate, self.dtype

    @property
    def next_types(self) -> tuple[DType, ...]:
        """The valid types of the next cast: after the last sum, the type of the result if it is not sent."""
        return (self.dtype,) if self.adds and not self.axes and self.sends_sum is False else self.types

    @property
    def done(self) -> bool:
        """Whether all sums are complete, and values were sent in the wire type as required.

        If the wire type is wider than the result, a sum may be sent in the type of the result, to which it is
        rounded either way.
        """
        if not self.adds or self.types == (self.dtype, self.dtype, self.dtype):
            return True
        may_narrow = self.wire == self.dtype or self.wire.nbytes > self.dtype.nbytes
        return not self.axes and (not self.sends_sum or may_narrow or self.wire in self.narrow)
