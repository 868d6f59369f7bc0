"""Proofs and costs of single chunk programs.

`algorithm_proof` caches them and combines those of hierarchies.
"""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from commplan.collectives.postcondition import lower_bounds
from commplan.collectives.program import IN_BLOCKS, ChunkProgram, Ints
from commplan.verify.programs.counterexample import Counterexample
from commplan.verify.programs.symbolic_execution import TransferColumns, interpret, representatives, rotates


class Counted(NamedTuple):
    """The cost of a program, counted from its messages.

    Attributes:
        rounds: number of rounds.
        sent: bytes that the busiest rank sends, as a fraction of the buffer.
        received: bytes that the busiest rank receives, as a fraction of the buffer.
        staged: most bytes that a rank receives in one round, as a fraction of the buffer.
        least_rounds: lower bound on `rounds` of any program (`commplan.collectives.postcondition`).
        least: lower bound on the larger of `sent` and `received` of any program.
    """

    rounds: int
    sent: Fraction
    received: Fraction
    staged: Fraction
    least_rounds: int
    least: Fraction


def prove(program: ChunkProgram) -> tuple[Counterexample, ...]:
    """Prove that `program` satisfies the postcondition of its collective.

    Proved properties:

    - each slot has the promised final contents, and no contribution is counted twice;
    - no slot is read before it is set, and no two messages arrive in one slot in one round;
    - every message changes a result;
    - no deadlock: both ends of a transfer are in one round and all ranks execute rounds in order, so every
      send meets its receive, even if sends are synchronous.

    Returns:
        At most one counterexample; empty if the program is proved.
    """
    wrong = check_ranges(program)
    if wrong is None:
        transfers, chunks = representatives(program)
        wrong = _out_of_range(program, transfers) or interpret(program, transfers, chunks)
    return () if wrong is None else (wrong,)


def check_ranges(program: ChunkProgram) -> Counterexample | None:
    """Check that the numbers of ranks and chunks and the root are valid.

    Returns:
        A counterexample, or None if they are valid.
    """
    n, chunks, root = program.ranks, program.chunks, program.root
    blocked = program.kind in IN_BLOCKS
    if n >= 1 and chunks >= 1 and 0 <= root < n and not (blocked and chunks % n):
        return None
    expected = "a rank, a chunk and a root among the ranks"
    if blocked and chunks % max(n, 1):
        expected = f"a multiple of {n} chunks"
    actual = f"{n} ranks, {chunks} chunks, root {root}"
    return Counterexample(
        "range", (), (), None, expected, actual, f"there is no {program.kind} with {actual}"
    )


def _out_of_range(program: ChunkProgram, transfers: TransferColumns) -> Counterexample | None:
    """Find a transfer whose ranks or chunks do not exist, or from a rank to itself; None if there is none."""
    n, chunks = program.ranks, program.chunks
    src, dst, chunk, count, _, time = transfers
    wrong = (src < 0) | (src >= n) | (dst < 0) | (dst >= n) | (src == dst)
    wrong |= (chunk < 0) | (count < 1) | (chunk + count > chunks)
    places = np.flatnonzero(wrong)
    if not len(places):
        return None
    first = transfers.take(places[np.lexsort((time[places], src[places]))[:1]])
    rank, peer, start, size, _, number = (int(column[0]) for column in first)
    return Counterexample(
        "range", (rank,), (number,), start, f"chunks below {chunks}, another rank below {n}",
        f"{size} chunks from {start} on, rank {peer}",
        f"rank {rank} sends to rank {peer} {size} chunks from chunk {start} on in its round {number}",
    )  # fmt: skip


def count(program: ChunkProgram) -> Counted:
    """Count the rounds and bytes of `program`."""
    n, k = program.ranks, program.chunks
    if rotates(program):  # by symmetry each rank sends as many chunks as there are sends of one chunk
        transfers = TransferColumns.of_first_chunk(program)
        src = dst = np.zeros_like(transfers.src)
    else:
        transfers = TransferColumns.from_program(program)
        src, dst = transfers.src, transfers.dst

    def busiest(place: Ints) -> Fraction:
        """The most chunks of transfers with one `place`, as a fraction of the buffer."""
        return Fraction(int(np.bincount(place, transfers.size).max(initial=0)), k)

    rounds = np.unique(transfers.round)
    # Number the pairs of receiver and round.
    _, staging = np.unique(dst * len(program.rounds) + transfers.round, return_inverse=True)
    sent, received, staged = (busiest(place) for place in (src, dst, staging))
    return Counted(len(rounds), sent, received, staged, *lower_bounds(program.kind, n))
