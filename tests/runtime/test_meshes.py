"""Typical meshes: types of axes, sub-meshes, axes that the plan does not name, with and without jit."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from commplan.diagnostics import CommplanError

PLAN = """plan dp
axis data = ?
input grads : tree partial data
input loss  : f32 per data
each step {{
    grads = reduce grads over data by mean {options}
    loss  = reduce loss over data by mean
    output grads, loss
}}
"""
TOTAL = """plan total
axis data = ?
input x : f32[4] per data
each step {
    x = reduce x over data by sum
    output x
}
"""
SUM = """plan sums
axis data = ?
input grads : tree partial data
each step {
    grads = reduce grads over data by sum
    output grads
}
"""
EXPLICIT, AUTO = AxisType.Explicit, AxisType.Auto
OPTIONS = ("", "via ring", "{ wire = bf16, accumulate = f32 }", "{ wire = int8(block = 32) }")


def params() -> Any:
    return {"w": jnp.arange(24.0).reshape(6, 4) / 10, "b": jnp.zeros((4,))}


def batch() -> Any:
    return jnp.arange(96.0).reshape(16, 6) / 100


def mean_square(params: Any, x: Any) -> Any:
    return jnp.mean((x @ params["w"] + params["b"]) ** 2)


class Trainer:
    """A step of a linear network on `mesh`, and how often it was traced."""

    def __init__(
        self, mesh: Any, options: str = "", loss: Callable[..., Any] = mean_square, **how: Any
    ) -> None:
        self.mesh, self.traces = mesh, 0
        program = commplan.loads(PLAN.format(options=options)).compile(mesh, shapes={"grads": params()})
        self.run = run = program.bind(mesh)

        @run.spmd(params="same", x="split data", returns=("same", "same"), **how)
        def train(state: Any, params: Any, x: Any) -> Any:
            self.traces += 1
            value, grads = jax.value_and_grad(loss)(run.varying(params), x)
            out, state = run.step(state, grads=grads, loss=value)
            return state, jax.tree.map(lambda p, g: p - 0.1 * g, params, out.grads), out.loss

        self.train = train

    def losses(self, step: Callable[..., Any], weights: Any, x: Any) -> list[float]:
        state, losses = self.run.init(), list[float]()
        for _ in range(3):
            state, weights, loss = step(state, weights, x)
            losses.append(float(loss))
        self.weights = weights
        return losses


@functools.cache
def expected() -> list[float]:
    """The losses on one device."""
    weights, losses = params(), list[float]()
    for _ in range(3):
        loss, grads = jax.value_and_grad(mean_square)(weights, batch())
        losses.append(float(loss))
        weights = jax.tree.map(lambda p, g: p - 0.1 * g, weights, grads)
    return losses


def close(losses: list[float], options: str = "") -> bool:
    return np.allclose(losses, expected(), rtol=1e-2 if "wire" in options else 1e-6)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_mesh_as_jax_makes_it(options: str):
    trainer = Trainer(jax.make_mesh((8,), ("data",)), options)
    assert trainer.mesh.axis_types == (EXPLICIT,)
    assert close(trainer.losses(jax.jit(trainer.train), params(), batch()), options)
    assert trainer.weights["w"].sharding == NamedSharding(trainer.mesh, P(None, None))


def test_arrays_may_lie_on_an_explicit_mesh_already():
    trainer = Trainer(mesh := jax.make_mesh((8,), ("data",)))
    weights = jax.device_put(params(), NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        x = jax.device_put(batch(), jax.P("data"))
        assert close(trainer.losses(jax.jit(trainer.train), weights, x))
    assert trainer.traces == 1


def test_arrays_that_lie_otherwise_are_moved():
    trainer = Trainer(mesh := jax.make_mesh((8,), ("data",)))
    x = jax.device_put(batch(), NamedSharding(mesh, P()))
    assert close(trainer.losses(jax.jit(trainer.train), params(), x))


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_mesh_of_some_devices(kind: AxisType):
    mesh = Mesh(np.array(jax.devices()[2:6]), ("data",), axis_types=(kind,))
    trainer = Trainer(mesh)
    assert close(trainer.losses(jax.jit(trainer.train), params(), batch()))
    assert trainer.weights["b"].sharding.device_set == set(jax.devices()[2:6])


@pytest.mark.parametrize("kinds", [(AUTO, AUTO), (EXPLICIT, AUTO), (EXPLICIT, EXPLICIT), (AUTO, EXPLICIT)])
def test_an_axis_that_the_plan_does_not_name(kinds: tuple[AxisType, AxisType]):
    """Leaves cut over `model` are reduced as they are: no bucket brings them together."""
    trainer = Trainer(mesh := jax.make_mesh((4, 2), ("data", "model"), kinds))
    assert "bucket{pinned=true}" in trainer.run.context.schedule.pipeline
    shardings = {"w": NamedSharding(mesh, P(None, "model")), "b": NamedSharding(mesh, P("model"))}
    weights, x = jax.device_put(params(), shardings), jax.device_put(batch(), NamedSharding(mesh, P("data")))
    step = jax.jit(trainer.train)
    if kinds[1] is AUTO:
        text = step.lower(trainer.run.init(), weights, x).compile().as_text()
        assert not re.findall(r" (all-gather|all-to-all|collective-permute)(?:-start)?\(", text)
    assert close(trainer.losses(step, weights, x))
    if kinds != (AUTO, EXPLICIT):  # where JAX itself forgets it
        assert trainer.weights["w"].sharding.spec == P(None, "model")


def test_buckets_over_an_explicit_axis_beside_the_plan_are_refused():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    program = commplan.loads(PLAN.format(options="")).compile({"data": 4}, shapes={"grads": params()})
    with pytest.raises(CommplanError, match=r"CP0802.*sharded over `model`, an Explicit axis"):
        program.bind(mesh)


def test_a_manual_axis_is_refused():
    mesh = jax.make_mesh((8,), ("data",), (AxisType.Manual,))
    with pytest.raises(CommplanError, match=r"CP0802.*axis `data` of the mesh is Manual"):
        Trainer(mesh)


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_without_jit_a_step_is_traced_once(kind: AxisType):
    trainer = Trainer(mesh := jax.make_mesh((8,), ("data",), (kind,)))
    weights = jax.device_put(params(), NamedSharding(mesh, P()))
    assert close(trainer.losses(trainer.train, weights, batch()))
    assert trainer.traces <= 2  # its results have other types than its first arguments


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_what_goes_in_may_be_donated(kind: AxisType):
    trainer = Trainer(mesh := jax.make_mesh((8,), ("data",), (kind,)))
    weights = jax.device_put(params(), NamedSharding(mesh, P()))
    step = jax.jit(trainer.train, donate_argnums=(0, 1))
    assert close(trainer.losses(step, weights, batch()))
    assert weights["w"].is_deleted()


@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_shardings_of_jit_in_place_of_spmd(kind: AxisType):
    """The batch of a member is on its devices: phases take global arrays under a user's jit."""
    mesh = jax.make_mesh((8,), ("data",), (kind,))
    run = commplan.loads(TOTAL).compile(mesh).bind(mesh)
    per_rank, same = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())

    @functools.partial(jax.jit, in_shardings=(None, per_rank), out_shardings=same)
    def total(state: Any, x: Any) -> Any:
        out, _ = run.step(state, x=2 * x)
        return out.x

    x = jax.device_put(jnp.arange(32.0).reshape(8, 4), per_rank)
    np.testing.assert_array_equal(total({}, x), 2 * x.sum(0))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [AUTO, EXPLICIT])
def test_a_pallas_kernel_in_a_step_that_jax_cannot_type(kind: AxisType, options: str):
    def double(ref: Any, out: Any) -> None:
        out[...] = 2 * ref[...]

    @jax.custom_vjp
    def doubled(x: Any) -> Any:
        return pallas.pallas_call(double, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (doubled(g),))

    def loss(params: Any, x: Any) -> Any:
        return jnp.mean((doubled(x @ params["w"]) / 2 + params["b"]) ** 2)

    trainer = Trainer(jax.make_mesh((8,), ("data",), (kind,)), options, loss, check_vma=False)
    assert close(trainer.losses(jax.jit(trainer.train), params(), batch()), options)


def total_square(params: Any, x: Any) -> Any:
    return jnp.mean((x @ params["w"]) ** 2)


def summed() -> tuple[Any, Any]:
    """A mesh of Explicit axes, and a run that sums gradients over it."""
    mesh = jax.make_mesh((8,), ("data",))
    shapes = {"grads": {"w": params()["w"]}}
    return mesh, commplan.loads(SUM).compile(mesh, shapes=shapes).bind(mesh)


def test_gradients_that_jax_has_not_summed_need_no_shard_map():
    """Parameters are typed as reduced, gradients come unreduced, and the plan's phase sums them."""
    mesh, run = summed()
    weights = {"w": params()["w"]}

    @jax.jit
    def gradients(weights: Any, x: Any) -> Any:
        grads = jax.grad(total_square)(run.varying(weights), x)
        assert jax.typeof(grads["w"]).sharding.spec.unreduced == {"data"}
        out, _ = run.step({}, grads=grads)
        return out.grads

    with jax.set_mesh(mesh):
        x = jax.device_put(batch(), P("data"))
        grads = gradients(weights, x)
        text = gradients.lower(weights, x).compile().as_text()
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1
    expected = jax.grad(total_square)(weights, batch())
    np.testing.assert_allclose(grads["w"], expected["w"], rtol=1e-5)


def test_an_array_that_jax_has_not_summed_is_not_the_same_everywhere():
    mesh, run = summed()
    with jax.set_mesh(mesh):
        weights = jax.reshard(params()["w"], P(reduced={"data"}))
        terms = jax.grad(total_square)({"w": weights}, jax.device_put(batch(), P("data")))["w"]

        @run.spmd(w="same")
        def step(state: Any, w: Any) -> Any:
            return state, 2 * w

        np.testing.assert_array_equal(step({}, weights)[1], 2 * params()["w"])  # a reduced value is the same
        with pytest.raises(CommplanError, match=r"CP0813.*is unreduced over data") as error:
            step({}, terms)
        assert "jax.reshard(x, jax.P(None, None))" in str(error.value)
        with pytest.raises(CommplanError, match=r"CP0806[\s\S]*unreduced over data"):
            run.step({}, grads={"w": weights})
