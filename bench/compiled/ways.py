"""How a step is trained: by JAX alone, or through a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from bench.compiled.models import Moves, ResNet50, Transformer

Tree = Any
Model = Transformer | ResNet50

PLAN = """\
plan training

{axes}

input params : tree
input grads  : tree partial {over}
{dispatch}
each step {{
    grads = reduce grads over {over} by mean {options}
    output grads
}}
"""
DISPATCH = """\
input blocks : tree per {axis}

phase dispatch {{
    arrived = swap blocks over {axis}
    output arrived
}}
"""


def sgd(params: Tree, grads: Tree) -> Tree:
    def update(p: Any, g: Any) -> Any:
        return p - jnp.asarray(0.1, p.dtype) * g.astype(p.dtype)

    return jax.tree.map(update, params, grads)


def arguments(mesh: Mesh, model: Model) -> tuple[Tree, Tree, Mapping[str, Any]]:
    """The weights of all, those of each rank, and the batch, as shapes with shardings."""

    def same(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P()))

    def split(leaf: Any) -> Any:
        shape, sharding = (
            (mesh.size * leaf.shape[0], *leaf.shape[1:]),
            NamedSharding(mesh, P(mesh.axis_names)),
        )
        return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)

    weights, own, batch = model.shapes(), model.own_shapes(), model.batch()
    return jax.tree.map(same, weights), jax.tree.map(split, own), jax.tree.map(split, batch)


def alone(mesh: Mesh, model: Model) -> Callable[..., Any]:
    """The step as it is written without a plan."""
    moves = Moves(swap=lambda blocks: lax.all_to_all(blocks, "data", 0, 0, tiled=True))

    def varying(p: Any) -> Any:
        return lax.pcast(p, "data", to="varying")

    def mean(g: Any) -> Any:
        return lax.psum(g, "data") / mesh.size

    def train(params: Tree, own: Tree, batch: Mapping[str, Any]) -> Tree:
        def loss(params: Tree, own: Tree) -> Any:
            return model.loss(params, own, batch, moves)

        grads, local = jax.grad(loss, (0, 1))(jax.tree.map(varying, params), own)
        return sgd(params, jax.tree.map(mean, grads)), sgd(own, local)

    specs = (P(), P("data"))
    step = jax.shard_map(train, mesh=mesh, in_specs=(*specs, specs[1]), out_specs=specs)
    return jax.jit(step, donate_argnums=(0, 1))


def planned(
    mesh: Mesh,
    model: Model,
    topology: Any = None,
    options: str = "{ overlap = backward }",
    pgle: str | bool = False,
) -> Callable[..., Any]:
    """The step through a plan, compiled for `topology`; layers under a scan are tapped. pgle: `run.jit`."""
    shapes, experts = model.shapes(), bool(model.own_shapes())
    free = {name: tree for name, tree in shapes.items() if name != "layers"}
    named = {"params": shapes, "grads": free} | ({"blocks": _blocks(mesh, model)} if experts else {})
    axes, over = "\n".join(f"axis {name} = ?" for name in mesh.axis_names), ", ".join(mesh.axis_names)
    dispatch = DISPATCH.format(axis=mesh.axis_names[-1]) if experts else ""
    plan = commplan.loads(PLAN.format(axes=axes, over=over, options=options, dispatch=dispatch))
    run = plan.compile(mesh, shapes=named, topology=topology).bind(mesh)

    def body(function: Any) -> Any:
        return jax.checkpoint(function, policy=run.save_anything_except_tapped, prevent_cse=False)

    moves = Moves(run.tap, body, lambda blocks: run.dispatch({}, blocks=blocks)[0].arrived)

    @run.spmd(params="same", own=f"split {over}", batch=f"split {over}", returns=("same", f"split {over}"))
    def train(state: Tree, params: Tree, own: Tree, batch: Mapping[str, Any]) -> Any:
        free = {name: tree for name, tree in params.items() if name != "layers"}
        tapped = {name: tree for name, tree in params.items() if name == "layers"}

        def loss(free: Tree, tapped: Tree, own: Tree) -> Any:
            return model.loss(free | tapped, own, batch, moves)

        grads, inside, local = jax.grad(loss, (0, 1, 2))(run.varying(free), tapped, own)
        out, state = run.step(state, grads=grads)
        return state, sgd(params, out.grads | inside), sgd(own, local)

    def step(params: Tree, own: Tree, batch: Mapping[str, Any]) -> Any:
        return train({}, params, own, batch)

    return run.jit(step, donate_argnums=(0, 1), pgle=pgle)


def _blocks(mesh: Mesh, model: Model) -> Any:
    """The tokens that one rank sends, a block for each expert."""
    if not isinstance(model, Transformer):
        return jax.ShapeDtypeStruct((mesh.size, 1), "bfloat16")
    room = -(-5 * model.rows * model.length // (4 * mesh.size))
    return jax.ShapeDtypeStruct((mesh.size * room, model.width), "bfloat16")
