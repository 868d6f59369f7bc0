"""Built-in functions on arrays of NumPy or JAX, leaf by leaf."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commplan.ir.builtins import Builtin
from commplan.ir.types import DType


def on_leaves(body: Builtin, operands: Sequence[Sequence[Any]], xp: Any) -> list[list[Any]]:
    """The leaves of each result of `body`.

    Floats are computed in f32, or in f64 if an operand has it, and rounded once. Integers are computed in
    their own type and wrap around.

    Args:
        body: The built-in function.
        operands: The leaves of each operand.
        xp: The module of the arrays, `numpy` or `jax.numpy`.
    """
    columns = [_on_arrays(body, xs, xp) for xs in zip(*operands, strict=True)]
    return [[column[number] for column in columns] for number in range(body.definition.results)]


def _on_arrays(body: Builtin, xs: Sequence[Any], xp: Any) -> list[Any]:
    if body.dtype is not None:
        return [xs[0].astype(xp.dtype(body.dtype.numpy_name))]
    dtypes = [DType(DType.from_name(str(x.dtype))) for x in xs]
    number: Any = int
    if dtypes[0].is_float:
        wide = DType.F64 if DType.F64 in dtypes else DType.F32
        number, xs = float, [x.astype(wide.numpy_name) for x in xs]
    results = zip(body.apply(xs, number), dtypes, strict=False)
    return [_array(y, xs[0].shape, xp.dtype(dtype.numpy_name), xp) for y, dtype in results]


def _array(y: Any, shape: tuple[int, ...], dtype: Any, xp: Any) -> Any:
    return y.astype(dtype) if hasattr(y, "astype") else xp.full(shape, y, dtype)
