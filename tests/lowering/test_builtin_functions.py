"""Built-in functions on arrays: optax computes the same, types are rounded once, and JAX and NumPy agree."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from support.oracle.builtins import builtin as by_oracle

import commplan
from commplan.diagnostics import CommplanError
from commplan.ir.plan import Fn
from commplan.ir.stages.builtins import Builtin
from commplan.ir.types import DType
from commplan.lowering.builtins import on_leaves
from commplan.lowering.jax.builtins import builtin_functions
from commplan.lowering.numpy import NumpyRun
from commplan.lowering.numpy.ops import numpy_dtype
from commplan.runtime.param_server.elementwise import non_elementwise_reason

PLAN = """plan diloco
axis island = 4
input params : tree per island
state center : tree
state moment : tree
fn outer = nesterov(rate = 0.7, momentum = 0.9)
fn mix = blend(alpha = 0.25)
at start {
    center = broadcast params over island from 0
    moment = map zeros(center)
    output center
}
every 36 steps {
    delta = map subtract(center, params)
    delta = reduce delta over island by mean
    center, moment = map outer(center, moment, delta)
    params = map mix(params, center)
    output params, center
}
"""
SHAPES = {"w": jax.ShapeDtypeStruct((5, 3), jnp.float32), "b": jax.ShapeDtypeStruct((), jnp.float32)}


def function(body: Builtin) -> Any:
    """`body` as a function of JAX trees."""
    program = commplan.loads("plan p\nphase look { }\n").compile()
    fn = Fn("f", (), (), "device", program.schedule.phases[0].span, elementwise=True, body=body)
    return builtin_functions(_with_fn(program.schedule, fn))["f"]


def _with_fn(schedule: Any, fn: Fn) -> Any:
    from msgspec.structs import replace  # noqa: PLC0415

    from commplan.ir.schedule import FnType  # noqa: PLC0415

    return replace(schedule, fns=(FnType.from_fn(fn),))


def tree(seed: int, dtype: Any = np.float32) -> Any:
    numbers = np.random.default_rng(seed)
    return {"w": numbers.normal(size=(5, 3)).astype(dtype), "b": numbers.normal(size=()).astype(dtype)}


def close(actual: Any, expected: Any, tolerance: float = 1e-6) -> None:
    pairs = zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True)
    for ours, theirs in pairs:
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("seed", range(5))
def test_nesterov_is_that_of_optax(seed: int):
    numbers = np.random.default_rng(seed)
    rate, momentum = float(numbers.uniform(0.01, 1)), float(numbers.uniform(0, 0.99))
    ours, theirs = function(Builtin("nesterov", (rate, momentum))), optax.sgd(rate, momentum, nesterov=True)
    weights = expected = tree(seed)
    moment, state = jax.tree.map(np.zeros_like, weights), theirs.init(expected)
    for step in range(4):
        gradient = tree(100 * seed + step)
        weights, moment = ours(weights, moment, gradient)
        updates, state = theirs.update(gradient, state, expected)
        expected = optax.apply_updates(expected, updates)
        close(weights, expected)
        close(moment, state[0].trace)


@pytest.mark.parametrize("seed", range(5))
def test_sgd_is_that_of_optax(seed: int):
    rate = float(np.random.default_rng(seed).uniform(0.01, 1))
    weights, gradient, optimizer = tree(seed), tree(seed + 50), optax.sgd(rate)
    updates, _ = optimizer.update(gradient, optimizer.init(weights), weights)
    close(function(Builtin("sgd", (rate,)))(weights, gradient), optax.apply_updates(weights, updates))


BODIES = (
    (Builtin("zeros"), 1), (Builtin("add"), 2), (Builtin("subtract"), 2), (Builtin("scale", (-3.0,)), 1),
    (Builtin("blend", (0.3,)), 2), (Builtin("sgd", (0.1,)), 2), (Builtin("nesterov", (0.7, 0.9)), 3),
    (Builtin("cast", dtype=DType.BF16), 1), (Builtin("cast", dtype=DType.F32), 1),
)  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.int32, np.uint8])
@pytest.mark.parametrize(("body", "count"), BODIES, ids=str)
def test_jax_numpy_and_the_oracle_agree(body: Builtin, count: int, dtype: Any):
    """Each rounds once: results differ by the rounding of f32 at most, integers in no bit."""
    is_float = np.dtype(dtype).kind in "fV"
    if not is_float and body.definition.numbers == "floats":
        pytest.skip("of floats only")
    xs = [tree(seed, np.float64)["w"] * 100 for seed in range(count)]
    xs = [x.astype(dtype) if is_float else x.astype(np.int64).astype(dtype) for x in xs]
    expected = by_oracle(body, *xs) if body.definition.results > 1 else (by_oracle(body, *xs),)
    jitted = jax.jit(function(body))(*xs)
    for answers in (jitted if body.definition.results > 1 else (jitted,), _by_numpy(body, xs)):
        for ours, theirs, like in zip(answers, expected, xs, strict=False):
            result = np.dtype(body.dtype.numpy_name) if body.dtype else np.dtype(dtype)
            assert ours.dtype == result and ours.shape == like.shape
            rounded = np.asarray(theirs).astype(result)
            epsilon = float(ml_dtypes.finfo(result).eps) if result.kind in "fV" else 0.0
            np.testing.assert_allclose(
                np.asarray(ours, np.float64), rounded.astype(np.float64), rtol=4 * epsilon, atol=200 * epsilon
            )


def _by_numpy(body: Builtin, xs: list[Any]) -> list[Any]:
    with np.errstate(all="ignore"):
        return [leaf for (leaf,) in on_leaves(body, [[x] for x in xs], numpy_dtype, np.full)]


def test_16_bit_floats_are_computed_in_32_bits():
    """1 + 2^-8 is no bfloat16; it is rounded after the multiplication, not before."""
    x = jnp.array([1 + 2**-7, 3.0], jnp.bfloat16)
    blend = function(Builtin("blend", (0.5,)))(x, jnp.array([1.0, 1.0], jnp.bfloat16))
    assert blend.dtype == jnp.bfloat16
    outer = function(Builtin("nesterov", (1.0, 0.5)))
    weights, moment = outer(jnp.ones(2), jnp.zeros(2, jnp.bfloat16), x)
    assert (weights.dtype, moment.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(weights, 1 - 1.5 * np.asarray(x, np.float32))


def test_zeros_of_a_nan_are_zeros():
    x = jnp.array([jnp.nan, jnp.inf, 1.0])
    np.testing.assert_array_equal(function(Builtin("zeros"))(x), [0, 0, 0])
    assert not function(Builtin("zeros"))(jnp.array([True])).any()


def test_integers_wrap_around():
    x = jnp.array([200], jnp.uint8)
    assert int(function(Builtin("add"))(x, x)[0]) == 144
    assert int(function(Builtin("subtract"))(jnp.uint8(1), jnp.uint8(2))) == 255


def test_a_server_can_apply_them_to_chunks():
    outer = function(Builtin("nesterov", (0.7, 0.9)))
    traced = [jax.make_jaxpr(outer)(*[jax.ShapeDtypeStruct((size,), jnp.float32)] * 3) for size in (4, 7)]
    assert not non_elementwise_reason(*traced)


def by_hand(steps: int, params: Any) -> tuple[Any, Any]:
    """The plan by NumPy and optax: the weights of all islands, and the center."""
    center = jax.tree.map(lambda x: x[0], params)
    optimizer = optax.sgd(0.7, 0.9, nesterov=True)
    state = optimizer.init(center)
    for _ in range(steps):
        delta = jax.tree.map(lambda c, p: (c - p).mean(0), center, params)
        updates, state = optimizer.update(delta, state, center)
        center = optax.apply_updates(center, updates)
        params = jax.tree.map(lambda p, c: 0.25 * p + 0.75 * c, params, center)
    return params, center


def test_diloco_runs_without_functions():
    mesh = jax.make_mesh((4,), ("island",), devices=jax.devices()[:4])
    run = commplan.loads(PLAN).compile(mesh, shapes={"params": SHAPES}).bind(mesh)
    numbers = np.random.default_rng(3)
    params: Any = jax.tree.map(lambda s: numbers.normal(size=(4, *s.shape)).astype(np.float32), SHAPES)
    _, state = run.start(run.init(), params=params)
    ours = params
    for _ in range(3):
        out, state = run.every[36](state, params=ours)
        ours = out.params
    expected, center = by_hand(3, params)
    close(ours, expected, 3e-6)
    close(out.center, center, 3e-6)


def test_numpy_runs_it_without_functions():
    schedule = commplan.loads(PLAN).compile(shapes={"params": SHAPES}).schedule
    trees = [tree(seed) for seed in range(4)]
    run = NumpyRun(schedule)
    _, states = run.phase("start", {"params": trees})
    outputs, _ = run.phase("every_36", {"params": trees}, states)
    params = jax.tree.map(lambda *xs: np.stack(xs), *trees)
    close(jax.tree.map(lambda *xs: np.stack(xs), *outputs["params"]), by_hand(1, params)[0])


def test_a_built_in_function_is_not_bound():
    mesh = jax.make_mesh((4,), ("island",), devices=jax.devices()[:4])
    program = commplan.loads(PLAN).compile(mesh, shapes={"params": SHAPES})
    with pytest.raises(CommplanError, match=r"`outer` as the built-in function `nesterov\(rate = 0.7"):
        program.bind(mesh, functions={"outer": lambda *xs: xs})


def test_a_cast_to_64_bits_needs_them():
    mesh = jax.make_mesh((1,), ("a",), devices=jax.devices()[:1])
    text = "plan p\naxis a = 1\nfn wide = cast(dtype = f64)\ninput x : f32[2]\n"
    run = commplan.loads(f"{text}each step {{\n  y = map wide(x)\n  output y\n}}\n").compile(mesh).bind(mesh)
    with pytest.raises(CommplanError, match="jax_enable_x64"):
        run.step(run.init(), x=np.zeros(2, np.float32))
