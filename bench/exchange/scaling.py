"""A rank of the bench of weak scaling: `bench.weak_scaling` starts one on each host of a lab, under mpirun.

A step holds `seconds` of work on a pretended device (`network.Device`) and one exchange of the weights' size,
however many ranks there are: weak scaling. `alone` has no exchange. `elastic` averages with a common centre
in every step; the exchange is a program of its own, begun with the step's and running beside it, as on a
device that computes while its host communicates. `gradients` are summed after the step has made them.
"""

from __future__ import annotations

import concurrent.futures
import functools
import importlib
import operator
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import commplan
from bench.exchange import network

MPI: Any = importlib.import_module("mpi4py.MPI")
jax: Any = importlib.import_module("jax")
jnp: Any = importlib.import_module("jax.numpy")
Array = Any

WAYS = ("alone", "elastic", "gradients")
LEAVES = 16  # of the weights, each twice as large as the one before, up to a limit
PLANS = {
    "elastic": """
plan averaging
axis worker = {ranks}
input params : tree per worker
state center : tree
at start {{
    center = broadcast params over worker from 0
}}
every 1 steps {{
    pull, center = elastic params with center over worker
                   by sync(eta = 0.1, rho = {rho}) {{ overlap = backward }}
    output pull
}}
""",
    "gradients": """
plan parallel
axis worker = {ranks}
input grads : tree partial worker
each step {{
    grads = reduce grads over worker by mean
    output grads
}}
""",
}  # fmt: skip
PHASE = {"elastic": "every_1", "gradients": "step"}


class Orders(msgspec.Struct, frozen=True):
    """nbytes: of the weights. seconds: of a step without any exchange. out: where rank 0 writes."""

    nbytes: int
    seconds: float
    steps: int
    topology: str
    calibration: str | None
    out: str


class Measured(msgspec.Struct, frozen=True):
    """Seconds of each step, until the last rank was done; late: steps whose work on the processor took longer
    than the pretended device."""

    way: str
    ranks: int
    seconds: list[float]
    chosen: str
    late: int

    @property
    def time(self) -> float:
        return statistics.median(self.seconds)


def counts(nbytes: int) -> list[int]:
    """Elements of the leaves: from small to large, as networks have them."""
    shares = [2 ** min(i, 6) for i in range(LEAVES)]
    return [max(1, nbytes // 4 * share // sum(shares)) for share in shares]


def plan_text(way: str, ranks: int) -> str:
    """eta rho p stays well below 1 for any number of ranks."""
    return PLANS[way].format(ranks=ranks, rho=f"{1 / ranks:.12f}")


def main() -> None:
    orders = msgspec.json.decode(sys.argv[1], type=Orders)
    comm = MPI.COMM_WORLD
    measured = [_measure(orders, way, comm) for way in WAYS]
    if comm.Get_rank() == 0:
        Path(orders.out).write_bytes(msgspec.json.encode(measured))


def _measure(orders: Orders, way: str, comm: Any) -> Measured:
    params = {f"w{i:02}": jnp.ones(count, "float32") for i, count in enumerate(counts(orders.nbytes))}
    device = network.Device(orders.seconds)
    step, state, chosen = _step(orders, way, comm, params, device)
    seconds: list[float] = []
    for number in range(orders.steps + 2):  # the first two warm up
        comm.Barrier()
        start = time.perf_counter()
        params, state = jax.block_until_ready(step(params, state, np.float32(0)))
        taken = comm.allreduce(time.perf_counter() - start, op=MPI.MAX)
        if number > 1:
            seconds.append(taken)
        else:
            device.late = 0
    for value in jax.tree_util.tree_leaves(params):  # all ranks hold ones, whose mean is one
        np.testing.assert_allclose(np.asarray(value), 1.0, rtol=1e-5)
    late = comm.allreduce(device.late)
    return Measured(way, comm.Get_size(), seconds, chosen, late)


def _step(orders: Orders, way: str, comm: Any, params: Array, device: network.Device) -> Any:
    run: Any = None
    chosen, state = "", dict[str, Any]()
    if way != "alone":
        key = "params" if way == "elastic" else "grads"
        program = commplan.loads(plan_text(way, comm.Get_size())).compile(
            comm, shapes={key: params}, topology=orders.topology, calibration=orders.calibration
        )
        chosen = "; ".join(dict.fromkeys(c.what for c in program.schedule.choices if c.by == "select"))
        run = program.bind(comm)
        state = run.init()
        if way == "elastic":
            _, state = run.start(state, params=params)

    def made(params: Any, zero: Array) -> Any:
        """The gradients, all zero, when the device has them."""
        pixels = device.begin(jnp.zeros((), jnp.uint8), zero)
        grads = {**jax.tree_util.tree_map(functools.partial(operator.mul, 0), params), "bias1": jnp.zeros(1)}
        grads, _ = device.held(grads, pixels.astype(jnp.float32))
        del grads["bias1"]
        return grads

    def summed(params: Any, zero: Array) -> Any:
        grads = made(params, zero)
        if run is not None:
            grads = run.step(state, grads=grads)[0].grads
        return less(params, grads)

    def exchanged(params: Any, state: Any) -> Any:
        out, state = run.every[1](state, params=params)
        return out.pull, state

    if way != "elastic":
        whole = jax.jit(summed)

        def alone(params: Any, state: Any, zero: Array) -> Any:
            return whole(params, zero), state

        return alone, state, chosen
    exchange, compute, update = jax.jit(exchanged), jax.jit(made), jax.jit(less)
    executor = concurrent.futures.ThreadPoolExecutor(1)

    def averaged(params: Any, state: Any, zero: Array) -> Any:
        """Programs of their own, that run beside each other: each in a thread, as a device would have it."""
        going = executor.submit(lambda: jax.block_until_ready(exchange(params, state)))
        grads = jax.block_until_ready(compute(params, zero))
        pull, state = going.result()
        return update(update(params, grads), pull), state

    return averaged, state, chosen


def less(params: Any, by: Any) -> Any:
    return jax.tree_util.tree_map(operator.sub, params, by)


if __name__ == "__main__":
    main()
