"""Who may own what of an exchange between workers, and what each way would take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec.structs import replace

from commplan.ir.analysis.optimizer_leaf_match import weights_of
from commplan.ir.axes import coordinates, position
from commplan.ir.plan import Algorithm, Arg, Hints, name_of
from commplan.ir.remark import Alternative, Choice
from commplan.ir.schedule import Collective, CollectiveKind, Exchange, Ownership, Schedule, widest
from commplan.ir.shard_shapes import row_size
from commplan.ir.types import sized
from commplan.select.algorithm_search import Chooser, rounded

SAVES = 0.20  # of the time: less is not worth every rank keeping and updating everything

CENTRAL = "one owner, who has everything"
SHARDED, REPLICATED = "each worker owns a part", "all-reduce, and everyone updates everything"


class Owners(NamedTuple):
    """Who updates the states of an exchange.

    how: `sharded`, each owner its part of every leaf; `replicated`, each rank everything. axes: in the order
    in which ranks along them hold parts, first major. via: how gradients and weights travel, None where that
    is open. moved: whether the optimiser's state lives with the owners. ranks: the owners, counted over all
    axes, where not all ranks are.
    """

    how: Literal["sharded", "replicated"]
    axes: tuple[str, ...]
    via: Algorithm | None = None
    moved: bool = False
    ranks: tuple[int, ...] = ()

    @property
    def kept(self) -> Ownership:
        return Ownership(self.axes, self.ranks)


def inner_first(over: tuple[str, ...], within: str | None) -> tuple[str, ...]:
    """The axes of an exchange in the order in which they are reduced: of those named the last comes first,
    and `within` last."""
    inside = tuple(axis for axis in reversed(over) if axis != within)
    return inside if within is None else (*inside, within)


def spread_out(
    sizes: Mapping[str, int], over: tuple[str, ...], axes: tuple[str, ...], owners: int
) -> tuple[int, ...]:
    """The ranks, counted row-major over `axes`, of so many owners, as far apart as they can be along `over`,
    whose first axis is the outermost: over racks first. Empty where all ranks are owners.

    >>> spread_out({"rack": 2, "worker": 4}, ("rack", "worker"), ("worker", "rack"), 2)
    (0, 1)
    """
    ranks = math.prod(sizes[axis] for axis in over)
    if owners == ranks:
        return ()
    places = (coordinates(number * ranks // owners, over, sizes) for number in range(owners))
    return tuple(position(place, axes, sizes) for place in places)


def levels(axes: tuple[str, ...], within: str | None, *, few: bool) -> Algorithm | None:
    """`hierarchical(worker, rack)` where the exchange is `within = rack`.

    few: some of the ranks are owners. Then levels are chains: no backend has a reduction to one rank that it
    could carry out at a level.
    """
    if within is None or len(axes) < 2:
        return None
    return Algorithm("hierarchical", tuple(Arg("chain", axis) if few else Arg(axis) for axis in axes))


def hints_of(op: Exchange, *, streams: bool = False) -> Hints:
    """What an exchange asks of the collectives that it becomes; streams: see `streaming`."""
    overlap = op.hints.overlap or ("backward" if streams else None)
    return replace(op.hints, staleness=None, overlap=overlap)


def streaming(schedule: Schedule, owners: Owners) -> bool:
    """Whether parts of an exchange had better be under way at once though the plan asks for no overlap.

    What goes to one of a few owners, or crosses one level of the network, leaves links idle, which others can
    use meanwhile. With all ranks as owners on one level links are never idle, and every part costs calls.
    """
    return bool(owners.ranks) or sum(max(1, len(schedule.axis(a).levels)) for a in owners.axes) > 1


def unshardable_reason(schedule: Schedule, op: Exchange) -> str | None:
    """What of the states cannot be cut among owners, and why; None: all of it can."""
    weights = schedule.values[op.results[0]]
    if not any(leaf.shape for leaf in weights.leaves):
        return f"a part of `{name_of(op.results[0])}`, which is a scalar"
    for ref in op.results[1:]:
        value = schedule.values[ref]
        if value.kind != weights.kind:
            return f"`{name_of(ref)}`, which is one {value.kind} while the weights are one {weights.kind}"
        for leaf, weight in zip(value.leaves, weights_of(value.leaves, weights.leaves), strict=True):
            if leaf.shape and weight is None:
                shape = f"{leaf.dtype}{list(leaf.shape)}"
                return f"leaf `{leaf.path}` of `{name_of(ref)}`, {shape}: it needs a whole-tree view"
    return None


class Times(NamedTuple):
    """Seconds to move what must be moved: with owners everywhere, with one, and without; None where nothing
    tells times."""

    sharded: float | None
    central: float | None
    replicated: float | None

    @property
    def without_owners(self) -> bool:
        """Whether an all-reduce clearly saves time."""
        sharded, replicated = self.sharded, self.replicated
        return sharded is not None and replicated is not None and replicated < sharded * (1 - SAVES)


def predicted(chooser: Chooser, op: Exchange, axes: tuple[str, ...]) -> Times:
    """How long the ways to carry out `op` take."""
    gradient = chooser.schedule.values[op.gradient]
    whole, ways, dtype = gradient.nbytes, chooser.schedule.size(axes), widest(gradient.leaves)

    def time(kind: CollectiveKind, nbytes: int) -> float | None:
        adds = "sum" if kind not in ("all_gather", "broadcast") else None
        root = 0 if kind in ("reduce", "broadcast") else None
        asked = Collective(kind, "", "", axes, dtype, nbytes, op.span, adds, root, hints=hints_of(op))
        way = chooser.about(asked)
        return way.seconds if way is not None else None

    def both(down: float | None, up: float | None) -> float | None:
        return down + up if down is not None and up is not None else None

    return Times(
        both(time("reduce_scatter", whole), time("all_gather", -(-whole // ways))),
        both(time("reduce", whole), time("broadcast", whole)),
        time("all_reduce", whole),
    )


def chosen(chooser: Chooser, op: Exchange, owners: Owners) -> Choice:
    """What was taken, for `explain`, beside what was not."""
    ways, why_not = chooser.schedule.size(owners.axes), unshardable_reason(chooser.schedule, op)
    times = predicted(chooser, op, owners.axes)
    few = len(owners.ranks)
    if owners.how == "replicated":
        text, taken = REPLICATED, times.replicated
        why = f"owners cannot keep {why_not}" if why_not else "it takes clearly less time"
    elif few:
        text, taken = _few(chooser, op, owners), times.central if few == 1 else None
        why = "the plan says so"
    else:
        text, taken = f"{SHARDED}: {ways} owners along {', '.join(owners.axes)}", times.sharded
        why = "the plan says so" if op.algorithm is not None else "every part is updated once"
    if owners.moved:
        kept = ", ".join(f"`{name_of(ref)}`" for ref in op.results[1:])
        why += f"; {kept} is kept by the owners, 1/{few or ways} of it on each"
    others = {SHARDED: times.sharded, CENTRAL: times.central, REPLICATED: times.replicated}
    mine = REPLICATED if owners.how == "replicated" else (CENTRAL if few == 1 else "" if few else SHARDED)
    alternatives = tuple(
        Alternative(name, rounded(seconds) if seconds is not None else None)
        for name, seconds in others.items()
        if name != mine
    )
    text = f"`{name_of(op.results[0])}`: {text}"
    return Choice("place", text, why, op.span, (), taken and rounded(taken), "", alternatives)


def _few(chooser: Chooser, op: Exchange, owners: Owners) -> str:
    """Who owns how much: parts differ by the padding of leaves alone."""
    weights, few = chooser.schedule.values[op.results[0]], len(owners.ranks)
    rows = [(row_size(weights.kind, leaf, few), leaf) for leaf in weights.leaves if leaf.shape]
    held = [
        sum(min(row, max(0, leaf.size - owner * row)) * leaf.dtype.nbytes for row, leaf in rows)
        for owner in range(few)
    ]
    where = ", ".join(map(str, owners.ranks))
    most, mean = max(held), sum(held) / few
    counted = f"rank {where}" if few == 1 else f"ranks {where}"
    text = f"{few} owner{'s' * (few != 1)} ({counted} along {', '.join(owners.axes)})"
    return f"{text}, the fullest with {sized(most)}, {most / max(mean, 1):.3f} of the mean"
