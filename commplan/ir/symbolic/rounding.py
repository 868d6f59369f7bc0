"""Rounding on the way: what casts a schedule makes, and what casts its plan allows.

A trace lists events in the order in which they happen to a contribution:

    ("cast", from, to)   every element converted; left out where the next cast takes it back exactly
    ("sum", axes)        added over axes in the type of the last cast; listed only behind a cast
    ("scale", factor)    multiplied by a number. Where among sums and casts that happens is left open: it
                         rounds, as sums in another order do
    ("allow", axes, wire, accumulate, type, again)
                         in the term of a plan, or of an operation that no pass has written out yet: a value
                         of `type` travels in `wire`, is added over `axes` in `accumulate`, and where `again`
                         is said its sum travels in `wire` as well; without axes it is moved
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from commplan.ir.hints import Hints
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


def allowed(axes: Iterable[str], dtype: DType, hints: Hints, *, again: bool = False) -> Event | None:
    """The event that says what `wire` and `accumulate` of a stage ask for; None where that is nothing.

    axes: those that a sum is made over, none of a move. again: the sum travels, too.
    """
    names = tuple(sorted(axes))
    sent, added = hints.wire_types(dtype)
    added = added if names else sent
    if sent == added == dtype:
        return None
    return ("allow", names, sent, added, dtype, again and bool(names))


def holds(wide: DType, narrow: DType) -> bool:
    """Whether every value of `narrow` is one of `wide`."""
    return wide == narrow or wide in _EXACT.get(narrow, frozenset())


def is_rounded(trace: Trace) -> bool:
    """Whether anything but factors is in `trace`."""
    return any(event[0] != "scale" for event in trace)


def _factors(trace: Trace) -> list[Event]:
    return sorted(event for event in trace if event[0] == "scale")


def cast(trace: Trace, before: DType, after: DType) -> Trace:
    """`trace` with a conversion behind it."""
    if before == after:
        return trace
    if trace and trace[-1] == ("cast", after, before) and holds(before, after):
        return trace[:-1]  # there and back, and nothing was done in between
    return (*trace, ("cast", before, after))


def accepts(trace: Trace, allowed: Trace) -> bool:
    """Whether what happened to a contribution is what its plan asks for: casts to the wire type, to the type
    that sums are made in and back, at the sum or move that they are written for, and every sum in its type.
    What is added travels in its wire type; what is only moved may. Factors are those of the plan."""
    if trace == allowed:
        return True
    if _factors(trace) != _factors(allowed):
        return False
    stages: list[_Stage] = []
    for event in (event for event in allowed if event[0] != "scale"):
        own: DType = event[4] if event[0] == "allow" else stages[-1].own  # or a sum behind a stage
        wire, accumulate, again = (event[2], event[3], event[5]) if event[0] == "allow" else (own, own, False)
        stages.append(_Stage(set(event[1]), wire, accumulate, own, again))
    place, current = 0, None
    narrow: set[DType] = set()  # the types that it was cast to since the last sum
    for event in (event for event in trace if event[0] != "scale"):
        end = place + 1
        while end < len(stages) and not stages[end].adds:
            end += 1  # what is only moved may travel as it is
        around = stages[place : end + 1]
        if event[0] == "cast":
            if not any(event[2] in stage.types or holds(event[2], event[1]) for stage in around):
                return False
            current = event[2]
            narrow.add(current)
            stages[place].narrow.add(current)
            continue
        if event[0] == "allow" and not event[1]:
            if not any(event[2] in stage.types for stage in around):
                return False
            stages[place].narrow.add(event[2])
            continue
        while place < len(stages) and not stages[place].axes.issuperset(event[1]):
            place += 1
        if place == len(stages):
            return False
        stage = stages[place]
        if event[0] == "allow" and event[2:5] != stage.types:
            return False
        if event[0] == "sum" and (
            current not in (None, stage.accumulate) or (stage.wire != stage.own and stage.wire not in narrow)
        ):
            return False
        stage.axes.difference_update(event[1])
        narrow = {current} if current is not None else set()
        stage.narrow = {*narrow, *((stage.wire,) if event[0] == "allow" and event[5] else ())}
    if current is not None and stages and current != stages[-1].own:
        return False
    return all(stage.done for stage in stages)


class _Stage:
    """What a plan asks for at one sum or move. axes: those that are still to be summed over. narrow: the
    types that the sum was cast to."""

    def __init__(self, axes: set[str], wire: DType, accumulate: DType, own: DType, again: bool) -> None:
        self.adds = bool(axes)
        self.axes, self.wire, self.accumulate, self.own, self.again = axes, wire, accumulate, own, again
        self.narrow: set[DType] = set()

    @property
    def types(self) -> tuple[DType, DType, DType]:
        return self.wire, self.accumulate, self.own

    @property
    def done(self) -> bool:
        """Whether all sums were made, and what is to travel did so in the wire type."""
        if not self.adds or self.types == (self.own, self.own, self.own):
            return True
        return not self.axes and (not self.again or self.wire == self.own or self.wire in self.narrow)
