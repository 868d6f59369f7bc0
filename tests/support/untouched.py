"""A process that trains for two steps and prints which process-wide settings commplan has changed.

    python untouched.py mpi
    python untouched.py jax PORT INDEX

It has an exception hook of `rich`, `faulthandler`, and a handler of SIGTERM, all of which must still work.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import rich.traceback

PLAN = """plan quiet
axis data = 2
input x : f32[4] partial data
each step {
    y = reduce x over data by sum
    output y
}
"""
_SIGACTION = 152  # bytes of a `struct sigaction`; the handler is the first word


def settings() -> dict[str, Any]:
    """State of the process that a library could replace or install."""
    libc, values = ctypes.CDLL(None), dict[str, Any]()
    for number in range(1, signal.SIGRTMAX + 1):
        action = ctypes.create_string_buffer(_SIGACTION)
        if libc.sigaction(number, None, action) == 0:
            values[f"signal {number}"] = action.raw[:8].hex()
            values[f"Python's handler of signal {number}"] = signal.getsignal(number)
    for hook in ("exit", "excepthook", "unraisablehook", "breakpointhook", "displayhook"):
        values[f"sys.{hook}"] = getattr(sys, hook)
    values["threading.excepthook"] = threading.excepthook
    values["faulthandler"] = faulthandler.is_enabled()
    values["the wake-up descriptor"] = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(values["the wake-up descriptor"], warn_on_full_buffer=False)
    return values


def train(mesh: Any) -> None:
    import commplan  # noqa: PLC0415  the settings before the import are compared

    run = commplan.loads(PLAN, "quiet.plan").compile(mesh).bind(mesh)
    step = run.jit(run.spmd(x="per data", returns="same")(one_step(run)))
    state, x = run.init(), jnp.ones((2, 4) if isinstance(mesh, jax.sharding.Mesh) else 4)
    if isinstance(mesh, jax.sharding.Mesh):
        x = jax.jit(lambda: x, out_shardings=jax.sharding.NamedSharding(mesh, jax.P("data")))()
    for _ in range(2):
        state, y = step(state, x)
    jax.block_until_ready(y)


def one_step(run: Any) -> Any:
    def step(state: Any, x: Any) -> Any:
        out, state = run.step(state, x=x)
        return state, out.y

    return step


def main(where: str, *words: str) -> None:
    mesh: Any
    if where == "mpi":
        from mpi4py import MPI  # noqa: PLC0415

        mesh = MPI.COMM_WORLD
    else:
        jax.distributed.initialize(f"localhost:{words[0]}", 2, int(words[1]))
        mesh = jax.make_mesh((2,), ("data",), (jax.sharding.AxisType.Auto,))
    jax.block_until_ready(jax.jit(jnp.sin)(jnp.ones(4)))
    faulthandler.enable()
    rich.traceback.install()
    signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM is handled", flush=True))
    before = settings()
    train(mesh)
    after = settings()
    changed = sorted(name for name in before if before[name] != after[name])
    print(f"changed: {', '.join(changed) or 'nothing'}", flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    if "raise" in words:
        raise ArithmeticError("loss is not finite")


if __name__ == "__main__":
    main(*sys.argv[1:])
