"""Ranks that issue different collectives: one mistake in one rank's use of communicators."""

from __future__ import annotations

import math
import random
from typing import Literal, NamedTuple

import msgspec

from commplan.diagnostics import Span
from tests.support.calls import Call, RankCalls

AXES = ("pod", "node", "gpu")


class CallMutant(NamedTuple):
    """A mesh, the calls of each rank, and the change."""

    kind: str
    what: str
    sizes: dict[str, int]
    ranks: tuple[RankCalls, ...]


def some_calls(rng: random.Random) -> tuple[dict[str, int], RankCalls]:
    """A mesh of two or three axes, and the collectives of a plan over some groups of them."""
    sizes = {axis: rng.choice([2, 2, 3, 4]) for axis in rng.sample(AXES, rng.choice([2, 2, 3]))}
    groups = [(axis,) for axis in sizes] + [tuple(sizes)]
    calls: list[Call] = []
    for line in range(10, 10 + rng.randint(2, 7)):
        axes = rng.choice(groups)
        kind = rng.choice(["all_reduce", "reduce_scatter", "all_gather", "broadcast"])
        calls.append(
            Call(
                rng.choice(["start", "step"]), axes, kind, rng.choice(["f32", "bf16"]),
                4 << rng.randint(0, 20), "sum" if "reduce" in kind else None,
                rng.randrange(math.prod(sizes[axis] for axis in axes)) if kind == "broadcast" else None,
                rng.choice(["native", "ring"]), Span(line, 5, line, 40),
            )
        )  # fmt: skip
    return sizes, RankCalls(tuple(dict.fromkeys(call.axes for call in calls)), tuple(calls))


def mutate_calls(rng: random.Random) -> CallMutant:
    """All ranks alike, but for one mistake of one of them."""
    while True:
        sizes, same = some_calls(rng)
        ranks = [same] * math.prod(sizes.values())
        victim = rng.randrange(len(ranks))
        kind: Literal["creation", "calls"] = rng.choice(["creation", "calls"])
        changed, description = (_created if kind == "creation" else _called)(rng, same)
        if changed == same:
            continue
        ranks[victim] = changed
        name = "communicators created in another order" if kind == "creation" else "sequence of calls"
        return CallMutant(name, f"rank {victim}: {description}", sizes, tuple(ranks))


def _created(rng: random.Random, same: RankCalls) -> tuple[RankCalls, str]:
    groups = list(same.created)
    first, other = rng.randrange(len(groups)), rng.randrange(len(groups))
    groups[first], groups[other] = groups[other], groups[first]
    return msgspec.structs.replace(same, created=tuple(groups)), f"{first} and {other} exchanged"


def _called(rng: random.Random, same: RankCalls) -> tuple[RankCalls, str]:
    calls = list(same.calls)
    at, other = rng.randrange(len(calls)), rng.randrange(len(calls))
    call = calls[at]
    change = rng.choice(["swapped", "swapped", "dropped", "doubled", "bytes", "type", "root"])
    match change:
        case "swapped":
            calls[at], calls[other] = calls[other], calls[at]
        case "dropped":
            del calls[at]
        case "doubled":
            calls.insert(other, call)
        case "bytes":
            calls[at] = msgspec.structs.replace(call, nbytes=call.nbytes + 4)
        case "type":
            calls[at] = msgspec.structs.replace(call, dtype="i32")
        case _ if call.root is not None:
            calls[at] = msgspec.structs.replace(call, root=call.root + 1)
        case _:
            pass
    return msgspec.structs.replace(same, calls=tuple(calls)), f"call {at} {change}"
