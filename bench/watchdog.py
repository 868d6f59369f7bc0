"""The costs of the watchdog and the record, and their false alarms.

    python -m bench.watchdog                        # a step with and without them, in turns
    python -m bench.watchdog --alarms --steps 100000 --bound 1.0
    python -m bench.watchdog --jax                  # both for processes under jax.distributed

The cost: ranks run the same jitted step of a program that is bound twice, watched and not, in alternating
blocks. Alarms: steps of a millisecond, with occasional delays of a rank by up to nine tenths of the bound. On
a busy machine the bound must be long: the wait of a rank for a core adds to the delay, and is not a false
alarm. Exit 1 if the cost is above 1% of a step of 10 ms, or after any alarm.
"""

from __future__ import annotations

import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from bench.harness.arguments import program_parser
from bench.harness.mpirun import command, environment

PLAN = """
plan watched
axis data = ?
input grads : f32[{elements}] partial data
each step {{
    grads = reduce grads over data by mean via ring
    output grads
}}
"""
STEP_S, SHARE, LATE = 0.01, 0.01, 0.9
BLOCKS, BLOCK, RANKS = 40, 50, 2


def mesh_stepper(elements: int, watchdog_s: float | None) -> Callable[[], Any]:
    """A step of a program on the devices of all processes."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    import commplan  # noqa: PLC0415

    mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    run = commplan.loads(PLAN.format(elements=elements)).compile(mesh).bind(mesh, watchdog_s=watchdog_s)

    @run.jit
    @run.spmd(scale="per data", returns="same")
    def step(state: Any, scale: Any) -> Any:
        out, state = run.step(state, grads=scale * jnp.ones(elements))
        return state, out.grads

    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    state, ones = run.init(), jax.jit(lambda: jnp.ones(RANKS), out_shardings=sharding)()
    return lambda: jax.block_until_ready(step(state, ones))


def stepper(elements: int, watchdog_s: float | None) -> Callable[[], Any]:
    """A step of a separate program."""
    if "JAX_NUM_CPU_DEVICES" in os.environ:
        return mesh_stepper(elements, watchdog_s)
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    from mpi4py import MPI  # noqa: PLC0415

    import commplan  # noqa: PLC0415

    plan = commplan.loads(PLAN.format(elements=elements))
    run = plan.compile(MPI.COMM_WORLD).bind(MPI.COMM_WORLD, watchdog_s=watchdog_s)

    def train(state: Any, grads: Any) -> Any:
        return run.step(state, grads=grads)

    step = jax.jit(train)
    state, grads = run.init(), jnp.ones(elements)
    return lambda: jax.block_until_ready(step(state, grads))


def cost(rank: int, elements: int) -> None:
    """Prints the medians of both, and of their difference block by block, in time of cores, too: it says
    more on a busy machine."""
    steps = {True: stepper(elements, 10.0), False: stepper(elements, None)}
    seconds: dict[bool, list[float]] = {True: [], False: []}
    cores: dict[bool, list[float]] = {True: [], False: []}
    for block in range(BLOCKS):
        for watched in (True, False) if block % 2 else (False, True):
            begin, used = time.perf_counter(), time.process_time()
            for _ in range(BLOCK):
                steps[watched]()
            seconds[watched].append((time.perf_counter() - begin) / BLOCK)
            cores[watched].append((time.process_time() - used) / BLOCK)
    if rank:
        return
    low, middle, high = _more(seconds)
    watched, bare = (statistics.median(seconds[each]) * 1e6 for each in (True, False))
    print(f"watched {watched:.1f} us, not {bare:.1f} us a step of f32[{elements}]", end="; ")
    print(f"more: median {middle:.1f} us, quartiles {low:.1f} to {high:.1f}")
    print("time of cores: more by {1:.1f} us, quartiles {0:.1f} to {2:.1f}".format(*_more(cores)))
    share = middle / 1e6 / STEP_S
    print(f"{share:.3%} of a step of {STEP_S * 1e3:g} ms")
    sys.exit(int(share > SHARE))


def _more(seconds: dict[bool, list[float]]) -> list[float]:
    """The quartiles of the additional time of watched blocks over their neighbors, in microseconds."""
    more = [with_it - without for with_it, without in zip(seconds[True], seconds[False], strict=True)]
    return [quarter * 1e6 for quarter in statistics.quantiles(more, n=4)]


def alarms(rank: int, steps: int, bound_s: float, times: int) -> None:
    """Every rank is late in `times` steps of its choice; an alarm is an exception, which ends the job."""
    step, draw = stepper(1000, bound_s), random.Random(rank)
    every = max(steps // times, 1)
    for number in range(steps):
        time.sleep(0.001 if draw.random() > 1 / every else draw.uniform(0, LATE * bound_s))
        step()
        if rank == 0 and number % (steps // 10 or 1) == 0:
            print(f"{number} steps", flush=True)


def processes(words: Sequence[Any]) -> list[int]:
    """The exit codes of processes under `jax.distributed`, of one CPU device each."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        place = f"localhost:{probe.getsockname()[1]}"
    own = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    job = [sys.executable, "-m", "bench.watchdog", "--rank", *map(str, words)]
    started = [subprocess.Popen([*job, place, str(index)], env=own) for index in range(RANKS)]
    return [process.wait() for process in started]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = program_parser("watchdog", __doc__)
    parser.add_argument("--alarms", action="store_true")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--bound", type=float, default=1.0, help="seconds")
    parser.add_argument("--late", type=int, default=200, help="steps to which a rank comes late")
    parser.add_argument("--elements", type=int, default=1000)
    parser.add_argument("--jax", action="store_true", help="processes under jax.distributed")
    options = parser.parse_args(arguments)
    words = (
        ("alarms", options.steps, options.bound, options.late)
        if options.alarms
        else ("cost", options.elements)
    )
    if options.jax:
        code = max(map(abs, processes(words)))
    else:
        job = command(RANKS, "bench.watchdog", "--rank", *words)
        code = subprocess.run(job, env=environment(), check=False).returncode
    if options.alarms:
        print("an alarm" if code else f"no alarm in {options.steps} steps")
    return int(code != 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        if "JAX_NUM_CPU_DEVICES" in os.environ:
            import jax

            place, number = sys.argv[-2:]
            rank = int(number)
            jax.distributed.initialize(place, RANKS, rank)
        else:
            from mpi4py import MPI

            rank = MPI.COMM_WORLD.rank
        if sys.argv[2] == "cost":
            cost(rank, int(sys.argv[3]))
        else:
            alarms(rank, int(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5]))
    else:
        sys.exit(main())
