"""Phases as callables: outside a shard_map, inside one, and their errors."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from support.embedding import bind, code_of, mesh_of, refused

import commplan
from commplan.diagnostics import CommplanError
from commplan.runtime.machines.mesh import check_mesh
from commplan.runtime.phases import Outputs

TREE = {"w": np.zeros((3, 5), np.float32), "b": np.zeros((), np.float32)}
ELASTIC = """plan p
axis worker = 4
input params : tree per worker
input eta    : f32
state center : tree
at start {
    center = broadcast params over worker from 0
}
every 4 steps {
    pull, center = elastic params with center over worker by sync(eta = eta, rho = 0.1)
    output pull
}
"""


def workers(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {k: rng.normal(size=(4, *v.shape)).astype(np.float32) for k, v in TREE.items()}


def elastic() -> Any:
    return bind(ELASTIC, mesh_of(worker=4), {"params": TREE, "center": TREE})


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


@pytest.mark.parametrize("state", [None, {}, {"centre": TREE}, {"center": TREE, "other": 1}])
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
    assert "did you mean `center`?" in refused(lambda: run.sharding("centre"))[1]
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


def test_functions_and_sources_are_those_of_the_plan():
    mesh = mesh_of(data=8)
    tree = {"w": jnp.zeros(9)}
    program = commplan.load("examples/plans/sharded_update.plan").compile(
        mesh, shapes={"params": tree, "grads": tree, "adam": tree}
    )
    functions: dict[str, Any] = {"adam_init": 3, "adamupdate": abs}
    with pytest.raises(CommplanError) as error:
        program.bind(mesh, functions=functions, sources={"images": []})
    problems = [(d.code, d.message) for d in error.value.diagnostics]
    assert {code for code, _ in problems} == {"CP0803"}
    assert [message for _, message in problems] == [
        "the plan has no function `adamupdate`",
        "function `adam_update` is not bound",
        "the plan has no source `images`",
        "function `adam_init` is of type `int`, which cannot be called",
    ]


def test_a_shard_map_over_other_axes():
    text = """plan p
ensemble m = 2
axis data = 2
input x : f32 per m, data
each step {
    y = reduce x over data by sum
    output y
}
"""
    run = bind(text, mesh_of(m=2, data=2))

    def step(x):
        return run.step({}, x=x.reshape(()))[0].y

    mapped = jax.shard_map(step, mesh=run.mesh, in_specs=P("m"), out_specs=P("m"), axis_names={"m"})
    code, text = refused(lambda: jax.jit(mapped)(np.zeros(2, np.float32)))
    assert (code, "data too" in text) == ("CP0814", True)
    other = mesh_of(m=4, data=2)
    mapped = jax.shard_map(step, mesh=other, in_specs=P(("m", "data")), out_specs=P())
    code, text = refused(lambda: jax.jit(mapped)(np.zeros(8, np.float32)))
    assert (code, "m = 4, expected 2" in text) == ("CP0814", True)


def test_a_saved_program_runs_without_its_shapes(tmp_path: Path):
    layers = [np.ones((2,), np.float32) * i for i in range(11)]
    mesh = mesh_of(worker=4)
    program = commplan.loads(ELASTIC).compile(mesh, shapes={"params": layers, "center": layers})
    program.save(tmp_path / "p.schedule.json")
    run = commplan.Program.load(tmp_path / "p.schedule.json").bind(mesh)
    params = [np.stack([x] * 4) for x in layers]
    state = run.init()
    assert list(state["center"]) == [str(i) for i in range(11)]
    zeros = [leaf + 0 for leaf in state["center"].values()]
    _, state = run.start(state, params=params)
    assert isinstance(state["center"], list)
    out, state = run.every[4]({"center": zeros}, params=params, eta=1.0)
    for i, leaf in enumerate(out.pull):
        np.testing.assert_allclose(leaf, np.full((4, 2), 0.1 * i), rtol=1e-6)


def test_wide_types_need_them_enabled():
    text = """plan p
axis data = 2
input x : f64[3] per data
input n : i64 per data
each step {
    y = broadcast x over data from 1
    n = reduce n over data by sum
    output y, n
}
"""
    x = np.array([[1.0, 2.0, 3.0], [np.pi, -0.0, 1e-300]])
    run = bind(text, mesh_of(data=2))
    code, text = refused(lambda: run.step({}, x=x, n=np.array([2**40, 3])))
    assert (code, "jax_enable_x64" in text) == ("CP0805", True)
    with jax.enable_x64(True):
        out, _ = run.step({}, x=x, n=np.array([2**40, 3]))
        assert np.asarray(out.y).tobytes() == x[1].tobytes()
        assert int(out.n) == 2**40 + 3


def test_a_wide_result_of_a_function_needs_them_enabled():
    text = """plan p
axis data = 2
fn f(f32) -> i64 on device
input x : f32 per data
each step {
    y = map f(x)
    output y
}
"""
    run = bind(text, mesh_of(data=2), functions={"f": lambda x: x.astype(int)})
    code, text = refused(lambda: run.step({}, x=np.ones(2, np.float32)))
    assert (code, "jax_enable_x64" in text) == ("CP0809", True)


@pytest.mark.parametrize("option", ["accumulate = f64", "wire = f64"])
def test_wide_options_need_them_enabled(option: str):
    text = f"""plan p
axis data = 2
input x : f32 partial data
each step {{
    y = reduce x over data by sum {{ {option} }}
    output y
}}
"""
    run = bind(text, mesh_of(data=2))

    @jax.jit
    @run.spmd(x="per data", returns="y")
    def step(state, x):
        out, state = run.step(state, x=run.varying(x))
        return state, out.y

    @jax.jit
    @run.spmd(x="per data", returns="same")
    def tapped(state, x):
        return state, jax.grad(lambda w: run.tap(w) * x)(jnp.float32(1))

    x = np.array([2**24 + 2, -1], np.float32)
    for function in (step, tapped):
        code, text = refused(lambda function=function: function({}, x))
        assert (code, "to f64 to compute `y`" in text, "jax_enable_x64" in text) == ("CP0805", True, True)
    with jax.enable_x64(True):
        assert step({}, x)[1] == 2**24 + 1


@pytest.mark.parametrize(
    "options",
    [
        {"sources": [1]}, {"functions": [1]}, {"seed": "x"}, {"seed": 1.5}, {"seed": True},
        *({"watchdog_s": wrong} for wrong in (0, -1.0, "abc", True, float("nan"), float("inf"))),
        {"timeout": 0}, {"timeout": None}, {"timeout": "x"}, {"busy_s": 0}, {"busy_s": None},
        {"on_hang": "print"}, {"on_hang": None},
    ],
)  # fmt: skip
def test_what_is_bound_comes_by_name_and_a_seed_is_whole(options: dict[str, Any]) -> None:
    program = commplan.loads(ELASTIC).compile(mesh_of(worker=4), {"params": TREE, "center": TREE})
    with pytest.raises(CommplanError) as caught:
        program.bind(mesh_of(worker=4), **options)
    assert caught.value.diagnostics[0].code == "CP0803"
    assert program.bind(mesh_of(worker=4), seed=np.int64(3)).context.seed == 3  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("mesh", [jax.sharding.AbstractMesh((4,), ("worker",)), np.zeros(3)])
def test_a_program_is_bound_to_devices(mesh: Any) -> None:
    program = commplan.loads(ELASTIC).compile({"worker": 4}, {"params": TREE, "center": TREE})
    with pytest.raises(CommplanError) as caught:
        program.bind(mesh)
    assert caught.value.diagnostics[0].code == "CP0801"


def test_a_period_is_a_number() -> None:
    with pytest.raises(CommplanError) as caught:
        elastic().every[[1]]
    assert caught.value.diagnostics[0].code == "CP0817"


def test_a_phase_with_some_of_its_sources_is_refused_when_it_is_bound():
    plan = commplan.loads("""plan pairs
source pictures : u8[2]
source classes  : i32
each step {
    x = load pictures batch 4 visit exactly_once seed 1
    y = load classes batch 4 visit exactly_once seed 1
    output x, y
}
""")
    mesh = mesh_of(data=1)
    program = plan.compile(mesh)
    with pytest.raises(CommplanError, match=r"CP0803.*source `classes` is not bound"):
        program.bind(mesh, sources={"pictures": [0]})
    program.bind(mesh)


def test_a_step_before_the_start_is_refused():
    run = elastic()
    state, params = run.init(), workers()
    with pytest.raises(CommplanError) as error:
        run.every[4](state, params=params, eta=0.05)
    assert code_of(error) == "CP0824"

    @run.spmd(params="params")
    def step(state, params):
        out, state = run.every[4](state, params=params, eta=0.05)
        return state, out.pull

    @run.spmd(params="params")
    def whole(state, params):
        _, state = run.start(state, params=params)
        out, state = run.every[4](state, params=params, eta=0.05)
        return state, out.pull

    with pytest.raises(CommplanError) as error:
        step(state, params)
    assert code_of(error) == "CP0824"
    whole(state, params)
    _, started = run.start(state, params=params)
    step(started, params)
    with pytest.raises(CommplanError) as error:  # the step is compiled by now
        step(state, params)
    assert code_of(error) == "CP0824" and "`every_4`" in str(error.value)
    restored = jax.tree_util.tree_map(lambda leaf: leaf + 0, state)
    step(restored, params)
    run.every[4](restored, params=params, eta=0.05)


def test_states_that_a_phase_does_not_read_are_not_copied(caplog: pytest.LogCaptureFixture):
    plan = ELASTIC.replace("state center", "input loss   : f32 per worker\nstate center")
    plan += "each step {\n    first = broadcast loss over worker from 0\n    output first\n}\n"
    run = bind(plan, mesh_of(worker=4), {"params": TREE, "center": TREE})
    before = run.init()  # whose zeros are not used before run.start
    with caplog.at_level("WARNING"), jax.log_compiles():
        _, after = run.step(before, loss=np.zeros(4, np.float32))
    assert after["center"]["w"] is before["center"]["w"]
    assert "Compiling jit(step)" in caplog.text
    assert refused(lambda: run.every[4](after, params=workers(), eta=0.05))[0] == "CP0824"
