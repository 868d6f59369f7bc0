"""Functions bound by users: keys of random ones, and results that differ from their declarations."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.embedding import bind, code_of, mesh_of

from commplan.diagnostics import CommplanError

NOISE = """plan p
ensemble member = 2
axis data = {data}
input x : f32[8]
fn noise(f32[8]) -> f32[8] on device random
each step {{
    same = map noise(x)
    own  = map noise(x) per member
    output same, own
}}
"""


def noise(key: Any, x: Any) -> Any:
    return x + jax.random.normal(key, x.shape)


def draws(data: int, seed: int = 0) -> tuple[Any, Any, Any]:
    run = bind(NOISE.format(data=data), mesh_of(member=2, data=data), functions={"noise": noise}, seed=seed)
    step = jax.jit(lambda state: run.step(state, x=np.zeros(8, np.float32)))
    first, state = step(run.init())
    second, state = step(state)
    again, _ = step(run.init())
    np.testing.assert_array_equal(again.own, first.own)
    assert int(state["#calls"]["step"]) == 2
    return np.asarray(first.same), np.asarray(first.own), np.asarray(second.own)


def test_random_functions_depend_on_seed_step_and_member_alone():
    same, per_member, later = draws(2)
    assert same.shape == (8,)
    assert per_member.shape == (2, 8)
    values = [same, per_member[0], per_member[1], later[0], later[1], draws(2, seed=1)[0]]
    assert len({value.tobytes() for value in values}) == len(values)


def test_random_functions_do_not_depend_on_the_number_of_ranks():
    for single, several in zip(draws(1), draws(4), strict=True):
        np.testing.assert_array_equal(single, several)


def test_seeds_may_be_any_whole_number():
    values = [draws(1, seed=seed)[0].tobytes() for seed in (0, -1, 2**64 + 7)]
    assert len(set(values)) == len(values)


MAP = """plan p
axis data = 2
input x : tree
fn f(tree) -> tree, tree on device elementwise
each step {
    y, z = map f(x)
    output y, z
}
"""


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda x: x, "2 values"),
        (lambda x: (x, x, x), "3 values"),
        (lambda x, y: (x, y), "1 argument"),
        (lambda: None, "1 argument"),
        (lambda x: (x, {"a": x["a"]}), "whose structure differs"),
        (lambda x: (x, {"a": x["a"][:1], "b": x["b"]}), "the shape [1]"),
        (lambda x: (x, jax.tree.map(lambda v: v.astype(jnp.float16), x)), "the dtype float16"),
    ],
)
def test_functions_that_are_not_what_the_plan_declares(function: Any, words: str):
    tree = {"a": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}
    run = bind(MAP, mesh_of(data=2), {"x": tree}, functions={"f": function})
    with pytest.raises(CommplanError) as error:
        run.step({}, x=tree)
    assert code_of(error) == "CP0809"
    assert words in str(error.value)
    assert error.value.diagnostics[0].span.line == 6


def test_constants_take_the_declared_dtype():
    tree = {"a": np.zeros(3, np.float32), "b": np.ones((), np.float32)}
    run = bind(MAP, mesh_of(data=2), {"x": tree}, functions={"f": lambda x: (x, {"a": jnp.ones(3), "b": 2})})
    out, _ = run.step({}, x=tree)
    assert float(out.z["b"]) == 2.0
    assert out.z["b"].dtype == jnp.float32


def test_pieces_of_a_cut_value_draw_their_own_numbers():
    text = """plan p
axis data = 4
input x : f32[8]
fn noise(f32[8]) -> f32[8] on device elementwise random
each step {
    s = slice x over data
    y = map noise(s)
    output y
}
"""
    run = bind(text, mesh_of(data=4), functions={"noise": noise})
    out, _ = run.step(run.init(), x=np.zeros(8, np.float32))
    assert len(set(np.asarray(out.y).tolist())) == 8
