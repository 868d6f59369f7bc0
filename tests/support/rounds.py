"""A chunk program carried out, rank by rank and chunk by chunk, as its definition says and no faster."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction

import numpy as np

from commplan.collectives.layout import bounds
from commplan.collectives.postcondition import postcondition, sources
from commplan.collectives.program import ChunkProgram, Round
from commplan.ir.collective_kinds import REDUCING

SLOTS = list[list[np.ndarray]]  # by rank and chunk


def transfers(each: Round) -> Iterator[tuple[int, int, int, bool]]:
    """Source, destination, chunk and whether it reduces, for each chunk that moves in one round."""
    for send in each:
        for src, dst, chunk, count in zip(send.src, send.dst, send.chunk, send.count, strict=True):
            for place in range(chunk, chunk + count):
                yield int(src), int(dst), place, send.reduce


def execute(
    program: ChunkProgram, slots: SLOTS, add: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> SLOTS:
    for each in program.rounds:
        before = [list(rank) for rank in slots]
        for src, dst, chunk, reduce in transfers(each):
            came = before[src][chunk]
            slots[dst][chunk] = add(before[dst][chunk], came) if reduce else came
    return slots


def keeps_its_promise(program: ChunkProgram, size: int, seed: int = 0) -> bool:
    """Whether integer results in a buffer of `size` elements are correct; elements outside the postcondition
    are noise."""
    draw = np.random.default_rng(seed)
    at = bounds(program.kind, program.ranks, program.chunks, size)
    assert at[0] == 0 and at[-1] == size and np.all(np.diff(at) >= 0)
    whole = [draw.integers(-(2**40), 2**40, size) for _ in range(program.ranks)]
    promise = postcondition(program.kind, program.ranks, program.chunks, program.root)
    slots = [[whole[r][at[c] : at[c + 1]] for c in range(program.chunks)] for r in range(program.ranks)]
    sums = [
        sum(slots[r][c] for r in range(program.ranks) if promise.starts[r, c]) for c in range(program.chunks)
    ]
    if program.kind == "swap":
        source = sources(program)
        after = execute(program, [list(rank) for rank in slots], np.add)
        return all(np.array_equal(after[r][c], slots[source[r, c]][c]) for r, c in np.argwhere(promise.ends))
    after = execute(program, [list(rank) for rank in slots], np.add)
    assert program.kind in REDUCING or promise.starts.sum() == program.chunks  # one source each
    return all(np.array_equal(after[r][c], sums[c]) for r, c in np.argwhere(promise.ends))


def expressions(program: ChunkProgram) -> np.ndarray:
    """The expression of each slot at the end, as numbers [ranks, chunks] that are equal for equal
    expressions. a + b equals b + a, but (a + b) + c differs from a + (b + c)."""
    draw = np.random.default_rng(1)
    begin = draw.integers(1, 2**63, (program.ranks, program.chunks), np.uint64)
    slots = [[begin[r, c] for c in range(program.chunks)] for r in range(program.ranks)]
    with np.errstate(over="ignore"):
        slots = execute(program, slots, lambda a, b: (a + b) * np.uint64(0x9E3779B97F4A7C15) ^ (a * b))
    return np.array(slots, np.uint64)


def counted(program: ChunkProgram) -> tuple[int, Fraction]:
    """Rounds, and the share of S that the busiest rank sends or receives, whichever is more.

    S are the bytes of the whole buffer, cut into equal chunks.
    """
    moved = np.zeros((2, program.ranks), np.int64)
    for each in program.rounds:
        for send in each:
            np.add.at(moved[0], send.src, send.count)
            np.add.at(moved[1], send.dst, send.count)
    return len(program.rounds), Fraction(int(moved.max()), program.chunks)
