"""A server's sums, updates and pulls against the equations, in NumPy, whatever order messages come in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from support.server_jobs import Job, compiled

from commplan.diagnostics import CommplanError
from commplan.ir.types import DType
from commplan.runtime.param_server.reductions import Sum

Array = Any

EXCHANGE = """plan p
axis worker = 3
server hub = 2
input params : tree per worker
input grads : tree partial worker
state weights : tree on hub
fn sgd(tree, tree) -> tree on device elementwise
at start {
    weights = broadcast params over worker from 0
}
each step {
    weights = exchange grads into weights with sgd over worker by OP { chunk = 1 KiB HINTS }
    output weights
}
"""
TWO = """plan p
axis worker = 3
server hub = 2
input params : tree per worker
input opt : tree per worker
input grads : tree partial worker
state weights : tree on hub
state moment : tree on hub
fn step(tree, tree, tree) -> tree, tree on device elementwise
at start {
    weights = broadcast params over worker from 0
    moment = broadcast opt over worker from 0
}
each step {
    weights, moment = exchange grads into weights, moment with step over worker by mean { chunk = 1 KiB }
    output weights
}
phase look {
    output weights, moment
}
"""
ELASTIC = """plan p
axis worker = 3
server master = 2
input params : tree per worker
state center : tree on master
at start {
    center = broadcast params over worker from 0
}
each step {
    pull, center = elastic params with center over worker by MODE(eta = 0.05, rho = 0.3) { chunk = 1 KiB }
    output pull
}
"""
STEPS = 4


def tree(seed: int, scale: float = 1.0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    shapes = {"a": (41, 23), "b": (99,), "c": ()}
    return {name: np.float32(scale * rng.standard_normal(shape)) for name, shape in shapes.items()}


def flat(arrays: dict[str, Array]) -> Array:
    return np.concatenate([np.asarray(arrays[name]).reshape(-1) for name in sorted(arrays)])


def gradient(worker: int, step: int) -> dict[str, Array]:
    return tree(100 * worker + step + 1)


def sgd(w: Any, g: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.5 * g, w, g)


def exchanging(job: Job, worker: int, received: list[Array], steps: int = STEPS, **more: Any) -> Any:
    for site in job.sites.all:
        if site.phase == "start":
            yield site, {"params": tree(0), "weights": tree(0), **more}
    for step in range(steps):
        site = job.site("exchange", "step")
        answer = yield site, {"grads": gradient(worker, step), "n": np.int32(worker + step), **more}
        received.append(answer[0])


@pytest.mark.parametrize("op", ["sum", "mean"])
def test_exchange_is_the_function_of_the_sum_in_rank_order(tmp_path: Path, op: str):
    shapes = {"params": tree(0), "grads": tree(0)}
    program = compiled(tmp_path, EXCHANGE.replace("OP", op).replace("HINTS", ""), shapes)
    finals: list[bytes] = []
    for seed in range(3):
        job = Job(program, {"sgd": sgd})
        received: dict[int, list[Array]] = {worker: [] for worker in range(3)}
        job.run({worker: exchanging(job, worker, received[worker]) for worker in received}, seed)
        w = flat(tree(0))
        for step in range(STEPS):
            g = flat(gradient(0, step)) + flat(gradient(1, step)) + flat(gradient(2, step))
            w = w - np.float32(0.5) * (g / np.float32(3) if op == "mean" else g)
            for worker in received:
                np.testing.assert_allclose(received[worker][step], w, rtol=1e-6, atol=1e-6)
        assert all(driver.all_departed for driver in job.drivers)
        finals.append(job.held("weights")[0][0].tobytes())
    assert len(set(finals)) == 1


def test_weighted_mean_is_that_of_the_records(tmp_path: Path):
    text = EXCHANGE.replace("OP", "mean(weight = n)").replace("HINTS", "")
    text = text.replace("input grads", "input n : i32 per worker\ninput grads")
    program = compiled(tmp_path, text, {"params": tree(0), "grads": tree(0)})
    job = Job(program, {"sgd": sgd})
    received: dict[int, list[Array]] = {worker: [] for worker in range(3)}
    job.run({worker: exchanging(job, worker, received[worker]) for worker in received}, 1)
    w = flat(tree(0))
    for step in range(STEPS):
        weights = [np.float32(worker + step) for worker in range(3)]
        total = sum(n * flat(gradient(worker, step)) for worker, n in enumerate(weights))
        w = w - np.float32(0.5) * total / sum(weights)
        np.testing.assert_allclose(received[0][step], w, rtol=1e-5, atol=1e-6)
    assert not job.drivers[0].scalars and not job.drivers[1].pending_units


def test_a_state_is_set_before_it_is_asked_for(tmp_path: Path):
    program = compiled(tmp_path, ELASTIC.replace("MODE", "async"), {"params": tree(0)})
    job = Job(program, {})
    workers = {worker: averaging(job, worker, []) for worker in (1, 2)}
    with pytest.raises(
        AssertionError, match="wait for ever"
    ):  # for the put of worker 0, which may still come
        job.run(workers)
    with pytest.raises(CommplanError, match=r"CP0978.*worker 0 asks for `center`, which is not set"):
        job.run({0: averaging(job, 0, [])})


@pytest.mark.parametrize("weight", [np.int32(1 << 30), np.uint8(200), np.float16(60000)])
def test_weights_that_are_large_together_do_not_wrap(weight: Any):
    total = Sum(DType.F32, DType.F32)
    for _ in range(3):
        total.add(np.ones(2, np.float32), np.asarray(weight))
    np.testing.assert_array_equal(total.take(3, mean=True), np.ones(2, np.float32))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("hints", ["", ", accumulate = f16"])
def test_a_weighted_mean_of_16_bits_is_made_in_float32(tmp_path: Path, dtype: Any, hints: str):
    """A gradient of 60,000 times a weight of 100,000 is none of f16's."""
    text = EXCHANGE.replace("OP", "mean(weight = n)").replace("HINTS", hints)
    text = text.replace("input grads", "input n : i32 per worker\ninput grads")
    params, grads = (
        {name: np.full(leaf.shape, value, dtype) for name, leaf in tree(0).items()} for value in (0, 60000)
    )
    job = Job(compiled(tmp_path, text, {"params": params, "grads": grads}), {"sgd": lambda w, g: w + g})

    def worker() -> Any:
        yield (
            next(site for site in job.sites.all if site.phase == "start"),
            {"params": params, "weights": params},
        )
        yield job.site("exchange", "step"), {"grads": grads, "n": np.int32(100_000)}

    job.run({rank: worker() for rank in range(3)}, 2)
    for array in job.held("weights")[0]:
        np.testing.assert_allclose(array.astype(np.float32), 60000, rtol=2**-8)


def test_terms_sent_in_bfloat16_are_added_in_float32(tmp_path: Path):
    text = EXCHANGE.replace("OP", "sum").replace("HINTS", ", wire = bf16, accumulate = f32")
    program = compiled(tmp_path, text, {"params": tree(0), "grads": tree(0)})
    job = Job(program, {"sgd": lambda w, g: w + g})
    received: dict[int, list[Array]] = {worker: [] for worker in range(3)}
    job.run({worker: exchanging(job, worker, received[worker], 1) for worker in received}, 2)
    narrow = [flat(gradient(worker, 0)).astype(ml_dtypes.bfloat16) for worker in range(3)]
    total = (narrow[0].astype(np.float32) + narrow[1].astype(np.float32)) + narrow[2].astype(np.float32)
    w = flat(tree(0)) + total
    np.testing.assert_array_equal(job.held("weights")[0][0], w)
    assert received[1][0].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(received[1][0], w.astype(ml_dtypes.bfloat16))


OPTIMISERS = {
    "plain": optax.sgd(0.1),  # remembers nothing
    "counting": optax.sgd(optax.linear_schedule(0.1, 0.0, 6)),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.05),
    "schedule": optax.chain(optax.clip(0.7), optax.adamw(optax.linear_schedule(0.1, 0.0, 6))),
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_optimizers_on_chunks_do_what_they_do_on_trees(tmp_path: Path, name: str):
    optimizer = OPTIMISERS[name]

    def step(w: Any, m: Any, g: Any) -> Any:
        updates, m = optimizer.update(g, m, w)
        return optax.apply_updates(w, updates), m

    start = optimizer.init(tree(0))
    program = compiled(tmp_path, TWO, {"params": tree(0), "opt": start, "grads": tree(0)})
    job = Job(program, {"step": step})
    received: dict[int, list[Array]] = {worker: [] for worker in range(3)}
    got: list[list[Array]] = []

    def worker_program(worker: int) -> Any:
        yield from exchanging(job, worker, received[worker], opt=start, moment=start)
        if worker == 2:
            got.append((yield job.site("get", "look", "moment"), {}))

    job.run({worker: worker_program(worker) for worker in received}, 3)
    w: Any = tree(0)
    m: Any = start
    for number in range(STEPS):
        grads = [gradient(worker, number) for worker in range(3)]
        mean = jax.tree.map(lambda a, b, c: (a + b + c) / np.float32(3), *grads)
        w, m = step(w, m, mean)
        np.testing.assert_allclose(received[0][number], flat(w), rtol=1e-5, atol=1e-6)
    nodes: list[Any] = jax.tree.leaves(m, is_leaf=lambda node: isinstance(node, dict))
    copies = [node for node in nodes if isinstance(node, dict)]
    counts = [np.asarray(leaf) for leaf in jax.tree.leaves(m) if np.asarray(leaf).dtype == np.int32]
    answer = got[0]
    scalars, slots = answer[: len(counts)], answer[len(counts) :]
    for mine, whole in zip(slots, copies, strict=True):
        np.testing.assert_allclose(mine, flat(whole), rtol=1e-5, atol=1e-6)
    for mine, count in zip(scalars, counts, strict=True):
        assert set(mine.tolist()) == {int(count)} == {STEPS}


def weights(worker: int, step: int) -> dict[str, Array]:
    return tree(1000 + 10 * worker + step)


def starting(job: Job) -> Any:
    yield job.site("put", "start"), {"center": tree(0)}


def averaging(job: Job, worker: int, received: list[Array]) -> Any:
    for step in range(STEPS):
        answer = yield job.site("elastic", "step"), {"params": weights(worker, step)}
        received.append(answer[0])


def expected(order: list[tuple[int, int]]) -> tuple[Array, dict[tuple[int, int], Array]]:
    """The center and all pulls, by (worker, step), where requests are served in `order`."""
    center, pulls = flat(tree(0)), {}
    factor = np.float32(0.05) * np.float32(0.3)
    for worker, step in order:
        pull = (flat(weights(worker, step)) - center) * factor
        center, pulls[worker, step] = center + pull, pull
    return center, pulls


def test_round_robin_serves_in_rank_order(tmp_path: Path):
    program = compiled(tmp_path, ELASTIC.replace("MODE", "round_robin"), {"params": tree(0)})
    center, pulls = expected([(worker, step) for step in range(STEPS) for worker in range(3)])
    for seed in range(3):
        job = Job(program, {})
        received: dict[int, list[Array]] = {worker: [] for worker in range(3)}
        job.run({worker: starting(job) for worker in received}, seed, leave=False)
        job.order.clear()
        job.run({worker: averaging(job, worker, received[worker]) for worker in received}, seed)
        np.testing.assert_array_equal(job.held("center")[0][0], center)
        for (worker, step), pull in pulls.items():
            np.testing.assert_array_equal(received[worker][step], pull)


@pytest.mark.parametrize("mode", ["async", "hogwild"])
def test_without_turns_each_unit_follows_the_order_in_which_it_was_asked(tmp_path: Path, mode: str):
    program = compiled(tmp_path, ELASTIC.replace("MODE", mode), {"params": tree(0)})
    for seed in range(3):
        job = Job(program, {})
        received: dict[int, list[Array]] = {worker: [] for worker in range(3)}
        job.run({worker: starting(job) for worker in received}, seed, leave=False)
        job.order.clear()
        job.run({worker: averaging(job, worker, received[worker]) for worker in received}, seed)
        site = job.site("elastic", "step")
        tag_of = {chunk.unit: chunk.tag for buffer in site.up for chunk in buffer.chunks}
        first: dict[int, int] = {}
        for unit in site.layout.units:
            first.setdefault(tag_of[unit.number], unit.server)
            if list(first.values()).count(unit.server) > 1:
                del first[tag_of[unit.number]]
        tickets: dict[int, list[int]] = {server: [] for server in first.values()}
        for server, worker, tag in job.order:
            if first.get(tag) == server:
                tickets[server].append(worker)
        for unit in site.layout.units:
            order = tickets[unit.server]
            if mode == "hogwild":
                order = [worker for _, worker, tag in job.order if tag == tag_of[unit.number]]
            done = [(worker, order[:i].count(worker)) for i, worker in enumerate(order)]
            center, pulls = expected(done)
            elements = slice(unit.start, unit.start + unit.size)
            np.testing.assert_array_equal(job.held("center")[0][0][elements], center[elements])
            for (worker, step), pull in pulls.items():
                np.testing.assert_array_equal(received[worker][step][elements], pull[elements])
