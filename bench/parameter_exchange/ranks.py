"""A rank of the bench of parameter exchange: `bench.parameter_exchange` starts one on each host of a lab.

The first ranks are workers, the others servers for those ways that need some. A step takes each worker's
gradients and gives every worker the new weights: SGD with momentum on the mean. All ways get the same
gradients, and the weights after the last step are compared with what NumPy makes of them.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

import commplan

MPI: Any = importlib.import_module("mpi4py.MPI")
jax: Any = importlib.import_module("jax")
Array = Any
Tree = dict[str, Array]
ETA, MU = np.float32(0.1), np.float32(0.9)

EXCHANGE = """
plan hub
{axes}
{server}
input params  : tree per {names}
input grads   : tree partial {names}
state weights : tree {on}
state moment  : tree {on}
fn zeros(tree) -> tree on device elementwise
fn sgd(tree, tree, tree) -> tree, tree on device elementwise
at start {{
    weights = broadcast params over {names} from 0
    moment  = map zeros(weights)
}}
each step {{
    weights, moment = exchange grads into weights, moment with sgd over {names} by mean {how}
    output weights
}}
"""
REDUCE = """
plan reduction
{axes}
input grads : tree partial {names}
each step {{
    grads = reduce grads over {names} by mean
    output grads
}}
"""


class Way(msgspec.Struct, frozen=True):
    """A method of exchanging.

    Attributes:
        kind: `exchange` or `reduce` (with a local update) by commplan, `central` (a plain parameter server)
            or `ddp` (torch).
        servers: ranks that serve.
        how: the rest of the stage in the plan.
    """

    name: str
    kind: str
    servers: int = 0
    how: str = ""


class Orders(msgspec.Struct, frozen=True):
    """What to measure. order: the world rank that each rank of the bench has. sizes: elements of each tensor.
    steps: of each way, after one that is thrown away. address: of the host of rank 0."""

    ways: list[Way]
    order: list[int]
    workers: int
    racks: int
    sizes: list[int]
    steps: int
    address: str
    topology: str | None
    calibration: str | None
    out: str


class Measured(msgspec.Struct, frozen=True):
    """The results of one method.

    Attributes:
        seconds: of each step, until the last worker had its weights.
        began, ended: clock times around all of them.
        wrong: the largest difference from NumPy's weights, relative to the largest weight.
        missing: the reason for a missing measurement.
        chosen: the compiler's choice.
    """

    way: Way
    seconds: list[float]
    began: float
    ended: float
    wrong: float
    missing: str = ""
    chosen: str = ""


def tensors(sizes: Sequence[int], number: int) -> Tree:
    """Whole multiples of 1/64: sums of them are exact in any order."""
    tensors_by_name: Tree = {}
    for i, size in enumerate(sizes):
        counted = np.arange(size, dtype=np.int32) * np.int32(2 * number + 7 * i + 1)
        tensors_by_name[f"t{i:03d}"] = (counted % 129 - 64).astype(np.float32) / np.float32(64)
    return tensors_by_name


def zeros(weights: Tree) -> Tree:
    return jax.tree_util.tree_map(jax.numpy.zeros_like, weights)


def sgd(weights: Tree, moment: Tree, mean: Tree) -> tuple[Tree, Tree]:
    """v <- mu v + g; w <- w - eta v."""
    moment = jax.tree_util.tree_map(_remembered, moment, mean)
    return jax.tree_util.tree_map(_moved, weights, moment), moment


def _remembered(v: Array, g: Array) -> Array:
    return MU * v + g


def _moved(w: Array, v: Array) -> Array:
    return w - ETA * v


def main() -> None:
    orders = msgspec.json.decode(sys.argv[1], type=Orders)
    world = MPI.COMM_WORLD
    comm = world.Split(0, orders.order.index(world.Get_rank()))
    results: list[Measured] = []
    for way in orders.ways:
        comm.Barrier()
        size = orders.workers + way.servers
        taking_part = comm.Split(0 if comm.Get_rank() < size else 1, comm.Get_rank())
        if comm.Get_rank() < size:
            measured = _measure(orders, way, taking_part)
            if comm.Get_rank() == 0:
                results.append(measured)
                Path(orders.out).write_bytes(msgspec.json.encode(results))
                print(f"{way.name}: {measured.seconds or measured.missing}", flush=True)


def _measure(orders: Orders, way: Way, comm: Any) -> Measured:
    rank = comm.Get_rank()
    workers = comm.Split(int(rank >= orders.workers), rank)
    runner = {"exchange": _exchange, "reduce": _reduce, "central": _central, "ddp": _ddp}[way.kind]
    step, chosen, close = runner(orders, way, comm)
    if step is None:
        return Measured(way, [], 0, 0, 0, missing=chosen)
    seconds: list[float] = []
    began, weights = time.time(), Tree()
    for number in range(orders.steps + 1):
        grads = tensors(orders.sizes, 1 + rank + number * orders.workers)
        workers.Barrier()
        if number == 1:
            began = time.time()
        start = time.perf_counter()
        weights = step(grads)
        jax.block_until_ready(weights)
        seconds.append(workers.allreduce(time.perf_counter() - start, op=MPI.MAX))
    ended = time.time()
    digest = hashlib.sha256(
        b"".join(np.asarray(weights[name]).tobytes() for name in sorted(weights))
    ).digest()
    alike = len(set(workers.allgather(digest))) == 1
    wrong = _difference(orders, weights) if rank == 0 else 0.0
    if not alike:
        wrong = float("inf")
    close()
    return Measured(way, seconds[1:], began, ended, wrong, chosen=chosen)


def _difference(orders: Orders, weights: Tree) -> float:
    """The largest difference from NumPy's result."""
    expected = tensors(orders.sizes, 0)
    moment = {name: np.zeros_like(x) for name, x in expected.items()}
    for number in range(orders.steps + 1):
        grads = [tensors(orders.sizes, 1 + rank + number * orders.workers) for rank in range(orders.workers)]
        for name in expected:
            mean = sum((gradient[name] for gradient in grads[1:]), grads[0][name]) / np.float32(
                orders.workers
            )
            moment[name] = MU * moment[name] + mean
            expected[name] = expected[name] - ETA * moment[name]
    most = max(float(np.abs(x).max()) for x in expected.values())
    return max(float(np.abs(np.asarray(weights[name]) - x).max()) for name, x in expected.items()) / most


Made = tuple[Callable[[Tree], Tree] | None, str, Callable[[], None]]


def _nothing() -> None:
    """Nothing to close."""


def _text(template: str, orders: Orders, way: Way) -> str:
    each = orders.workers // orders.racks
    axes, names = f"axis worker = {each}", "worker"
    if orders.racks > 1:
        axes, names = f"axis rack = {orders.racks}\n{axes}", "rack, worker"
    server, on = (f"server hub = {way.servers}", "on hub") if way.servers else ("", "")
    return template.format(axes=axes, names=names, server=server, on=on, how=way.how)


def _compiled(orders: Orders, way: Way, comm: Any, template: str, shapes: dict[str, Tree]) -> tuple[Any, str]:
    program = commplan.loads(_text(template, orders, way)).compile(
        comm, shapes=shapes, topology=orders.topology, calibration=orders.calibration
    )
    return program, "; ".join(choice.what for choice in program.schedule.choices)


def _exchange(orders: Orders, way: Way, comm: Any) -> Made:
    params = tensors(orders.sizes, 0)
    program, chosen = _compiled(orders, way, comm, EXCHANGE, {"params": params, "grads": params})
    run = program.bind(comm, functions={"zeros": zeros, "sgd": sgd})
    if way.servers and run.serve() is not None:
        return None, "a server", _nothing
    _, state = run.start(run.init(), params=params)
    held = {"state": state}

    @jax.jit
    @run.spmd(grads="grads", returns=("weights",))
    def one(state: Any, grads: Tree) -> Any:
        out, state = run.step(state, grads=grads)
        return state, out.weights

    def step(grads: Tree) -> Tree:
        held["state"], weights = one(held["state"], grads)
        return weights

    return step, chosen, run.close if way.servers else _nothing


def _reduce(orders: Orders, way: Way, comm: Any) -> Made:
    params = tensors(orders.sizes, 0)
    program, chosen = _compiled(orders, way, comm, REDUCE, {"grads": params})
    run = program.bind(comm)
    held = {"all": (run.init(), params, jax.tree_util.tree_map(np.zeros_like, params))}

    @jax.jit
    @run.spmd(weights="grads", moment="grads", grads="grads", returns=("grads", "grads"))
    def one(state: Any, weights: Tree, moment: Tree, grads: Tree) -> Any:
        out, state = run.step(state, grads=grads)
        return state, *sgd(weights, moment, out.grads)

    def step(grads: Tree) -> Tree:
        held["all"] = one(*held["all"], grads)
        return held["all"][1]

    return step, chosen, _nothing


def _central(orders: Orders, way: Way, comm: Any) -> Made:
    """A plain central server: one message for each tensor, and the update after all have arrived."""
    del way
    params = tensors(orders.sizes, 0)
    server = orders.workers
    if comm.Get_rank() == server:
        moment = {name: np.zeros_like(x) for name, x in params.items()}
        update = jax.jit(sgd)
        for _ in range(orders.steps + 1):
            total = {name: np.zeros_like(x) for name, x in params.items()}
            for worker in range(orders.workers):
                for name, x in params.items():
                    got = np.empty_like(x)
                    comm.Recv(got, source=worker)
                    total[name] += got
            mean = {name: x / np.float32(orders.workers) for name, x in total.items()}
            params, moment = jax.tree_util.tree_map(np.asarray, update(params, moment, mean))
            for worker in range(orders.workers):
                for x in params.values():
                    comm.Send(x, dest=worker)
        return None, "the server", _nothing

    def step(grads: Tree) -> Tree:
        for x in grads.values():
            comm.Send(x, dest=server)
        new = {name: np.empty_like(x) for name, x in grads.items()}
        for x in new.values():
            comm.Recv(x, source=server)
        return new

    return step, "", _nothing


def _ddp(orders: Orders, way: Way, comm: Any) -> Made:
    """DistributedDataParallel over Gloo: buckets of 25 MiB, and torch's own SGD."""
    del way
    try:
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None, "torch is not installed", _nothing
    os.environ |= {"GLOO_SOCKET_IFNAME": "eth0"}
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", init_method=f"tcp://{orders.address}:29531", rank=comm.Get_rank(), world_size=orders.workers
    )
    model = torch.nn.Module()
    for name, x in tensors(orders.sizes, 0).items():
        model.register_parameter(name, torch.nn.Parameter(torch.from_numpy(x)))

    def forward(grads: list[Any]) -> Any:
        return sum((p * g).sum() for p, g in zip(model.parameters(), grads, strict=True))

    model.forward = forward
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(ETA), momentum=float(MU))

    def step(grads: Tree) -> Tree:
        optimizer.zero_grad()
        parallel([torch.from_numpy(x) for x in grads.values()]).backward()
        optimizer.step()
        return {name: p.detach().numpy() for name, p in model.named_parameters()}

    return step, "", functools.partial(torch.distributed.destroy_process_group)


if __name__ == "__main__":
    main()
