"""Random asynchronous runs, recorded and replayed: each must come to the recorded weights, to the last bit.

    python -m bench.replays --count 1000 --seed 0

A run has two to four workers and one or two servers, a tree of random shapes, a random size of chunks, and is
`async`, `hogwild` (by messages), `round_robin`, or an exchange with staleness, with momentum or without. It
is recorded, and replayed with workers of another pace. Compared are the servers' states and every worker's
weights after every step. A tenth of the runs are ranks under mpirun; the others have workers and servers in
one process, between which messages take turns at random, and in every fourth of them a worker is killed
somewhere. Exit 1 where anything differs, hangs or fails.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

RUNS = 20  # of one case, in one process
AT_ONCE = 5  # cases of one mpirun
RANKS = 5
DEADLINE_S = 240.0  # of one mpirun


def simulated(count: int, seed: int, counts: Counter[str]) -> list[str]:
    """`count` replays in this process; what was wrong."""
    from bench.servers.cases import drawn  # noqa: PLC0415  after the platform is chosen
    from bench.servers.inprocess import Job, differences, made  # noqa: PLC0415

    rng = random.Random(seed)
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        case = drawn(1000 * seed)
        ready = made(case)
        for number in range(count):
            if number and number % RUNS == 0:
                case = drawn(1000 * seed + number // RUNS)
                ready = made(case)
            victim = None
            if rng.random() < 0.25:
                victim = rng.randrange(case.workers), rng.randint(4, case.steps + 2)  # after what it puts
            paces = rng.getrandbits(32), rng.getrandbits(32)
            try:
                first = Job(ready, Path(name), paces[0], replay=False, victim=victim).run()
                again = Job(ready, Path(name), paces[1], replay=True).run()
            except Exception:  # noqa: BLE001  whatever it is, it is told, and the campaign goes on
                problems.append(f"{case}, victim {victim}, paces {paces}:\n{traceback.format_exc()}")
                continue
            problems += differences(case, first, again)
            counts["replays in one process"] += 1
            counts["with a death"] += bool(first.lost)
            counts["steps of workers"] += sum(map(len, first.weights))
    return problems


def started(count: int, seed: int, counts: Counter[str]) -> list[str]:
    """`count` replays under mpirun; what was wrong."""
    from bench.servers.mpirun import command, environment  # noqa: PLC0415

    problems: list[str] = []
    for begin in range(0, count, AT_ONCE):
        size = min(AT_ONCE, count - begin)
        with tempfile.TemporaryDirectory() as name:
            words = command(RANKS, "bench.servers.replay_ranks", name, 1000 * seed + 500 + begin, size)
            try:
                done = subprocess.run(
                    words, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S, check=False
                )
            except subprocess.TimeoutExpired:
                problems.append(f"{' '.join(words)}: hung")
                continue
        lines = done.stdout.splitlines()
        if done.returncode or not lines or lines[-1] != f"replays: {size}":
            problems.append(f"{' '.join(words)}: ended with {done.returncode}\n{done.stdout}\n{done.stderr}")
            continue
        problems += lines[:-1]
        counts["replays under mpirun"] += size
    return problems


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--mpirun", type=int, help="how many of them under mpirun (a tenth)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    ranks: int = options.count // 10 if options.mpirun is None else options.mpirun
    counts: Counter[str] = Counter()
    seconds: list[str] = []
    problems: list[str] = []
    for how, count in ((simulated, options.count - ranks), (started, ranks)):
        begin = time.perf_counter()
        problems += how(count, options.seed, counts)
        seconds.append(f"{time.perf_counter() - begin:.0f} s")
    print(", ".join(f"{number} {event}" for event, number in counts.items()), "in", " + ".join(seconds))
    print("\n".join(problems) or "each came to the recorded weights")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
