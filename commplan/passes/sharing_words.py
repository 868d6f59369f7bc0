"""How a choice of sharing is told: the reason in numbers, and the rows of the table."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from commplan.input.costs import TIE, Links, Predicted, Setting, predict
from commplan.ir.choice import SharingCost
from commplan.ir.types import timed
from commplan.passes.choosing import rounded


def why(found: Sequence[Predicted], taken: Predicted) -> str:
    """The reason, in numbers."""
    alone = next(one for one in found if one.design == "duplicate")
    if taken.design == "duplicate":
        others = [one for one in found if one.design != "duplicate"]
        least = min((one.cpu for one in others), default=taken.cpu)
        return (
            f"preprocessing is not the bottleneck: a step takes {timed(taken.wall)}, waiting for "
            f"{taken.waits_for}, and sharing would save at most {TIE:.0%} of it, and "
            f"{max(0.0, 1 - least / taken.cpu) if taken.cpu else 0:.0%} of the CPU time of the input"
        )
    return (
        f"a step takes {timed(taken.wall)}, waiting for {taken.waits_for}, and "
        f"{timed(alone.wall)} where nothing is shared; {timed(taken.cpu)} of CPU per record "
        f"and member instead of {timed(alone.cpu)}, {taken.distance:.2f} times the limit"
    )


def worker_processes(setting: Setting, taken: Predicted, links: Links | None) -> str:
    """What worker processes would do for a step that waits for the interpreter's lock."""
    apart = dataclasses.replace(setting, processes=True)
    other = predict(apart, taken.cut, taken.design, taken.readers, links, taken.limit)
    if other.wall * (1 + TIE) >= taken.wall:
        return ""
    how = '`run.batches(workers="processes")`'
    return f"; {timed(other.wall)} with worker processes, which do not wait for one lock: {how}"


def row_of(one: Predicted, *, taken: bool) -> SharingCost:
    numbers = (one.cpu, one.wall, one.nbytes, one.memory, one.limit, one.distance)
    cpu, wall, nbytes, memory, least, distance = map(rounded, numbers)
    cut = "" if one.design == "duplicate" else one.cut.name
    return SharingCost(
        one.design, one.readers, cut, cpu, wall, one.waits_for, nbytes, memory, least, distance, taken
    )
