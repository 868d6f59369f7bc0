"""Run on every rank by test_faults.py, under a fault-tolerant MPI: a rank dies while others wait.

    mpirun -n N --with-ft ulfm python faults_worker.py CASE

Every survivor prints one line "CASE: MESSAGE" for each wait.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from mpi4py import MPI

import commplan
from commplan.ir.plan import Algorithm
from commplan.lowering.mpi.collectives import Channel
from commplan.lowering.mpi.tuning import Spec

comm = MPI.COMM_WORLD
RANK = comm.Get_rank()
VICTIM = 2  # of collectives
DOOM = 7  # the tag of a word that workers are under way
REDUCE = """
plan reduces
axis data = ?
input grads : f32[64] partial data
each step {
    grads = reduce grads over data by sum
    output grads
}
"""
ELASTIC = """
plan asks
axis worker = ?
server master = 1
input params : f32[1000] per worker
state center : f32[1000] on master
at start {
    center = broadcast params over worker from 0
}
each step {
    pull, center = elastic params with center over worker by async(eta = 0.5, rho = 0.5) { chunk = 1 KiB }
    output pull
}
"""


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def told(label: str, call: Callable[[], Any]) -> None:
    began = time.monotonic()
    try:
        call()
        message = "nothing"
    except Exception as error:  # noqa: BLE001  whatever it is, it is what is told
        message = " ".join(str(error).split())
    sys.stderr.write(f"{label} after {time.monotonic() - began:.1f} s\n")
    print(f"{label}: {message}\n", end="", flush=True)


def collectives() -> None:
    """All forms at once, each on separate channels, and a step of a plan."""
    waiting: dict[str, Callable[[], Any]] = {}
    for name in ("native", "ring"):
        for form in ("call", "split"):
            channel = Channel(comm)
            spec = Spec("all_reduce", algorithm=Algorithm(name), form=form, line=7, file="x.plan")
            waiting[f"{name} {form}"] = reducing(channel, spec)
    run = commplan.loads(REDUCE, "reduces.plan").compile(comm).bind(comm)
    waiting["plan"] = lambda: jax.block_until_ready(run.step(run.init(), grads=np.ones(64, np.float32)))
    for each in waiting.values():
        each()
    comm.Barrier()
    if RANK == VICTIM:
        die()
    threads = [threading.Thread(target=told, args=pair) for pair in waiting.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    told("again", waiting["ring call"])


def reducing(channel: Channel, spec: Spec) -> Callable[[], Any]:
    call = jax.jit(lambda x, token: channel.run(x, spec, token)[0])
    return lambda: call(jnp.ones(50_000), channel.token()).block_until_ready()


def asking(server: Callable[[], None], worker: Callable[[Any, Any], None]) -> None:
    program = commplan.loads(ELASTIC, "asks.plan").compile(comm)
    run = program.bind(comm)
    if run.role == "server":
        server()
        served = run.serve()
        print(f"served: lost {served.lost}, broken off {served.broken_off}", flush=True)
        return
    _, state = run.start(run.init(), params=np.full(1000, RANK, np.float32))
    step(run, state)
    worker(run, state)


def step(run: Any, state: Any) -> None:
    jax.block_until_ready(run.step(state, params=np.ones(1000, np.float32)))


def before_bind() -> None:
    comm.Barrier()
    if RANK == VICTIM:
        die()
    told("bind", lambda: commplan.loads(REDUCE, "reduces.plan").compile(comm).bind(comm))
    machine = Path(__file__).parents[2] / "examples/topologies/flat4.toml"
    told("compile", lambda: commplan.loads(REDUCE, "reduces.plan").compile(comm, topology=machine))


def server_dies() -> None:
    def doomed() -> None:
        while not all(comm.Iprobe(source=rank_of_worker, tag=DOOM) for rank_of_worker in range(RANK)):
            time.sleep(0.05)
        die()

    def worker(run: Any, state: Any) -> None:
        comm.send(None, dest=comm.Get_size() - 1, tag=DOOM)

        def on() -> None:
            while True:
                step(run, state)

        told("worker", on)
        told("again", lambda: step(run, state))

    asking(lambda: threading.Thread(target=doomed, daemon=True).start(), worker)


def put_waits() -> None:
    """A state is set again while a worker is idle for longer than the watchdog's bounds."""
    run = commplan.loads(ELASTIC, "asks.plan").compile(comm).bind(comm, watchdog_s=0.5)
    if run.serve():
        return
    values = np.full(1000, RANK, np.float32)
    for number in range(2):
        if RANK == 1 and number == 1:
            time.sleep(12 * 0.5 + 4)
        _, state = run.start(run.init(), params=values)
        told(f"put {number}", functools.partial(step, run, state))


def worker_dies() -> None:
    def worker(run: Any, state: Any) -> None:
        if RANK == 1:
            die()
        for _ in range(50):
            step(run, state)
            time.sleep(0.01)
        told("worker", lambda: step(run, state))

    asking(lambda: None, worker)


def worker_raises() -> None:
    def worker(run: Any, state: Any) -> None:
        if RANK == 1:
            raise ValueError("out of luck")
        told("worker", lambda: step(run, state))

    asking(lambda: None, worker)


if __name__ == "__main__":
    globals()[sys.argv[1]]()
