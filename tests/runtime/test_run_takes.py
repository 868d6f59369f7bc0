"""Source values that a phase takes as arguments, though they are no outputs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.embedding import bind, code_of, mesh_of

import commplan
from commplan.diagnostics import CommplanError

PLAN = """plan p
axis data = 4
source images : f32[3]
input grads : tree partial data
each step {
    x, n  = load images batch 8 split data visit exactly_once seed 1
    grads = reduce grads over data by mean(weight = n)
    output x, grads
}
"""
RECORDS = np.arange(11 * 3, dtype=np.float32).reshape(11, 3)


def bound() -> Any:
    shapes = {"grads": {"w": np.zeros(3, np.float32)}}
    return bind(PLAN, mesh_of(data=4), shapes, sources={"images": RECORDS})


def test_the_weights_of_a_mean_come_with_the_batches() -> None:
    """The mean over ranks, weighted by their records, is the mean over the records of the batch."""
    run = bound()

    @jax.jit
    @run.spmd(x="x", n="n", returns="grads")
    def step(state: Any, x: Any, n: Any) -> Any:
        valid = (jnp.arange(x.shape[0]) < n)[:, None]
        mean = jnp.where(valid, x, 0).sum(0) / jnp.maximum(n, 1)
        out, state = run.step(state, grads={"w": mean}, n=n)
        return state, out.grads

    counts: list[list[int]] = []
    items: list[Any] = []
    with run.batches() as batches:
        for item in batches:
            assert sorted(item) == ["n", "x"]
            counts.append(np.asarray(item["n"]).tolist())
            rows = np.asarray(item["x"])[: sum(counts[-1])] if len(counts) == 2 else np.asarray(item["x"])
            items.append(rows)
            _, grads = step(run.init(), item["x"], item["n"])
            np.testing.assert_allclose(np.asarray(grads["w"]), rows.mean(0), rtol=1e-6)
    assert counts == [[2, 2, 2, 2], [2, 1, 0, 0]]
    assert sorted(map(tuple, np.concatenate(items))) == sorted(map(tuple, RECORDS))


def test_names_of_taken_values_are_unique() -> None:
    """The plan's inputs have the names `n` and `n_1`, which the count of the load would have."""
    text = """plan p
axis data = 2
source images : f32[3]
input n     : f32 per data
input n_1   : f32 per data
input grads : tree partial data
each step {
    a = reduce n over data by max
    b = reduce n_1 over data by max
    x, n = load images batch 8 split data visit exactly_once seed 1
    grads = reduce grads over data by mean(weight = n)
    output x, grads, a, b
}
"""
    shapes = {"grads": {"w": np.zeros(3, np.float32)}}
    (phase,) = commplan.loads(text).compile({"data": 2}, shapes=shapes).schedule.phases
    assert [(binding.name, binding.value) for binding in phase.takes] == [("n_1_", "n.1")]


def test_a_phase_says_that_it_takes_them() -> None:
    run = bound()
    assert "n" in run.step.lowered.arguments

    @run.spmd()
    def step(state: Any) -> Any:
        _, state = run.step(state, grads={"w": jnp.zeros(3)})
        return state

    with pytest.raises(CommplanError) as caught:
        step(run.init())
    assert code_of(caught) == "CP0804"
    assert "needs `n`" in str(caught.value)
