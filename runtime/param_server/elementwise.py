"""Check that each element of a function's results depends only on the same element of its flat operands.

Operations that are known to be elementwise are listed; all others are refused, since JAX keeps adding new
ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from commplan.lowering.jax._compat import scan_operands
from commplan.lowering.jax.jaxprs import called_by

# Primitives of JAX that compute each element from the same elements of their operands.
_ELEMENT = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh",
    "bessel_i0e", "bessel_i1e", "bitcast_convert_type", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
    "convert_element_type", "copy", "copy_p", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf",
    "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma", "igamma_grad_a", "igammac",
    "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log", "log1p", "logistic", "lt",
    "lt_to", "max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "optimization_barrier", "or",
    "polygamma", "population_count", "pow", "real", "reduce_precision", "regularized_incomplete_beta",
    "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "sign", "sin", "sinh", "sqrt", "square", "sub", "tan", "tanh", "xor",
})  # fmt: skip
# Primitives that preserve the order of elements, if the number of elements stays.
_SHAPED = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze"})
# Primitives that call other jaxprs, which are searched.
_INNER = frozenset({
    "checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "jit", "pjit", "remat", "remat2", "scan", "while",
})  # fmt: skip


def non_elementwise_reason(traced: Any, longer: Any) -> str:
    """Find an operation that makes a function not elementwise.

    Scalars may be computed from scalars in any way, if their values do not depend on the length of arrays.

    Args:
        traced: A closed jaxpr of the function for arrays of a length greater than 1.
        longer: A closed jaxpr of the function for arrays of another length, also greater than 1.

    Returns:
        The reason, with the operation, as text; "" if the function is elementwise.
    """
    reason = _constants(traced.consts) or _search(traced.jaxpr)
    if reason:
        return reason
    # A program of elementwise operations that depends on the length contains it in a number.
    for (name, number), (_, other) in zip(_numbers(traced), _numbers(longer), strict=False):
        if number != other:
            return f"`{name}` has {number} or {other} by the length of the arrays; a chunk has another length"
    return ""


def _search(jaxpr: Any) -> str:
    """The reason of the first equation that has one; see `_equation`."""
    return next((reason for equation in jaxpr.eqns if (reason := _equation(equation))), "")


def _equation(equation: Any) -> str:
    """The reason why an equation of a jaxpr may not be elementwise; empty if it is."""
    name = str(equation.primitive.name)
    reason = _constants(operand.val for operand in equation.invars if hasattr(operand, "val"))
    for inner, consts in called_by(equation):
        reason = reason or _constants(consts) or _search(inner)
    if reason:
        return reason
    operands = [operand.aval for operand in equation.invars if getattr(operand.aval, "ndim", 0)]
    results = [result.aval for result in equation.outvars if getattr(result.aval, "ndim", 0)]
    if not results and (not operands or not equation.outvars or name in _INNER):
        return ""  # Scalars from scalars, no results, or a call, whose equations were searched.
    if name == "broadcast_in_dim" and all(operand.size == 1 for operand in operands):
        return ""  # All elements are equal.
    if name in _INNER:
        return _loop_reason(equation) if name == "scan" else ""
    sizes = {int(operand.size) for operand in (*operands, *results)}
    if operands and name in _ELEMENT | _SHAPED and len(sizes) == 1:
        return ""
    if not operands:
        return f"`{name}` produces elements from their index; a chunk has no index in the whole array"
    return f"`{name}` is not known to be elementwise; a chunk has only its own elements"


def _loop_reason(equation: Any) -> str:
    """The reason why a `scan` iterates over elements; empty if it only carries arrays."""
    consts, carry = scan_operands(equation.params)
    iterates = len(equation.invars) > consts + carry or len(equation.outvars) > carry
    return "`scan` iterates over elements; a chunk has only its own" if iterates else ""


def _constants(values: Any) -> str:
    """The reason why a constant of `values` depends on the index; empty if each one has equal elements."""
    for value in values:
        shape = tuple(getattr(value, "shape", ()))
        if shape and not _is_uniform(value):
            return f"it has a constant of shape {list(shape)}; a chunk has no index in the whole array"
    return ""


def _is_uniform(value: Any) -> bool:
    """Whether an array has elements, and the bits of all of them are equal."""
    try:
        array = np.asarray(value)
    except TypeError:  # Random keys.
        return False
    return array.size > 0 and array.tobytes() == array.size * array.reshape(-1)[:1].tobytes()


def _numbers(closed: Any) -> Iterator[tuple[str, str]]:
    """The constants and parameters in a closed jaxpr, as text, each after the operation that uses it."""
    yield from (("constant", _text(value)) for value in closed.consts)
    yield from _in_equations(closed.jaxpr)


def _in_equations(jaxpr: Any) -> Iterator[tuple[str, str]]:
    """Those in the equations of a jaxpr, and in the jaxprs that it calls; see `_numbers`."""
    for equation in jaxpr.eqns:
        name = str(equation.primitive.name)
        yield from ((name, _text(operand.val)) for operand in equation.invars if hasattr(operand, "val"))
        for key, value in equation.params.items():
            if isinstance(value, bool | int | float | str) and key != "name":
                yield name, f"{key} = {value}"
        for inner, consts in called_by(equation):
            yield from ((name, _text(value)) for value in consts)
            yield from _in_equations(inner)


def _text(value: Any) -> str:
    """The text of a number; for an array, which is uniform, of its element."""
    array = np.asarray(value)
    return str(array.reshape(-1)[0] if array.size else array)
