"""Differentiated phases: values carried as integers have the derivative of the floats that they encode."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import commplan
from commplan.runtime.run import Run

PLAN = """
plan derived

axis data = 8
input x : tree per data

each step {{
    x = {stage}
    output x
}}
"""


def bound(stage: str, dtype: Any = jnp.float32) -> Run:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shapes = {"x": {"a": jax.ShapeDtypeStruct((3,), dtype)}}
    return commplan.loads(PLAN.format(stage=stage)).compile(mesh, shapes=shapes).bind(mesh)


def gradient(run: Run, x: Any) -> Any:
    def weighted(x: Any) -> Any:
        out, _ = run.step(run.init(), x={"a": x})
        return (out.x["a"] * jnp.arange(1, 4, dtype=x.dtype)).sum()

    return np.asarray(jax.grad(weighted)(x), np.float32)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_of_a_broadcast_is_that_of_its_root(dtype: Any) -> None:
    run = bound("broadcast x over data from 2", dtype)
    expected = np.zeros((8, 3), np.float32)
    expected[2] = [1, 2, 3]
    np.testing.assert_array_equal(gradient(run, jnp.ones((8, 3), dtype)), expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("by", [1, -3, 8, 17])
def test_the_gradient_of_a_shift_is_a_shift_back(by: int, dtype: Any) -> None:
    run = bound(f"shift x over data by {by}", dtype)
    scale = jnp.arange(1, 9, dtype=dtype)[:, None]

    def weighted(x: Any) -> Any:
        out, _ = run.step(run.init(), x={"a": x})
        return (out.x["a"] * scale).sum()

    gradient = np.asarray(jax.grad(weighted)(jnp.ones((8, 3), dtype)), np.float32)
    np.testing.assert_array_equal(gradient[:, 0], np.roll(np.arange(1, 9), -by))


@pytest.mark.parametrize(
    ("dtype", "via"), [(jnp.float32, ""), (jnp.bfloat16, ""), (jnp.float32, " via bruck")]
)
def test_the_gradient_of_a_swap_is_a_swap(dtype: Any, via: str) -> None:
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    shapes = {"x": {"a": jax.ShapeDtypeStruct((16,), dtype)}}
    run = commplan.loads(PLAN.format(stage=f"swap x over data{via}")).compile(mesh, shapes=shapes).bind(mesh)
    scale = jnp.asarray(np.random.default_rng(0).integers(-9, 9, (8, 16)), dtype)

    def weighted(x: Any) -> Any:
        out, _ = run.step(run.init(), x={"a": x})
        return (out.x["a"] * scale).sum()

    gradient = np.asarray(jax.grad(weighted)(jnp.ones((8, 16), dtype)), np.float32)
    blocks = np.asarray(scale, np.float32).reshape(8, 8, 2)
    np.testing.assert_array_equal(gradient, blocks.swapaxes(0, 1).reshape(8, 16))


def test_the_gradient_of_a_mean_passes_a_narrow_wire() -> None:
    run = bound("reduce x over data by mean { wire = bf16, accumulate = f32 }")
    expected = np.tile(np.array([1, 2, 3], np.float32) / 8, (8, 1))
    np.testing.assert_array_equal(gradient(run, jnp.ones((8, 3))), expected)


def test_a_derivative_leaves_the_broadcast_bit_for_bit() -> None:
    run = bound("broadcast x over data from 5")
    x = np.full((8, 3), np.nan, np.float32)
    x[5] = np.array([0x7F800001, 0x80000000, 0x00000001], np.uint32).view(np.float32)

    def made(x: Any) -> Any:
        return run.step(run.init(), x={"a": x})[0].x["a"]

    value, tangent = jax.jvp(made, (jnp.asarray(x),), (jnp.ones((8, 3)),))
    np.testing.assert_array_equal(np.asarray(value).view(np.uint32), x[5].view(np.uint32))
    np.testing.assert_array_equal(np.asarray(tangent), np.ones(3))
