"""What a program takes, counted from its rounds, and what no program can go below."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from commplan.collectives.program import Kind, Program, log2_up


def counted(program: Program) -> tuple[int, Fraction]:
    """Rounds, and the share of S that the busiest rank sends or receives, whichever is more.

    S are the bytes of the whole buffer, cut into equal chunks.
    """
    moved = np.zeros((2, program.ranks), np.int64)
    for each in program.rounds:
        for send in each:
            np.add.at(moved[0], send.src, send.count)
            np.add.at(moved[1], send.dst, send.count)
    return len(program.rounds), Fraction(int(moved.max()), program.chunks)


def lower_bounds(kind: Kind, n: int) -> tuple[int, Fraction]:
    """The least rounds, and the least share of S that some rank must send or receive.

    Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and
    experience" (2007), table I: what one rank has or needs cannot reach all in fewer than ceil(log2 n)
    rounds, as the ranks that it has reached at most double; a root sends or receives all that it does not
    keep; a reduced chunk is made of n - 1 received ones, and then sent to n - 1 ranks.
    """
    if n == 1:
        return 0, Fraction(0)
    match kind:
        case "broadcast" | "reduce":
            return log2_up(n), Fraction(1)
        case "all_reduce":
            return log2_up(n), Fraction(2 * (n - 1), n)
        case _:
            return log2_up(n), Fraction(n - 1, n)
