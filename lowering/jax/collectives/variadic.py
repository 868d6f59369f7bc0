"""All-reduces that take several arrays as they are, so that no buffer is packed and none unpacked.

XLA combines neighbouring all-reduces of one bucket into one operation of many arrays. For GPUs it then copies
these into one buffer after all, unless that pass is left out of the compilation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple

from commplan.lowering.compiler_options import COPYING, LEFT_OUT
from commplan.lowering.jax.typing_shim import jnp
from commplan.lowering.taps import COPY_NBYTES

if TYPE_CHECKING:  # which import what asks this
    from commplan.lowering.jax.backend import BufferLayout, Run

Array = Any

_wanted: ContextVar[bool] = ContextVar("variadic", default=False)


def compiled_with(options: Mapping[str, Any], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, to be traced for a compilation with XLA's `options`."""
    if COPYING not in str(options.get(LEFT_OUT, "")).split(","):
        return function

    @functools.wraps(function)
    def traced(*args: Any, **kwargs: Any) -> Any:
        token = _wanted.set(True)
        try:
            return function(*args, **kwargs)
        finally:
            _wanted.reset(token)

    return traced


def wanted() -> bool:
    """Whether what is being traced will be compiled without XLA's copies."""
    return _wanted.get()


class Piece(NamedTuple):
    """A run of a buffer: whence it is taken, and which of the arrays that are given it is."""

    run: Run
    given: int


def pieces(taken: BufferLayout, given: BufferLayout) -> list[Piece] | None:
    """The runs of a buffer that are taken and given whole; None where both are cut otherwise."""
    places = {(run.offset, run.size): run.array for run in given.runs}
    whole = len(places) == len(taken.runs) == len(given.shapes) and not any(run.start for run in given.runs)
    if not whole or any((run.offset, run.size) not in places for run in taken.runs):
        return None
    return [Piece(run, places[run.offset, run.size]) for run in taken.runs]


def joined(xs: Sequence[Array], cut: Sequence[Piece]) -> tuple[list[Array], list[list[Piece]]]:
    """The arrays to reduce, flat where they are parts of a leaf, and which pieces each of them holds."""
    held = [[piece] for piece in cut if piece.run.size * xs[piece.run.array].dtype.itemsize >= COPY_NBYTES]
    large = {piece for (piece,) in held}
    small = [piece for piece in cut if piece not in large]
    if small:
        held.append(small)

    def array(group: list[Piece]) -> Array:
        first, *others = (part(xs, piece.run) for piece in group)
        return jnp.concatenate([x.reshape(-1) for x in (first, *others)]) if others else first

    return [array(group) for group in held], held


def part(xs: Sequence[Array], run: Run) -> Array:
    """The elements of `run`: their whole array as it is, or a flat slice of it."""
    x = xs[run.array]
    return x if run.size == x.size else x.reshape(-1)[run.start : run.start + run.size]


def parted(moved: Sequence[Array], held: Sequence[Sequence[Piece]], given: BufferLayout) -> tuple[Array, ...]:
    """The arrays that are given, out of those that were reduced."""
    results: list[Array] = [None] * len(given.shapes)
    for x, group in zip(moved, held, strict=True):
        flat, at = x.reshape(-1), 0
        for piece in group:
            own = x if len(group) == 1 else flat[at : at + piece.run.size]
            results[piece.given] = own.reshape(given.shapes[piece.given])
            at += piece.run.size
    return tuple(results)
