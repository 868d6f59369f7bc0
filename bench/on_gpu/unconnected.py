"""One of eight ranks without the other seven: phases that are traced for eight and run on one device."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import commplan
from commplan.ir import schedule as ir
from commplan.lowering.jax import variadic
from commplan.lowering.jax.collectives.lax_backend import LaxBackend
from commplan.lowering.jax.phase import Lowered
from commplan.lowering.jax.pytree import flatten
from commplan.lowering.xla_passes import COPYING, DISABLED_PASSES

RANKS = 8
PLAN = """plan transformer
axis data = ?
input grads : tree partial data
each step {{
    grads = reduce grads over data by mean {options}
    output grads
}}
"""
BUCKETS = "bucket = 25 MiB, overlap = backward"
OPTIONS = {
    "default": "",
    "25 MiB": f"{{ {BUCKETS} }}",
    "bf16 wire": f"{{ {BUCKETS}, wire = bf16, accumulate = f32 }}",
}
Tree = Any


class Unconnected(LaxBackend):
    """A barrier in place of each collective: its result has the right shape, and this rank's own elements."""

    def move(self, x: Any, op: ir.Collective) -> Any:
        x, ways = lax.optimization_barrier(x), self.ways(op.axes)
        match op.kind:
            case "all_gather":
                return jnp.tile(x, (ways, *(1,) * (x.ndim - 1)))
            case "reduce_scatter":
                return x[: x.shape[0] // ways]
            case _:
                return x

    def _native_all_reduce(self, x: Any, op: ir.Collective) -> Any:
        return lax.optimization_barrier(x)

    def behind(
        self, xs: Sequence[Any], previous: Sequence[Any], axes: tuple[str, ...]
    ) -> tuple[list[Any], list[Any]]:
        tied, before = lax.optimization_barrier((list(xs), list(previous)))
        return list(tied), list(before)

    def tie(self, x: Any, previous: Any, axes: tuple[str, ...]) -> Any:
        return lax.optimization_barrier((x, previous))[0]

    def index(self, axes: str | tuple[str, ...]) -> Any:
        return 0

    def varying(self, x: Any, axes: tuple[str, ...]) -> Any:
        return x

    def same(self, x: Any, axes: tuple[str, ...]) -> Any:
        return x


class Phase:
    """The step of `PLAN` with `options` (`{ bucket = .. }`) for gradients of the shapes `like`."""

    def __init__(self, like: Tree, options: str) -> None:
        program = commplan.loads(PLAN.format(options=options)).compile(
            axes={"data": RANKS}, shapes={"grads": like}
        )
        self._phase = program.schedule.phase("step")
        backend = Unconnected("gpu", {"data": RANKS}, "")
        self._lowered = Lowered(program.schedule, self._phase, {}, backend, {})

    @property
    def buckets(self) -> int:
        return sum(isinstance(op, ir.Pack) for op in self._phase.ops)

    def packed(self) -> Callable[[Tree], Tree]:
        """A function of gradients as `jax.jit` traces it: buckets are packed into buffers."""
        return self._run

    def as_they_are(self) -> Callable[[Tree], Tree]:
        """A function of gradients as `run.jit` traces it for GPUs: all-reduces take arrays as they are."""
        return variadic.compiled_with({DISABLED_PASSES: COPYING}, self._run)

    def _run(self, grads: Tree) -> Tree:
        outputs, _ = self._lowered.run({"grads": flatten(grads)[1]}, {})
        return jax.tree.unflatten(jax.tree.structure(grads), outputs["grads"].leaves)


def phases(like: Tree, dtype: str) -> dict[str, Callable[[Tree], Tree]]:
    """The step's ways by name, for gradients of `dtype`. A wire is always packed, and narrows f32 alone."""
    ways: dict[str, Callable[[Tree], Tree]] = {}
    for name, options in OPTIONS.items():
        if name == "bf16 wire" and dtype == "bfloat16":
            continue
        phase = Phase(like, options)
        ways[f"{name}, packed"] = phase.packed()
        if name != "bf16 wire":
            ways[f"{name}, as they are"] = phase.as_they_are()
    return ways


def random_tree(like: Tree, seed: int = 0) -> Tree:
    """Normal numbers, of standard deviation 0.02, in the shapes and dtypes of `like`."""
    leaves, structure = jax.tree.flatten(like)
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def normal(key: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return (jax.random.normal(key, shape) * 0.02).astype(dtype)

    draw = jax.jit(normal, static_argnums=(1, 2))
    arrays = [draw(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, arrays)


def with_dtype(like: Tree, dtype: str) -> Tree:
    """The shapes of `like`, of another dtype."""

    def converted(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, dtype)

    return jax.tree.map(converted, like)


def nbytes(tree: Tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
