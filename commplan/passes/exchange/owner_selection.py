"""Chooses the owners of an exchange between workers, by predicted cost, for the pass `place`.

The owners of a state update it. Each worker may own a part, only some workers may, or every worker may update
the whole state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from msgspec.structs import replace

from commplan.ir.analysis.optimizer_leaf_match import weights_of
from commplan.ir.axes import coordinates, position
from commplan.ir.collective_kinds import REDUCING, ROOTED
from commplan.ir.plan import Algorithm, Arg, Hints, name_of
from commplan.ir.remark import Alternative, Choice
from commplan.ir.schedule import Collective, CollectiveKind, Exchange, Ownership, Schedule, widest
from commplan.ir.shard_shapes import row_size
from commplan.ir.types import sized
from commplan.select.algorithm_search import Chooser, rounded

SAVES = 0.20  # least saving, as a fraction of time, for which replicated updates are used

# The names of the alternatives in remarks.
SHARDED = "each worker owns a part"
CENTRAL = "one owner of all parts"
REPLICATED = "all-reduce, and every worker updates all parts"


class Owners(NamedTuple):
    """The ranks that update the states of an exchange.

    Attributes:
        how: `sharded` if each owner updates its part of every leaf, `replicated` if each rank updates
            everything.
        axes: The axes of the exchange in the order of parts, the first one major.
        via: The algorithm for gradients and weights; None if later passes choose it.
        shards_state: Whether some of the optimizer's state is stored in shards, by the owners.
        ranks: The owners, counted row-major over `axes`; empty if all ranks are owners.
    """

    how: Literal["sharded", "replicated"]
    axes: tuple[str, ...]
    via: Algorithm | None = None
    shards_state: bool = False
    ranks: tuple[int, ...] = ()

    @property
    def ownership(self) -> Ownership:
        return Ownership(self.axes, self.ranks)


def inner_first(over: tuple[str, ...], within: str | None) -> tuple[str, ...]:
    """The axes of an exchange in the order of reduction: the last named first, and `within` last.

    `within` is one of `over`, or None if the plan does not specify it.
    """
    inside = tuple(axis for axis in reversed(over) if axis != within)
    return inside if within is None else (*inside, within)


def spread_out(
    sizes: Mapping[str, int], over: tuple[str, ...], axes: tuple[str, ...], owners: int
) -> tuple[int, ...]:
    """Choose `owners` ranks, as far apart as possible along `over`.

    Args:
        sizes: The sizes of the axes.
        over: The axes from outermost to innermost, so that owners are spread over racks first.
        axes: The same axes, row-major for the numbers of the returned ranks.
        owners: The number of owners.

    Returns:
        The ranks, or an empty tuple if all ranks are owners.

    >>> spread_out({"rack": 2, "worker": 4}, ("rack", "worker"), ("worker", "rack"), 2)
    (0, 1)
    """
    ranks = math.prod(sizes[axis] for axis in over)
    if owners == ranks:
        return ()
    owner_coords = (coordinates(number * ranks // owners, over, sizes) for number in range(owners))
    return tuple(position(coords, axes, sizes) for coords in owner_coords)


def levels(axes: tuple[str, ...], within: str | None, *, few: bool) -> Algorithm | None:
    """The hierarchy for `within`, for example `hierarchical(worker, rack)` for `within = rack`.

    Args:
        axes: The axes in the order of reduction (`inner_first`).
        within: The option of the plan; None if it is absent.
        few: Whether some ranks own nothing. Levels then use chains, since no backend has a native reduction
            to one rank at a level.

    Returns:
        The hierarchy; None without `within`, or with a single axis.
    """
    if within is None or len(axes) < 2:
        return None
    return Algorithm("hierarchical", tuple(Arg("chain", axis) if few else Arg(axis) for axis in axes))


def hints_of(op: Exchange, *, streams: bool = False) -> Hints:
    """The hints of the collectives of an exchange.

    Args:
        op: The exchange.
        streams: Whether parts overlap even if the plan does not request it (`streaming`).
    """
    overlap = op.hints.overlap or ("backward" if streams else None)
    return replace(op.hints, staleness=None, overlap=overlap)


def streaming(schedule: Schedule, owners: Owners) -> bool:
    """Whether parts of an exchange should overlap even if the plan does not request it.

    With few owners, or across levels of the network, some links idle while a part is sent, and another part
    can use them. With all ranks as owners on one level no link idles, and each part costs extra calls.
    """
    level_count = sum(max(1, len(schedule.axis(name).levels)) for name in owners.axes)
    return bool(owners.ranks) or level_count > 1


def unshardable_reason(schedule: Schedule, op: Exchange) -> str | None:
    """The first of the states of `op` that cannot be sharded, with the reason; None if all can."""
    weights = schedule.values[op.results[0]]
    if not any(leaf.shape for leaf in weights.leaves):
        return f"a part of `{name_of(op.results[0])}`, which is a scalar"
    for ref in op.results[1:]:
        value = schedule.values[ref]
        if value.kind != weights.kind:
            return f"`{name_of(ref)}`, which is one {value.kind} while the weights are one {weights.kind}"
        for leaf, weight in zip(value.leaves, weights_of(value.leaves, weights.leaves), strict=True):
            if leaf.shape and weight is None:
                described = f"leaf `{leaf.path}` of `{name_of(ref)}`, {leaf.dtype}{list(leaf.shape)}"
                return f"{described}: no leaf of the weights has its shape and path"
    return None


class Times(NamedTuple):
    """Predicted seconds of data movement; None without a prediction.

    Attributes:
        sharded: If each worker owns a part.
        central: If one worker owns all parts.
        replicated: If every worker updates all parts.
    """

    sharded: float | None
    central: float | None
    replicated: float | None

    @property
    def without_owners(self) -> bool:
        """Whether an all-reduce is predicted to be faster than sharded owners by at least `SAVES`."""
        sharded, replicated = self.sharded, self.replicated
        return sharded is not None and replicated is not None and replicated < sharded * (1 - SAVES)


def predict(chooser: Chooser, op: Exchange, axes: tuple[str, ...]) -> Times:
    """Predict the time of each way to carry out `op` over `axes`."""
    gradient = chooser.schedule.values[op.gradient]
    whole, dtype = gradient.nbytes, widest(gradient.leaves)
    shard = -(-whole // chooser.schedule.size(axes))

    def time(kind: CollectiveKind, nbytes: int) -> float | None:
        """The predicted seconds of a collective with an operand of `nbytes`."""
        adds = "sum" if kind in REDUCING else None
        root = 0 if kind in ROOTED else None
        query = Collective(kind, "", "", axes, dtype, nbytes, op.span, adds, root, hints=hints_of(op))
        prediction = chooser.estimate(query)
        return prediction.seconds if prediction is not None else None

    def total(reduction: float | None, distribution: float | None) -> float | None:
        return reduction + distribution if reduction is not None and distribution is not None else None

    return Times(
        total(time("reduce_scatter", whole), time("all_gather", shard)),
        total(time("reduce", whole), time("broadcast", whole)),
        time("all_reduce", whole),
    )


def describe_choice(chooser: Chooser, op: Exchange, owners: Owners) -> Choice:
    """The record of the choice of `owners` for `op`, with its alternatives, for `explain`."""
    workers = chooser.schedule.size(owners.axes)
    why_not = unshardable_reason(chooser.schedule, op)
    times = predict(chooser, op, owners.axes)
    owner_count = len(owners.ranks)  # 0 if all ranks are owners
    if owners.how == "replicated":
        text, seconds = REPLICATED, times.replicated
        why = f"owners cannot store {why_not}" if why_not else "it takes clearly less time"
    elif owner_count:
        text = _describe_owners(chooser, op, owners)
        seconds = times.central if owner_count == 1 else None
        why = "set in the plan"
    else:
        text, seconds = f"{SHARDED}: {workers} owners along {', '.join(owners.axes)}", times.sharded
        why = "set in the plan" if op.algorithm is not None else "every part is updated once"
    if owners.shards_state:
        sharded_states = ", ".join(f"`{name_of(ref)}`" for ref in op.results[1:])
        why += f"; {sharded_states} is kept by the owners, 1/{owner_count or workers} of it on each"
    predictions = {SHARDED: times.sharded, CENTRAL: times.central, REPLICATED: times.replicated}
    if owners.how == "replicated":
        chosen = REPLICATED
    elif owner_count:
        chosen = CENTRAL if owner_count == 1 else ""
    else:
        chosen = SHARDED
    alternatives = tuple(
        Alternative(name, rounded(time) if time is not None else None)
        for name, time in predictions.items()
        if name != chosen
    )
    text = f"`{name_of(op.results[0])}`: {text}"
    return Choice("place", text, why, op.span, (), seconds and rounded(seconds), "", alternatives)


def _describe_owners(chooser: Chooser, op: Exchange, owners: Owners) -> str:
    """Describe a few owners and the bytes of the weights that each stores."""
    weights, count = chooser.schedule.values[op.results[0]], len(owners.ranks)
    rows = [(row_size(weights.kind, leaf, count), leaf) for leaf in weights.leaves if leaf.shape]
    loads = [
        sum(min(row, max(0, leaf.size - owner * row)) * leaf.dtype.nbytes for row, leaf in rows)
        for owner in range(count)
    ]
    rank_list = ", ".join(map(str, owners.ranks))
    most = max(loads)
    mean = sum(loads) / count
    counted = f"rank {rank_list}" if count == 1 else f"ranks {rank_list}"
    text = f"{count} owner{'s' * (count != 1)} ({counted} along {', '.join(owners.axes)})"
    return f"{text}, the fullest with {sized(most)}, {most / max(mean, 1):.3f} of the mean"
