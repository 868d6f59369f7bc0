"""A rank of a job with a fault in the sixth step of one rank: see `test_watchdog.py`."""

from __future__ import annotations

import os
import re
import signal
import sys
import time

import jax
import numpy as np
from mpi4py import MPI

from commplan.hang_limits import HangLimits
from commplan.ir.plan import Algorithm
from commplan.lowering.mpi.collectives import Channel
from commplan.lowering.mpi.job.watchdog import expected_late
from commplan.lowering.mpi.tuning import Spec
from commplan.recorder.file import offer_stacks_of_process, start_recording

WRONG, CULPRIT, STEPS = 5, 2, 8
fault, algorithm, form, bound_s = sys.argv[1], sys.argv[2], sys.argv[3], float(sys.argv[4])
rank = MPI.COMM_WORLD.rank
if fault == "lock":
    offer_stacks_of_process()
if hosts := os.environ.get("WORKER_HOSTS"):  # rank 2 is on another host, which has a sidecar of its own
    os.environ["COMMPLAN_SIDECAR"] = f"{hosts}/{rank // 2}"
busy_s = 5 * bound_s if fault == "held" else bound_s
channel = Channel(MPI.COMM_WORLD, limits=HangLimits(bound_s, busy_s), plan="faulty")
if fault == "lock":
    start_recording("second", "input", rank, MPI.COMM_WORLD.size)  # of the same processes


def step(line: int, size: int):
    spec = Spec(
        "all_reduce",
        algorithm=Algorithm(algorithm),
        form="split" if form == "split" else "call",
        line=line,
        file="x.plan",
    )
    run = jax.jit(lambda x, token: channel.run(x, spec, token)[0])
    return lambda: jax.block_until_ready(run(np.ones(size, np.float32), channel.token()))


first, second = step(6, 300_000), step(7, 300_000)


def decode() -> None:
    time.sleep(600)


def keep_the_lock() -> None:
    re.match("(a+)+b", "a" * 60)  # in C, which lets no other thread in


def go_wrong() -> None:
    if fault.startswith("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "sleep":
        decode()
    elif fault == "lock":
        keep_the_lock()
    elif fault == "held":
        sys.setswitchinterval(60)  # no other thread runs until then
        until = time.monotonic() + 3 * bound_s
        while time.monotonic() < until:
            pass
    elif fault == "late":
        with expected_late():
            time.sleep(3 * bound_s)
    elif fault == "order":
        second()


try:
    for number in range(STEPS):
        if rank == CULPRIT and number == (0 if fault in ("stopped early", "held") else WRONG):
            go_wrong()
        first()
        second()
    print(f"rank {rank} is done", flush=True)
except (ValueError, RuntimeError) as error:
    print(f"rank {rank} was told: {error}", flush=True)
    time.sleep(3)  # until the others have said theirs
    MPI.COMM_WORLD.Abort(3)
