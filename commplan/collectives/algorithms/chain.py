"""chain: data moves along the line of ranks; large buffers are pipelined in slices.

With n ranks, S bytes and the root at the start of the line, in s slices,

    broadcast, reduce   n + s - 2 rounds, a rank sends S
    all_reduce          2n + s - 3 rounds: up the line, down the line; a rank sends 2 S
    scatter, gather     n - 1 rounds, the root sends or receives (n-1)/n S

The number of bytes is the lower bound of Chan et al. (2007; see `postcondition.lower_bounds`), except in
all_reduce. Scatter sends the farthest block first, so that all blocks arrive in the last round.
"""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

from commplan.collectives.program import Kind, Programs, Round, rank_range, send
from commplan.collectives.transform import from_root


def _broadcast(n: int) -> Iterator[Round]:
    """In round t, rank t sends the whole buffer to rank t + 1."""
    r = rank_range(n)
    for step in range(n - 1):
        yield (send(r, r + 1, 0, where=r == step),)


def _scatter(n: int) -> Iterator[Round]:
    """In round t, rank 0 sends block n - 1 - t, and ranks 1 to t forward the block received last."""
    r = rank_range(n)
    for step in range(n - 1):
        yield (send(r, r + 1, n - 1 - step + r, where=r <= step),)


def formula(kind: Kind, n: int) -> tuple[int, Fraction]:
    """The number of rounds, and the fraction of S that the busiest rank sends or receives."""
    if kind == "all_reduce":
        return 2 * (n - 1), Fraction(min(n - 1, 2))
    whole = kind in ("broadcast", "reduce")
    return n - 1, Fraction(min(n - 1, 1)) if whole else Fraction(n - 1, n)


PROGRAMS: Programs = from_root(_broadcast, _scatter)
