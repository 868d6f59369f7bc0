"""What is bound to a program, and when its phases may run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support.elastic_run import ELASTIC, TREE, elastic, workers
from support.embedding import bind, code_of, mesh_of, refused

import commplan
from commplan.diagnostics import CommplanError


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
