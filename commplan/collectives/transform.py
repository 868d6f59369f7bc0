"""Transformations of chunk programs: roots, permutations of ranks, slices, reversal and pruning.

Algorithms derive their reversals here, and `registry` derives programs with other roots and with slices.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from commplan.collectives.program import (
    IN_BLOCKS,
    NO_TARGETS,
    Bools,
    ChunkProgram,
    Family,
    Ints,
    Programs,
    Rotation,
    Round,
    RoundSequence,
    Send,
)
from commplan.diagnostics import fail
from commplan.ir.collective_kinds import BLOCKED


def expand_runs(send: Family) -> tuple[Ints, Ints, Ints]:
    """The source, the destination and the chunk of each transfer of a single chunk in `send`.

    All three arrays are [sum of `send.count`]. Runs keep their order.
    """
    src, dst, first = (np.repeat(x, send.count) for x in (send.src, send.dst, send.chunk))
    start = np.repeat(np.cumsum(send.count) - send.count, send.count)
    return src, dst, first + np.arange(len(src), dtype=np.int64) - start


def runs(src: Ints, dst: Ints, chunk: Ints, reduce: bool) -> Send:
    """The inverse of `expand_runs`: join transfers of adjacent chunks into runs.

    The result is sorted by source, destination and chunk.
    """
    order = np.lexsort((chunk, dst, src))
    src, dst, chunk = src[order], dst[order], chunk[order]
    begins = np.ones(len(src), np.bool_)
    begins[1:] = (src[1:] != src[:-1]) | (dst[1:] != dst[:-1]) | (chunk[1:] != chunk[:-1] + 1)
    starts = np.flatnonzero(begins)
    count = np.diff(np.append(starts, len(src)))
    return Send(src[starts], dst[starts], chunk[starts], count.astype(np.int64), reduce)


def drop_empty(rounds: Iterable[Round]) -> tuple[Round, ...]:
    """Remove sends without transfers, and rounds without sends."""
    non_empty = (
        tuple(send for send in sends if isinstance(send, Rotation) or send.src.size) for sends in rounds
    )
    return tuple(sends for sends in non_empty if sends)


def permute_ranks(program: ChunkProgram, places: Sequence[int] | Ints) -> ChunkProgram:
    """Rename the ranks of `program`: rank r does what rank `places[r]` of `program` does.

    If every rank has a block, the blocks are renamed with the ranks. The slots of a swap keep their numbers,
    and `targets` changes instead.

    Args:
        program: The program.
        places: A permutation of the ranks.

    Raises:
        CommplanError: CP0737 if `places` is not a permutation of 0 to `program.ranks` - 1.
    """
    position = np.asarray(places, np.int64)
    n = program.ranks
    if position.shape != (n,) or not np.array_equal(np.sort(position), np.arange(n)):
        fail("CP0737", f"the places of {n} ranks must be the numbers 0 to {n - 1}, each once")
    rank = np.argsort(position)
    targets = rank[program.targets[position]] if program.kind == "swap" else NO_TARGETS
    rounds = (tuple(_rename_send(send, program, rank) for send in sends) for sends in program.rounds)
    return dataclasses.replace(program, rounds=tuple(rounds), root=int(rank[program.root]), targets=targets)


def _rename_send(send: Family, program: ChunkProgram, rank: Ints) -> Send:
    """`send` with ranks, and the blocks that belong to them, renamed: `rank[r]` is the new name of rank r."""
    if program.kind not in BLOCKED:
        return Send(rank[send.src], rank[send.dst], send.chunk, send.count, send.reduce)
    parts = program.chunks // program.ranks
    src, dst, chunk = expand_runs(send)
    return runs(rank[src], rank[dst], rank[chunk // parts] * parts + chunk % parts, send.reduce)


def rooted(program: ChunkProgram, root: int) -> ChunkProgram:
    """`program`, whose root is 0, with root `root`: all ranks are shifted by `root`, modulo their number."""
    if not root:
        return program
    return permute_ranks(program, (np.arange(program.ranks) - root) % program.ranks)


def pipelined(program: ChunkProgram, slices: int) -> ChunkProgram:
    """Cut every chunk into `slices` parts, 1 or more; slice j does round t of `program` in round t + j.

    If all ranks have the same buffer, chunk k of slice j is chunk `j*chunks + k` of the result. If every rank
    has a block, it is chunk `k*slices + j`, so that a block remains contiguous.
    """
    if slices == 1:
        return program
    last = len(program.rounds) + slices - 1 if program.rounds else 0
    rounds: list[Round] = []
    for time in range(last):
        active = range(max(0, time - len(program.rounds) + 1), min(slices, time + 1))
        parts = [_slice(send, j, slices, program) for j in active for send in program.rounds[time - j]]
        rounds.append(tuple(merge_sends(parts, reduce) for reduce in sorted({part.reduce for part in parts})))
    return dataclasses.replace(program, chunks=program.chunks * slices, rounds=tuple(rounds))


def _slice(send: Family, j: int, slices: int, program: ChunkProgram) -> Send:
    """`send`, a part of `program`, for slice `j` of `slices`."""
    if program.kind not in IN_BLOCKS:
        return Send(send.src, send.dst, send.chunk + j * program.chunks, send.count, send.reduce)
    src, dst, chunk = expand_runs(send)
    return Send(src, dst, chunk * slices + j, np.ones_like(chunk), send.reduce)


def merge_sends(sends: Iterable[Family], reduce: bool) -> Family:
    """The transfers of those of `sends` that reduce (or do not, if `reduce` is False), as one family.

    At least one of `sends` must match. A single match is returned unchanged.
    """
    matching = [send for send in sends if send.reduce == reduce]
    if len(matching) == 1:
        return matching[0]
    columns = zip(*((send.src, send.dst, send.chunk, send.count) for send in matching), strict=True)
    src, dst, chunk, count = map(np.concatenate, columns)
    return Send(src, dst, chunk, count, reduce)


def reversed_rounds(rounds: Iterable[Round], *, reduce: bool) -> Iterator[Round]:
    """The rounds in reverse order, with every transfer reversed.

    The result sends as much as the original receives, so the costs are equal.

    Args:
        rounds: A program that copies, and writes no slot twice; or, to undo an earlier reversal, its result.
        reduce: Whether the result sums along the same paths (broadcast --> reduce, all_gather -->
            reduce_scatter), instead of copying (scatter --> gather, reduce --> broadcast).
    """
    for sends in reversed(tuple(rounds)):
        yield tuple(_backwards(send, reduce) for send in sends)


def _backwards(send: Family, reduce: bool) -> Family:
    """`send` from receivers to senders."""
    if isinstance(send, Rotation):
        return Rotation(send.ranks, -send.step, send.first - send.step, send.length, reduce)
    return Send(send.dst, send.src, send.chunk, send.count, reduce)


def from_root(
    broadcast: Callable[[int], Iterator[Round]], scatter: Callable[[int], Iterator[Round]]
) -> Programs:
    """The five collectives along the paths of a broadcast and a scatter.

    Reduce and gather use the paths in reverse; all_reduce is a reduce followed by a broadcast.

    Args:
        broadcast: The rounds of a broadcast of chunk 0, the only one, from rank 0 to all `n` ranks.
        scatter: The rounds of a scatter of `n` chunks from rank 0: chunk r ends on rank r.
    """

    def up(n: int) -> Iterator[Round]:
        return reversed_rounds(broadcast(n), reduce=True)

    return {
        "all_reduce": lambda n: RoundSequence(1, itertools.chain(up(n), broadcast(n))),
        "broadcast": lambda n: RoundSequence(1, broadcast(n)),
        "reduce": lambda n: RoundSequence(1, up(n)),
        "scatter": lambda n: RoundSequence(n, scatter(n)),
        "gather": lambda n: RoundSequence(n, reversed_rounds(scatter(n), reduce=False)),
    }


def pruned(rounds: Iterable[Round], starts: Bools, ends: Bools) -> tuple[Round, ...]:
    """Remove transfers from a program that copies: those that the receiver already has or never needs.

    Transfers of chunks that the sender does not have are removed too.

    Args:
        rounds: The program.
        starts: The slots that hold data before it, [ranks, chunks], as in `Postcondition`.
        ends: The slots that must hold data after it, [ranks, chunks].
    """
    # Forwards: keep the transfers that bring a chunk to a rank for the first time.
    present = starts.copy()
    useful_rounds: list[list[tuple[Ints, Ints, Ints]]] = []
    for sends in rounds:
        new: list[tuple[Ints, Ints, Ints]] = []
        for src, dst, chunk in map(expand_runs, sends):
            useful = present[src, chunk] & ~present[dst, chunk]
            new.append((src[useful], dst[useful], chunk[useful]))
        for _, dst, chunk in new:
            present[dst, chunk] = True
        useful_rounds.append(new)
    # Backwards: keep those of them whose receiver needs the chunk at the end, or for a later transfer.
    needed = ends & ~starts
    backwards: list[Round] = []
    for moved in reversed(useful_rounds):
        masks = [needed[dst, chunk] for _, dst, chunk in moved]
        pairs = zip(masks, moved, strict=True)
        new = [(src[mask], dst[mask], chunk[mask]) for mask, (src, dst, chunk) in pairs]
        for src, _, chunk in new:
            needed[src, chunk] = True
        backwards.append(tuple(runs(*single, False) for single in new))
    return drop_empty(reversed(backwards))
