"""One of three processes of `test_watchdog_jax`: python watched_processes.py PORT INDEX MODE."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

import commplan
from commplan.runtime.observe import watchdog

PLAN = """plan watched
axis data = 3
input x : f32[4] per data
each step {
    y = reduce x over data by sum
    output y
}
"""
BOUND_S, BUSY_S, STEPS, CULPRIT = 1.0, 3.0, 8, 1


def main(port: str, index: str, mode: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", 3, int(index))
    mesh = jax.make_mesh((3,), ("data",), (AxisType.Auto,))
    if mode in ("lock", "ctrl-c"):
        commplan.install_hooks()
    watchdog_s = {"none": None, "ctrl-c": 600.0}.get(mode, BOUND_S)
    run = commplan.loads(PLAN).compile(mesh).bind(mesh, watchdog_s=watchdog_s, busy_s=BUSY_S)
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    x = jax.jit(lambda: jnp.ones((3, 4)), out_shardings=sharding)()
    slow = int(index) == CULPRIT
    for number in range(STEPS):
        if slow and number == 5 and mode in ("late", "phase", "none"):
            if mode == "late":
                with run.late():
                    time.sleep(4 * BOUND_S)
            else:
                time.sleep(4 * BOUND_S if mode == "none" else 600)
        if slow and number == 2 and mode == "fork":
            fork()
        if slow and number == 5 and mode == "lock":
            backtrack()
        if number == 5 and mode == "ctrl-c":
            if slow:
                os.kill(os.getpid(), signal.SIGSTOP)
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        if slow and mode == "rhythm":
            time.sleep(2.5 * BOUND_S if number == 7 else BOUND_S)
        out, _ = run.step({}, x=x)  # a phase outside of any step
        jax.block_until_ready(out.y)
    print("finished", flush=True)


def backtrack() -> None:
    """For years, in C, with the interpreter's lock."""
    re.match("(a+)+$", "a" * 40 + "b")


def fork() -> None:
    """A child that ends at once, through the exit handlers of a watched process."""
    (running,) = watchdog._running
    child = os.fork()
    if child == 0:
        running._ending()
        os._exit(0)
    os.waitpid(child, 0)
    time.sleep(3 * BOUND_S)  # the others would take it for the end of this process


if __name__ == "__main__":
    main(*sys.argv[1:])
