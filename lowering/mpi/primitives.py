"""The engine's entry points as JAX primitives.

XLA is told that the calls have side effects and drops none. JAX is not: it calls a function with effects from
Python each time, which takes 30 us longer than its fast way. A rule of their own makes it keep them all the
same, so that a rank that ignores a result, or does not compile, issues what the others do.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NoReturn, cast
from weakref import WeakValueDictionary

import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from commplan.diagnostics import fail
from commplan.lowering.jax import _compat
from commplan.lowering.jax.typing_shim import jax

Array = Any
owners: WeakValueDictionary[int, Any] = WeakValueDictionary()  # the channel of each program of the engine


def _declare(name: str, aliases: dict[int, int]) -> Any:
    """The primitive of FFI target `commplan_mpi_NAME`; `aliases`: operand -> the result in its place."""
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

    def alone(*operands: Any, **how: Any) -> Any:
        with jax.disable_jit(False):  # else it would come back here
            return compiled(*operands, **how)

    primitive.def_abstract_eval(abstract)
    _compat.keep_unused(primitive)
    cast("Any", ad).primitive_jvps[primitive] = _no_derivative
    cast("Any", batching).primitive_batchers[primitive] = _no_batches
    primitive.def_impl(alone)
    cast("Any", mlir).register_lowering(primitive, lowering, platform="cpu")
    return primitive


def _no_batches(*_: object, **__: object) -> NoReturn:
    message = "a collective over MPI is batched by jax.vmap"
    note = "one call moves one value: give the phase the whole batch, declared with its leading dimension"
    fail("CP0848", message, note, "or take `jax.vmap` of what stands around the phase")


def _no_derivative(*_: object, **__: object) -> NoReturn:
    message = "a collective over MPI is differentiated"
    note = "phases have no derivative under MPI: take the gradient first, and call the phase on it"
    fail("CP0847", message, note, "run.tap(params) reduces inside the backward pass")


@cache
def _primitive(name: str, inputs: int, outputs: int) -> Any:
    """`call`, `start` or `finish` of what has so many operands and results, the token not counted."""
    if name == "call":
        return _declare(name, {inputs: outputs})
    if name == "start":
        return _declare(name, {inputs: outputs + 1})
    return _declare(name, {inputs + i: i for i in range(outputs)} | {inputs + outputs + 1: outputs})


def _bind(primitive: Any, operands: Sequence[Array], results: Sequence[Any], program: int) -> list[Array]:
    shapes = tuple((tuple(each.shape), np.dtype(each.dtype)) for each in results)
    return primitive.bind(*operands, results=shapes, program=program)


def call(
    xs: Sequence[Array], token: Array, results: Sequence[Any], program: int
) -> tuple[list[Array], Array]:
    """xs, token -> ys of the shapes and dtypes of `results`, token."""
    *ys, after = _bind(_primitive("call", len(xs), len(results)), (*xs, token), (*results, token), program)
    return ys, after


def start(
    xs: Sequence[Array], token: Array, results: Sequence[Any], program: int
) -> tuple[list[Array], Array | None, Array]:
    """xs, token -> the results to be, their handle, token.

    Without a trace a result does not stay where it was begun: then it is finished here, and has no handle.
    """
    if _compat.recording() is None:

        def both(xs: Sequence[Array], token: Array) -> tuple[list[Array], Array]:
            return finish(xs, *start(xs, token, results, program), program)

        with jax.disable_jit(False):
            ys, after = jax.jit(both)(xs, token)
        return ys, None, after
    handle = jax.ShapeDtypeStruct((2,), np.int32)
    primitive = _primitive("start", len(xs), len(results))
    *pending, number, after = _bind(primitive, (*xs, token), (*results, handle, token), program)
    return pending, number, after


def finish(
    xs: Sequence[Array], pending: list[Array], handle: Array | None, token: Array, program: int
) -> tuple[list[Array], Array]:
    """xs, the results to be, handle, token -> ys, token."""
    if handle is None:
        return pending, token
    primitive = _primitive("finish", len(xs), len(pending))
    *ys, after = _bind(primitive, (*xs, *pending, handle, token), (*pending, token), program)
    return ys, after
