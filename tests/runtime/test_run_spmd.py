"""`run.spmd`: a training step with specs from the plan, and what it refuses."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.embedding import bind, code_of, mesh_of

from commplan.diagnostics import CommplanError

PLAN = """plan p
ensemble member = 2
axis data = 2
input params : tree per member, data
input grads  : tree per member partial data
state seen   : i32 per member
input one    : i32 per member, data
at start {
    params = broadcast params over data from 0
    seen   = broadcast one over data from 0
    output params
}
each step {
    grads = reduce grads over data by mean
    seen  = reduce one over data by sum
    output grads
}
"""
TREE = {"w": np.zeros((3, 2), np.float32), "b": np.zeros((2,), np.float32)}


def bound() -> Any:
    return bind(PLAN, mesh_of(member=2, data=2), {"params": TREE, "grads": TREE})


def started() -> tuple[Any, Any, Any]:
    run = bound()
    rng = np.random.default_rng(0)
    params = {k: rng.normal(size=(2, 2, *v.shape)).astype(np.float32) for k, v in TREE.items()}
    out, state = run.start(run.init(), params=params, one=np.ones((2, 2), np.int32))
    return run, out.params, state


def loss(params: Any, x: Any) -> Any:
    return ((x @ params["w"] + params["b"]) ** 2).mean()


def test_a_step_trains_like_one_device_per_member():
    run, params, state = started()
    optimizer = optax.adam(1e-2)

    @jax.jit
    @run.spmd(
        params="params", opt="params", x="per member, data", returns=("params", "params", "per member, data")
    )
    def train(state, params, opt, x):
        value, grads = jax.value_and_grad(loss)(run.varying(params), x)
        out, state = run.step(state, grads=grads, one=jnp.int32(2))
        updates, opt = optimizer.update(out.grads, opt, params)
        return state, optax.apply_updates(params, updates), opt, value

    x = np.random.default_rng(1).normal(size=(2, 2, 4, 3)).astype(np.float32)
    opt = jax.vmap(optimizer.init)(params)
    # The same on one device: the mean over all records of a member, as each shard has four of them.
    alone = [jax.tree.map(lambda p, m=m: jnp.asarray(np.asarray(p)[m]), params) for m in range(2)]
    states = [optimizer.init(p) for p in alone]
    for _ in range(3):
        state, params, opt, values = train(state, params, opt, x)
        for m in range(2):
            grads = jax.grad(loss)(alone[m], x[m].reshape(8, 3))
            updates, states[m] = optimizer.update(grads, states[m], alone[m])
            alone[m] = optax.apply_updates(alone[m], updates)
    assert values.shape == (2, 2)
    assert params["w"].sharding.spec == P("member")
    np.testing.assert_array_equal(state["seen"], [4, 4])
    for m in range(2):
        for key, one in alone[m].items():
            np.testing.assert_allclose(np.asarray(params[key])[m], one, atol=1e-5)


def test_the_results_may_be_fewer_than_the_arguments():
    run, params, state = started()

    @run.spmd(params="params", x="per member, data")
    def nothing(state, params, x):
        return state

    @run.spmd(params="params", x="per member, data")
    def first(state, params, x):
        return state, jax.tree.map(lambda p: 2 * p, params)

    @run.spmd(params="params", x="per member, data")
    def both(state, params, x):
        return state, params, x + 1

    x = np.zeros((2, 2, 3), np.float32)
    assert sorted(nothing(state, params, x)) == ["seen"]
    _, doubled = first(state, params, x=x)
    np.testing.assert_array_equal(doubled["w"], 2 * np.asarray(params["w"]))
    _, _, more = both(state, x=x, params=params)
    np.testing.assert_array_equal(more, x + 1)


def test_names_mean_the_last_output_then_the_state_then_the_input():
    run = bound()
    # `params` is an output that is the same over data, and an input that is not; `seen` a state.
    assert run.context.find("params").placement.per == ("member",)
    assert run.context.find("seen").placement.per == ("member",)
    assert run.context.find("one").placement.per == ("member", "data")
    assert run.context.find("nothing") is None


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


def refused(call: Any) -> tuple[str, str]:
    with pytest.raises(CommplanError) as error:
        call()
    return code_of(error), str(error.value)


def test_gradients_that_jax_has_summed_are_refused():
    run, params, state = started()

    @run.spmd(params="params", x="per member, data")
    def train(state, params, x):
        grads = jax.grad(loss)(params, x)
        _, state = run.step(state, grads=grads, one=jnp.int32(1))
        return state

    code, text = refused(lambda: train(state, params, np.zeros((2, 2, 4, 3), np.float32)))
    assert code == "CP0807"
    assert "jax.grad(loss)(run.varying(params), ...)" in text
    assert "at `b`" in text


def test_summed_gradients_are_fine_where_there_is_one_rank():
    run = bind(
        PLAN.replace("axis data = 2", "axis data = 1"),
        mesh_of(member=2, data=1),
        {"params": TREE, "grads": TREE},
    )
    params = {k: np.ones((2, 1, *v.shape), np.float32) for k, v in TREE.items()}
    out, state = run.start(run.init(), params=params, one=np.ones((2, 1), np.int32))

    @run.spmd(params="params", x="per member, data")
    def train(state, params, x):
        out, state = run.step(state, grads=jax.grad(loss)(params, x), one=jnp.int32(1))
        return state, out.grads

    _, grads = train(state, out.params, np.ones((2, 1, 4, 3), np.float32))
    expected = jax.grad(loss)({"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, jnp.ones((4, 3)))
    np.testing.assert_allclose(grads["w"][0], expected["w"])


def test_partial_inputs_need_a_shard_map():
    run, params, state = started()
    code, text = refused(lambda: run.step(state, grads=params, one=np.ones((2, 2), np.int32)))
    assert code == "CP0806"
    assert "@run.spmd" in text
    code, _ = refused(lambda: run.spmd(g="per member partial data"))
    assert code == "CP0806"


def test_values_that_should_be_the_same():
    text = """plan p
axis data = 2
input x : f32
input g : f32 partial data
each step {
    g = reduce g over data by sum
    output g, x
}
"""
    run = bind(text, mesh_of(data=2))

    @run.spmd(x="same")
    def step(state, x):
        out, state = run.step(state, g=run.varying(x), x=run.varying(x))
        return state, out.x

    code, text = refused(lambda: step({}, np.float32(1)))
    assert (code, "over data" in text) == ("CP0813", True)


def test_spmd_is_not_nested():
    run, params, state = started()

    @run.spmd(params="params")
    def inner(state, params):
        return state, params

    @run.spmd(params="params")
    def outer(state, params):
        return inner(state, params)

    code, text = refused(lambda: outer(state, params))
    assert (code, "`inner`" in text) == ("CP0810", True)


def test_names_and_parameters_agree():
    run = bound()
    assert refused(lambda: run.spmd(params="parms"))[0] == "CP0811"
    assert refused(lambda: run.spmd(params="per nothing"))[0] == "CP0811"
    assert refused(lambda: run.spmd(params="per"))[0] == "CP0811"
    assert refused(lambda: run.spmd(params="params", returns=("parms",)))[0] == "CP0811"

    def train(state, params, x):
        return state

    code, text = refused(lambda: run.spmd(params="params", y="params")(train))
    assert code == "CP0811"
    assert "does not say where `x` lies" in text
    assert "no parameter `y`" in text
    assert refused(lambda: run.spmd()(lambda: None))[0] == "CP0811"


def test_results_agree():
    run, params, state = started()

    @run.spmd(params="params")
    def extra(state, params):
        return state, params, jnp.zeros(())

    @run.spmd(params="params", returns=("params", "same"))
    def few(state, params):
        return state, params

    @run.spmd(params="params")
    def stateless(state, params):
        return params

    @run.spmd(params="params")
    def other_state(state, params):
        return {"seen": params}

    assert refused(lambda: extra(state, params))[0] == "CP0811"
    assert refused(lambda: few(state, params))[0] == "CP0811"
    assert refused(lambda: stateless(state, params))[0] == "CP0812"
    assert refused(lambda: other_state(state, params))[0] == "CP0805"
    assert refused(lambda: few(state))[0] == "CP0811"
    assert refused(lambda: few({"seen": params}, params))[0] == "CP0805"


def test_results_are_named_by_argument_or_by_value():
    run, params, state = started()

    @run.spmd(params="params", opt="params", x="per member, data", returns=("params", "opt", "one", "x"))
    def train(state, params, opt, x):
        return state, params, opt + 1, jnp.int32(3), x

    x = np.zeros((2, 2, 3), np.float32)
    _, _, opt, one, same = train(state, params, np.zeros(2), x)
    assert opt.sharding.spec == P("member")
    assert one.shape == (2, 2)  # as the plan's input `one`: per member, data
    assert same.sharding.spec == P("member", "data")


def test_what_a_result_may_be_named_after():
    run = bound()
    code, text = refused(lambda: run.spmd(params="params", opt="params", returns=("params", "loss")))
    assert code == "CP0811"
    assert "returns[1]: the plan has no output, state or input `loss`" in text
    assert "arguments that results may be named after: `params` and `opt`" in text
    code, text = refused(lambda: run.spmd(grads="per member, data", returns=("grads",)))
    assert code == "CP0811"
    assert "`grads` is an argument that lies `per member, data`, and a value of the plan that is" in text
    assert "write the placement that is meant" in text


def test_a_number_has_nothing_to_cut():
    run = bind(PLAN, mesh_of(member=2, data=2), {"params": TREE, "grads": TREE})

    @run.spmd(x="split data", returns=("x",))
    def step(state, x):
        return state, x.sum()

    code, text = refused(lambda: step({}, np.zeros(8, np.float32)))
    assert code == "CP0813"
    assert "result 1 of `step` is one number, another on each rank over data, and cannot be cut" in text
    assert "should be the same" not in text
    assert 'returns=("per data", ...)' in text


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
    _, state = run.start({}, x=np.float32([3, 4]))  # which reads none
    assert {name: float(value) for name, value in state.items()} == {"a": 3, "b": 4}
    out, state = run.other({"b": np.float32(7)})
    assert (float(out.b), list(state)) == (7, ["b"])

    @run.spmd(y="per data", returns="a")
    def step(state, y):
        out, state = run.step(state, y=y)
        return state, out.a

    state, a = step({"a": np.float32(3)}, np.float32([1, 2]))  # `b` comes with the step
    assert (sorted(state), float(a), float(state["b"])) == (["a", "b"], 3, 3)
    code, words = refused(lambda: step({"b": np.float32(0)}, np.float32([1, 2])))
    assert code == "CP0812"
    assert "phase `step` was given lacks `a`" in words
    assert "it uses `a`" in words

    @run.spmd()
    def forgetful(state):
        return {}

    code, words = refused(lambda: forgetful(state))
    assert (code, "lacks `a`, `b`" in words) == ("CP0812", True)


def test_results_that_should_be_the_same():
    run, params, state = started()

    @run.spmd(params="params", x="per member, data")
    def local(state, params, x):
        return state, jax.tree.map(lambda p: p + x.sum(), params)

    @run.spmd(params="params", x="per member, data", returns=())
    def other(state, params, x):
        return {"seen": state["seen"] + x.sum().astype(jnp.int32)}

    @run.spmd(params="params", x="per member, data", returns=())
    def nothing(state, params, x):
        return state

    x = np.zeros((2, 2, 3), np.float32)
    code, text = refused(lambda: local(state, params, x))
    assert code == "CP0813"
    assert re.search("result 1 of `local` at `[bw]` should be the same over data", text)
    code, text = refused(lambda: other(state, params, x))
    assert (code, "state `seen`" in text) == ("CP0813", True)
    np.testing.assert_array_equal(nothing(state, params, x)["seen"], state["seen"])


def test_arguments_have_the_dimensions_of_their_placement():
    run, params, state = started()

    @run.spmd(params="params", x="per member split data")
    def step(state, params, x):
        return state, params, x

    good = np.arange(2 * 6, dtype=np.float32).reshape(2, 6)
    np.testing.assert_array_equal(step(state, params, good)[2], good)
    code, text = refused(lambda: step(state, params, np.zeros((3, 6), np.float32)))
    assert (code, "should begin with [2]" in text) == ("CP0805", True)
    code, text = refused(lambda: step(state, params, np.zeros((2, 5), np.float32)))
    assert (code, "5 rows" in text) == ("CP0805", True)


def test_varying_costs_nothing_and_belongs_inside():
    run, params, state = started()
    code, _ = refused(lambda: run.varying(params))
    assert code == "CP0816"
    assert refused(lambda: run.tap(params))[0] == "CP0816"

    @run.spmd(params="params")
    def step(state, params):
        again = run.varying(run.varying(params))
        return state, jax.tree.map(lambda x: jax.lax.pmean(x, "data"), again)

    _, same = step(state, params)
    np.testing.assert_allclose(same["w"], params["w"])


def test_taps_that_cannot_do_what_the_plan_does():
    run, params, state = started()

    def call(tree, **options):
        @run.spmd(params="params")
        def step(state, params):
            run.tap(tree(params), **options)
            return state

        return step(state, params)

    assert refused(lambda: call(run.varying))[0] == "CP0815"
    assert refused(lambda: call(lambda p: p, like="one"))[0] == "CP0815"
    assert refused(lambda: call(lambda p: p, phase="evaluate"))[0] == "CP0817"
    assert refused(lambda: call(lambda p: p, phase="start"))[0] == "CP0815"
    weighted = bind("weighted_mean", mesh_of(member=2, data=4), {"grads": TREE})

    @weighted.spmd(params="per member")
    def step(state, params):
        return state, weighted.tap(params)

    tree = jax.tree.map(lambda x: np.stack([x, x]), TREE)
    code, text = refused(lambda: step({}, tree))
    assert (code, "weighted" in text) == ("CP0815", True)


def step(state: Any, params: Any = None) -> Any:
    return state


@pytest.mark.parametrize(
    "misuse",
    [
        lambda run: run.spmd(step),
        lambda run: run.spmd("params"),
        lambda run: run.spmd(params=3),
        lambda run: run.spmd(returns=3),
        lambda run: run.spmd(returns=["same", 3]),
    ],
)
def test_names_of_parameters_and_results_are_texts(misuse: Any) -> None:
    with pytest.raises(CommplanError) as caught:
        misuse(bound())
    assert caught.value.diagnostics[0].code == "CP0811"
    assert any("such as" in note.text for note in caught.value.diagnostics[0].notes)
