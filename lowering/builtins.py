"""Applies built-in functions of plans to the leaves of trees.

`lowering/numpy` and `lowering/jax` call it with their own arrays, so built-in functions round in the same way
on all backends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from commplan.ir.stages.builtins import Builtin
from commplan.ir.types import DType


def on_leaves(
    body: Builtin,
    operands: Sequence[Sequence[Any]],
    dtype: Callable[[DType], Any],
    full: Callable[[tuple[int, ...], Any, Any], Any],
) -> list[list[Any]]:
    """Apply `body` to corresponding leaves of its operands.

    Floats are computed in f32, or in f64 if an operand has it, and rounded once. Integers are computed in
    their own type and wrap around. Result `i` has the shapes and dtypes of operand `i`, except for a cast.

    Args:
        body: The built-in function.
        operands: The leaves of each operand: arrays of NumPy or JAX. All operands have as many leaves.
        dtype: A function that converts a type of the language to a dtype of the array library.
        full: A function of shape, value and dtype that makes a constant array, for a result that is a number.

    Returns:
        The leaves of each result, in the order of the operands' leaves.
    """

    def on_arrays(xs: Sequence[Any]) -> list[Any]:
        if body.dtype is not None:
            return [xs[0].astype(dtype(body.dtype))]
        dtypes = [DType.from_name(str(x.dtype)) or DType.F32 for x in xs]
        if dtypes[0].is_float:
            wide = dtype(DType.F64 if DType.F64 in dtypes else DType.F32)
            results = body.apply([x.astype(wide) for x in xs])
        else:
            results = body.apply(xs, lambda factor: _wrapped(int(factor), dtypes[0]))
        pairs = zip(results, xs, strict=False)
        return [y.astype(x.dtype) if hasattr(y, "astype") else full(x.shape, y, x.dtype) for y, x in pairs]

    answers = [on_arrays(xs) for xs in zip(*operands, strict=True)]
    return [[answer[number] for answer in answers] for number in range(body.definition.results)]


def _wrapped(number: int, dtype: DType) -> int:
    """`number` modulo 2 ** bits, in the range of the integer type `dtype`."""
    size = 1 << 8 * dtype.nbytes
    least = size // 2 if str(dtype).startswith("i") else 0
    return (number + least) % size - least
