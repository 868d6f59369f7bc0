"""States of plans in `run.spmd`: cut over ranks, and only those that a phase uses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from support.embedding import bind, mesh_of, refused


def test_split_states_and_arguments_with_scalar_leaves():
    text = """plan p
axis data = 4
input grads : tree partial data
state shard : tree split data
fn keep(tree) -> tree on device elementwise
input params : tree
at start {
    s = slice params over data
    shard = map keep(s)
}
each step {
    g = scatter grads over data by sum
    shard = map keep(g)
    output shard
}
"""
    tree = {"w": np.zeros((3, 2), np.float32), "s": np.zeros((), np.float32)}
    run = bind(
        text, mesh_of(data=4), {"params": tree, "grads": tree, "shard": tree}, functions={"keep": lambda x: x}
    )
    values = {"w": np.arange(6, dtype=np.float32).reshape(3, 2), "s": np.float32(7)}
    _, state = run.start(run.init(), params=values)
    np.testing.assert_array_equal(state["shard"]["w"], [0, 1, 2, 3, 4, 5, 0, 0])

    @jax.jit
    @run.spmd(old="shard", x="per data")
    def step(state, old, x):
        grads = jax.tree.map(lambda leaf: run.varying(jnp.asarray(leaf)) * x, values)
        _, state = run.step(state, grads=grads)
        return state, jax.tree.map(lambda a, b: a - b, state["shard"], old)

    @run.spmd(old="shard")
    def drop(state, old):
        return state

    @run.spmd(returns=("shard", "split data"))
    def listed(state):
        return state, state["shard"], state["shard"]["w"]

    @run.spmd(returns=("split data",))
    def written(state):
        return state, state["shard"]

    @run.spmd(returns=("split data",))
    def varying(state):
        return state, {"loss": state["shard"]["w"].sum(), "w": state["shard"]["w"]}

    _, shard, w = listed(state)
    np.testing.assert_array_equal(shard["w"], state["shard"]["w"])
    np.testing.assert_array_equal(w, state["shard"]["w"])
    jax.tree.map(np.testing.assert_array_equal, written(state)[1], state["shard"])
    code, message = refused(lambda: varying(state))
    assert (code, "at `loss`" in message) == ("CP0813", True)
    new, change = step(state, state["shard"], np.ones(4, np.float32))
    np.testing.assert_array_equal(new["shard"]["w"], [0, 4, 8, 12, 16, 20, 0, 0])
    assert float(new["shard"]["s"]) == 28
    np.testing.assert_array_equal(change["w"], [0, 3, 6, 9, 12, 15, 0, 0])
    assert float(change["s"]) == 21
    assert list(drop(state, state["shard"])) == ["shard"]


TWO_STATES = """plan p
axis data = 2
input x : f32 per data
input y : f32 partial data
state a : f32
state b : f32
at start {
    a = broadcast x over data from 0
    b = broadcast x over data from 1
}
each step {
    b = reduce y over data by sum
    output a
}
phase again {
    a = broadcast x over data from 1
}
phase other {
    output b
}
"""


def test_a_phase_asks_for_the_states_that_it_uses():
    run = bind(TWO_STATES, mesh_of(data=2))
    _, state = run.start({}, x=np.array([3, 4], np.float32))  # which reads none
    assert {name: float(value) for name, value in state.items()} == {"a": 3, "b": 4}
    out, state = run.other({"b": np.float32(7)})
    assert (float(out.b), list(state)) == (7, ["b"])

    @run.spmd(y="per data", returns="a")
    def step(state, y):
        out, state = run.step(state, y=y)
        return state, out.a

    state, a = step({"a": np.float32(3)}, np.array([1, 2], np.float32))  # `b` comes with the step
    assert (sorted(state), float(a), float(state["b"])) == (["a", "b"], 3, 3)
    code, words = refused(lambda: step({"b": np.float32(0)}, np.array([1, 2], np.float32)))
    assert code == "CP0812"
    assert "phase `step` was given a state that lacks `a`" in words
    assert "it uses `a`" in words

    @run.spmd()
    def forgetful(state):
        return {}

    code, words = refused(lambda: forgetful(state))
    assert (code, "lacks `a`, `b`" in words) == ("CP0812", True)
