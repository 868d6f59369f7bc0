"""Training steps for `commplan audit`: functions of a mesh that give one and its arguments."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import commplan

PLAN = """\
plan audited

axis data = 8

input grads : tree partial data

each step {
    grads = reduce grads over data by mean { bucket = 8 KiB, overlap = backward }
    output grads
}

every 2 steps {
    grads = reduce grads over data by sum
    output grads
}
"""
Tree = Any


def shapes(width: int = 32) -> Tree:
    return {f"layer{i}": jax.ShapeDtypeStruct((width, width), "float32") for i in range(4)}


def arguments(mesh: Any, width: int = 32, rows: int = 64) -> tuple[Any, ...]:
    """The state, the parameters and a batch, as shapes."""
    same, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=same), shapes(width)
    )
    return {}, params, jax.ShapeDtypeStruct((rows, width), "float32", sharding=split)


def loss(params: Tree, x: Any) -> Any:
    for w in params.values():
        x = jnp.tanh(x @ w)
    return (x * x).mean()


def bound(mesh: Any, **compiling: Any) -> Any:
    return commplan.loads(PLAN, "audited.plan").compile(mesh, {"grads": shapes()}, **compiling).bind(mesh)


def stepped(run: Any, mesh: Any, *, varying: bool = True, extra: bool = False, calls: int = 1) -> Any:
    """A training step. `varying`: whether gradients differ between ranks; `extra`: whether it has another
    collective."""

    @jax.jit
    @run.spmd(params="same", x="split data")
    def train(state: Tree, params: Tree, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(run.varying(params) if varying else params, x)
        for _ in range(calls):
            out, state = run.step(state, grads=run.varying(grads))
            grads = out.grads
        new = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
        if extra:
            total = lax.pmax(value, "data")
            new = jax.tree.map(lambda w: w + total, new)
        return state, new

    return train, arguments(mesh)


def planned(mesh: Any) -> Any:
    return stepped(bound(mesh), mesh)


def own_sum(mesh: Any) -> Any:
    return stepped(bound(mesh), mesh, extra=True)


def by_autodiff(mesh: Any) -> Any:
    return stepped(bound(mesh), mesh, varying=False)


def nothing(mesh: Any) -> Any:
    return planned(mesh)[0]


class _Silent(BaseException):
    """None of `Exception`, and without a text."""

    def __str__(self) -> str:
        raise TypeError


def silent(mesh: Any) -> Any:
    raise _Silent


def broken(mesh: Any) -> Any:
    raise RuntimeError("no data here")
