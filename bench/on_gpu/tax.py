"""What a plan costs a step on these devices, beside the same step written without one.

On one device a plan has nothing to send: what it costs there is a tax. On several the step without any
reduction says how much of the communication is exposed, through the plan and as XLA does it alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from bench.compiled.models import Moves, Transformer
from bench.compiled.ways import sgd
from bench.on_gpu.timing import Scale, in_turns, median, spread
from commplan.lowering.jax.typing_shim import jax, jnp, lax

PLAN = """plan transformer
axis data = ?
input grads : tree partial data
each step {
    grads = reduce grads over data by mean
    output grads
}
"""
Tree = Any
Step = Callable[[Tree, Any], Tree]


def measure(scale: Scale) -> dict[str, Any]:
    """Milliseconds a step, bf16, of a transformer: 12 layers, 2048 wide, 8 x 1024 tokens a device."""
    layers, width = scale.pick(2, 12), scale.pick(128, 2048)
    rows, length = scale.pick(1, 8), scale.pick(32, 1024)
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    model = Transformer(layers, width, rows, length)
    like = model.shapes()
    tokens = jax.device_put(
        np.random.default_rng(0).integers(0, 32_768, (mesh.size * rows, length)).astype(np.int32),
        NamedSharding(mesh, P("data")),
    )
    steps = {"XLA alone": by_hand(mesh, model, mean), "plan": planned(mesh, model)}
    if mesh.size > 1:
        steps["no communication"] = by_hand(mesh, model, lambda g: g)
    held = {name: jax.jit(parameters, static_argnums=0, out_shardings=NamedSharding(mesh, P()))(
        tuple((path, leaf.shape) for path, leaf in flat(like))) for name in steps}  # fmt: skip
    held = {name: jax.tree.unflatten(jax.tree.structure(like), leaves) for name, leaves in held.items()}

    def advancing(name: str) -> Callable[[], Any]:
        def call() -> Any:
            held[name] = steps[name](held[name], tokens)
            return held[name]

        return call

    took = in_turns({name: advancing(name) for name in steps}, scale.rounds, repeat=scale.pick(1, 4))
    weights = [np.asarray(jax.tree.leaves(held[name])[0], np.float32) for name in ("XLA alone", "plan")]
    lines = [f"{name:18} {spread(times)}" for name, times in took.items()]
    tax = median(took["plan"]) / median(took["XLA alone"]) - 1
    lines.append(f"plan against XLA alone: {tax:+.2%} on {mesh.size} device(s)")
    result: dict[str, Any] = {
        "ms": {name: [t * 1e3 for t in times] for name, times in took.items()},
        "tax": tax,
    }
    if mesh.size > 1:
        alone = median(took["no communication"])
        result["exposed"] = {name: median(took[name]) - alone for name in ("XLA alone", "plan")}
        lines += [f"exposed, {name}: {seconds * 1e3:.3f} ms" for name, seconds in result["exposed"].items()]
    result["apart"] = float(np.max(np.abs(weights[0] - weights[1])))
    lines.append(f"weights after the same steps are apart by at most {result['apart']:.2g}")
    return {"lines": lines, **result}


def flat(like: Tree) -> list[tuple[str, Any]]:
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(like)]


def parameters(leaves: tuple[tuple[str, tuple[int, ...]], ...]) -> list[Any]:
    """Seeded weights in bf16; norms are ones."""
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return [
        jnp.ones(shape, jnp.bfloat16) if len(shape) == 1
        else (jax.random.normal(key, shape) * shape[-1] ** -0.5).astype(jnp.bfloat16)
        for key, (_, shape) in zip(keys, leaves, strict=True)
    ]  # fmt: skip


def mean(g: Any) -> Any:
    return lax.psum(g, "data") / lax.axis_size("data")


def varying(p: Any) -> Any:
    return lax.pcast(p, "data", to="varying")


def gradients(model: Transformer, params: Tree, tokens: Any) -> Tree:
    def loss(params: Tree) -> Any:
        return model.loss(params, {}, {"tokens": tokens}, Moves())

    return jax.grad(loss)(params)


def by_hand(mesh: Mesh, model: Transformer, reduced: Callable[[Any], Any]) -> Step:
    """The step without a plan: each gradient reduced as it is. On one device a plain function."""

    def train(params: Tree, tokens: Any) -> Tree:
        grads = gradients(model, jax.tree.map(varying, params), tokens)
        return sgd(params, jax.tree.map(reduced, grads))

    def alone(params: Tree, tokens: Any) -> Tree:
        return sgd(params, gradients(model, params, tokens))

    if mesh.size == 1:
        return jax.jit(alone, donate_argnums=0)
    options = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
    return jax.jit(jax.shard_map(train, **options), donate_argnums=0)


def planned(mesh: Mesh, model: Transformer) -> Step:
    """The step through a plan, as the manual writes it."""
    run = commplan.loads(PLAN).compile(mesh, shapes={"grads": model.shapes()}).bind(mesh)

    @run.spmd(params="same", tokens="split data")
    def train(state: Tree, params: Tree, tokens: Any) -> Any:
        grads = gradients(model, run.varying(params), tokens)
        out, state = run.step(state, grads=grads)
        return state, sgd(params, out.grads)

    step = run.jit(train, donate_argnums=1)
    return lambda params, tokens: step({}, params, tokens)[1]
