"""Rounding on the way: what casts a schedule makes, and what casts its plan allows.

A trace lists events in the order in which they happen to a contribution:

    ("cast", from, to)   every element converted; left out where the next cast takes it back exactly
    ("sum", axes)        added over axes in the type of the last cast; listed only behind a cast
    ("scale", factor, type, axes)
                         multiplied by a number, in `type`, after the sums over `axes`. A mean of values that
                         travel in another type is divided directly after each sum, by its ranks and in its
                         type: what travels on is a mean, never a sum
    ("allow", axes, wire, accumulate, type, again, divides)
                         in the term of a plan, or of an operation that no pass has written out yet: a value
                         of `type` travels in `wire`, is added over `axes` in `accumulate`, and where `again`
                         is said its sum travels in `wire` as well; without axes it is moved. With `divides`
                         it is a mean, and its factor follows
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from commplan.ir.hints import Hints
from commplan.ir.types import DType

Event = tuple[Any, ...]
Trace = tuple[Event, ...]

# Types that hold every value of a type, as XLA converts. No type of 64 bits is among them: without
# `jax_enable_x64` JAX computes in 32 bits, and on the way from f32 to f64 XLA:CPU loses denormals.
EXACT: dict[DType, frozenset[DType]] = {
    DType.BOOL: frozenset(dtype for dtype in DType if dtype.nbytes < 8),
    DType.U8: frozenset({DType.I32, DType.F32, DType.F16, DType.BF16}),
    DType.I8: frozenset({DType.I16, DType.I32, DType.F32, DType.F16, DType.BF16}),
    DType.I16: frozenset({DType.I32, DType.F32}),
    DType.U16: frozenset({DType.U32, DType.I32, DType.F32}),
    DType.BF16: frozenset({DType.F32}),
    DType.F16: frozenset({DType.F32}),
}


def allowed(
    axes: Iterable[str], dtype: DType, hints: Hints, *, again: bool | None = False, divides: bool = False
) -> Event | None:
    """The event for `wire` and `accumulate` of a stage; None if values stay in their own type.

    axes: those that a sum is made over, none of a move. again: the sum travels, too; None: it may. divides:
    the sum is divided, which an event ("scale", ..) behind this one says.
    """
    names = tuple(sorted(axes))
    sent, added = hints.wire_types(dtype, adds=bool(names))
    added = added if names else sent
    if sent == added == dtype:
        return None
    return ("allow", names, sent, added, dtype, again and bool(names), divides and bool(names))


def holds(wide: DType, narrow: DType) -> bool:
    """Whether every value of `narrow` is one of `wide`."""
    return wide == narrow or wide in EXACT.get(narrow, frozenset())


def is_rounded(trace: Trace) -> bool:
    """Whether anything but factors is in `trace`."""
    return any(event[0] != "scale" for event in trace)


def cast(trace: Trace, before: DType, after: DType) -> Trace:
    """`trace` with a conversion behind it."""
    if before == after:
        return trace
    if trace and trace[-1] == ("cast", after, before) and holds(before, after):
        return trace[:-1]  # there and back, and nothing was done in between
    return (*trace, ("cast", before, after))


def accepts(trace: Trace, allowed: Trace, sizes: Mapping[str, int]) -> bool:
    """Whether what happened to a contribution is what its plan asks for: casts to the wire type, to the type
    that sums are made in and back, at the sum or move that they are written for, and every sum in its type.
    What is added travels in its wire type; what is only moved may. Factors are those of the plan, in the same
    type and behind the same sums; those of means follow each sum (see the module). sizes: those of axes."""
    if trace == allowed:
        return True
    stages, factors = _stages(allowed)
    own_factors: list[Event] = []
    place, current = 0, None
    narrow: set[DType] = set()  # the types that it was cast to since the last sum
    events = iter(trace)
    for event in events:
        if event[0] == "scale":
            own_factors.append(event)
            continue
        end = place + 1
        while end < len(stages) and not stages[end].adds:
            end += 1  # what is only moved may travel as it is
        around = stages[place : end + 1]
        if event[0] == "cast":
            if not any(event[2] in stage.next_types or holds(event[2], event[1]) for stage in around):
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
        if stage.divides:
            factor = Fraction(1, math.prod(sizes[axis] for axis in event[1]))
            added = stage.accumulate if event[0] == "sum" else stage.own
            if next(events, ())[:3] != ("scale", factor, added):
                return False
        stage.axes.difference_update(event[1])
        narrow = {current} if current is not None else set()
        stage.narrow = {*narrow, *((stage.wire,) if event[0] == "allow" and event[5] else ())}
    if current is not None and stages and current != stages[-1].own:
        return False
    return sorted(own_factors) == sorted(factors) and all(stage.done for stage in stages)


def _stages(allowed: Trace) -> tuple[list[_Stage], list[Event]]:
    """The sums and moves that a plan asks for, and its factors except those of their means."""
    stages: list[_Stage] = []
    factors: list[Event] = []
    for index, event in enumerate(allowed):
        if event[0] == "scale":
            if not index or not (allowed[index - 1][0] == "allow" and allowed[index - 1][6]):
                factors.append(event)
            continue
        own: DType = event[4] if event[0] == "allow" else stages[-1].own  # or a sum behind a stage
        wire, accumulate, again = (event[2], event[3], event[5]) if event[0] == "allow" else (own, own, False)
        divides = event[0] == "allow" and event[6] and allowed[index + 1 : index + 2] != ()
        stages.append(_Stage(set(event[1]), wire, accumulate, own, again, divides))
    return stages, factors


class _Stage:
    """What a plan asks for at one sum or move. axes: those that are still to be summed over. narrow: the
    types that the sum was cast to. divides: every sum is divided by its ranks."""

    def __init__(
        self, axes: set[str], wire: DType, accumulate: DType, own: DType, again: bool | None, divides: bool
    ) -> None:
        self.adds, self.divides = bool(axes), divides
        self.axes, self.wire, self.accumulate, self.own, self.again = axes, wire, accumulate, own, again
        self.narrow: set[DType] = set()

    @property
    def types(self) -> tuple[DType, DType, DType]:
        return self.wire, self.accumulate, self.own

    @property
    def next_types(self) -> tuple[DType, ...]:
        """The types that may follow: behind the last sum, if it is not sent on, its own alone."""
        return (self.own,) if self.adds and not self.axes and self.again is False else self.types

    @property
    def done(self) -> bool:
        """Whether all sums were made, and what is to travel did so in the wire type. If that is wider than
        the result, a sum may travel in the type of the result, to which it is rounded either way."""
        if not self.adds or self.types == (self.own, self.own, self.own):
            return True
        may_narrow = self.wire == self.own or self.wire.nbytes > self.own.nbytes
        return not self.axes and (not self.again or may_narrow or self.wire in self.narrow)
