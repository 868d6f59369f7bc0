"""A rank of two: rank 1 never arrives, and rank 0 is interrupted: interrupted_worker.py WHERE."""

from __future__ import annotations

import os
import sys
import time

import jax
import jax.numpy as jnp
from mpi4py import MPI

import commplan

LONG_S = 600.0  # no bound ends a wait here
SIZE = 30_000 if sys.argv[1] == "exit" else 64  # JAX runs small programs in the calling thread
PLAN = f"""
plan p
axis data = 2
input grads : f32[{SIZE}] partial data
each step {{
    grads = reduce grads over data by mean via ring
    output grads
}}
"""
comm = MPI.COMM_WORLD
where = sys.argv[1]
if where == "step":
    commplan.install_hooks()  # an uncaught error of the step becomes KeyboardInterrupt


def stay_away() -> None:
    """Rank 1 stays away; rank 0 prints its process id before it waits."""
    if comm.rank == 1:
        time.sleep(LONG_S)
    print(f"waits as {os.getpid()}", flush=True)


def bind() -> None:
    program = commplan.loads(PLAN).compile(comm)
    stay_away()
    program.bind(comm, timeout=LONG_S)


def step() -> None:
    run = commplan.loads(PLAN).compile(comm).bind(comm, watchdog_s=LONG_S)
    call = jax.jit(lambda grads: run.step(run.init(), grads=grads)[0].grads)
    grads = jnp.ones(SIZE)
    jax.block_until_ready(call(grads))
    stay_away()
    call(grads)


{"bind": bind, "step": step, "exit": step}[where]()
