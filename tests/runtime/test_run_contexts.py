"""Runs under any mesh that `jax.set_mesh` has set, and under JAX's transfer guards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from support.embedding import bind, refused

pytestmark = pytest.mark.filterwarnings("ignore:[^$]*begin at the same place again")

PLAN = """plan p
ensemble member = 2
axis data = 2
source rows : f32[4]
fn noise(f32[4]) -> f32[4] on device random
fn shake(tree) -> tree on device random
input params : tree per member, data
input grads  : tree per member partial data
state seen   : tree per member
at start {
    params = broadcast params over data from 0
    seen   = map shake(params)
    output params
}
each step {
    raw   = load rows batch 8 split data visit exactly_once seed 1
    x     = map noise(raw)
    output raw, x
}
phase sums {
    grads = reduce grads over data by mean
    seen  = map shake(seen)
    output grads
}
"""
TREE = {"w": jax.ShapeDtypeStruct((4,), jnp.float32), "b": jax.ShapeDtypeStruct((), jnp.float32)}


def noise(key: Any, x: Any) -> Any:
    return x + jax.random.normal(key, x.shape)


def shake(key: Any, tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf + jax.random.normal(key, leaf.shape), tree)


def mesh_of(kind: AxisType, devices: Any = None) -> Any:
    return jax.make_mesh((2, 2), ("member", "data"), (kind, kind), devices=devices or jax.devices()[:4])


class Program:
    """A program that uses a run: its state, steps under run.jit and without, and a member's."""

    def __init__(self, kind: AxisType) -> None:
        self.run = bind(
            PLAN, mesh_of(kind), {"params": TREE, "grads": TREE, "seen": TREE},
            sources={"rows": np.ones((16, 4), np.float32)}, functions={"noise": noise, "shake": shake},
        )  # fmt: skip
        self.jitted = self.run.jit(self.spmd(self.run, "split data"))
        self.alone = self.spmd(self.run, "split data")
        self.member = self.run.member(1)
        self.own = self.member.jit(self.spmd(self.member, "split data"))

    def spmd(self, run: Any, rows: str) -> Any:
        @run.spmd(params="params", x=rows)
        def step(state: Any, params: Any, x: Any) -> Any:
            grads = jax.grad(lambda p: jnp.mean((x @ p["w"] + p["b"]) ** 2))(run.varying(params))
            out, state = run.sums(state, grads=grads)
            return state, jax.tree.map(lambda p, g: p - 0.1 * g, params, out.grads)

        return step

    def all(self, *, host: bool) -> tuple[Any, ...]:
        """Everything once. host: begin with arrays of the host."""
        run = self.run
        params: Any = {"w": np.ones((2, 2, 4), np.float32), "b": np.zeros((2, 2), np.float32)}
        if not host:
            params = jax.device_put(params, NamedSharding(run.mesh, P("member", "data")))
        out, state = run.start(run.init(), params=params)
        begun = out.params
        with run.batches() as batches:
            for item in batches:
                state, stepped = self.jitted(state, begun, item["x"])
                _, again = self.alone(state, begun, item["raw"])
        other, mine = (each.take("params", begun) for each in (self.run.member(0), self.member))
        part = self.member.take("seen", state["seen"])
        with run.batches(member=1) as member_batches:
            item = next(member_batches)
        _, trained = self.own({"seen": part, "#calls": self.member.init()["#calls"]}, mine, item["x"])
        run.join("params", {0: other, 1: trained})
        return stepped, again, trained


@pytest.fixture(scope="module", params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def program(request: pytest.FixtureRequest) -> Program:
    return Program(request.param)


@pytest.fixture(scope="module")
def expected(program: Program) -> list[Any]:
    return jax.tree.leaves(program.all(host=False))


def contexts() -> Iterator[tuple[str, Any]]:
    explicit, auto = AxisType.Explicit, AxisType.Auto
    devices = jax.devices()
    yield "whole, explicit", mesh_of(explicit)
    yield "whole, auto", mesh_of(auto)
    yield "reversed", mesh_of(explicit, devices[3::-1])
    yield "part", jax.make_mesh((2,), ("data",), (explicit,), devices=devices[2:4])
    yield "other", jax.make_mesh((8,), ("z",), (auto,))


@pytest.mark.parametrize("name", [name for name, _ in contexts()])
def test_a_run_works_under_any_mesh(program: Program, expected: list[Any], name: str) -> None:
    with jax.set_mesh(dict(contexts())[name]):
        leaves = jax.tree.leaves(program.all(host=False))
        lowered = program.own.lower(program.member.init(), TREE, jax.ShapeDtypeStruct((8, 4), jnp.float32))
    for actual, exact in zip(leaves, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(exact))
    assert "all_reduce" in lowered.as_text()


def test_under_an_abstract_mesh(program: Program, expected: list[Any]) -> None:
    with jax.sharding.use_abstract_mesh(AbstractMesh((4,), ("z",), (AxisType.Explicit,))):
        leaves = jax.tree.leaves(program.all(host=False))
    np.testing.assert_array_equal(np.asarray(leaves[0]), np.asarray(expected[0]))


def test_a_jit_of_the_programs_own_is_told_how_to_set_the_mesh(program: Program) -> None:
    member, x = program.member, np.ones((8, 4), np.float32)

    def step(state: Any, x: Any) -> Any:
        return state, x

    call = jax.jit(member.spmd(x="split data")(step))
    with jax.set_mesh(mesh_of(AxisType.Auto)):
        code, text = refused(lambda: call({}, x))
    assert code == "CP0828"
    assert "jax.set_mesh has set a mesh of 4 devices, but this step runs on 2" in text
    assert "run.jit" in text


@pytest.mark.parametrize("host", [True, False], ids=["from the host", "from devices"])
def test_transfers_are_explicit(program: Program, expected: list[Any], host: bool) -> None:
    del expected  # all is compiled: transfers of constants during compilation are not transfers of a step
    with contextlib.ExitStack() as stack:
        for guard in (
            jax.transfer_guard_host_to_device,
            jax.transfer_guard_device_to_device,
            jax.transfer_guard_device_to_host,
        ):
            stack.enter_context(guard("disallow"))
        program.all(host=host)


def test_arrays_on_devices_are_passed_on_without_a_look_at_their_shardings(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, shardings = program.run, list[Any]()

    def named(*args: Any) -> NamedSharding:
        shardings.append(args)
        return NamedSharding(*args)

    monkeypatch.setattr("commplan.runtime.context.NamedSharding", named)
    host = {"w": np.ones((2, 2, 4), np.float32), "b": np.zeros((2, 2), np.float32)}
    placement = run.context.schedule.named["params"].placement
    placed = run.context.placed(host, placement)
    assert len(shardings) == 2
    again = run.context.placed(placed, placement)
    assert len(shardings) == 2
    assert again["w"] is placed["w"]
