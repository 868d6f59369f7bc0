"""Random plans with servers, and what their workers compute: the same bits wherever it is computed."""

from __future__ import annotations

import functools
import importlib
import operator
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import commplan

jax: Any = importlib.import_module("jax")
Array = Any
Tree = dict[str, Array]

ELASTIC = """
plan replayed_averaging
axis worker = {workers}
server master = {servers}
input params : tree per worker
{inputs}
state center : tree on master
at start {{
    center = broadcast params over worker from 0
}}
each step {{
    pull, center = elastic params with center over worker by {mode}(eta = {eta}, rho = 0.25) {{ {hints} }}
    output pull
}}
phase look {{
    output center
}}
"""
EXCHANGE = """
plan replayed_exchange
axis worker = {workers}
server hub = {servers}
input params : tree per worker
input grads : tree partial worker
state weights : tree on hub
fn sgd(tree, tree) -> tree on device elementwise
at start {{
    weights = broadcast params over worker from 0
}}
each step {{
    weights = exchange grads into weights with sgd over worker by {op} {{ {hints} }}
    output weights
}}
phase look {{
    output weights
}}
"""
MOMENTUM = """
plan replayed_momentum
axis worker = {workers}
server hub = {servers}
input params : tree per worker
input opt : tree per worker
input grads : tree partial worker
state weights : tree on hub
state moment : tree on hub
fn momentum(tree, tree, tree) -> tree, tree on device elementwise
at start {{
    weights = broadcast params over worker from 0
    moment = broadcast opt over worker from 0
}}
each step {{
    weights, moment = exchange grads into weights, moment with momentum over worker by {op} {{ {hints} }}
    output weights
}}
phase look {{
    output weights
}}
"""
TEXTS = {"exchange": EXCHANGE, "momentum": MOMENTUM}
MODES = ("async", "hogwild", "round_robin", "exchange", "momentum")


@dataclass(frozen=True, eq=False)
class Case:
    """A plan and the trees that it is about. mode: `exchange` and `momentum` are updates with staleness."""

    seed: int
    workers: int
    servers: int
    mode: str
    staleness: int | None
    scalars: bool  # eta is a value of every worker
    text: str
    shapes: Mapping[str, tuple[tuple[int, ...], str]]
    steps: int

    @property
    def elastic(self) -> bool:
        return self.mode not in TEXTS

    def __str__(self) -> str:
        late = "" if self.staleness is None else f", staleness {self.staleness}"
        return f"case {self.seed}: {self.mode}{late}, {self.workers} workers, {self.servers} servers"


def drawn(seed: int, *, most: int = 6) -> Case:
    """A case. most: of its workers and servers together."""
    rng = random.Random(seed)
    mode = MODES[seed % len(MODES)]
    servers = rng.randint(1, 2)
    workers = rng.randint(2, min(4, most - servers))
    staleness = rng.randint(1, 3) if mode in TEXTS else rng.choice((None, None, 1, 2))
    hints = [f"chunk = {rng.choice((64, 100, 256, 1000, 4096))}"]
    if staleness is not None:
        hints.append(f"staleness = {staleness}")
    if rng.random() < 0.2:
        hints.append("wire = bf16")
    scalars = mode not in TEXTS and rng.random() < 0.5
    text = TEXTS.get(mode, ELASTIC).format(
        workers=workers, servers=servers, mode=mode, hints=", ".join(hints),
        inputs="input eta : f32 per worker" if scalars else "", eta="eta" if scalars else "0.5",
        op=rng.choice(("sum", "mean")),
    )  # fmt: skip
    return Case(seed, workers, servers, mode, staleness, scalars, text, _shapes(rng), rng.randint(3, 8))


def _shapes(rng: random.Random) -> dict[str, tuple[tuple[int, ...], str]]:
    """Leaves of odd sizes, among them scalars and some without elements, of one or two dtypes."""
    shapes: dict[str, tuple[tuple[int, ...], str]] = {
        "w0": ((rng.choice((1, 7, 33, 127, 501, 1021)),), "float32")
    }
    for number in range(rng.randint(0, 4)):
        sizes = (1, 2, 3, 5, 11, 17, 0 if number == 2 else 13)
        shape = tuple(rng.choice(sizes) for _ in range(rng.randint(0, 3)))
        shapes[f"w{number + 1}"] = shape, "float16" if rng.random() < 0.25 else "float32"
    return shapes


@functools.lru_cache(maxsize=8)
def program(case: Case) -> Any:
    """The compiled plan, for MPI."""
    plan = commplan.loads(case.text)
    tree = {name: jax.ShapeDtypeStruct(shape, dtype) for name, (shape, dtype) in case.shapes.items()}
    trees = ("params", "grads", "opt", "center", "weights", "moment")
    shapes = {value.name: tree for value in plan.graph.values if value.name in trees}
    return plan.compile(backend="mpi", shapes=shapes)


def sgd(w: Any, g: Any) -> Any:
    return jax.tree.map(functools.partial(_less, 0.5), w, g)


def momentum(w: Any, m: Any, g: Any) -> tuple[Any, Any]:
    m = jax.tree.map(functools.partial(_less, -1.0), jax.tree.map(functools.partial(operator.mul, 0.5), m), g)
    return jax.tree.map(functools.partial(_less, 0.25), w, m), m


def _less(factor: float, x: Any, y: Any) -> Any:
    return x - factor * y


def functions(case: Case) -> dict[str, Callable[..., Any]]:
    return {"exchange": {"sgd": sgd}, "momentum": {"momentum": momentum}}.get(case.mode, {})


def noise(case: Case, *place: int) -> Tree:
    """Numbers of a worker, or of one of its steps."""
    rng = np.random.default_rng([case.seed, *place])
    return {name: rng.standard_normal(shape).astype(dtype) for name, (shape, dtype) in case.shapes.items()}


def started(case: Case, worker: int) -> dict[str, Any]:
    """The inputs of the phase `start`."""
    first = {"params": noise(case, worker)}
    return first | {"opt": noise(case, worker, 0)} if case.mode == "momentum" else first


def asked(case: Case, worker: int, step: int, w: Tree) -> dict[str, Any]:
    """The inputs of a step of a worker that has `w`."""
    if case.elastic:
        eta = {"eta": np.float32(0.5 / (1 + (worker + step) % 3))} if case.scalars else {}
        return {"params": w, **eta}
    wanted = noise(case, worker)
    return {"grads": {name: (x - wanted[name]) * x.dtype.type(0.125) for name, x in w.items()}}


def stepped(case: Case, worker: int, step: int, w: Tree, answer: Tree) -> Tree:
    """What the worker has after it: the servers' weights, or its own, pulled and moved on."""
    if not case.elastic:
        return {name: np.asarray(x).astype(w[name].dtype) for name, x in answer.items()}
    move = noise(case, worker, step, 1)
    return {
        name: x - np.asarray(answer[name]).astype(x.dtype) + move[name] * x.dtype.type(0.125)
        for name, x in w.items()
    }
