"""All-reduces of several arrays without packing them into a buffer and unpacking the result.

XLA combines adjacent all-reduces of one bucket into one operation with many operands. On GPUs a later pass
copies these into one buffer, unless the pass is disabled for the compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from commplan.lowering.jax.backend import BufferLayout, BufferRun
from commplan.lowering.taps import COPY_NBYTES
from commplan.lowering.xla_passes import COPYING, DISABLED_PASSES

_enabled: ContextVar[bool] = ContextVar("variadic", default=False)  # of the current trace; see `is_enabled`


def compiled_with(options: Mapping[str, Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which is traced for a compilation with these options of XLA.

    If they disable XLA's copies, `is_enabled` is true while the function is traced.
    """
    if COPYING not in str(options.get(DISABLED_PASSES, "")).split(","):
        return function

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        token = _enabled.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _enabled.reset(token)

    return traced


def is_enabled() -> bool:
    """Whether the current trace will be compiled without XLA's copies of many operands into one buffer."""
    return _enabled.get()


class Piece(NamedTuple):
    """A run of the operand buffer that becomes one array of the result.

    Attributes:
        run: The run: a part of an operand array.
        result: The index of the result array.
    """

    run: BufferRun
    result: int


def pieces(operand_layout: BufferLayout, result_layout: BufferLayout) -> list[Piece] | None:
    """The runs of a buffer, each with its result array.

    None if operands and results are cut at different offsets, or if a result array has several runs.
    """
    results = result_layout.runs
    arrays = {(run.offset, run.size): run.array for run in results}
    is_whole = not any(run.start for run in results)
    if not is_whole or not len(arrays) == len(operand_layout.runs) == len(result_layout.shapes):
        return None
    if any((run.offset, run.size) not in arrays for run in operand_layout.runs):
        return None
    return [Piece(run, arrays[run.offset, run.size]) for run in operand_layout.runs]


def operands(xs: Sequence[Array], buffer: Sequence[Piece]) -> tuple[list[Array], list[list[Piece]]]:
    """The arrays to reduce instead of a buffer, and the pieces in each of them.

    Each piece of at least `COPY_NBYTES` bytes is reduced separately: as the operand array, or as a flat slice
    of it. The others, if there are several, are concatenated to one flat array, which is the last.

    Args:
        xs: The operand arrays.
        buffer: The pieces of the buffer.
    """
    nbytes = {piece: piece.run.size * xs[piece.run.array].dtype.itemsize for piece in buffer}
    groups = [[piece] for piece in buffer if nbytes[piece] >= COPY_NBYTES]
    small = [piece for piece in buffer if nbytes[piece] < COPY_NBYTES]
    if small:
        groups.append(small)

    def array(group: list[Piece]) -> Array:
        first, *more = (part(xs, piece.run) for piece in group)
        return jnp.concatenate([x.reshape(-1) for x in (first, *more)]) if more else first

    return [array(group) for group in groups], groups


def part(xs: Sequence[Array], run: BufferRun) -> Array:
    """The elements of `run`: its whole array unchanged, or a flat slice of it. `xs` are all arrays."""
    x = xs[run.array]
    return x if run.size == x.size else x.reshape(-1)[run.start : run.start + run.size]


def split_results(
    moved: Sequence[Array], groups: Sequence[Sequence[Piece]], result_layout: BufferLayout
) -> tuple[Array, ...]:
    """The result arrays, from the arrays that were reduced.

    Args:
        moved: The reduced arrays.
        groups: The pieces in each of them; see `operands`.
        result_layout: The shapes of the result arrays.
    """
    results: list[Any] = [None] * len(result_layout.shapes)
    for x, group in zip(moved, groups, strict=True):
        flat, offset = x.reshape(-1), 0
        for piece in group:
            elements = x if len(group) == 1 else flat[offset : offset + piece.run.size]
            results[piece.result] = elements.reshape(result_layout.shapes[piece.result])
            offset += piece.run.size
    return tuple(results)
