"""Rounding on the way: what casts a schedule makes, and what casts its plan allows.

A trace lists events in the order in which they happen to a contribution:

    ("cast", from, to)   every element converted; left out where the next cast takes it back exactly
    ("sum", axes)        added over axes in the type of the last cast; listed only behind a cast
    ("allow", axes, wire, accumulate, type)
                         in the term of a plan, or of an operation that no pass has written out yet: a value
                         of `type` is added over `axes`, or moved where there are none, and may travel in
                         `wire` meanwhile; sums are made in `accumulate`
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from commplan.ir.types import DType

Event = tuple[Any, ...]
Trace = tuple[Event, ...]

_EXACT: dict[DType, frozenset[DType]] = {
    DType.BOOL: frozenset(DType),
    DType.U8: frozenset({DType.I32, DType.I64, DType.F32, DType.F64, DType.F16, DType.BF16}),
    DType.I32: frozenset({DType.I64, DType.F64}),
    DType.BF16: frozenset({DType.F32, DType.F64}),
    DType.F16: frozenset({DType.F32, DType.F64}),
    DType.F32: frozenset({DType.F64}),
}


def wire_types(dtype: DType, wire: DType | None, accumulate: DType | None) -> tuple[DType, DType]:
    """The types in which values of `dtype` travel and are added, where a stage asks for `wire` and
    `accumulate`.

    Only floats change. The wire type is never wider than the value; a sum is never narrower than what
    travels; where nothing is said values are added in their own type.
    """
    if not dtype.is_float:
        return dtype, dtype
    sent = wire if wire and wire.nbytes <= dtype.nbytes else dtype
    added = accumulate or dtype
    return sent, added if added.nbytes >= sent.nbytes else sent


def allowed(axes: Iterable[str], dtype: DType, wire: DType | None, accumulate: DType | None) -> Event | None:
    """The event that says what `wire` and `accumulate` of a stage allow; None where that is nothing.

    axes: those that a sum is made over, none of a move.
    """
    names = tuple(sorted(axes))
    sent, added = wire_types(dtype, wire, accumulate if names else None)
    return None if sent == added == dtype else ("allow", names, sent, added if names else sent, dtype)


def holds(wide: DType, narrow: DType) -> bool:
    """Whether every value of `narrow` is one of `wide`."""
    return wide == narrow or wide in _EXACT.get(narrow, frozenset())


def cast(trace: Trace, before: DType, after: DType) -> Trace:
    """`trace` with a conversion behind it."""
    if before == after:
        return trace
    if trace and trace[-1] == ("cast", after, before) and holds(before, after):
        return trace[:-1]  # there and back, and nothing was done in between
    return (*trace, ("cast", before, after))


def accepts(made: Trace, allowed: Trace) -> bool:
    """Whether what happened to a contribution is what its plan allows: casts to the wire type, to the type
    that sums are made in and back, at the sum or move that they are written for, and every sum in its
    type."""
    if made == allowed:
        return True
    stages: list[_Stage] = []
    for event in allowed:
        types = event[2:] if event[0] == "allow" else (stages[-1].own,) * 3  # a sum behind another stage
        stages.append(_Stage(set(event[1]), *types))
    place, current = 0, None
    for event in made:
        around = stages[place : place + 2]
        if event[0] == "allow" and not event[1]:
            if not any(event[2] in stage.types for stage in around):
                return False
            continue
        if event[0] == "cast":
            if not any(event[2] in stage.types or holds(event[2], event[1]) for stage in around):
                return False
            current = event[2]
            continue
        while place < len(stages) and not stages[place].axes.issuperset(event[1]):
            place += 1
        if place == len(stages):
            return False
        stage = stages[place]
        if event[0] == "allow" and event[2:] != stage.types:
            return False
        if event[0] == "sum" and current not in (None, stage.accumulate):
            return False
        stage.axes.difference_update(event[1])
    if current is not None and stages and current != stages[-1].own:
        return False
    return not any(stage.axes and not holds(stage.own, stage.accumulate) for stage in stages)


class _Stage:
    """What a plan allows at one sum or move; `axes`: those that are still to be summed over."""

    def __init__(self, axes: set[str], wire: DType, accumulate: DType, own: DType) -> None:
        self.axes, self.wire, self.accumulate, self.own = axes, wire, accumulate, own

    @property
    def types(self) -> tuple[DType, DType, DType]:
        return self.wire, self.accumulate, self.own
