"""Order and buckets in the compiled program, as far as XLA preserves them on CPUs."""

from __future__ import annotations

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.embedding import bind, code_of, mesh_of

from commplan.diagnostics import CommplanError
from commplan.lowering.jax.collectives.order import with_barriers

REDUCE = """plan p
axis data = 4
input params : tree
input grads : tree partial data
each step {{
    grads = reduce grads over data by mean {braces}
    output grads
}}
"""
LAYERS = {f"l{i}": jnp.zeros((64, 64), jnp.float32) for i in range(6)}


def compiled(run: Any, *args: Any) -> str:
    @jax.jit
    @run.spmd(params="params", x="per data", returns=("params",))
    def step(state, params, x):
        def loss(layers):
            y = x
            for i in range(6):
                y = jnp.tanh(y @ layers[f"l{i}"])
            return (y**2).sum()

        grads = jax.grad(loss)(run.varying(params))
        out, state = run.step(state, grads=grads)
        return state, out.grads

    return step.lower({}, LAYERS, np.ones((4, 8, 64), np.float32)).compile().as_text() or ""


def test_buckets_stay_apart_and_none_is_copied():
    # Two layers of 16 KiB each to a bucket: three all-reduces, which XLA would combine into one.
    run = bind(
        REDUCE.format(braces="{ bucket = 32 KiB }"), mesh_of(data=4), {"params": LAYERS, "grads": LAYERS}
    )
    text = compiled(run)
    assert len(re.findall(r" all-reduce\(", text)) == 3
    assert not re.findall(r"f32\[8192\]\S* copy\(", text)


def test_without_an_order_xla_combines_them():
    run = bind(REDUCE.format(braces=""), mesh_of(data=4), {"params": LAYERS, "grads": LAYERS}, passes="")
    assert len(re.findall(r" all-reduce\(", compiled(run))) == 1


@pytest.mark.parametrize("policy", [False, True])
def test_a_tap_reduces_inside_the_scanned_backward_pass(policy: bool):
    layers = {"w": jnp.zeros((5, 16, 16), jnp.float32), "b": jnp.zeros((5, 16), jnp.float32)}
    run = bind(REDUCE.format(braces=""), mesh_of(data=4), {"params": layers, "grads": layers})

    def loss(layers, x):
        def body(y, layer):
            layer = run.tap(layer)
            return jnp.tanh(y @ layer["w"] + layer["b"]), None

        if policy:
            body = jax.checkpoint(body, policy=run.save_anything_except_tapped, prevent_cse=False)
        y, _ = jax.lax.scan(body, x, layers)
        return (y**2).mean()

    @jax.jit
    @run.spmd(params="params", x="per data", returns=("params",))
    def step(state, params, x):
        return state, jax.grad(loss)(params, x)

    @jax.jit
    @run.spmd(params="params", x="per data", returns=("params",))
    def after(state, params, x):
        def plain(layers):
            y = x
            for i in range(5):
                y = jnp.tanh(y @ layers["w"][i] + layers["b"][i])
            return (y**2).mean()

        out, state = run.step(state, grads=jax.grad(plain)(run.varying(params)))
        return state, out.grads

    rng = np.random.default_rng(1)
    params = jax.tree.map(lambda p: rng.normal(size=p.shape).astype(np.float32) / 4, layers)
    x = rng.normal(size=(4, 8, 16)).astype(np.float32)
    lowered = step.lower({}, params, x)
    copies = re.findall(r"dynamic_update_slice.*tensor<5x16x16xf32>", lowered.as_text())
    assert len(copies) == (1 if policy else 2)  # the gradient, and the residuals of the weights
    text = lowered.compile().as_text() or ""
    bodies = [part for part in text.split("\n\n") if " all-reduce(" in part]
    assert len(bodies) == 1
    assert not bodies[0].startswith("ENTRY")
    _, tapped = step({}, params, x)
    _, reference = after({}, params, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), tapped, reference)


@pytest.mark.parametrize("options", ["wire = bf16, accumulate = f32", "wire = bf16"])
def test_a_tap_sends_in_the_wire_type(options: str):
    layers = {"w": jnp.zeros((7, 3), jnp.float32)}
    run = bind(REDUCE.format(braces=f"{{ {options} }}"), mesh_of(data=4), {"params": layers, "grads": layers})

    @run.spmd(params="params", x="per data", returns=("params", "params"))
    def step(state, params, x):
        tapped = jax.grad(lambda p: (run.tap(p)["w"] * x).sum())(params)
        grads = jax.grad(lambda p: (p["w"] * x).sum())(run.varying(params))
        out, state = run.step(state, grads=grads)
        return state, tapped, out.grads

    x = np.random.default_rng(1).normal(size=(4, 7, 3)).astype(np.float32)
    _, tapped, stepped = step({}, layers, x)
    np.testing.assert_allclose(stepped["w"], x.mean(0), atol=2e-2)
    np.testing.assert_array_equal(tapped["w"], stepped["w"])


@pytest.mark.parametrize(
    ("axes", "via"),
    [
        ({"node": 2, "gpu": 2}, "via hierarchical(gpu, node) { wire = bf16, accumulate = f32 }"),
        ({"node": 2, "gpu": 3}, "via hierarchical(gpu, node) { wire = bf16, accumulate = f32 }"),
        ({"node": 2, "gpu": 2, "chip": 2}, "via hierarchical(chip, gpu, node)"),
    ],
)
def test_a_tap_pads_for_nested_scatters(axes: dict[str, int], via: str):
    layers = {"w": jnp.zeros((7, 3), jnp.float32)}
    names = ", ".join(axes)
    declared = "\n".join(f"axis {name} = {size}" for name, size in axes.items())
    text = f"""plan p
{declared}
input params : tree
input grads : tree partial {names}
each step {{
    grads = reduce grads over {names} by mean {via}
    output grads
}}
"""
    run = bind(text, mesh_of(**axes), {"params": layers, "grads": layers})

    @run.spmd(params="params", x=f"per {names}", returns=("params",))
    def step(state, params, x):
        return state, jax.grad(lambda p: (run.tap(p)["w"] * x).sum())(params)

    ranks = tuple(axes.values())
    # Multiples of the number of ranks: every sum, mean and shard is exact in bf16.
    x = math.prod(ranks) * np.random.default_rng(1).integers(-4, 5, size=(*ranks, 7, 3)).astype(np.float32)
    _, tapped = step({}, layers, x)
    np.testing.assert_array_equal(tapped["w"], x.mean(tuple(range(len(ranks)))))


def tapped_gradients(leaf: Any) -> Any:
    """The gradients of an empty leaf and of `leaf`, from a tap of a plan for f32."""
    tree = {"w": jnp.zeros((7,), jnp.float32)}
    text = REDUCE.format(braces="{ wire = bf16, accumulate = f32 }")
    run = bind(text, mesh_of(data=4), {"params": tree, "grads": tree})

    @run.spmd(params="params", returns=("params",))
    def step(state, params):
        def loss(p):
            tapped = run.tap(p)
            return tapped["w"].sum() + tapped["other"].astype(jnp.float32).sum() + tapped["none"].sum()

        return state, jax.grad(loss, allow_int=True)({**params, "other": leaf, "none": jnp.zeros((0,), "f2")})

    return step({}, tree)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_tap_refuses_a_dtype_that_the_plan_has_no_wire_for(dtype: str):
    with pytest.raises(CommplanError) as error:
        tapped_gradients(jnp.ones((3,), dtype))
    assert code_of(error) == "CP0815"
    assert f"a leaf of the parameters is {dtype}" in str(error.value)
    assert "compiled for float32" in str(error.value)


def test_a_tap_leaves_what_has_no_gradient_alone():
    _, grads = tapped_gradients(jnp.ones((3,), jnp.int32))
    np.testing.assert_array_equal(grads["w"], np.ones(7, np.float32))
    assert grads["none"].shape == (0,)
    assert grads["other"].dtype == jax.dtypes.float0


def test_accumulated_gradients_are_reduced_once():
    layers = {"w": jnp.zeros((8, 8), jnp.float32)}
    run = bind(REDUCE.format(braces=""), mesh_of(data=4), {"params": layers, "grads": layers})

    @jax.jit
    @run.spmd(params="params", x="per data", returns=("params",))
    def step(state, params, x):
        varying = run.varying(params)

        def micro(total, batch):
            grads = jax.grad(lambda p: ((batch @ p["w"]) ** 2).mean())(varying)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = run.varying(jax.tree.map(jnp.zeros_like, params))
        total, _ = jax.lax.scan(micro, zeros, x)
        out, state = run.step(state, grads=total)
        return state, out.grads

    text = step.lower({}, layers, np.zeros((4, 3, 2, 8), np.float32)).compile().as_text() or ""
    assert len(re.findall(r" all-reduce\(", text)) == 1
    entry = text[text.index("ENTRY") :]
    assert " all-reduce(" in entry


def test_sixteen_bit_wires_travel_as_sixteen_bits():
    layers = {"w": jnp.zeros((64, 64), jnp.float32)}
    braces = "{ wire = bf16, accumulate = f32 }"
    run = bind(REDUCE.format(braces=braces), mesh_of(data=4), {"params": layers, "grads": layers})

    @jax.jit
    @run.spmd(x="per data", returns=("params",))
    def step(state, x):
        out, state = run.step(state, grads={"w": x})
        return state, out.grads

    text = step.lower({}, np.ones((4, 64, 64), np.float32)).compile().as_text() or ""
    moved = re.findall(r"= (\S+?)\[[^=]* (all-to-all|all-gather|all-reduce)\(", text)
    # XLA:CPU has no 16-bit float collectives: it would move f32, twice the bytes.
    assert sorted((kind, dtype.lstrip("(")) for dtype, kind in moved) == [
        ("all-gather", "u16"),
        ("all-to-all", "u16"),
    ]


def test_a_barrier_leaves_missing_gradients_missing() -> None:
    x = jnp.ones(3)
    assert with_barriers([None, x], [None]) == ([None, x], [None])
    assert "barrier" in str(jax.make_jaxpr(lambda x: with_barriers([None, x], [x, None]))(x))
