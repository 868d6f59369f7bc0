"""A plan's reduction as an optax transformation."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from support.embedding import bind, code_of, mesh_of

import commplan.optax
from commplan.diagnostics import CommplanError

PLAN = """plan p
axis data = 4
input params : tree per data
input grads  : tree partial data
input n      : f32 per data
at start {
    params = broadcast params over data from 0
    output params
}
each step {
    grads = reduce grads over data by mean(weight = n)
    output grads
}
"""
TREE = {"w": np.ones((3,), np.float32)}


def test_gradients_are_reduced_before_the_optimizer():
    run = bind(PLAN, mesh_of(data=4), {"params": TREE, "grads": TREE})
    optimizer = optax.chain(commplan.optax.reduce(run, "grads"), optax.sgd(0.5))

    @jax.jit
    @run.spmd(params="params", opt="params", x="per data")
    def train(state, params, opt, x):
        grads = jax.grad(lambda p: (p["w"] * x).sum())(run.varying(params))
        updates, opt = optimizer.update(grads, opt, params, n=x[0])
        return state, optax.apply_updates(params, updates), opt

    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    _, params, _ = train({}, TREE, optimizer.init(TREE), x)
    mean = (x * x[:, :1]).sum(0) / x[:, 0].sum()
    np.testing.assert_allclose(params["w"], TREE["w"] - 0.5 * mean, rtol=1e-6)


def test_a_missing_weight_is_named():
    run = bind(PLAN, mesh_of(data=4), {"params": TREE, "grads": TREE})
    with pytest.raises(CommplanError) as error:
        commplan.optax.reduce(run, "grads").update(TREE, optax.EmptyState())
    assert code_of(error) == "CP0804"
    assert "`n`" in str(error.value)


@pytest.mark.parametrize(
    ("name", "phase"), [("params", "step"), ("params", "evaluate"), ("gradients", "step")]
)
def test_phases_that_are_no_transformation(name: str, phase: str):
    run = bind(PLAN, mesh_of(data=4), {"params": TREE, "grads": TREE})
    with pytest.raises(CommplanError) as error:
        commplan.optax.reduce(run, name, phase=phase)
    assert code_of(error) == "CP0820"


def test_plans_with_states_are_refused():
    run = bind("easgd_sync", mesh_of(worker=8), {"params": TREE, "center": TREE})
    with pytest.raises(CommplanError) as error:
        commplan.optax.reduce(run, "params", phase="start")
    assert code_of(error) == "CP0820"
    text = """plan p
axis data = 4
state count : f32
input grads : tree partial data
at start { count = broadcast n over data from 0 }
input n : f32 per data
each step {
    grads = reduce grads over data by mean
    count = reduce n over data by sum
    output grads
}
"""
    run = bind(text, mesh_of(data=4), {"grads": TREE})
    with pytest.raises(CommplanError) as error:
        commplan.optax.reduce(run, "grads")
    assert "states (count)" in str(error.value)
