"""The engine's entry points as JAX primitives: `call`, or `start` and `finish`, run a program.

A program is a collective or a request to servers, which the engine knows by a number.

The custom calls are marked as having side effects for XLA, so XLA removes none. The primitives have no JAX
effect, because JAX dispatches functions with effects from Python, which takes 30 us longer than the fast
path. Instead a dead-code rule keeps all of them: a rank that ignores a result issues the same collectives as
the other ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn, cast
from weakref import WeakValueDictionary

import jax
import numpy as np
from jax import Array
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from commplan.diagnostics import fail
from commplan.lowering.jax import _compat

owners: WeakValueDictionary[int, Any] = WeakValueDictionary()  # channels, by program number in the engine


def _declare(name: str, aliases: dict[int, int]) -> Any:
    """The primitive of FFI target `commplan_mpi_NAME`.

    Args:
        name: The name of the entry point.
        aliases: The index of the result that uses the buffer of an operand, by the index of the operand.
    """
    primitive: Any = Primitive(f"commplan_{name}")
    primitive.multiple_results = True
    target = f"commplan_mpi_{name}"
    rule = jax.ffi.ffi_lowering(target, has_side_effect=True, operand_output_aliases=aliases)

    def abstract(*operands: Any, results: tuple[tuple[tuple[int, ...], Any], ...], program: int) -> list[Any]:
        return [ShapedArray(shape, dtype) for shape, dtype in results]

    def lowering(ctx: Any, *operands: Any, results: Any, program: int) -> Any:
        if (owner := owners.get(program)) is not None:
            ctx.module_context.add_keepalive(owner)
        return rule(ctx, *operands, program=np.int64(program))

    compiled = jax.jit(primitive.bind, static_argnames=("results", "program"))

    def evaluate(*operands: Any, **parameters: Any) -> Any:
        with jax.disable_jit(False):  # with disabled jit, `compiled` would call this function again
            return compiled(*operands, **parameters)

    primitive.def_abstract_eval(abstract)
    _compat.keep_unused(primitive)
    cast("Any", ad).primitive_jvps[primitive] = _no_derivative
    cast("Any", batching).primitive_batchers[primitive] = _no_batches
    primitive.def_impl(evaluate)
    cast("Any", mlir).register_lowering(primitive, lowering, platform="cpu")
    return primitive


def _no_batches(*_: object, **__: object) -> NoReturn:
    message = "jax.vmap cannot batch a collective over MPI"
    note = "one call moves one value: pass the whole batch to the phase, with a leading dimension in the plan"
    fail("CP0848", message, note, "or apply `jax.vmap` to the code around the phase")


def _no_derivative(*_: object, **__: object) -> NoReturn:
    message = "a collective over MPI cannot be differentiated"
    note = "phases have no derivative under MPI: take the gradient first, then call the phase with it"
    fail("CP0847", message, note, "run.tap(params) reduces gradients inside the backward pass")


@cache
def _primitive(name: str, inputs: int, outputs: int) -> Any:
    """The primitive `call`, `start` or `finish` with this many operands and results, without the token."""
    if name == "call":
        return _declare(name, {inputs: outputs})
    if name == "start":
        return _declare(name, {inputs: outputs + 1})
    return _declare(name, {inputs + i: i for i in range(outputs)} | {inputs + outputs + 1: outputs})


def _bind(primitive: Any, operands: Sequence[Array], results: Sequence[Any], program: int) -> list[Array]:
    shapes = tuple((tuple(result.shape), np.dtype(result.dtype)) for result in results)
    return primitive.bind(*operands, results=shapes, program=program)


def call(
    xs: Sequence[Array], token: Array, results: Sequence[Any], program: int
) -> tuple[list[Array], Array]:
    """Run a program.

    Args:
        xs: Its operands.
        token: The token of the previous operation.
        results: Values with the shapes and dtypes of its results.
        program: Its number in the engine.

    Returns:
        The results, and the token for the next operation.
    """
    *ys, after = _bind(_primitive("call", len(xs), len(results)), (*xs, token), (*results, token), program)
    return ys, after


def start(
    xs: Sequence[Array], token: Array, results: Sequence[Any], program: int
) -> tuple[list[Array], Array | None, Array]:
    """Start a program; see `call` for the arguments.

    Outside of a trace, results do not stay in their buffers, so the program is also finished.

    Returns:
        The results, which are not complete before `finish`; the handle for `finish`, i32[2], or None if the
        program is finished; and the token for the next operation.
    """
    if _compat.recording() is None:

        def start_and_finish(xs: Sequence[Array], token: Array) -> tuple[list[Array], Array]:
            return finish(xs, *start(xs, token, results, program), program)

        with jax.disable_jit(False):
            ys, after = jax.jit(start_and_finish)(xs, token)
        return ys, None, after
    handle = jax.ShapeDtypeStruct((2,), np.int32)
    primitive = _primitive("start", len(xs), len(results))
    *pending, number, after = _bind(primitive, (*xs, token), (*results, handle, token), program)
    return pending, number, after


def finish(
    xs: Sequence[Array], pending: list[Array], handle: Array | None, token: Array, program: int
) -> tuple[list[Array], Array]:
    """Finish a program.

    Args:
        xs: The operands of `start`.
        pending: The results of `start`.
        handle: The handle of `start`; None if the program is finished.
        token: The token of the previous operation.
        program: Its number in the engine.

    Returns:
        The results, and the token for the next operation.
    """
    if handle is None:
        return pending, token
    primitive = _primitive("finish", len(xs), len(pending))
    *ys, after = _bind(primitive, (*xs, *pending, handle, token), (*pending, token), program)
    return ys, after
