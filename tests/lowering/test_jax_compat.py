"""Uses of private parts of JAX: types of values inside shard_map, on every supported version."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.embedding import mesh_of

from commplan.lowering.jax import _compat
from commplan.lowering.jax.collectives import native
from commplan.lowering.jax.primitives import assume_same, optimization_barrier


def inside(function: Any, x: Any, out: Any, *, check_vma: bool = True) -> Any:
    mesh = mesh_of(a=2, b=2)
    return jax.shard_map(function, mesh=mesh, in_specs=P("a"), out_specs=out, check_vma=check_vma)(x)


def test_values_vary_over_the_axes_of_their_specs():
    axes_of: list[Any] = []

    def body(x):
        axes_of.append(_compat.varying_axes(x))
        axes_of.append(_compat.varying_axes(_compat.as_varying(x, ("a", "b"))))
        axes_of.append(_compat.tracks_varying("b"))
        axes_of.append(_compat.manual_axes())
        return x

    inside(body, np.zeros(2), P("a"))
    assert axes_of == [{"a"}, {"a", "b"}, True, {"a": 2, "b": 2}]
    axes_of.clear()
    inside(body, np.zeros(2), P("a"), check_vma=False)
    assert axes_of == [set(), set(), False, {"a": 2, "b": 2}]
    assert _compat.manual_axes() == {}


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_proved_value_is_the_same(check_vma: bool):
    def body(x):
        total = jax.lax.all_gather(x, "a", tiled=True).sum()  # typed as varying, and the same
        return assume_same(total, ("a", "b"))

    assert float(inside(body, np.array([2.0, 3.0], np.float32), P(), check_vma=check_vma)) == 5.0


def test_a_proved_value_has_gradients_and_batches():
    def body(x):
        def square(y):
            return (assume_same(y, ("a",)) ** 2).sum()

        each = jax.vmap(lambda y: assume_same(y, ("a",)))(x)
        return jax.grad(square)(x), each

    x = np.array([3.0, 3.0], np.float32)
    grads, each = inside(body, x, (P("a"), P()))
    np.testing.assert_array_equal(grads, 2 * x)
    np.testing.assert_array_equal(each, [3.0])


def test_a_barrier_leaves_types_as_they_are():
    types: list[Any] = []

    def body(x):
        results = optimization_barrier({"varying": x, "same": jnp.ones(2)})
        types.append({name: _compat.varying_axes(y) for name, y in results.items()})
        return results["varying"]

    inside(body, np.zeros(2), P("a"))
    assert types == [{"varying": {"a"}, "same": set()}]


def test_a_gathered_value_is_the_same_and_its_gradient_is_a_slice():
    def body(x):
        def loss(y):
            return (native.all_gather_same(y, ("a",)) * jnp.arange(1.0, 5.0)).sum()

        return native.all_gather_same(x, ("a",)), jax.grad(loss)(x)

    x = np.arange(4, dtype=np.float32)
    whole, grads = inside(body, x, (P(), P("a")))
    np.testing.assert_array_equal(whole, x)
    np.testing.assert_array_equal(grads, [1, 2, 3, 4])


@pytest.mark.parametrize("check_vma", [True, False])
def test_empty_arguments_come_back(check_vma: bool):
    """JAX 0.11.2 crashes if a function returns an empty argument unchanged."""

    def body(*arguments: Any) -> Any:
        return {"given": arguments, "number": 1}

    xs = (np.zeros((4, 0), "bfloat16"), np.zeros(0, bool), np.arange(4.0, dtype=np.float32))
    specs = {"given": (P("a"), P(), P("a")), "number": P()}
    options = {"mesh": mesh_of(a=2, b=2), "in_specs": specs["given"], "out_specs": specs}
    out = jax.jit(_compat.shard_map(body, check_vma=check_vma, **options))(*xs)
    kinds = [(x.shape, str(x.dtype)) for x in out["given"]]
    assert kinds == [((4, 0), "bfloat16"), ((0,), "bool"), ((4,), "float32")]
    np.testing.assert_array_equal(out["given"][2], xs[2])
