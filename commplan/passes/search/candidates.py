"""The alternatives of a unit: sizes of buckets and messages, and algorithms of its collectives.

`unit_search` tries them. Sizes are in bytes of one rank's operand.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import permutations

from msgspec.structs import replace

from commplan.ir.collective_kinds import BLOCKED
from commplan.ir.plan import Algorithm, Arg
from commplan.passes.base import StageChoice
from commplan.passes.bin_packing import WHOLE
from commplan.passes.search.units import Unit
from commplan.select import options
from commplan.select.algorithm_search import Chooser
from commplan.select.options import NATIVE

LEAST = 64 * 1024  # approximate minimum bytes of a bucket
MOST = 256  # approximate maximum number of buckets
FEW = 256  # number of leaves; with more, buckets of any size are nearly full
COUNTS = (2, 3, 4, 6, 8)  # numbers of buckets among which few leaves are divided evenly
STEP = 2  # factor between the sizes that are tried first
PROGRAMS = 3  # number of chunk programs to try for each size: those that are fastest alone


def bucket_sizes(unit: Unit) -> Sequence[int | None]:
    """The bucket sizes to try first, the largest first: the whole unit, half of it, and so on.

    Few leaves seldom fill such buckets. For them, the sizes that divide the leaves most evenly among some
    numbers of buckets are added. Only None, the default of the pass, if the size is not open.
    """
    if not unit.packs:
        return [None]
    sizes, size = {unit.nbytes}, unit.nbytes
    while size // STEP >= least_bucket(unit):
        size = -(-size // STEP)
        sizes.add(size)
    if 0 < len(unit.leaves) <= FEW:
        even = (even_size(unit.leaves, count) for count in COUNTS if count <= len(unit.leaves))
        sizes |= {candidate for candidate in even if candidate >= least_bucket(unit)}
    return distinct(unit, sizes)


def sizes_by_split(unit: Unit, sizes: Sequence[int | None]) -> list[list[int | None]]:
    """`sizes` in two lists: those that split no leaf, with None, and the smaller ones."""
    least = _least_whole(unit) if unit.leaves else 0
    return [
        [size for size in sizes if size is None or size >= least],
        [size for size in sizes if size is not None and size < least],
    ]


def _least_whole(unit: Unit) -> int:
    """The least bucket size that splits no leaf. There is at least one leaf."""
    return -(-max(unit.leaves) // WHOLE)


def around(unit: Unit, choice: StageChoice) -> list[int]:
    """Bucket sizes that are a little larger or smaller than that of `choice`, the largest first.

    Few leaves seldom fill such buckets. For them, the sizes that divide the leaves most evenly among as many
    buckets, one fewer and one more, are added. Empty if the size is not open.
    """
    if not unit.packs:
        return []
    size = choice.bucket or unit.collective.nbytes
    even = list[int]()
    if len(unit.leaves) <= FEW:
        count = len(filled(unit.leaves, size))
        even = [even_size(unit.leaves, each) for each in (count - 1, count, count + 1) if each > 1]
    near = (size * 2, size * 3 // 2, -(-size * 3 // 4), -(-size // 2), *even)
    return distinct(unit, (each for each in near if least_bucket(unit) <= each <= unit.nbytes))


def filled(leaves: Sequence[int], size: int) -> list[list[int]]:
    """Divide leaves, in bytes, among buckets of at most `size` bytes, in their order.

    A larger leaf has a separate bucket.
    """
    buckets = list[list[int]]()
    total = 0
    for nbytes in leaves:
        if not buckets or total + nbytes > size:
            buckets.append([])
            total = 0
        buckets[-1].append(nbytes)
        total += nbytes
    return buckets


def distinct(unit: Unit, sizes: Iterable[int]) -> list[int]:
    """`sizes` without those that pack the leaves like another one, the largest first.

    For few leaves, each size is replaced by the least size with the same buckets. For many leaves, only equal
    sizes are removed.
    """
    if not 0 < len(unit.leaves) <= FEW:
        return sorted(set(sizes), reverse=True)
    least = max(least_bucket(unit), _least_whole(unit))
    result = set[int]()
    for size in sizes:
        shared = [sum(bucket) for bucket in filled(unit.leaves, size) if len(bucket) > 1]
        result.add(max([least, *shared]) if size >= least else size)
    return sorted(result, reverse=True)


def even_size(leaves: Sequence[int], count: int) -> int:
    """The least bucket size that divides `leaves`, in bytes, among at most `count` buckets.

    It is at least the size of the largest leaf; 0 without leaves.
    """
    if not leaves:
        return 0
    sizes = range(max(leaves), sum(leaves) + 1)
    return sizes[bisect_left(sizes, True, key=lambda size: len(filled(leaves, size)) <= count)]


def least_bucket(unit: Unit) -> int:
    """The smallest bucket size that is tried."""
    return max(LEAST, unit.nbytes // MOST)


def message_sizes(unit: Unit, choice: StageChoice, chooser: Chooser) -> list[int | None]:
    """Message sizes to try for `choice`; None stands for the fastest size of each collective alone.

    Empty if the size is not open, or the backend's own collective is chosen.
    """
    if not unit.cuts or choice.algorithm == NATIVE:
        return []
    nbytes = min(unit.nbytes, choice.bucket or unit.collective.nbytes)
    return [None, *options.pieces(chooser.whole(replace(unit.collective, nbytes=nbytes)))]


def algorithms(unit: Unit, chooser: Chooser) -> list[Algorithm | None]:
    """Algorithms to try, in order of preference; None stands for the fastest of each collective alone.

    Of the chunk programs, only the fastest are listed, for the whole unit and for its largest collective.
    Only None if the algorithm is not open.
    """
    if not unit.chooses:
        return [None]
    op = unit.collective
    # Under MPI the library's own choice is slower than its best algorithm for long messages: try it last.
    result: list[Algorithm | None] = [NATIVE, None] if chooser.is_jax else [None]
    for nbytes in dict.fromkeys((unit.nbytes, op.nbytes)):
        flat = chooser.flat(replace(op, nbytes=nbytes), few=True)
        fastest = sorted(
            (candidate.seconds, index)
            for index, candidate in enumerate(flat)
            if candidate.algorithm != NATIVE
        )
        result += [flat[index].algorithm for _, index in fastest[:PROGRAMS]]
    crossed = options.crossed_levels(op, chooser.schedule, chooser.topology)
    if len(crossed) > 1:
        keys = tuple(level.key for level in crossed)
        is_by_axis = all(key in op.axes for key in keys)
        orders = permutations(keys) if is_by_axis and op.kind not in BLOCKED else (keys,)
        result += [Algorithm("hierarchical", tuple(map(Arg, order))) for order in orders]
    return list(dict.fromkeys([*result, NATIVE]))


def with_algorithm(choice: StageChoice, algorithm: Algorithm | None) -> StageChoice:
    """`choice` with another algorithm, and without a message size for the backend's own collective."""
    return replace(choice, algorithm=algorithm, chunk=None if algorithm == NATIVE else choice.chunk)


def programs(unit: Unit, chooser: Chooser) -> Sequence[Algorithm]:
    """All algorithms without levels, to try with the best size; empty if the algorithm is not open."""
    op = unit.collective
    return options.flat(op.kind, chooser.schedule.size(op.axes)) if unit.chooses else ()


def with_one_level_changed(unit: Unit, algorithm: Algorithm, chooser: Chooser) -> list[Algorithm]:
    """The hierarchies that differ from `algorithm` in the algorithm of one level.

    Under MPI the level is native, and all levels become separate collectives, between which others may run.
    Under JAX it is a chunk program, which takes another share of links that levels have in common.

    Args:
        unit: The unit.
        algorithm: A hierarchy without algorithms of its levels.
        chooser: Has the backend.

    Returns:
        The hierarchies. Empty if a level is not an axis, and for kinds other than all_reduce and broadcast.
    """
    keys = [key for key, _ in algorithm.levels]
    if unit.collective.kind not in ("all_reduce", "broadcast") or not set(keys) <= set(unit.collective.axes):
        return []
    names = ("ring", "halving_doubling") if unit.collective.kind == "all_reduce" else ("binomial_tree",)
    return [
        Algorithm("hierarchical", tuple(Arg(changed, key) if key == level else Arg(key) for key in keys))
        for changed in (names if chooser.is_jax else (NATIVE.name,))
        for level in keys
    ]
