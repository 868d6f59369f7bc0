"""Proofs of chunk programs: of one program, and of all that a name stands for."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

import numpy as np

from commplan.collectives.lower import lower_bounds
from commplan.collectives.program import BLOCKED, Program
from commplan.verify.contributions import interpret
from commplan.verify.counterexample import Counterexample
from commplan.verify.matching import match
from commplan.verify.projection import Projection, project


class Counted(NamedTuple):
    """What a program costs, counted in its messages.

    rounds: of all ranks together. sent, received: bytes of the busiest rank as a share of S, the bytes of
    the whole buffer; staged: what it receives in one round at most. least_rounds, least: what no program goes
    below (`commplan.collectives.lower`); `least` is of the larger of `sent` and `received`.
    """

    rounds: int
    sent: Fraction
    received: Fraction
    staged: Fraction
    least_rounds: int
    least: Fraction


def prove(program: Program | Projection) -> tuple[Counterexample, ...]:
    """Why `program` does not do what its collective promises; empty: it is proved.

    Proved is: every send meets a receive of the same chunks; all ranks get to their end although a send
    completes only when its receive is posted; what each slot holds at the end; no contribution counted twice,
    nothing read that was never set, no two messages into one slot at a time, none that changes no result.
    """
    projection = project(program) if isinstance(program, Program) else program
    strange = _strange(projection)
    if strange is not None:
        return (strange,)
    messages = match(projection)
    if isinstance(messages, Counterexample):
        return (messages,)
    wrong = interpret(projection, messages)
    return () if wrong is None else (wrong,)


def _strange(projection: Projection) -> Counterexample | None:
    """Numbers of ranks, chunks and root that no program can have."""
    n, chunks, root = projection.ranks, projection.chunks, projection.root
    blocked = projection.kind in BLOCKED
    if n >= 1 and chunks >= 1 and 0 <= root < n and not (blocked and chunks % n):
        return None
    wanted = (
        f"a multiple of {n} chunks"
        if blocked and chunks % max(n, 1)
        else "a rank, a chunk and a root among the ranks"
    )
    found = f"{n} ranks, {chunks} chunks, root {root}"
    return Counterexample("range", (), (), None, wanted, found, f"there is no {projection.kind} with {found}")


def count(program: Program | Projection) -> Counted:
    """Rounds and bytes of `program`."""
    projection = project(program) if isinstance(program, Program) else program
    n, k = projection.ranks, projection.chunks
    ends = (projection.sends, projection.receives)
    rounds = np.concatenate([posts.round for posts in ends])
    width = int(rounds.max(initial=0)) + 1
    sent, received = (
        Fraction(int(np.bincount(posts.rank, posts.size, n).max(initial=0)), k) for posts in ends
    )
    into = projection.receives
    _, place = np.unique(into.rank * width + into.round, return_inverse=True)
    staged = Fraction(int(np.bincount(place, into.size).max(initial=0)), k)
    return Counted(len(np.unique(rounds)), sent, received, staged, *lower_bounds(projection.kind, n))
