"""The time of a step with a plan, compared with the same step without one.

On one device there is nothing to send: every difference is a tax. On several devices the step without any
reduction shows how much of the communication is exposed, with the plan and with XLA alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from bench.compiled import models
from bench.compiled.models import Moves, Transformer
from bench.compiled.ways import sgd
from bench.on_gpu.findings import Findings
from bench.on_gpu.scale import Scale
from bench.on_gpu.timing import Seconds, in_turns, median, spread

PLAN = """plan transformer
axis data = ?
input grads : tree partial data
each step {
    grads = reduce grads over data by mean
    output grads
}
"""
ALONE, PLANNED, SILENT = "XLA alone", "plan", "no communication"
Tree = Any
Step = Callable[[Tree, Any], Tree]


def measure(scale: Scale, findings: Findings) -> None:
    """Milliseconds a step, bf16, of a transformer: 12 layers, 2048 wide, 8 x 1024 tokens a device."""
    layers, width = scale.pick(1, 12), scale.pick(128, 2048)
    rows, length = scale.pick(1, 8), scale.pick(32, 1024)
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    model = Transformer(layers, width, rows, length)
    like = model.shapes()
    tokens = jax.device_put(
        np.random.default_rng(0).integers(0, models.VOCABULARY, (mesh.size * rows, length)).astype(np.int32),
        NamedSharding(mesh, P("data")),
    )
    steps = {ALONE: by_hand(mesh, model, mean), PLANNED: planned(mesh, model)}
    if mesh.size > 1:
        steps[SILENT] = by_hand(mesh, model, lambda g: g)
    held = {name: jax.jit(parameters, static_argnums=0, out_shardings=NamedSharding(mesh, P()))(
        tuple((path, leaf.shape) for path, leaf in flat(like))) for name in steps}  # fmt: skip
    held = {name: jax.tree.unflatten(jax.tree.structure(like), leaves) for name, leaves in held.items()}

    def advancing(name: str) -> Callable[[], Any]:
        def call() -> Any:
            held[name] = steps[name](held[name], tokens)
            return held[name]

        return call

    def progress(times: Seconds) -> None:
        lines, figures = _summary(times, mesh.size)
        findings.progress(lines, **figures)

    times = in_turns({name: advancing(name) for name in steps}, scale.rounds, progress=progress)
    lines, figures = _summary(times, mesh.size)
    weights = [np.asarray(jax.tree.leaves(held[name])[0], np.float32) for name in (ALONE, PLANNED)]
    apart = float(np.max(np.abs(weights[0] - weights[1])))
    findings.add(
        *lines, f"weights after the same steps are apart by at most {apart:.2g}", apart=apart, **figures
    )


def _summary(times: Seconds, devices: int) -> tuple[list[str], dict[str, Any]]:
    """Lines and figures of the times so far."""
    if not all(times.values()):
        return [f"{len(times)} step(s) compiled"], {}
    lines = [f"{name:18} {spread(each)}" for name, each in times.items()]
    medians = {name: median(each) for name, each in times.items()}
    tax = medians[PLANNED] / medians[ALONE] - 1
    lines.append(f"plan against XLA alone: {tax:+.2%} on {devices} device(s)")
    milliseconds = {name: [t * 1e3 for t in each] for name, each in times.items()}
    figures: dict[str, Any] = {"ms": milliseconds, "tax": tax}
    if SILENT in medians:
        exposed = {name: medians[name] - medians[SILENT] for name in (ALONE, PLANNED)}
        lines += [f"exposed, {name}: {seconds * 1e3:.3f} ms" for name, seconds in exposed.items()]
        figures["exposed"] = exposed
    return lines, figures


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
    options: Any = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": P(), "check_vma": False}
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
