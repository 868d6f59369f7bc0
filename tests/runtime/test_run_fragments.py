"""Phases in fragments against a reference in NumPy: streaming DiLoCo, whose outer state is whole or split."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.diloco import (
    BUILT_IN,
    FRAGMENTS,
    ISLANDS,
    OPTAX,
    SHAPES,
    Reference,
    check,
    nesterov,
    text,
    weights,
)
from support.embedding import mesh_of, refused

import commplan
from commplan.diagnostics import CommplanError
from commplan.lowering.numpy import NumpyRun


def bind(plan: str, shapes: Mapping[str, tuple[int, ...]] = SHAPES, **functions: Any) -> Any:
    tree = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    loaded = commplan.loads(plan, "streaming.plan")
    sizes = {axis.name: axis.size for axis in loaded.graph.axes}
    mesh = mesh_of(**sizes)
    return loaded.compile(mesh=mesh, shapes={"params": tree}).bind(mesh, functions=functions)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("outer", [BUILT_IN, OPTAX], ids=["built in", "optax"])
def test_fragments_are_exchanged_in_turn(split: bool, outer: str):
    functions = {"outer": nesterov} if outer == OPTAX else {}
    run = bind(text(split=split, outer=outer), **functions)
    phase, params = run.every[36], weights(0)
    assert phase.interval == 4
    _, state = run.start(run.init(), params=params)
    reference = Reference(params, ISLANDS if split else 1)
    for step in range(2 * FRAGMENTS + 1):
        moved = weights(step + 1)
        params = {name: np.asarray(x) + moved[name] for name, x in params.items()}
        reference.params = {name: x + moved[name] for name, x in reference.params.items()}
        out, state = phase(state, params=params)
        params = out.params
        reference.exchange()
        check(params, state, reference)


def test_fragments_within_a_jitted_step():
    run = bind(text(split=True, data=2))

    @run.jit
    @run.spmd(params="params")
    def exchange(state: Any, params: Any) -> Any:
        out, state = run.every[36](state, params=params)
        return state, out.params

    params = weights(0)
    _, state = run.start(run.init(), params=params)
    reference = Reference(params, ISLANDS)
    for _ in range(FRAGMENTS + 2):
        state, params = exchange(state, params)
        reference.exchange()
        check(params, state, reference)


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_a_run_goes_on_in_mid_cycle_on_other_ranks(split: bool):
    run, params = bind(text(split=split, data=2)), weights(0)
    _, state = run.start(run.init(), params=params)
    reference = Reference(params, ISLANDS if split else 1)
    for _ in range(4):
        out, state = run.every[36](state, params=params)
        params = out.params
        reference.exchange()
    saved = jax.tree.map(np.asarray, (params, state))
    params, state = saved
    run = bind(text(split=split, data=1))
    for _ in range(FRAGMENTS):
        out, state = run.every[36](state, params=params)
        params = out.params
        reference.exchange()
    check(params, state, reference)


def test_the_numpy_backend_runs_the_same_fragments():
    plan = commplan.loads(text(split=True), "streaming.plan")
    shapes = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in SHAPES.items()}
    program = NumpyRun(plan.compile(shapes={"params": shapes}).schedule)
    params = weights(0)
    trees = [{name: x[island] for name, x in params.items()} for island in range(ISLANDS)]
    _, state = program.phase("start", {"params": trees})
    reference = Reference(params, ISLANDS)
    for call in range(FRAGMENTS + 1):
        outputs, state = program.phase("every_36", {"params": trees}, state, call)
        trees = outputs["params"]
        reference.exchange()
        for island, tree in enumerate(trees):
            for name, x in tree.items():
                np.testing.assert_allclose(x, reference.params[name][island], rtol=0, atol=2e-6)


def test_a_scalar_of_floats_belongs_to_the_first_fragment():
    shapes = {"w": (18,), "scale": ()}
    run, params = bind(text(split=False), shapes), weights(0, shapes)
    _, state = run.start(run.init(), params=params)
    out, state = run.every[36](state, params=params)
    assert not np.array_equal(out.params["scale"], params["scale"])
    after, _ = run.every[36](state, params=out.params)
    np.testing.assert_array_equal(after.params["scale"], out.params["scale"])


@pytest.mark.parametrize(("split", "dtype"), [(False, jnp.int32), (True, jnp.float32)])
def test_counts_and_scalars_of_split_trees_are_refused(split: bool, dtype: Any):
    plan = commplan.loads(text(split=split), "streaming.plan")
    tree = {"w": jax.ShapeDtypeStruct((18,), jnp.float32), "count": jax.ShapeDtypeStruct((), dtype)}
    with pytest.raises(CommplanError) as caught:
        plan.compile(shapes={"params": tree})
    assert {problem.code for problem in caught.value.diagnostics} == {"CP0773"}


@pytest.mark.parametrize("fragments", [FRAGMENTS, 1])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_an_exchange_is_hidden_under_steps(split: bool, fragments: int):
    run = bind(text(split=split, fragments=fragments, hidden=4))
    phase, params = run.every[36], weights(0)

    @run.jit
    @run.spmd(params="params", moves="per island")
    def window(state: Any, params: Any, moves: Any) -> Any:
        call = phase.begin(state, params=params)
        for step in range(4):
            params = call.advance(params)
            params = jax.tree.map(lambda x, move, step=step: x + move[step], params, moves)
        out, state = call.finish(state, params=params)
        return state, out.params

    _, state = run.start(run.init(), params=params)
    reference = Reference(params, ISLANDS if split else 1, fragments)
    for number in range(fragments + 2):
        moves = {name: np.stack([weights(4 * number + n)[name] for n in range(4)], 1) / 4 for name in SHAPES}
        state, params = window(state, params, moves)
        reference.exchange({name: x.sum(1) for name, x in moves.items()})
        check(params, state, reference)


def test_a_hidden_phase_can_be_called_at_once():
    run, params = bind(text(split=True, hidden=4)), weights(0)
    _, state = run.start(run.init(), params=params)
    reference = Reference(params, ISLANDS)
    out, state = run.every[36](state, params=params)
    reference.exchange()
    check(out.params, state, reference)


@pytest.mark.parametrize("hidden", [0, 4])
def test_calls_that_cannot_begin_are_refused(hidden: int):
    run, params = bind(text(split=True, hidden=hidden)), weights(0)
    _, state = run.start(run.init(), params=params)
    code, words = refused(lambda: run.every[36].begin(state, params=params))
    assert code == "CP0862"
    assert ("is not hidden" in words) == (hidden == 0)


@pytest.mark.parametrize("ends", [0, 2])
def test_a_call_ends_once(ends: int):
    run, params = bind(text(split=True, hidden=4)), weights(0)
    _, state = run.start(run.init(), params=params)

    @run.spmd(params="params")
    def window(state: Any, params: Any) -> Any:
        call = run.every[36].begin(state, params=params)
        for _ in range(ends):
            _, state = call.finish(state, params=params)
        return state, params

    code, words = refused(lambda: run.jit(window)(state, params))
    assert code == "CP0862"
    assert ("returns before" in words) == (ends == 0)


def test_the_end_of_a_call_needs_the_count_of_calls():
    run, params = bind(text(split=True, hidden=4)), weights(0)
    _, state = run.start(run.init(), params=params)

    @run.spmd(params="params")
    def window(state: Any, params: Any) -> Any:
        call = run.every[36].begin(state, params=params)
        out, state = call.finish({}, params=params)
        return state, out.params

    code, words = refused(lambda: run.jit(window)(state, params))
    assert code == "CP0812" and "#calls" in words


def test_the_end_of_a_call_takes_the_inputs_that_are_read_late():
    run, params = bind(text(split=True, hidden=4)), weights(0)
    _, state = run.start(run.init(), params=params)

    @run.spmd(params="params")
    def window(state: Any, params: Any) -> Any:
        out, state = run.every[36].begin(state, params=params).finish(state)
        return state, out.params

    code, words = refused(lambda: run.jit(window)(state, params))
    assert code == "CP0804" and "`params`" in words


def refused_in_a_step(body: Callable[[Any, Any, Any], Any], hidden: int = 4) -> tuple[str, str]:
    """The error of a step that calls `body` with the run, the state and the weights."""
    run, params = bind(text(split=True, hidden=hidden)), weights(0)
    _, state = run.start(run.init(), params=params)

    @run.spmd(params="params")
    def window(state: Any, params: Any) -> Any:
        body(run, state, params)
        return state, params

    return refused(lambda: run.jit(window)(state, params))


def begins_twice(run: Any, state: Any, params: Any) -> None:
    run.every[36].begin(state, params=params)
    run.every[36].begin(state, params=params)


def calls_meanwhile(run: Any, state: Any, params: Any) -> None:
    run.every[36].begin(state, params=params)
    run.every[36](state, params=params)


def starts_meanwhile(run: Any, state: Any, params: Any) -> None:
    run.every[36].begin(state, params=params)
    run.start(state, params=params)


def advances_after_the_end(run: Any, state: Any, params: Any) -> None:
    call = run.every[36].begin(state, params=params)
    call.finish(state, params=params)
    call.advance(params)


def ends_an_earlier_call(run: Any, state: Any, params: Any) -> None:
    call = run.every[36].begin(state, params=params)
    _, state = call.finish(state, params=params)
    run.every[36].begin(state, params=params)
    call.finish(state, params=params)


def advances_in_a_loop(run: Any, state: Any, params: Any) -> None:
    call = run.every[36].begin(state, params=params)
    jax.lax.fori_loop(0, 4, lambda _, params: call.advance(params), params)


def begins_under_jit(run: Any, state: Any, params: Any) -> None:
    calls: list[Any] = []
    jax.jit(lambda state, params: calls.append(run.every[36].begin(state, params=params)))(state, params)
    calls[0].finish(state, params=params)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (begins_twice, "`every_36` begins before the call of phase `every_36` has ended"),
        (calls_meanwhile, "`every_36` is called before the call of phase `every_36` has ended"),
        (starts_meanwhile, "`start` is called before the call of phase `every_36` has ended"),
        (advances_after_the_end, "`advance` of phase `every_36` belongs to no open call"),
        (ends_an_earlier_call, "`finish` of phase `every_36` belongs to no open call"),
        (advances_in_a_loop, "`advance` of phase `every_36` is traced apart from its `begin`"),
        (begins_under_jit, "`finish` of phase `every_36` is traced apart from its `begin`"),
    ],
)
def test_methods_of_a_call_in_another_order_are_refused(body: Any, expected: str):
    code, words = refused_in_a_step(body)
    assert code == "CP0862"
    assert expected in words


def test_an_error_between_beginning_and_end_leaves_no_open_call():
    run, params = bind(text(split=True, hidden=4)), weights(0)
    _, state = run.start(run.init(), params=params)
    fails = [True, False]

    @run.jit
    @run.spmd(params="params")
    def window(state: Any, params: Any) -> Any:
        call = run.every[36].begin(state, params=params)
        if fails.pop(0):
            raise ValueError("of the step")
        out, state = call.finish(state, params=params)
        return state, out.params

    with pytest.raises(ValueError, match="of the step"):
        window(state, params)
    state, params = window(state, params)
    assert state["#calls"]["every_36"] == 1


def test_a_step_may_contain_derivatives_and_random_keys():
    run, params = bind(text(split=True, hidden=4)), weights(0)
    _, state = run.start(run.init(), params=params)

    @run.jit
    @run.spmd(params="params")
    def window(state: Any, params: Any) -> Any:
        call = run.every[36].begin(state, params=params)
        for _ in range(4):
            params, key, none = call.advance((params, jax.random.key(0), None))
            assert none is None
            assert key.dtype == jax.random.key(0).dtype
            grads = jax.grad(lambda params: sum((x**2).sum() for x in call.advance(params).values()))(params)
            params = jax.tree.map(lambda x, grad: x - grad / 8, params, grads)
        out, state = call.finish(state, params=params)
        return state, out.params

    reference = Reference(params, ISLANDS)
    moves = {name: (0.75**4 - 1) * x for name, x in reference.params.items()}
    state, params = window(state, params)
    reference.exchange(moves)
    check(params, state, reference)


def test_values_of_a_step_are_arrays():
    code, words = refused_in_a_step(
        lambda run, state, params: run.every[36].begin(state, params=params).advance({"name": "adam"})
    )
    assert code == "CP0805"
    assert "`every_36` was given a str at `name`" in words


@pytest.mark.parametrize("method", ["begin", "finish"])
def test_inputs_of_begin_and_finish_have_names(method: str):
    def body(run: Any, state: Any, params: Any) -> None:
        if method == "begin":
            run.every[36].begin(state, params)
        run.every[36].begin(state, params=params).finish(state, params)

    code, words = refused_in_a_step(body)
    assert code == "CP0804"
    assert "takes its inputs by name, but was passed 2 values" in words


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({}, "has no count of `every_36`"),
        ({"every_12": np.int32(3)}, "it has `every_12`"),
        (3, "is an int"),
        ({"every_36": np.float32(3)}, "is float32[]"),
        ({"every_36": np.zeros(2, np.int32)}, "is int32[2]"),
        ({"every_36": None}, "is None"),
    ],
)
def test_the_count_of_calls_is_an_integer(counts: Any, expected: str):
    run, params = bind(text(split=True)), weights(0)
    _, state = run.start(run.init(), params=params)
    code, words = refused(lambda: run.every[36](state | {"#calls": counts}, params=params))
    assert code == "CP0812"
    assert expected in words


@pytest.mark.parametrize("fragments", [1, FRAGMENTS])
def test_an_input_that_is_an_output_is_read_at_the_end(fragments: int):
    plan = text(split=True, fragments=fragments, hidden=4).replace("params = map mix(params, shared)\n", "\n")
    run, params = bind(plan), weights(0)
    assert run.every[36].lowered.late_arguments == ("params",)
    _, state = run.start(run.init(), params=params)

    @run.jit
    @run.spmd(params="params")
    def window(state: Any, params: Any) -> Any:
        call = run.every[36].begin(state, params=params)
        params = jax.tree.map(lambda x: x + 1, call.advance(params))
        out, state = call.finish(state, params=params)
        return state, out.params

    _, moved = window(state, params)
    for name, x in params.items():
        np.testing.assert_array_equal(moved[name], x + 1)
