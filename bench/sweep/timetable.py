"""When each program of a sweep is started, killed and started again: a function of the seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

KINDS = ("numpy", "jax")


@dataclass(frozen=True)
class Asked:
    """What to play. minute: seconds over which programs are started."""

    members: int
    torch: int
    killed: int
    returning: int
    minute: float
    seed: int


@dataclass(frozen=True)
class Member:
    """One program. Seconds from the start; None: it is not killed, it does not come back."""

    number: int
    kind: str
    starts: float
    dies: float | None = None
    returns: float | None = None


def timetable(asked: Asked) -> list[Member]:
    """The programs by the moment at which they are started."""
    rng = np.random.default_rng(asked.seed)
    others = [KINDS[number % len(KINDS)] for number in range(asked.members - asked.torch)]
    kinds = rng.permutation(["torch"] * asked.torch + others).tolist()
    starts = sorted(rng.uniform(0, asked.minute, asked.members).tolist())
    killed = rng.choice(asked.members, asked.killed, replace=False).tolist()
    members: list[Member] = []
    for number, (kind, start) in enumerate(zip(kinds, starts, strict=True)):
        dies = returns = None
        if number in killed:
            dies = start + asked.minute * float(rng.uniform(0.1, 0.3))
            if killed.index(number) < asked.returning:
                returns = dies + asked.minute * float(rng.uniform(0.01, 0.08))
        members.append(Member(number, kind, start, dies, returns))
    return members
