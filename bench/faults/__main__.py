"""Faults, one a job: the blamed process, the line, and the delay.

    python -m bench.faults --place all --count 300 --seed 1 [--jobs 2] [--resume FILE]
    python -m bench.faults --place ulfm --count 40

Places are ranks under MPI (`mpi`: one that ends a job when a rank dies, `ulfm`: one that does not), processes
under `jax.distributed` (`jax`, and `guard` without a plan), one process with its workers (`process`),
processes that share their input (`input`), workers and parameter servers (`servers`), and ranks on hosts of
an emulated cluster (`cluster`, root only). One process or rank has one fault, at a random moment. A job is
right if its messages name the culprit and the waiting line, and no other process; it is in time if its first
message comes within five seconds of the bound. The module of a place defines the expected result of faults
that no process waits for. Exit 1 if a job hangs, or fewer than 95% are right in time.
"""

from __future__ import annotations

import concurrent.futures
import functools
import random
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.faults import cluster, input, jax, mpi, process, servers
from bench.faults.campaign import Fault, Outcome, in_time, resumed, table
from bench.harness.arguments import names, program_parser

DRAWS = 100  # of one fault, until it is another one than all before
PLACES = {
    "mpi": mpi.PLACE,
    "ulfm": mpi.PLACE,
    "jax": jax.PLACE,
    "guard": jax.GUARD,
    "process": process.PLACE,
    "input": input.PLACE,
    "servers": servers.PLACE,
    "cluster": cluster.PLACE,
}


def faults(places: Sequence[str], count: int, seed: int) -> list[Fault]:
    """All kinds of faults of these places in turn, each at a random moment, and all different if possible."""
    draw, drawn = random.Random(seed), list[Fault]()
    pairs = [(name, kind) for name in places for kind in PLACES[name].kinds]
    for number in range(count):
        name, kind = pairs[number % len(pairs)]
        fault = PLACES[name].draw(draw, kind)._replace(place=name)
        for _ in range(DRAWS if fault in drawn else 0):
            fault = PLACES[name].draw(draw, kind)._replace(place=name)
            if fault not in drawn:
                break
        drawn.append(fault)
    return drawn


def judged(fault: Fault) -> Outcome:
    return PLACES[fault.place].judge(fault)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = program_parser("faults", __doc__)
    parser.add_argument("--place", default="all", choices=("all", *PLACES))
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    kinds = tuple(dict.fromkeys(kind for place in PLACES.values() for kind in place.kinds))
    parser.add_argument("--kinds", type=names(kinds), default=kinds, help="these alone, with commas")
    parser.add_argument("--resume", type=Path, help="a file of outcomes: those in it are taken from it")
    options = parser.parse_args(arguments)
    places = list(PLACES) if options.place == "all" else [options.place]
    drawn = [fault for fault in faults(places, options.count, options.seed) if fault.kind in options.kinds]
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        outcomes = list(pool.map(functools.partial(resumed, options.resume, judged), drawn))
    print("\n".join(table(outcomes, {name: place.bound_s for name, place in PLACES.items()})))
    for outcome in outcomes:
        if not outcome.right or not outcome.ended:
            print(f"--- {outcome.fault}: {outcome.seconds}\n{outcome.text.strip()[-1500:]}")
    hung, right = (sum(not o.ended for o in outcomes), sum(o.right for o in outcomes))
    timely = sum(o.right and in_time(o, PLACES[o.fault.place].bound_s) for o in outcomes)
    print(f"{right} of {len(outcomes)} right, {timely} of them in time, {hung} hang")
    return int(hung > 0 or timely < 0.95 * len(outcomes))


if __name__ == "__main__":
    sys.exit(main())
