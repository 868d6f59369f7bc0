"""Proofs of chunk programs: of one program, and of all that a name stands for."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from commplan.collectives.postcondition import lower_bounds
from commplan.collectives.program import IN_BLOCKS, ChunkProgram, Ints
from commplan.verify.programs.counterexample import Counterexample
from commplan.verify.programs.symbolic_execution import Transfers, interpret, representatives, rotates


class Counted(NamedTuple):
    """What a program costs, counted in its messages.

    rounds: of all ranks together. sent, received: bytes of the busiest rank as a share of S, the bytes of
    the whole buffer; staged: what it receives in one round at most. least_rounds, least: what no program goes
    below (`commplan.collectives.postcondition`); `least` is of the larger of `sent` and `received`.
    """

    rounds: int
    sent: Fraction
    received: Fraction
    staged: Fraction
    least_rounds: int
    least: Fraction


def prove(program: ChunkProgram) -> tuple[Counterexample, ...]:
    """Why `program` does not do what its collective promises; empty: it is proved.

    Proved is: what each slot holds at the end; no contribution counted twice, nothing read that was never
    set, no two messages into one slot at a time, none that changes no result. Every transfer has both its
    ends in one round, and all ranks go through the rounds in one order: so every send meets its receive, and
    no rank waits for ever, although a send completes only when its receive is posted.
    """
    wrong = unfit(program)
    if wrong is None:
        transfers, few = representatives(program)
        wrong = _out_of_range(program, transfers) or interpret(program, transfers, few)
    return () if wrong is None else (wrong,)


def unfit(program: ChunkProgram) -> Counterexample | None:
    """Numbers of ranks, chunks and root that no program can have."""
    n, chunks, root = program.ranks, program.chunks, program.root
    blocked = program.kind in IN_BLOCKS
    if n >= 1 and chunks >= 1 and 0 <= root < n and not (blocked and chunks % n):
        return None
    wanted = "a rank, a chunk and a root among the ranks"
    if blocked and chunks % max(n, 1):
        wanted = f"a multiple of {n} chunks"
    actual = f"{n} ranks, {chunks} chunks, root {root}"
    return Counterexample("range", (), (), None, wanted, actual, f"there is no {program.kind} with {actual}")


def _out_of_range(program: ChunkProgram, transfers: Transfers) -> Counterexample | None:
    """A transfer from or to a rank, or of a chunk, that does not exist."""
    n, chunks = program.ranks, program.chunks
    src, dst, chunk, count, _, time = transfers
    wrong = (src < 0) | (src >= n) | (dst < 0) | (dst >= n) | (src == dst)
    wrong |= (chunk < 0) | (count < 1) | (chunk + count > chunks)
    places = np.flatnonzero(wrong)
    if not len(places):
        return None
    first = transfers.take(places[np.lexsort((time[places], src[places]))[:1]])
    rank, peer, start, many, _, now = (int(column[0]) for column in first)
    return Counterexample(
        "range", (rank,), (now,), start, f"chunks below {chunks}, another rank below {n}",
        f"{many} chunks from {start} on, rank {peer}",
        f"rank {rank} sends to rank {peer} {many} chunks from chunk {start} on in its round {now}",
    )  # fmt: skip


def count(program: ChunkProgram) -> Counted:
    """Rounds and bytes of `program`."""
    n, k = program.ranks, program.chunks
    if rotates(program):  # a rank sends, and receives, as many chunks as are sent of one chunk
        transfers = Transfers.of_first_chunk(program)
        src = dst = np.zeros_like(transfers.src)
    else:
        transfers = Transfers.of(program)
        src, dst = transfers.src, transfers.dst

    def busiest(place: Ints) -> Fraction:
        return Fraction(int(np.bincount(place, transfers.size).max(initial=0)), k)

    rounds = np.unique(transfers.round)
    _, staging = np.unique(dst * len(program.rounds) + transfers.round, return_inverse=True)
    sent, received, staged = (busiest(place) for place in (src, dst, staging))
    return Counted(len(rounds), sent, received, staged, *lower_bounds(program.kind, n))
