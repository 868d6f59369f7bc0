"""A rank of the bench of elastic averaging: `bench.elastic` starts one on each host of a lab, under mpirun.

The last rank is the master; all others are workers. The methods take turns with the same network from the
same weights, on the same pictures. If a method needs no master, its rank waits.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import commplan
from bench.elastic import network

MPI: Any = importlib.import_module("mpi4py.MPI")
jax: Any = importlib.import_module("jax")
Array = Any
SERVED = ("round_robin", "async", "hogwild")  # by the master

ELASTIC = """
plan easgd
axis worker = {workers}
{server}
input params : tree per worker
state center : tree {on}
at start {{
    center = broadcast params over worker from 0
}}
every 1 steps {{
    pull, center = elastic params with center over worker by {mode}(eta = {eta}, rho = {rho}) {how}
    output pull
}}
phase look {{
    output center
}}
"""
SGD = """
plan sgd
axis worker = {workers}
input params : tree per worker
input grads  : tree partial worker
at start {{
    first = broadcast params over worker from 0
    output first
}}
each step {{
    grads = reduce grads over worker by mean
    output grads
}}
"""


class Way(msgspec.Struct, frozen=True):
    """A method of averaging.

    Attributes:
        mode: the mode in plans; `sgd` for synchronous SGD, `alone` for no communication.
        how: the rest of the stage in the plan.
        passes: the compiler's pipeline, if not the default.
        overlap: whether the exchange may overlap the step; otherwise the step waits for it first.
    """

    name: str
    mode: str
    how: str = ""
    passes: str | None = None
    overlap: bool = False


class Orders(msgspec.Struct, frozen=True):
    """What to measure. seconds: of a step on the pretended device. out: where rank 0 writes."""

    pictures: str
    ways: list[Way]
    steps: int
    seconds: float
    batch: int
    eta: float
    rho: float
    width: int
    seed: int
    topology: str | None
    calibration: str | None
    out: str


class Trained(msgspec.Struct, frozen=True):
    """The results of one method.

    Attributes:
        step_s: [worker][step].
        losses: the mean over workers after each step.
        at_s: the times of the losses.
        accuracy: of the center (of worker 0 without one), on held-out pictures.
        chosen: the compiler's choice.
        late: steps, over all workers, in which the processor was slower than the simulated device.
        cpu_s: CPU seconds of all workers.
    """

    way: Way
    step_s: list[list[float]]
    losses: list[float]
    at_s: list[float]
    accuracy: float
    chosen: str
    late: int
    cpu_s: float


def main() -> None:
    orders = msgspec.json.decode(sys.argv[1], type=Orders)
    world = MPI.COMM_WORLD
    master = world.Get_size() - 1
    workers = world.Split(int(world.Get_rank() == master), world.Get_rank())
    data = np.load(orders.pictures)
    results: list[Trained] = []
    for way in orders.ways:
        world.Barrier()
        served = way.mode in SERVED
        if served or world.Get_rank() != master:
            trained = _train(orders, way, world if served else workers, data, master)
            if world.Get_rank() == 0 and trained is not None:
                results.append(trained)
    if world.Get_rank() == 0:
        Path(orders.out).write_bytes(msgspec.json.encode(results))


def _train(orders: Orders, way: Way, comm: Any, data: Array, workers: int) -> Trained | None:
    params = network.init(orders.seed, orders.width)
    cpu = time.process_time()
    run, chosen = _bound(orders, way, comm, params, workers)
    if way.mode in SERVED and run.serve() is not None:
        return None
    device = network.Device(orders.seconds)
    state: Any = {}
    if run is not None:
        state = run.init()
        out, state = run.start(state, params=params)
        if way.mode == "sgd":
            params = out.first
    step = _step(orders, way, run, device)
    mine: list[int] = list(range(comm.Get_rank(), len(data["labels"]), workers))
    order = np.random.default_rng([orders.seed, comm.Get_rank()])
    picked = [order.choice(mine, orders.batch, replace=False) for _ in range(orders.steps + 1)]
    warm = step(state, params, data["pixels"][picked[-1]], data["labels"][picked[-1]])
    jax.block_until_ready(warm)
    state = warm[0]  # one exchange has happened
    seconds: list[float] = []
    losses: list[float] = []
    at: list[float] = []
    device.late = 0
    if way.mode not in SERVED:
        comm.Barrier()
    began = time.perf_counter()
    for chosen_now in picked[:-1]:
        start = time.perf_counter()
        state, params, loss = step(state, params, data["pixels"][chosen_now], data["labels"][chosen_now])
        losses.append(float(jax.block_until_ready(loss)))
        jax.block_until_ready(params)
        at.append(time.perf_counter() - began)
        seconds.append(time.perf_counter() - start)
    center = params
    if run is not None and way.mode not in ("sgd", "alone"):
        out, state = run.look(state)
        center = out.center
    scores = np.asarray(network.logits(center, data["held_pixels"]))
    accuracy = float((scores.argmax(-1) == data["held_labels"]).mean())
    if run is not None and way.mode in SERVED:
        run.close()
    own = (seconds, losses, at, device.late, time.process_time() - cpu)
    return _gather(comm, workers, way, own, accuracy, chosen)


def _gather(
    comm: Any, workers: int, way: Way, own: tuple[list[float], list[float], list[float], int, float],
    accuracy: float, chosen: str,
) -> Trained | None:  # fmt: skip
    """The results of all workers at the first one, by separate messages of the bench."""
    if comm.Get_rank():
        comm.send(own, 0, tag=7)
        return None
    every = [own, *(comm.recv(source=rank, tag=7) for rank in range(1, workers))]
    losses = np.mean([entry[1] for entry in every], axis=0).tolist()
    at = np.mean([entry[2] for entry in every], axis=0).tolist()
    late, cpu = sum(entry[3] for entry in every), sum(entry[4] for entry in every)
    return Trained(way, [entry[0] for entry in every], losses, at, accuracy, chosen, late, cpu)


def _bound(orders: Orders, way: Way, comm: Any, params: Array, workers: int) -> tuple[Any, str]:
    if way.mode == "alone":
        return None, ""
    served = way.mode in SERVED
    text = SGD if way.mode == "sgd" else ELASTIC
    plan = commplan.loads(
        text.format(
            workers=workers, mode=way.mode, eta=orders.eta, rho=orders.rho, how=way.how,
            server="server master = 1" if served else "", on="on master" if served else "",
        )
    )  # fmt: skip
    shapes = {"params": params} | ({"grads": params} if way.mode == "sgd" else {})
    program = plan.compile(
        comm, shapes=shapes, topology=orders.topology, calibration=orders.calibration, passes=way.passes
    )
    chosen = "; ".join(choice.what for choice in program.schedule.choices)
    return program.bind(comm), chosen


def _step(orders: Orders, way: Way, run: Any, device: network.Device) -> Any:
    def less(x: Array, by: Array) -> Array:
        return x - by

    def step(state: Any, params: Any, pixels: Array, labels: Array) -> Any:
        pull, before = None, labels[0].astype("float32")
        if way.mode not in ("alone", "sgd"):
            out, state = run.every[1](state, params=params)
            pull = out.pull
            if not way.overlap:  # the step begins when the exchange has ended
                before = sum(x.reshape(-1)[0] for x in jax.tree_util.tree_leaves((pull, state)))
        pixels = device.begin(pixels, before)
        value, grads = jax.value_and_grad(network.loss)(params, pixels, labels)
        grads, value = device.held(grads, value)
        if way.mode == "sgd":
            out, state = run.step(state, grads=grads)
            grads = out.grads
        moved = jax.tree_util.tree_map(functools.partial(operator.mul, orders.eta), grads)
        params = jax.tree_util.tree_map(less, params, moved)
        if pull is not None:
            params = jax.tree_util.tree_map(less, params, pull)
        return state, params, value

    if run is None:
        return jax.jit(step)
    placed = run.spmd(
        params="params", pixels="per worker", labels="per worker", returns=("params", "per worker")
    )
    return jax.jit(placed(step))


if __name__ == "__main__":
    main()
