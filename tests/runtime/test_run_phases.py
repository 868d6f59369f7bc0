"""Phases as callables: outside a shard_map, inside one, and their errors."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.elastic_run import ELASTIC, TREE, elastic, workers
from support.embedding import bind, code_of, mesh_of, refused

import commplan
from commplan.diagnostics import CommplanError
from commplan.runtime.machines.mesh import check_mesh
from commplan.runtime.phases import Outputs


def test_elastic_averaging_follows_its_equations():
    # C <- C + eta rho sum_i (W_i - C) and pull_i = eta rho (W_i - C), W_i before the update.
    run, eta, rho, params = elastic(), 0.05, 0.1, workers()
    _, state = run.start(run.init(), params=params)
    center = {k: v[0].astype(np.float64) for k, v in params.items()}
    for step in range(3):
        params = workers(step + 1)
        out, state = run.every[4](state, params=params, eta=eta)
        for key, array in params.items():
            pull = eta * rho * (array - center[key])
            np.testing.assert_allclose(out.pull[key], pull, rtol=1e-5, atol=1e-7)
            center[key] = center[key] + pull.sum(0)
            np.testing.assert_allclose(state["center"][key], center[key], rtol=1e-5)


def test_elastic_averaging_is_the_same_to_the_bit_every_time():
    def once() -> list[bytes]:
        run = elastic()
        _, state = run.start(run.init(), params=workers())
        for step in range(5):
            out, state = run.every[4](state, params=workers(step), eta=0.05)
        return [np.asarray(x).tobytes() for x in jax.tree.leaves((out, state))]

    assert once() == once()


def test_states_are_zero_before_the_start_and_lie_as_declared():
    run = elastic()
    state = run.init()
    assert list(state) == ["center"]
    assert jax.tree.structure(state["center"]) == jax.tree.structure(TREE)
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding == NamedSharding(run.mesh, P())
        assert not np.asarray(leaf).any()


def test_outputs_are_a_pytree_with_attributes():
    run = elastic()
    _, state = run.start(run.init(), params=workers())
    out, _ = run.every[4](state, params=workers(), eta=0.1)
    assert list(out) == ["pull"]
    assert len(out) == 1
    assert "pull" in out
    assert out["pull"] is out.pull
    doubled = jax.tree.map(lambda x: 2 * x, out)
    np.testing.assert_array_equal(doubled.pull["w"], 2 * np.asarray(out.pull["w"]))
    assert "pull" in repr(out)
    with pytest.raises(AttributeError, match="no output `grads`"):
        _ = out.grads
    with pytest.raises(AttributeError, match="cannot be changed"):
        out.pull = 1


def test_phases_work_inside_jit_and_scan():
    run = elastic()

    @jax.jit
    def train(state, params):
        def body(carry, _):
            out, state = run.every[4](carry, params=params, eta=0.1)
            return state, out.pull["b"]

        return jax.lax.scan(body, state, None, length=3)

    _, state = run.start(run.init(), params=workers())
    scanned, pulls = train(state, workers(1))
    for _ in range(3):
        out, state = run.every[4](state, params=workers(1), eta=0.1)
    np.testing.assert_allclose(pulls[-1], out.pull["b"], rtol=1e-6)
    np.testing.assert_allclose(scanned["center"]["w"], state["center"]["w"], rtol=1e-6)


@pytest.mark.parametrize("check_vma", [True, False])
def test_phases_work_inside_a_shard_map_of_ones_own(check_vma: bool):
    run = elastic()
    _, state = run.start(run.init(), params=workers())

    def step(state, params):
        local = jax.tree.map(lambda x: x[0], params)
        out, state = run.every[4](state, params=local, eta=0.1)
        return state, jax.tree.map(lambda x: x[None], out.pull)

    mapped = jax.shard_map(
        step, mesh=run.mesh, in_specs=(P(), P("worker")), out_specs=(P(), P("worker")), check_vma=check_vma
    )
    inside, pull = jax.jit(mapped)(state, workers(1))
    out, outside = run.every[4](state, params=workers(1), eta=0.1)
    np.testing.assert_array_equal(inside["center"]["w"], outside["center"]["w"])
    np.testing.assert_array_equal(pull["b"], out.pull["b"])


def test_other_axes_of_the_mesh_are_left_alone():
    mesh = mesh_of(worker=4, model=2)
    run = bind(ELASTIC, mesh, {"params": TREE, "center": TREE})
    _, state = run.start(run.init(), params=workers())
    np.testing.assert_array_equal(state["center"]["w"], workers()["w"][0])


def test_losses_can_be_differentiated_through_a_reduction():
    text = """plan p
axis data = 4
input loss : f32 per data
each step {
    loss = reduce loss over data by mean
    output loss
}
"""
    run = bind(text, mesh_of(data=4))

    def total(w, x):
        @run.spmd(w="same", x="per data", returns=("same",))
        def mean(state, w, x):
            out, state = run.step(state, loss=(w * x).sum())
            return state, out.loss

        return mean({}, w, x)[1]

    x = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    w = np.ones(3, np.float32)
    np.testing.assert_allclose(jax.grad(total)(w, x), x.mean(0), rtol=1e-6)


def test_inputs_are_checked_by_name():
    run = elastic()
    code, text = refused(lambda: run.start(run.init()))
    assert (code, "needs `params`" in text) == ("CP0804", True)
    code, text = refused(lambda: run.start(run.init(), params=workers(), eta=0.1))
    assert (code, "does not take `eta`" in text) == ("CP0804", True)
    code, text = refused(lambda: run.start(run.init(), workers()))
    assert (code, "takes its inputs by name" in text, "(state, params=..)" in text) == ("CP0804", True, True)
    assert refused(lambda: run.start(params=workers()))[0] == "CP0812"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: {"w": p["w"]}, "it lacks `b`"),
        (lambda p: {**p, "c": p["b"]}, "it has unexpected leaves: `c`"),
        (lambda p: p["w"], "a bare array"),
        (lambda p: {**p, "w": p["w"][:, :2]}, "at `w` has the shape [4, 2, 5], expected [4, 3, 5]"),
        (lambda p: {**p, "w": p["w"][0]}, "one leading dimension for each `per` axis: worker = 4"),
        (lambda p: {**p, "w": p["w"].astype(np.float16)}, "has the dtype float16, expected float32"),
        (lambda p: {**p, "w": "text"}, "is a str, not an array"),
    ],
)
def test_inputs_are_checked_leaf_by_leaf(change: Any, words: str):
    run = elastic()
    code, text = refused(lambda: run.start(run.init(), params=change(workers())))
    assert code == "CP0805"
    assert words in text


def test_the_leading_dimension_of_a_rank_is_explained():
    run = elastic()
    mapped = jax.shard_map(
        lambda p: run.start({"center": TREE}, params=p)[1], mesh=run.mesh, in_specs=P("worker"), out_specs=P()
    )
    code, text = refused(lambda: mapped(workers()))
    assert code == "CP0805"
    assert "x.reshape(x.shape[1:])" in text


@pytest.mark.parametrize("state", [None, {}, {"centr": TREE}, {"center": TREE, "other": 1}])
def test_a_state_that_is_not_the_plans(state: Any):
    run = elastic()
    code, text = refused(lambda: run.every[4](state, params=workers(), eta=0.1))
    assert code == "CP0812"
    assert "run.init()" in text


def test_phases_by_period_are_a_mapping():
    run = elastic()
    assert 4 in run.every and 3 not in run.every
    assert run.every.get(4) is run.every[4] and run.every.get(3) is None
    with pytest.raises(KeyError) as error:
        run.every[3]
    assert isinstance(error.value, CommplanError)
    assert code_of(error) == "CP0817"
    assert str(error.value).startswith("error[CP0817]: the plan has no phase `every 3 steps`")


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda out: pickle.loads(pickle.dumps(out))])
def test_outputs_can_be_copied(clone: Any):
    original = Outputs({"grads": {"w": np.arange(3)}, "loss": 2.0})
    result = clone(original)
    assert isinstance(result, Outputs) and tuple(result) == ("grads", "loss")
    assert result.loss == 2.0
    np.testing.assert_array_equal(result.grads["w"], original.grads["w"])


def test_a_state_of_another_shape():
    run = elastic()
    state = {"center": {**TREE, "b": np.zeros(2, np.float32)}}
    code, text = refused(lambda: run.every[4](state, params=workers(), eta=0.1))
    assert code == "CP0805"
    assert "state `center` at `b`" in text


def test_numbers_stand_for_scalars_where_they_fit():
    text = """plan p
axis data = 2
input n : i32
input f : f32
input x : i32 per data
each step {
    y = reduce x over data by sum
    output y, n, f
}
"""
    run = bind(text, mesh_of(data=2))
    out, _ = run.step({}, n=3, f=2, x=np.array([4, 5], np.int32))
    assert (int(out.n), float(out.f), int(out.y)) == (3, 2.0, 9)
    assert out.f.dtype == jnp.float32
    code, text = refused(lambda: run.step({}, n=3.5, f=2, x=np.array([4, 5], np.int32)))
    assert code == "CP0805"


def test_misspelt_names_say_what_was_meant():
    run, params = elastic(), workers()
    for name, meant in (("strat", "start"), ("batchs", "batches"), ("evry", "every")):
        assert f"did you mean `{meant}`?" in refused(lambda name=name: getattr(run, name))[1]
    text = refused(lambda: run.start({}, parms=params))[1]
    assert "needs `params`, but was passed `parms`" in text and "did you mean `params`?" in text
    assert "did you mean `center`?" in refused(lambda: run.sharding("centr"))[1]
    assert "did you mean `start`?" in refused(lambda: run.batches("strat"))[1]
    for options in ({"functions": {"decod": len}}, {"sources": {"image": []}}):
        text = "plan p\naxis data = 1\nsource images : u8[4]\nfn decode(u8[4]) -> u8[4] on host\n"
        text += "each step {\n  x = load images batch 1 visit exactly_once seed 1\n  y = map decode(x)\n"
        wrong = refused_all(
            lambda options=options, text=text: bind(text + "  output y\n}\n", mesh_of(data=1), **options)
        )
        assert any(meant in wrong for meant in ("did you mean `decode`?", "did you mean `images`?"))
    out = run.every[4](run.start(run.init(), params=params)[1], params=params, eta=0.1)[0]
    with pytest.raises(KeyError, match="did you mean `pull`"):
        _ = out["pul"]


def refused_all(call: Any) -> str:
    with pytest.raises(CommplanError) as error:
        call()
    return str(error.value)


def test_phases_that_are_not_there():
    run = elastic()
    code, text = refused(lambda: run.evaluate)
    assert (code, "`start` and `every_4`" in text) == ("CP0817", True)
    assert not hasattr(run, "evaluate")
    assert refused(lambda: run.every[3])[0] == "CP0817"
    assert dict(run.every) == {4: run.phases["every_4"]}
    assert repr(run.every[4]) == "<phase every_4(state, params, eta) -> (pull), state>"
    assert "p: start, every_4" in repr(run)


def test_meshes_that_do_not_fit():
    program = commplan.loads(ELASTIC).compile(mesh_of(worker=4), shapes={"params": TREE, "center": TREE})
    for mesh in (mesh_of(worker=2), mesh_of(data=4), {"worker": 4}):
        assert refused(lambda mesh=mesh: check_mesh(program.schedule, mesh))[0] == "CP0801"
