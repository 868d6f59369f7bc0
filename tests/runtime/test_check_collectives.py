"""Collectives on known data: the results of backends are correct, and faults are found."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support.agreement import compile_case
from support.campaign import parameters
from support.embedding import bind, mesh_of
from support.example_cases import AXES, example
from support.random_case import make_case

from commplan.diagnostics import CommplanError
from commplan.lowering.jax.collectives.lax_backend import LaxBackend

PLAN = """plan p
axis a = 2
axis b = 4
input sums : f32[1001] partial b
input own  : {dtype}[12, 3] per a, b
each step {{
    x = {stage}
    output x
}}
"""
STAGES = {
    "all_reduce": "reduce own over b, a by sum",
    "max": "reduce own over a by max",
    "reduce_scatter": "scatter sums over b by mean",
    "broadcast": "broadcast own over b from 3",
    "broadcast over all": "broadcast own over b, a from 5",
    "shift": "shift own over b by -1",
    "swap": "swap own over b",
}


def checked(run: Any) -> list[str]:
    return [collective.text.partition(" ")[0] for collective in run.check_collectives(seconds=60.0)]


@pytest.mark.parametrize(
    ("stage", "dtype"),
    parameters(
        [*((stage, "f32") for stage in STAGES), ("all_reduce", "bf16"), ("max", "u8"), ("swap", "u8")],
        itertools.product(STAGES, ("bf16", "u8")),
    ),
)
def test_every_kind_gives_what_it_should(stage: str, dtype: str):
    run = bind(PLAN.format(stage=STAGES[stage], dtype=dtype), mesh_of(a=2, b=4))
    assert len(checked(run)) >= 1


@pytest.mark.parametrize("name", [name for name in AXES if name != "two_level"])
def test_the_collectives_of_the_example_plans_give_what_they_should(name: str):
    program, sizes = compile_case(example(name)), AXES[name]
    run = program.bind(mesh_of(**sizes), functions=example(name).functions)
    times = run.check_collectives(seconds=60.0)
    assert times and all(collective.place.startswith("line ") for collective in times)


@pytest.mark.parametrize(
    "seeds",
    parameters([(302, 323, 327, 329, 355)], [((302, 304, 305, 306, 308, 309, 312, 314, 322, 323, 327),)]),
)
def test_collectives_of_random_plans_give_what_they_should(seeds: tuple[int, ...]):
    kinds: set[str] = set()
    for seed in seeds:  # few plans that have every kind and reduction
        case = make_case(seed)
        program = compile_case(case)
        kinds.update(checked(program.bind(mesh_of(**case.sizes), functions=case.functions)))
    reduced = {"all_reduce(sum)", "all_reduce(max)", "all_reduce(min)", "reduce_scatter(sum)"}
    assert kinds == {*reduced, "all_gather", "all_to_all", "broadcast", "shift"}


def culprit(backend: Any, op: Any) -> Any:
    """Whether this is the rank that sends to all, or otherwise the last one."""
    return jnp.asarray(backend.index(op.axes)) == (op.root or backend.ways(op.axes) - 1)


def lost(backend: Any, x: Any, op: Any, move: Callable[..., Any]) -> Any:
    """The data of one rank is lost."""
    return move(backend, jnp.where(culprit(backend, op), 0, x).astype(x.dtype), op)


def shifted(backend: Any, x: Any, op: Any, move: Callable[..., Any]) -> Any:
    """The data of one rank is shifted by an element."""
    return move(backend, jnp.where(culprit(backend, op), jnp.roll(x, 1), x), op)


def turned(backend: Any, x: Any, op: Any, move: Callable[..., Any]) -> Any:
    """Blocks arrive at another place."""
    return jnp.roll(move(backend, x, op), 128 % max(x.size, 2) or 1)


@pytest.mark.parametrize("fault", [lost, shifted, turned])
@pytest.mark.parametrize("stage", STAGES)
def test_what_is_broken_is_found(monkeypatch: pytest.MonkeyPatch, stage: str, fault: Callable[..., Any]):
    move = LaxBackend.move
    run = bind(PLAN.format(stage=STAGES[stage], dtype="f32"), mesh_of(a=2, b=4))
    monkeypatch.setattr(LaxBackend, "move", lambda backend, x, op: fault(backend, x, op, move))
    with pytest.raises(CommplanError, match="CP0856"):
        run.check_collectives()


def test_what_is_not_begun_in_time_is_left_out():
    text = PLAN.format(stage=STAGES["all_reduce"], dtype="f32").replace(
        "output x", "y = reduce sums over b by sum\n    output x, y"
    )
    run = bind(text, mesh_of(a=2, b=4))
    assert len(run.check_collectives()) == 2
    largest = run.check_collectives(seconds=0.0)
    assert [collective.text for collective in largest] == ["all_reduce(sum) f32[1001] over b by native"]


@pytest.mark.parametrize("wrong", ["x", None, -1, float("nan"), float("inf"), True, 10**400, [1]])
def test_times_that_are_none_are_refused_with_one_process_too(wrong: Any):
    run = bind(PLAN.format(stage=STAGES["all_reduce"], dtype="f32"), mesh_of(a=2, b=4))
    for call in (
        lambda: run.check_collectives(wrong),
        lambda: run.check_collectives(timeout=wrong),
        lambda: run.jit(lambda x: x, check_s=wrong),
        lambda: run.jit(timeout=wrong),
    ):
        with pytest.raises(CommplanError, match=r"CP0857.*: expected seconds above 0, 10000000 at most"):
            call()


def test_nothing_is_tried_while_a_step_is_traced():
    run = bind(PLAN.format(stage=STAGES["all_reduce"], dtype="f32"), mesh_of(a=2, b=4))

    @run.spmd()
    def step(state: Any) -> Any:
        run.check_collectives()
        return state

    for traced in (lambda: jax.jit(step)({}), lambda: step({}), jax.jit(run.check_collectives)):
        with pytest.raises(CommplanError, match="inside a function that JAX traces"):
            traced()
    with jax.disable_jit():
        assert len(checked(run)) == 1


def test_equal_collectives_of_two_stages_are_checked_once():
    text = """plan p
axis a = 8
input x : f32[8] partial a
input y : f32[8] partial a
each step {
    u = reduce x over a by sum
    output u
}
every 2 steps {
    v = reduce y over a by sum
    output v
}
"""
    assert len(checked(bind(text, mesh_of(a=8)))) == 1
