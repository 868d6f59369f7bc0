"""Random machines that the axes of a plan fit on: a level for each, or levels that know nothing of them."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from commplan.topology import Level, Topology


def make_machine(seed: int, sizes: Sequence[int]) -> Topology:
    """A function of the seed. sizes: of the plan's axes, in its order."""
    rng = random.Random(seed)
    counts = [size * rng.choice((1, 1, 1, 2)) for size in reversed(sizes)]
    if rng.random() < 0.6:
        counts, remaining = [], math.prod(sizes)
        while remaining > 1:
            counts.append(rng.choice([n for n in range(2, remaining + 1) if remaining % n == 0]))
            remaining //= counts[-1]
    levels = [
        Level(f"level{number}", count, 10 ** rng.uniform(-7, -3), 10 ** rng.uniform(1, 9))
        for number, count in enumerate(counts or [2])
    ]
    return Topology("random", tuple(levels))
