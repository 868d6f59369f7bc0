"""Collectives over axes of one rank are the identity: same values and types, nothing packed or summed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from support.agreement import check
from support.random_case import Case

import commplan
from commplan.diagnostics import Span
from commplan.ir import schedule as ir
from commplan.ir.types import DType
from commplan.lowering.jax import _compat, variadic
from commplan.lowering.jax.collectives.lax_backend import LaxBackend
from commplan.lowering.jax.phase import Lowered
from commplan.lowering.jax.pytree import flatten
from commplan.lowering.xla_passes import COPYING, DISABLED_PASSES

PLAN = """plan one
axis a = 1
axis b = {b}
input g : tree partial a
input p : tree per a
each step {{
    mean = reduce g over a by mean {options}
    most = reduce p over a by max
    part = scatter g over a by sum
    back = gather part over a
    root = broadcast p over a from 0
    output mean, most, back, root
}}
"""
SHAPES = {"w": (64, 65), "s": (), "v": (7,), "x": (130, 64)}
SHIFT = (
    "    output",
    "    next = shift p over a by 1\n    output next,",
)  # whose buffer is packed, as on several ranks
OPS = [("all_reduce", "sum"), ("all_reduce", "max"), ("reduce", "sum"), ("reduce_scatter", "sum"),
       ("all_gather", None), ("all_to_all", None), ("swap", None), ("shift", None),
       ("broadcast", None)]  # fmt: skip


def tree(dtype: str = "float32") -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {name: draw.standard_normal((1, *shape)).astype(dtype) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    "options", ["", "{ bucket = 16 KiB }", "via ring", "{ wire = bf16, accumulate = f32 }"]
)
def test_one_rank_agrees_with_the_oracle(options: str) -> None:
    inputs = {"g": tree(), "p": tree()}
    text = PLAN.format(b=2, options=options).replace(*SHIFT)
    shapes = {name: {leaf: x[0] for leaf, x in each.items()} for name, each in inputs.items()}
    both = {"g": ("a",), "p": ("a",)}
    case = Case(0, text, {"a": 1, "b": 2}, shapes, inputs, both, {"g": (), "p": ()}, {}, {}, None)
    check(case, jax=True)


def primitives(jaxpr: Any) -> Iterator[str]:
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from primitives(inner)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("options", ["", "{ bucket = 1 MiB, overlap = backward }", "via ring"])
@pytest.mark.parametrize("compiled", [{}, {DISABLED_PASSES: COPYING}], ids=["packed", "as they are"])
def test_one_rank_neither_moves_nor_packs(platform: str, options: str, compiled: dict[str, str]) -> None:
    arrays = {"g": tree(), "p": tree()}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), arrays)
    schedule = commplan.loads(PLAN.format(b=1, options=options)).compile(shapes=shapes).schedule
    lowered = Lowered(schedule, schedule.phase("step"), {}, LaxBackend(platform, {"a": 1, "b": 1}))

    def step(arrays: Any) -> Any:
        structures = {name: flatten(jax.tree.map(lambda x: x[0], each))[1] for name, each in arrays.items()}
        outputs, _ = lowered.run(structures, {})
        return {name: _compat.as_varying(jnp.float32(0), ("a",)) + sum(map(jnp.sum, t.leaves))
                for name, t in outputs.items()}  # fmt: skip

    def total(arrays: Any) -> Any:
        return jax.tree.map(lambda x: x[None], step(arrays))

    mesh = jax.make_mesh((1, 1), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    mapped = jax.shard_map(total, mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    names = set(primitives(jax.make_jaxpr(variadic.compiled_with(compiled, mapped))(arrays)))
    moved = {
        name for name in names if name.startswith(("psum", "pmax", "all_", "ppermute", "reduce_scatter"))
    }
    assert not moved and not {"concatenate", "dynamic_slice", "optimization_barrier"} & names, names


@pytest.mark.parametrize(("kind", "op"), OPS)
def test_the_types_are_those_of_several_ranks(kind: Any, op: Any) -> None:
    root = 0 if kind in ("broadcast", "reduce", "shift") else None
    move = ir.Collective(kind, "y.0", "x.0", ("a",), DType.F32, 16, Span(1, 1, 1, 2), op=op, root=root)

    def types(ranks: int) -> tuple[Any, Any]:
        types_of: list[Any] = []

        def body(x: Any) -> Any:
            types_of.append(_compat.varying_axes(LaxBackend("cpu", {"a": ranks}).move(x, move)))
            return x

        mesh = jax.make_mesh((ranks,), ("a",), axis_types=(AxisType.Auto,))
        jax.make_jaxpr(jax.shard_map(body, mesh=mesh, in_specs=P("a"), out_specs=P("a")))(
            jnp.zeros((4 * ranks, 2))
        )
        return types_of[0]

    assert types(1) == types(2)
