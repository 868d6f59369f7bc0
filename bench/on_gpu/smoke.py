"""Whether what people train with runs here around one plan: flax, optax, orbax and torch, where installed."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

import commplan
from bench.on_gpu.findings import Findings
from bench.on_gpu.scale import Scale

PLAN = """plan smoke
axis data = ?
source rows : f32[16]
source classes : i32
input params : tree per data
input grads : tree partial data
at start {
    params = broadcast params over data from 0
    output params
}
each step {
    x = load rows batch 64 split data visit exactly_once seed 5
    y = load classes batch 64 split data visit exactly_once seed 5
    grads = reduce grads over data by mean
    output x, y, grads
}
"""
STEPS = 8


class Records:
    """256 seeded pairs of f32[16] and a class."""

    def __init__(self) -> None:
        rng = np.random.default_rng(1)
        self._x = rng.normal(size=(256, 16)).astype(np.float32)
        self._y = (self._x[:, :4].argmax(1)).astype(np.int32)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, number: int) -> Any:
        return self._x[number], self._y[number]


def measure(scale: Scale, findings: Findings) -> None:
    """Losses before and after training; raises CommplanError, or the error of a library that fails."""
    del scale
    model = _model()
    for name in ("numpy", "torch"):
        source = _torch_records() if name == "torch" else Records()
        if source is None:
            findings.add("torch: not installed")
            continue
        losses, params = train(model, source)
        if not losses[-1] < losses[0]:
            raise AssertionError(f"records of {name}: the loss went from {losses[0]:.4f} to {losses[-1]:.4f}")
        line = f"records of {name}: loss {losses[0]:.4f} -> {losses[-1]:.4f}, model of {model[2]}"
        findings.add(line, _saved(params), **{name: losses})


def train(model: Any, source: Any) -> tuple[list[float], Any]:
    """Losses of some steps on all devices, and the parameters then."""
    init, apply, _ = model
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    params = init(jax.random.key(0))
    run = commplan.loads(PLAN).compile(mesh, shapes={"params": params, "grads": params}).bind(
        mesh, sources={"rows": commplan.column(source, 0), "classes": commplan.column(source, 1)}
    )  # fmt: skip

    def stacked(leaf: Any) -> Any:
        return jnp.stack([leaf * (1 + rank) for rank in range(mesh.size)])

    each = jax.tree.map(stacked, params)
    out, state = run.start(run.init(), params=each)
    params = out.params
    advance, opt = _optimizer(params)

    def loss(params: Any, x: Any, y: Any) -> Any:
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(apply(params, x)), y[:, None], -1))

    @run.spmd(params="same", opt="same", x="x", y="y", returns=("same", "same", "same"))
    def step(state: Any, params: Any, opt: Any, x: Any, y: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(run.varying(params), x, y)
        out, state = run.step(state, grads=grads)
        params, opt = advance(params, opt, out.grads)
        return state, params, opt, jax.lax.pmean(value, "data")

    jitted, losses = run.jit(step), list[float]()
    with run.batches() as batches:
        while len(losses) < STEPS:
            for item in batches:
                state, params, opt, value = jitted(state, params, opt, item["x"], item["y"])
                losses.append(float(value))
    return losses, params


def _model() -> tuple[Any, Any, str]:
    """A small network: how to begin, how to apply it, and whose it is."""
    try:
        linen: Any = importlib.import_module("flax.linen")
    except ImportError:
        return _begun, _applied, "jax (flax is not installed)"
    network: Any = linen.Sequential([linen.Dense(64), linen.relu, linen.Dense(4)])

    def begun(key: Any) -> Any:
        return network.init(key, jnp.ones((1, 16)))

    return begun, network.apply, "flax"


def _begun(key: Any) -> Any:
    first, second = jax.random.split(key)
    return {"a": jax.random.normal(first, (16, 64)) / 4, "b": jax.random.normal(second, (64, 4)) / 8}


def _applied(params: Any, x: Any) -> Any:
    return jax.nn.relu(x @ params["a"]) @ params["b"]


def _optimizer(params: Any) -> tuple[Any, Any]:
    try:
        optax: Any = importlib.import_module("optax")
    except ImportError:
        return _descended, {}
    adam = optax.adam(0.01)

    def advance(params: Any, opt: Any, grads: Any) -> Any:
        updates, opt = adam.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    return advance, adam.init(params)


def _descended(params: Any, opt: Any, grads: Any) -> Any:
    def lower(w: Any, g: Any) -> Any:
        return w - 0.1 * g

    return jax.tree.map(lower, params, grads), opt


def _saved(params: Any) -> str:
    """The parameters through a checkpoint of orbax and back, bit by bit."""
    try:
        orbax: Any = importlib.import_module("orbax.checkpoint")
    except ImportError:
        return "orbax: not installed"
    with (
        tempfile.TemporaryDirectory(prefix="commplan-bench-") as folder,
        orbax.StandardCheckpointer() as keeper,
    ):
        keeper.save(Path(folder) / "params", params)
        keeper.wait_until_finished()
        back = keeper.restore(Path(folder) / "params", params)
    same = all(
        np.array_equal(np.asarray(a), np.asarray(b))
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(back), strict=True)
    )
    if not same:
        raise AssertionError("orbax gave back other parameters")
    return "orbax: parameters saved and restored, the same bit by bit"


def _torch_records() -> Any:
    try:
        data: Any = importlib.import_module("torch.utils.data")
        torch: Any = importlib.import_module("torch")
    except ImportError:
        return None
    pairs = [Records()[i] for i in range(len(Records()))]
    return data.TensorDataset(
        torch.from_numpy(np.stack([x for x, _ in pairs])), torch.from_numpy(np.stack([y for _, y in pairs]))
    )
