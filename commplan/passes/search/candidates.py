"""The alternatives of a unit: sizes of buckets and messages, and algorithms of its collectives."""

from __future__ import annotations

from itertools import permutations

from msgspec.structs import replace

from commplan.ir.plan import Algorithm, Arg
from commplan.passes.pipeline.base import StageChoice
from commplan.passes.search.units import Unit
from commplan.select import options
from commplan.select.algorithm_search import Chooser
from commplan.select.options import NATIVE

LEAST, MOST = 64 * 1024, 256  # bytes of a bucket, and how many there are, about
STEP = 4  # sizes that are tried first differ by this factor
PROGRAMS = 3  # chunk programs that are tried of each size: those that are fastest alone


def bucket_sizes(unit: Unit) -> list[int | None]:
    """All in one bucket, a quarter of it in each, and so on; None: what the pass takes by itself."""
    if not unit.packs:
        return [None]
    sizes: list[int | None] = [unit.nbytes]
    size = unit.nbytes
    while size // STEP >= least_bucket(unit):
        size = -(-size // STEP)
        sizes.append(size)
    return sizes


def around(unit: Unit, choice: StageChoice) -> list[int]:
    """Sizes of buckets that are a little larger or smaller than the one of `choice`."""
    if not unit.packs or choice.bucket is None:
        return []
    size = choice.bucket
    near = (size * 2, size * 3 // 2, -(-size * 3 // 4), -(-size // 2))
    return [each for each in near if least_bucket(unit) <= each <= unit.nbytes]


def least_bucket(unit: Unit) -> int:
    """The smallest size that is tried."""
    return max(LEAST, unit.nbytes // MOST)


def message_sizes(unit: Unit, choice: StageChoice, chooser: Chooser) -> list[int | None]:
    """Sizes of messages that the collectives of `choice` may have; None: each has what is fastest alone."""
    if not unit.cuts or choice.algorithm == NATIVE:
        return []
    nbytes = min(unit.nbytes, choice.bucket or unit.collective.nbytes)
    return [None, *options.pieces(chooser.whole(replace(unit.collective, nbytes=nbytes)))]


def algorithms(unit: Unit, chooser: Chooser) -> list[Algorithm | None]:
    """Those that are worth a try, the simplest first; None: each collective by the one that is fastest alone.

    Of chunk programs those that are the fastest alone, for the whole and for the largest collective.
    """
    if not unit.chooses:
        return [None]
    op = unit.collective
    # Under MPI a library's own gets slower than its best algorithm as messages grow: it comes last.
    result: list[Algorithm | None] = [NATIVE, None] if chooser.jax else [None]
    for nbytes in dict.fromkeys((unit.nbytes, op.nbytes)):
        ways = chooser.flat(replace(op, nbytes=nbytes), few=True)
        fastest = sorted((way.seconds, index) for index, way in enumerate(ways) if way.algorithm != NATIVE)
        result += [ways[index].algorithm for _, index in fastest[:PROGRAMS]]
    crossed = options.crossed_levels(op, chooser.schedule, chooser.topology)
    if len(crossed) > 1:
        keys = tuple(level.key for level in crossed)
        is_by_axis = all(key in op.axes for key in keys)
        orders = permutations(keys) if is_by_axis and op.kind not in options.ORDERED else (keys,)
        result += [Algorithm("hierarchical", tuple(map(Arg, order))) for order in orders]
    return list(dict.fromkeys([*result, NATIVE]))
