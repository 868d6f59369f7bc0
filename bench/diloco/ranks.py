"""A rank of the bench of DiLoCo: `bench.diloco` starts one on each host of a lab, under mpirun.

Every rank is an island. The ways take turns with the same weights. A step moves the weights a little, and
ends no sooner than a fixed time after it began.
"""

from __future__ import annotations

import importlib
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import commplan

MPI: Any = importlib.import_module("mpi4py.MPI")
jax: Any = importlib.import_module("jax")
Array = Any
PLAN = """
plan streaming_diloco
axis island = {islands}
input params   : tree per island
state center   : tree split island
state momentum : tree split island
fn outer = nesterov(rate = 0.7, momentum = 0.9)
fn mix   = blend(alpha = 0.5)
at start {{
    shared   = broadcast params over island from 0
    center   = slice shared over island
    momentum = map zeros(center)
}}
{head} {{
    mean             = scatter params over island by mean
    delta            = map subtract(center, mean)
    center, momentum = map outer(center, momentum, delta)
    shared           = gather center over island
    params           = map mix(params, shared)
    output params
}}
"""


class Orders(msgspec.Struct, frozen=True):
    """The measurement.

    Attributes:
        ways: of `alone`, `hidden`, `fragments` and `whole`.
        size: elements of the weights.
        seconds: of a step on the simulated device.
        steps: from one exchange to the next, in fragments.
        fragments: of the weights.
        rounds: windows of each way, in turns.
        out: the file that rank 0 writes.
    """

    ways: list[str]
    size: int
    seconds: float
    steps: int
    fragments: int
    rounds: int
    out: str


class Device:
    """The simulated device: a step ends no sooner than `seconds` after it began."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.late = 0

    def step(self, params: Any) -> Any:
        """The weights after a step, inside jit."""
        first = jax.tree_util.tree_leaves(params)[0].reshape(-1)[0]
        zero = jax.pure_callback(self._wait, jax.ShapeDtypeStruct((), "float32"), first)
        return jax.tree_util.tree_map(lambda x: x * np.float32(0.999) + zero, params)

    def _wait(self, first: Array) -> Array:
        del first
        time.sleep(self.seconds)
        return np.float32(0)


def window_of(way: str, orders: Orders, device: Device, comm: Any, params: Any) -> tuple[Any, Any]:
    """A jitted window of `orders.steps` steps, and the state that it begins with."""
    if way == "alone":

        def alone(state: Any, params: Any) -> Any:
            for _ in range(orders.steps):
                params = device.step(params)
            return state, params

        return jax.jit(alone), {}
    period = orders.steps * orders.fragments
    heads = {
        "hidden": f"every {period} steps in {orders.fragments} fragments hidden under {orders.steps} steps",
        "fragments": f"every {period} steps in {orders.fragments} fragments",
    }
    text = PLAN.format(islands=comm.Get_size(), head=heads[way])
    run = commplan.loads(text).compile(comm, shapes={"params": params}).bind(comm)
    _, state = run.start(run.init(), params=params)
    phase = run.every[period]

    def window(state: Any, params: Any) -> Any:
        call = phase.begin(state, params=params) if way == "hidden" else None
        for _ in range(orders.steps):
            params = device.step(params if call is None else call.advance(params))
        out, state = call.finish(state, params=params) if call is not None else phase(state, params=params)
        return state, out.params

    return jax.jit(run.spmd(params="params")(window)), state


def main() -> None:
    orders = msgspec.json.decode(sys.argv[1], type=Orders)
    comm = MPI.COMM_WORLD
    device = Device(orders.seconds)
    start = {"w": np.ones(orders.size, np.float32)}
    windows = {way: window_of(way, orders, device, comm, start) for way in orders.ways}
    current = {way: (state, start) for way, (_, state) in windows.items()}
    seconds: dict[str, list[float]] = {way: [] for way in orders.ways}
    for _ in range(orders.rounds + 1):
        for way, (window, _) in windows.items():
            comm.Barrier()
            began = time.perf_counter()
            current[way] = jax.block_until_ready(window(*current[way]))
            seconds[way].append(time.perf_counter() - began)
    every = comm.gather({way: times[1:] for way, times in seconds.items()})
    if comm.Get_rank() == 0:
        slowest = {
            way: [max(times) for times in zip(*(each[way] for each in every), strict=True)]
            for way in orders.ways
        }
        Path(orders.out).write_bytes(msgspec.json.encode(slowest))


if __name__ == "__main__":
    main()
