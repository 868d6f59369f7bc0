"""Terms of a sum: a constant is that of each rank, and a value that is reduced already is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.embedding import bind, mesh_of, refused

from commplan.lowering.jax._lineage import lineage

PLAN = """plan p
axis data = 2
input count : f32 partial data
input tree  : tree partial data
input whole : f32
each step {
    count = reduce count over data by sum
    output count
}
phase trees {
    tree = reduce tree over data by sum
    output tree, whole
}
"""
SHAPES = {"tree": {"n": jnp.zeros(()), "w": jnp.zeros(3)}}


@pytest.fixture(scope="module")
def run() -> Any:
    return bind(PLAN, mesh_of(data=2), SHAPES)


def summed(run: Any, term: Callable[[Any], Any], wrap: Any = jax.jit) -> Any:
    """The sum of `term(x)`, x: f32[4, 3] of each rank, by a step under `wrap`."""

    def step(state: Any, x: Any) -> Any:
        out, state = run.step(state, count=term(x))
        return state, out.count

    return wrap(run.spmd(x="split data", returns="count")(step))({}, np.ones((8, 3), np.float32))[1]


def identity(function: Any) -> Any:
    return function


@pytest.mark.parametrize("wrap", [jax.jit, identity], ids=["jit", "alone"])
@pytest.mark.parametrize(
    "term",
    [
        lambda x: jnp.float32(x.shape[0]),
        lambda x: x.shape[0],
        lambda x: float(x.shape[0]),
        lambda x: np.float32(x.shape[0]),
        lambda x: np.float64(x.shape[0]),
        lambda x: jnp.ones(x.shape[0]).sum(),
        lambda x: jax.jit(lambda: jnp.arange(x.shape[0]).sum() - 2.0)(),
        lambda x: jax.vmap(lambda element: element)(jnp.ones(x.shape[0])).sum(),
        lambda x: jnp.ones_like(x[:, 0]).sum(),
    ],
    ids=["jnp", "int", "float", "numpy", "float64", "ones", "inner jit", "vmap", "ones_like"],
)
def test_a_constant_is_the_term_of_each_rank(run: Any, term: Any, wrap: Any) -> None:
    assert summed(run, term, wrap) == 8


def test_a_constant_within_a_derivative_and_a_loop(run: Any) -> None:
    four = jnp.float32(4)

    def step(state: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            out, _ = run.step(state, count=four)
            return w * out.count

        def body(total: Any, _: Any) -> Any:
            out, _ = run.trees(state, tree={"n": four, "w": jnp.ones(3)}, whole=jnp.float32(1))
            return total + out.tree["n"], None

        looped, _ = jax.lax.scan(body, jnp.float32(0), None, length=2)
        return state, jax.grad(loss)(1.0), looped

    results = run.spmd(x="split data", returns=("same", "same"))(step)({}, np.ones((8, 3), np.float32))
    assert results[1:] == (8, 16)


@pytest.mark.parametrize(
    ("term", "message", "causes"),
    [
        (
            lambda run, x: jax.grad(lambda w: (x * w).sum())(jnp.float32(1)),
            "is already summed over data",
            ("JAX has summed this gradient", "jax.grad(loss)(run.varying(params), ...)"),
        ),
        (
            lambda run, x: jax.lax.pmean(x.sum(), "data"),
            "is already summed over data",
            ("the program's own collective has: ", "test_run_terms.py:"),
        ),
        (
            lambda run, x: run.step({}, count=x.sum())[0].count,
            "is already summed over data",
            ("phase `step` made it the same on all ranks: line 7 of the plan",),
        ),
        (
            lambda run, x: jnp.sqrt(run.step({}, count=x.sum())[0].count) * 2,
            "is already summed over data",
            ("phase `step` made it the same on all ranks: line 7 of the plan",),
        ),
    ],
    ids=["derivative", "own collective", "phase", "made of a phase's"],
)
def test_what_is_reduced_already_is_refused_with_its_cause(
    run: Any, term: Any, message: str, causes: tuple[str, ...]
) -> None:
    code, text = refused(lambda: summed(run, lambda x: term(run, x)))
    assert code == "CP0807"
    assert message in text
    assert all(cause in text for cause in causes), text


def test_an_argument_that_is_the_same_is_no_term_unless_the_step_says_so(run: Any) -> None:
    def step(state: Any, n: Any, *, varying: bool) -> Any:
        out, state = run.step(state, count=run.varying(n) if varying else n)
        return state, out.count

    def call(*, varying: bool) -> Any:
        def own(state: Any, n: Any) -> Any:
            return step(state, n, varying=varying)

        return run.spmd(n="whole", returns="count")(own)({}, jnp.float32(3))[1]

    code, text = refused(lambda: call(varying=False))
    assert code == "CP0807"
    assert "`count` is the same on all ranks over data, but the plan expects each rank's own term" in text
    assert "run.varying(x)" in text
    assert call(varying=True) == 6


def test_without_types_a_value_that_comes_back_is_still_found(run: Any) -> None:
    """As under MPI: `check_vma=False` types nothing."""

    def step(state: Any, x: Any) -> Any:
        out, state = run.step(state, count=x.sum())
        out, state = run.step(state, count=(-out.count).astype(jnp.float32))
        return state, out.count

    call = run.spmd(x="split data", returns="count", check_vma=False)(step)
    code, text = refused(lambda: call({}, np.ones((8, 3), np.float32)))
    assert (code, "phase `step` made it the same" in text) == ("CP0807", True)


def test_the_search_for_marked_values_ends_at_the_first_other_one() -> None:
    """It runs for every leaf of a gradient, each of which may depend on the whole model."""
    visited: list[Any] = []

    def is_marked(value: Any) -> bool:
        visited.append(value)
        return False

    def step(x: Any) -> Any:
        total = sum(jnp.sin(x) for _ in range(50))
        assert lineage(total, is_marked).has_inputs
        return total

    jax.make_jaxpr(step)(jnp.ones(3))
    assert len(visited) < 10
