"""A rank of `bench.soak`, which starts some under mpirun: a worker that sends requests until it is stopped,
or a server.

A worker writes each answer to a file at once. A file triggers its start.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import commplan
from commplan.protocol.build_sites import sites

jax: Any = importlib.import_module("jax")
MPI: Any = importlib.import_module("mpi4py.MPI")

SIZE = 2999  # elements of the state
SPAN = 1 << 17  # what tells workers' numbers apart
AVERAGING = """
plan soaked_averaging
axis worker = ?
server master = {servers}
input params : f32[2999] per worker
input eta : f32
state center : f32[2999] on master
at start {{
    center = broadcast params over worker from 0
}}
each step {{
    pull, center = elastic params with center over worker by {mode}(eta = eta, rho = 1.0) {{ chunk = 4 KiB }}
    output pull
}}
phase look {{
    output center
}}
"""
EXCHANGE = """
plan soaked_exchange
axis worker = ?
server hub = {servers}
input params : f32[2999] per worker
input grads : f32[2999] partial worker
state weights : f32[2999] on hub
fn add(f32[2999], f32[2999]) -> f32[2999] on device elementwise
at start {{
    weights = broadcast params over worker from 0
}}
each step {{
    weights = exchange grads into weights with add over worker by sum {{ {hints} }}
    output weights
}}
phase look {{
    output weights
}}
"""


def add(w: Any, g: Any) -> Any:
    return w + g


def main(folder_name: str, mode: str, servers_text: str) -> None:
    folder, servers = Path(folder_name), int(servers_text)
    world = MPI.COMM_WORLD
    rank, workers = world.Get_rank(), world.Get_size() - servers
    elastic = mode in ("async", "hogwild", "shared")
    hints = f"chunk = 4 KiB, staleness = {mode}"
    text = AVERAGING if elastic else EXCHANGE
    text = text.format(servers=servers, mode="hogwild" if mode == "shared" else mode, hints=hints)
    program = commplan.loads(text).compile(world)
    run = program.bind(world, functions={} if elastic else {"add": add})
    (folder / f"bound-{rank}").write_text(str(os.getpid()))
    # Messages instead of shared memory, where sums have an order.
    served = run.serve(**({"record": folder / "soak.order"} if mode == "hogwild" else {}))
    if served is not None:
        text = f"{sum(served.requests.values())} {served.shared} {len(served.lost)}"
        (folder / f"served-{rank}").write_text(text)
        os._exit(0)  # MPI's own end waits for the dead
    _until(folder / f"join-{rank}")
    state = run.init()
    _, state = run.start(state, params=np.zeros(SIZE, np.float32))
    (site,) = [site for site in sites(program.schedule).all if site.phase == "step"]
    units = [unit.start for unit in site.layout.units], [unit.size for unit in site.layout.units]
    push = averaging if elastic else exchanging
    with (folder / f"note-{rank}").open("ab", buffering=0) as note:
        push(run, state, rank, workers, units, note, Until(folder, rank))
    if (folder / f"last-{rank}").exists():
        look(run, state, folder, None if elastic else expected(folder, workers))
    run.close()
    (folder / f"done-{rank}").touch()
    os._exit(0)


class Until:
    """The stop condition of a worker: the one that ends last continues until all others have left."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.stop, self.last, self.finish = folder / "stop", folder / f"last-{rank}", folder / "finish"

    def __bool__(self) -> bool:
        return self.stop.exists() and (not self.last.exists() or self.finish.exists())


def averaging(run: Any, state: Any, rank: int, workers: int, units: Any, note: Any, stop: Until) -> None:
    """Each request stores a different number in the centre, and returns the previous one."""
    del workers
    count = 0
    while not stop:
        count += 1
        own = np.full(SIZE, rank * SPAN + count, np.float32)
        out, state = run.step(state, params=own, eta=np.float32(1))
        before = own - np.asarray(out.pull)
        parts = [before[start : start + size] for start, size in zip(*units, strict=True)]
        # A unit that is not the same everywhere is none that anybody has left there.
        values = [float(x[0]) if (x == x[0]).all() else -1.0 for x in parts]
        note.write(np.array(values, np.float32).tobytes())


def exchanging(run: Any, state: Any, rank: int, workers: int, units: Any, note: Any, stop: Until) -> None:
    """Each request adds 1 to every element of the worker's own."""
    del units
    own = np.float32(np.arange(SIZE) % workers == rank)
    while not stop:
        out, state = run.step(state, grads=own)
        jax.block_until_ready(out)
        note.write(np.float32(0).tobytes())


def look(run: Any, state: Any, folder: Path, least: Any) -> None:
    """The state of the servers when all other workers have left; terms of others may still be in flight."""
    view: Any = None
    for _ in range(100):
        out, state = run.look(state)
        view = np.asarray(out.center if least is None else out.weights)
        if least is None or (view >= least).all():
            break
        time.sleep(0.1)
    np.save(folder / "last.npy", view)


def expected(folder: Path, workers: int) -> Any:
    """The least weights, by the workers' logs."""
    counts = [0] * workers
    for rank in range(workers):
        if (folder / f"note-{rank}").exists():
            counts[rank] = (folder / f"note-{rank}").stat().st_size // 4
    return np.array(counts, np.float32)[np.arange(SIZE) % workers]


def _until(path: Path) -> None:
    while not path.exists():
        time.sleep(2e-3)


if __name__ == "__main__":
    main(*sys.argv[1:])
