"""`run.spmd`: a training step with specs from the plan, and its errors."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from support.embedding import bind, mesh_of, refused

import commplan
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


@pytest.mark.parametrize(
    ("function", "call"),
    [
        (lambda state, x, /: (state, x), lambda step, state, x: step(state, x)),
        (lambda state, /, *, x: (state, x), lambda step, state, x: step(state, x=x)),
        (lambda *, state, x: (state, x), lambda step, state, x: step(x=x, state=state)),
    ],
    ids=["positional-only", "keyword-only", "all by keyword"],
)
def test_parameters_may_be_positional_only_or_keyword_only(function: Any, call: Any):
    run = bound()
    step = run.spmd(x="per member, data", returns="per member, data")(function)
    x = np.arange(4).reshape(2, 2)
    np.testing.assert_array_equal(call(step, run.init(), x)[1], x)


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
        for key, leaf in alone[m].items():
            np.testing.assert_allclose(np.asarray(params[key])[m], leaf, atol=1e-5)


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
    named = bound().context.schedule.named
    # `params` is an output that is the same over data, and an input that is not; `seen` a state.
    assert named["params"].placement.per == ("member",)
    assert named["seen"].placement.per == ("member",)
    assert named["one"].placement.per == ("member", "data")
    assert "nothing" not in named


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
    assert "the plan has no axis `nothing`" in refused(lambda: run.spmd(params="per nothing"))[1]
    assert refused(lambda: run.spmd(params="per"))[0] == "CP0811"
    axis = next(iter(run.context.sizes))
    assert refused(lambda: run.spmd(params=f"per {axis}, {axis}"))[0] == "CP0811"
    assert refused(lambda: run.spmd(params=f"per {axis} split {axis}"))[0] == "CP0811"
    assert refused(lambda: run.spmd(params="params", returns=("parms",)))[0] == "CP0811"

    def train(state, params, x):
        return state

    code, text = refused(lambda: run.spmd(params="params", y="params")(train))
    assert code == "CP0811"
    assert "run.spmd does not declare the placement of `x`" in text
    assert "no parameter `y`" in text
    code, text = refused(lambda: run.spmd(parms="params", x="params")(train))
    assert "no parameter `parms`; did you mean `params`?" in text
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
    code, words = refused(lambda: stateless(state, params))
    assert code == "CP0812"
    assert "`stateless` returned first a state that lacks `seen`" in words
    assert refused(lambda: other_state(state, params))[0] == "CP0805"
    assert refused(lambda: few(state))[0] == "CP0811"
    assert refused(lambda: few({"seen": params}, params))[0] == "CP0805"


def test_an_argument_named_like_an_output_of_another_placement_is_told_which_to_write():
    run = bind(
        "plan p\naxis data = 2\ninput loss : f32 per data\n"
        "each step {\n    loss = reduce loss over data by mean\n    output loss\n}\n",
        mesh_of(data=2),
    )

    def mean(state, loss):
        out, state = run.step(state, loss=loss)
        return state, out.loss

    losses = np.array([1, 3], np.float32)
    code, words = refused(lambda: run.spmd(loss="loss", returns="loss")(mean)({}, losses))
    assert code == "CP0805"
    assert 'declare the argument of run.spmd as "per data"' in words
    assert float(run.spmd(loss="per data", returns="loss")(mean)({}, losses)[1]) == 2


def test_results_are_named_by_argument_or_by_value():
    run, params, state = started()

    @run.spmd(params="params", opt="params", x="per member, data", returns=("params", "opt", "one", "x"))
    def train(state, params, opt, x):
        return state, params, opt + 1, jnp.int32(3), x

    x = np.zeros((2, 2, 3), np.float32)
    _, _, opt, scale, same = train(state, params, np.zeros(2), x)
    assert opt.sharding.spec == P("member")
    assert scale.shape == (2, 2)  # as the plan's input `one`: per member, data
    assert same.sharding.spec == P("member", "data")


def test_what_a_result_may_be_named_after():
    run = bound()
    code, text = refused(lambda: run.spmd(params="params", opt="params", returns=("params", "loss")))
    assert code == "CP0811"
    assert "returns[1]: the plan has no output, state or input `loss`" in text
    assert "results may also have the name of an argument: `params` and `opt`" in text

    @run.spmd(grads="per member, data", returns=("grads",))
    def both(state, grads):
        return state, run.step(state, grads=grads, one=jnp.int32(1))[0].grads

    grads = {name: np.ones((2, 2, *leaf.shape), np.float32) for name, leaf in TREE.items()}
    _, reduced = both(run.init(), grads)  # a name that is both means the value: the phase's result
    assert reduced["w"].sharding.spec == P("member")


def test_a_number_has_nothing_to_cut():
    run = bind(PLAN, mesh_of(member=2, data=2), {"params": TREE, "grads": TREE})

    @run.spmd(x="split data", returns=("x",))
    def step(state, x):
        return state, x.sum()

    code, text = refused(lambda: step({}, np.zeros(8, np.float32)))
    assert code == "CP0813"
    assert "result 1 of `step` is a scalar that differs over data, and a scalar cannot be cut" in text
    assert "should be the same" not in text
    assert 'returns=("per data", ...)' in text


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


def test_a_result_named_like_an_output_and_an_input_says_which_it_is():
    run, params, state = started()

    @run.spmd(params="params", x="per member, data", returns="params")
    def local(state, params, x):
        return state, jax.tree.map(lambda p: p + x.sum(), params)

    code, text = refused(lambda: local(state, params, np.zeros((2, 2, 3), np.float32)))
    assert code == "CP0813"
    note = "`params` means the output, not the input or state `params`, whose placement is `per member, data`"
    assert note in text


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


ENCODED = """plan encoded
axis data = 8
input grads : tree partial data
each step {
    grads = reduce grads over data by mean { wire = int8(block = 8) }
    output grads
}
"""


def test_a_tap_does_not_encode():
    run = commplan.loads(ENCODED).compile(mesh_of(data=8), shapes={"grads": TREE}).bind(mesh_of(data=8))
    step = run.spmd(params="same")(lambda state, params: (state, run.tap(params)))
    code, text = refused(lambda: step({}, TREE))
    assert (code, "in blocks" in text) == ("CP0815", True)


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


def test_a_member_of_one_device_has_nothing_to_vary_over():
    plan = "plan p\nensemble member = 2\nfn twice(tree) -> tree on device\ninput grads : tree per member\n"
    plan += "each step {\n    grads = map twice(grads)\n    output grads\n}\n"
    twice = {"twice": lambda tree: jax.tree.map(lambda x: 2 * x, tree)}
    member_run = bind(plan, mesh_of(member=2), {"grads": TREE}, functions=twice).member(1)

    @member_run.jit
    @member_run.spmd(params="same", x="same")
    def step(state: Any, params: Any, x: Any) -> Any:
        grads = jax.grad(loss)(member_run.varying(params), x)
        return state, member_run.step(state, grads=grads)[0].grads

    params = {"w": jnp.ones((3, 2)), "b": jnp.zeros(2)}
    x = jnp.ones((4, 3))
    _, outputs = step({}, params, x)
    jax.tree.map(np.testing.assert_allclose, outputs, twice["twice"](jax.grad(loss)(params, x)))
