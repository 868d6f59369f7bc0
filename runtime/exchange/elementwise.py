"""Whether a traced function makes each element from the same element of its flat operands alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

_MIXING = (
    "reduce_", "argm", "arg_", "cum", "dot_general", "sort", "top_k", "conv_", "fft", "rev", "roll", "gather",
    "scatter", "dynamic_", "slice", "concatenate", "pad", "transpose", "triangular", "cholesky", "lu", "qr",
    "eig", "svd", "psum", "pmax", "pmin", "all_", "ppermute", "select_and_",
)  # fmt: skip
_ALLOWED = ("reduce_precision",)


def mixing(traced: Any) -> str:
    """The first operation on an array with dimensions that mixes its elements; "" if there is none.

    traced: a closed jaxpr. Scalars may be computed from scalars in any way.
    """
    return _search(traced.jaxpr)


def _search(jaxpr: Any) -> str:
    for equation in jaxpr.eqns:
        name = str(equation.primitive.name)
        for inner in _inner(equation.params):
            found = _search(inner)
            if found:
                return found
        wide = any(getattr(one.aval, "ndim", 0) for one in equation.invars)
        if wide and name.startswith(_MIXING) and name not in _ALLOWED:
            return name
    return ""


def _inner(params: Any) -> list[Any]:
    """The jaxprs among the parameters of an operation: of a branch, a body, a function that it calls."""
    found: list[Any] = []
    for value in params.values():
        for one in cast("Sequence[Any]", value) if isinstance(value, tuple | list) else (value,):
            inner = getattr(one, "jaxpr", one)
            if hasattr(inner, "eqns"):
                found.append(inner)
    return found
