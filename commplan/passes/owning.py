"""Who may own what of an exchange between workers, and what each way would take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from commplan.ir.choice import Alternative, Choice
from commplan.ir.plan import Algorithm, Arg, Hints, Ref, name_of
from commplan.ir.schedule import Collective, CollectiveKind, Exchange, Leaf, Schedule, Value, widest
from commplan.passes.choosing import Chooser, rounded

SHARDED, REPLICATED = "each worker owns a part", "all-reduce, and everyone updates everything"


class Owners(NamedTuple):
    """Who updates the states of an exchange.

    how: `sharded`, each rank its part of every leaf; `replicated`, each rank everything. axes: in the order
    in which ranks along them hold parts, first major. via: how gradients and weights travel, None where that
    is open. moved: whether the optimiser's state lives with the owners.
    """

    how: Literal["sharded", "replicated"]
    axes: tuple[str, ...]
    via: Algorithm | None = None
    moved: bool = False


def inner_first(over: tuple[str, ...], within: str | None) -> tuple[str, ...]:
    """The axes of an exchange in the order in which they are reduced: of those named the last comes first,
    and `within` last."""
    inside = tuple(axis for axis in reversed(over) if axis != within)
    return inside if within is None else (*inside, within)


def levels(axes: tuple[str, ...], within: str | None) -> Algorithm | None:
    """`hierarchical(worker, rack)` where the exchange is `within = rack`."""
    if within is None or len(axes) < 2:
        return None
    return Algorithm("hierarchical", tuple(Arg(axis) for axis in axes))


def hints_of(op: Exchange) -> Hints:
    """What an exchange asks of the collectives that it becomes: they run beside each other's updates."""
    return msgspec.structs.replace(op.hints, staleness=None, overlap=op.hints.overlap or "backward")


def strange(schedule: Schedule, op: Exchange) -> str | None:
    """What of the states cannot be cut among owners, and why; None: all of it can."""
    weights = _value(schedule, op.results[0])
    if not any(leaf.shape for leaf in weights.leaves):
        return f"a part of `{name_of(op.results[0])}`, which is a scalar"
    for ref in op.results[1:]:
        value = _value(schedule, ref)
        if value.kind != weights.kind:
            return f"`{name_of(ref)}`, which is one {value.kind} while the weights are one {weights.kind}"
        for leaf in value.leaves:
            if leaf.shape and weight_of(leaf, weights.leaves) is None:
                shape = f"{leaf.dtype}{list(leaf.shape)}"
                return f"leaf `{leaf.path}` of `{name_of(ref)}`, {shape}: it needs a whole-tree view"
    return None


def weight_of(leaf: Leaf, weights: Sequence[Leaf]) -> int | None:
    """The weight that `leaf` of an optimiser's state belongs to, by its index: of those of its shape whose
    path ends its path the one with the longest; None where there is none."""
    fits = [
        (len(weight.path), -index)
        for index, weight in enumerate(weights)
        if weight.shape == leaf.shape and f"/{leaf.path}".endswith(f"/{weight.path}" if weight.path else "")
    ]
    return -max(fits)[1] if fits else None


def predicted(
    chooser: Chooser, op: Exchange, axes: tuple[str, ...]
) -> tuple[float | None, float | None]:
    """Seconds that owners, and an all-reduce, take to move what they must; None where nothing tells times."""
    gradient = _value(chooser.schedule, op.gradient)
    whole, ways, dtype = gradient.nbytes, chooser.schedule.size(axes), widest(gradient.leaves)

    def time(kind: CollectiveKind, nbytes: int) -> float | None:
        adds = "sum" if kind != "all_gather" else None
        asked = Collective(kind, "", "", axes, dtype, nbytes, op.span, adds, hints=hints_of(op))
        way = chooser.about(asked)
        return way.seconds if way is not None else None

    down, up = time("reduce_scatter", whole), time("all_gather", -(-whole // ways))
    both = down + up if down is not None and up is not None else None
    return both, time("all_reduce", whole)


def chosen(chooser: Chooser, op: Exchange, owners: Owners) -> Choice:
    """What was taken, for `explain`, beside what was not."""
    ways, why_not = chooser.schedule.size(owners.axes), strange(chooser.schedule, op)
    sharded, replicated = predicted(chooser, op, owners.axes)
    if owners.how == "sharded":
        what, other, times = SHARDED, REPLICATED, (sharded, replicated)
        what += f": {ways} owners along {', '.join(owners.axes)}"
        why = "the plan says so" if op.algorithm is not None else "every part is updated once"
    else:
        what, other, times = REPLICATED, SHARDED, (replicated, sharded)
        why = f"owners cannot keep {why_not}" if why_not else "it takes clearly less time"
    if owners.moved:
        kept = ", ".join(f"`{name_of(ref)}`" for ref in op.results[1:])
        why += f"; {kept} is kept by the owners, 1/{ways} of it on each"
    told = [rounded(seconds) if seconds is not None else None for seconds in times]
    what = f"`{name_of(op.results[0])}`: {what}"
    return Choice("place", what, why, op.span, (), told[0], "", (Alternative(other, told[1]),))


def _value(schedule: Schedule, ref: Ref) -> Value:
    values = (value for phase in schedule.phases for value in phase.values)
    return next(value for value in (*schedule.entry, *values) if value.id == ref)
