"""What no program can go below."""

from __future__ import annotations

from fractions import Fraction

from commplan.collectives.program import Kind, log2_up


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
