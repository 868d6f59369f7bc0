"""Run on every rank by test_serving.py: servers that record, replay, checkpoint, or are killed.

    mpirun -n N python serving_worker.py CASE FOLDER WORDS...

Server ranks print "served: ..." as JSON, workers the result of their case.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from mpi4py import MPI

import commplan

comm = MPI.COMM_WORLD
RANK = comm.Get_rank()
ELASTIC = """
plan averaging
axis worker = ?
server master = 1
input params : f32[3000] per worker
state center : f32[3000] on master
at start {{
    center = broadcast params over worker from 0
}}
each step {{
    pull, center = elastic params with center over worker by {mode}(eta = 0.5, rho = 0.5) {{ chunk = 4 KiB }}
    output pull
}}
phase look {{
    output center
}}
"""
EXCHANGE = """
plan exchanging
axis worker = ?
server hub = 2
input params : f32[3000] per worker
input grads : f32[3000] partial worker
state weights : f32[3000] on hub
fn add(f32[3000], f32[3000]) -> f32[3000] on device elementwise
at start {{
    weights = broadcast params over worker from 0
}}
each step {{
    weights = exchange grads into weights with add over worker by sum {{ chunk = 4 KiB{hints} }}
    output weights
}}
phase look {{
    output weights
}}
"""


def values(*seed: int) -> Any:
    return np.float32(np.random.default_rng(seed).integers(-9, 9, 3000))


def add(w: Any, g: Any) -> Any:
    return w + g


def bound(text: str, **how: Any) -> Any:
    """The run on workers; None on servers, when all has been served."""
    run = commplan.loads(text).compile(comm).bind(comm, functions={"add": add} if "add" in text else {})
    served = run.serve(**how)
    if served is None:
        return run
    assert str(served).startswith(served.name)
    print("served: " + json.dumps(dataclasses.asdict(served)) + "\n", end="", flush=True)
    return None


def averaging(folder: Path, mode: str, how: str, steps: str = "6") -> None:
    """Elastic averaging, recorded or replayed; workers wait at random."""
    run = bound(ELASTIC.format(mode=mode), **{how: folder / "x.order"} if how != "plain" else {})
    if run is None:
        return
    wait = np.random.default_rng([os.getpid(), time.time_ns()])
    state = run.init()
    w = values(RANK)
    _, state = run.start(state, params=w)
    for step in range(int(steps)):
        time.sleep(float(wait.uniform(0, 4e-3)))
        out, state = run.step(state, params=w)
        w = w - np.asarray(out.pull) + np.float32(0.125) * values(RANK, step)
    run.context.machine.comm.Barrier()
    out, state = run.look(state)
    if RANK == 0:
        np.save(folder / f"{mode}-{how}.npy", np.asarray(out.center))


def pushing(folder: Path, first: str, count: str, victim: str = "", hints: str = "") -> None:
    """Exchanges from number `first` on; a file holds the answers of each worker.

    `victim` is a server that kills itself after the third exchange.
    """
    if victim and int(victim) == RANK:
        threading.Thread(target=kill_when, args=(folder,), daemon=True).start()
    run = bound(EXCHANGE.format(hints=hints), checkpoint=folder / "kept")
    if run is None:
        return
    state = run.init()
    if first == "0":
        _, state = run.start(state, params=values(0))
    else:
        out, state = run.look(state)
        np.save(folder / f"begins-{RANK}.npy", np.asarray(out.weights))
    for step in range(int(first), int(first) + int(count)):
        out, state = run.step(state, grads=values(step, RANK))
        jax.block_until_ready(out)
        (folder / f"answered-{RANK}").write_text(str(step + 1))


def kill_when(folder: Path) -> None:
    marker = folder / "answered-0"
    while not marker.exists() or int(marker.read_text() or 0) < 3:
        time.sleep(1e-4)
    os.kill(os.getpid(), signal.SIGKILL)


def dying(folder: Path, victim: str) -> None:
    """A worker kills itself before its third step; the others continue to their sixth."""
    run = bound(EXCHANGE.format(hints=""))
    if run is None:
        return
    state = run.init()
    _, state = run.start(state, params=values(0))
    for step in range(6):
        if int(victim) == RANK and step == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        out, state = run.step(state, grads=values(step, RANK))
        np.save(folder / "ends.npy", np.asarray(out.weights))
    run.close()


CASES = {"averaging": averaging, "pushing": pushing, "dying": dying}


if __name__ == "__main__":
    CASES[sys.argv[1]](Path(sys.argv[2]), *sys.argv[3:])
