"""Means of large values on two or four ranks, on a mesh or under MPI, with terms of weight zero."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import commplan

LARGE = (40000.0, 1.0, 1e-3)  # twice the first is none of f16's
WAYS = (
    "", "{ accumulate = f32 }", "{ wire = f16 }", "{ wire = bf16 }", "{ wire = f32, accumulate = f32 }",
    "{ wire = f16, accumulate = f16 }", "via ring", "via hierarchical(gpu, node)",
    "via hierarchical(gpu, node) { wire = f16 }",
    "via hierarchical(gpu = ring, node = ring) { accumulate = f32 }",
)  # fmt: skip
WEIGHTED = ("", "{ wire = bf16 }", "via hierarchical(gpu, node)")
COUNTED = "mean(weight = n) { integers = max }"
DTYPES = ("float16", "bfloat16", "float32")
WEIGHTS = (0, 100_000, 200_000, 100_000)  # counts beyond f16


def check(where: Any, *, nodes: int, dtypes: tuple[str, ...] = DTYPES) -> None:
    """Reduce in every way, on the mesh or communicator `where`."""
    reductions = [(f"g{n}", "g", "mean", way) for n, way in enumerate(WAYS)]
    reductions += [(f"h{n}", "h", "mean(weight = n)", way) for n, way in enumerate(WEIGHTED)]
    lines = {
        f"{result}_{dtype}": f"{result}_{dtype} = reduce {x}_{dtype} over node, gpu by {op} {way}"
        for result, x, op, way in reductions
        for dtype in dtypes
    }
    for how in ("mean { integers = max }", "mean { integers = first, wire = bf16 }", COUNTED):
        lines[f"i{len(lines)}"] = f"i{len(lines)} = reduce mixed over node, gpu by {how}"
    inputs = [f"{x}_{dtype}" for x in "gh" for dtype in dtypes]
    plan = commplan.loads(
        "\n".join(
            [
                "plan means", f"axis node = {nodes}", "axis gpu = 2", "input n : i32 per node, gpu",
                "input mixed : tree partial node, gpu",
                *(f"input {name} : tree partial node, gpu" for name in inputs),
                "each step {", *lines.values(), f"output {', '.join(lines)}", "}",
            ]
        )
    )  # fmt: skip
    shapes = {name: {"w": jax.ShapeDtypeStruct((3,), jnp.dtype(name[2:]))} for name in inputs}
    mixed = {"done": np.zeros((), np.bool_), "step": np.zeros(2, np.int32), "w": np.zeros(3, np.float16)}
    run = plan.compile(where, shapes=shapes | {"mixed": mixed}).bind(where)
    on_mesh = isinstance(where, jax.sharding.Mesh)

    def step(state: Any) -> Any:
        rank = jax.lax.axis_index(("node", "gpu")) if on_mesh else where.rank
        count = jnp.asarray(WEIGHTS, jnp.int32)[rank]
        keywords: dict[str, Any] = {}
        for name in inputs:
            terms = jnp.asarray(LARGE, name[2:])
            absent = (count == 0) & (name[0] == "h")
            keywords[name] = {"w": run.varying(jnp.where(absent, jnp.full(3, jnp.nan, terms.dtype), terms))}
        steps = jnp.stack([10 * rank + 3, -rank]).astype(jnp.int32)
        terms = {"done": jnp.asarray(rank == 1), "step": steps, "w": jnp.asarray(LARGE, "float16")}
        keywords["mixed"] = jax.tree.map(run.varying, terms)
        outputs, state = run.step(state, n=run.varying(count), **keywords)
        return state, *(getattr(outputs, name) for name in lines)

    if on_mesh:
        step = run.spmd(returns=tuple("same" for _ in lines))(step)
    _, *results = jax.jit(step)({})
    for line, tree in zip(lines.values(), results, strict=True):
        mean, narrow = np.asarray(tree["w"], "f4"), "16" in line or "mixed" in line  # the type, or the wire
        assert np.allclose(mean, LARGE, rtol=2e-2 if narrow else 1e-6), f"{line}: {mean}"
        if "mixed" in line:
            first = "first" in line
            assert np.array_equal(tree["step"], [3, 0] if first else [20 * nodes - 7, 0]), line
            assert bool(tree["done"]) is not first, line
