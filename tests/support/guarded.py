"""A program of plain JAX under `commplan.guard`, with a fault in the last process.

    python guarded.py PROGRAM FAULT PORT INDEX

PROGRAM: `jit` with shardings, `shard_map` with `psum`, or `split`, which calls two steps in turn. FAULT:
`none`, or the fault before the fourth step: `stop`, `kill`, `sleep`, `skip`, `shape`, `late`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import commplan

RANKS, STEPS, WRONG, BOUND_S, BUSY_S = 2, 6, 3, 1.0, 3.0


def sums(x: Any) -> Any:
    return jnp.sum(x * x)


def summed(x: Any) -> Any:
    return jax.lax.psum(jnp.sum(x * x), "data")


def scaled(x: Any) -> Any:
    return jnp.sum(2 * x)


def go_wrong(fault: str) -> None:
    if fault in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)
    elif fault == "sleep":
        time.sleep(600)
    elif fault == "late":
        with commplan.guard.late():
            time.sleep(2 * BUSY_S)


def main(program: str, fault: str, port: str, index: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", RANKS, int(index))
    mesh = jax.make_mesh((RANKS,), ("data",), (jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, P("data"))
    guard = commplan.guard.jit(mesh=mesh, watchdog_s=BOUND_S, busy_s=BUSY_S)
    if program == "shard_map":
        steps = [guard(jax.shard_map(summed, mesh=mesh, in_specs=P("data"), out_specs=P()))]
    else:
        steps = [guard(sums), *([guard(scaled)] if program == "split" else [])]
    x = jax.make_array_from_callback((RANKS, 1000), rows, lambda place: jnp.ones((1, 1000)))
    for number in range(STEPS):
        is_wrong = int(index) == RANKS - 1 and number == WRONG
        if is_wrong:
            go_wrong(fault)
            x = x[:, :500] if fault == "shape" else x
        for step in steps[int(is_wrong and fault == "skip") :]:
            jax.block_until_ready(step(x))
    print(f"process {index} has made all steps", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
