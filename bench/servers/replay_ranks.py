"""A rank of `bench.replays`, which starts some under mpirun: cases recorded and replayed through MPI.

Ranks beyond those of a case wait. Rank 0 prints each problem, and how many replays there were.
"""

from __future__ import annotations

import importlib
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.servers.cases import Case, asked, drawn, functions, noise, program, started, stepped

MPI: Any = importlib.import_module("mpi4py.MPI")
Weights = list[bytes]


def main(folder: str, seed: str, count: str) -> None:
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    problems: list[str] = []
    for number in range(int(seed), int(seed) + int(count)):
        case = drawn(number, most=size)
        ranks = case.workers + case.servers
        comm = world.Split(0 if rank < ranks else MPI.UNDEFINED, rank)
        own_problems: list[str] = []
        if rank < ranks:
            path = Path(folder) / f"{number}.order"
            first, again = (run(case, comm, number, path, how) for how in ("record", "replay"))
            own_problems = (
                [f"{case}: worker {rank} has other weights than recorded"] if first != again else []
            )
            if rank < case.workers and len(first) != case.steps + 1:
                own_problems.append(f"{case}: worker {rank} made {len(first)} steps")
            comm.Free()
        _wait(world)
        problems += [problem for each in world.allgather(own_problems) for problem in each]
    if rank == 0:
        print("\n".join([*problems, f"replays: {count}"]), flush=True)


def run(case: Case, comm: Any, number: int, path: Path, how: str) -> Weights:
    """The weights of a worker after each step, and the servers' at the end; nothing on a server."""
    run = program(case).bind(comm, functions=functions(case))
    if run.serve(**{how: path}) is not None:
        _wait(comm)
        return []
    worker, pace = run.context.machine.comm.Get_rank(), random.Random(f"{number} {how} {comm.Get_rank()}")
    most = pace.choice((0.0, 0.0, 1e-3, 5e-3))  # of a thought
    _, state = run.start(run.init(), **started(case, worker))
    w = noise(case, worker if case.elastic else 0)
    weights: Weights = []
    for step in range(case.steps):
        time.sleep(pace.uniform(0, most))
        out, state = run.step(state, **asked(case, worker, step, w))
        w = stepped(case, worker, step, w, out.pull if case.elastic else out.weights)
        weights.append(_bytes(w))
    _wait(run.context.machine.comm)  # nobody is still on the way to the servers
    out, state = run.look(state)
    weights.append(_bytes(out.center if case.elastic else out.weights))
    run.close()
    _wait(comm)
    return weights


def _bytes(tree: Any) -> bytes:
    return b"".join(np.asarray(tree[name]).tobytes() for name in sorted(tree))


def _wait(comm: Any) -> None:
    """A barrier that leaves the cores to those who still work."""
    waiting = comm.Ibarrier()
    while not waiting.Test():
        time.sleep(1e-3)


if __name__ == "__main__":
    main(*sys.argv[1:])
