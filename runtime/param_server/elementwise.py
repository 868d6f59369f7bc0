"""Whether a traced function makes each element from the same element of its flat operands alone.

What is known to do so is listed, and everything else is refused: JAX has more operations every year.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from commplan.lowering.jax._compat import scan_operands
from commplan.lowering.jax.jaxprs import called_by

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
# These keep the order of elements.
_SHAPED = frozenset({"broadcast_in_dim", "expand_dims", "reshape", "squeeze"})
_INNER = frozenset({
    "checkpoint", "closed_call", "cond", "core_call", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "jit", "pjit", "remat", "remat2", "scan", "while",
})  # fmt: skip


def why_not(traced: Any, longer: Any) -> str:
    """What in a function looks beyond the element; "" if nothing does.

    traced, longer: closed jaxprs of the function for arrays of two lengths, both more than 1. Scalars may be
    computed from scalars in any way that is the same for both.
    """
    reason = _constants(traced.consts) or _search(traced.jaxpr)
    if reason:
        return reason
    for (name, number), (_, other) in zip(_numbers(traced), _numbers(longer), strict=False):
        if number != other:
            return f"`{name}` is given {number} or {other} by the length of the arrays; a chunk has another"
    return ""


def _search(jaxpr: Any) -> str:
    return next((reason for equation in jaxpr.eqns if (reason := _equation(equation))), "")


def _equation(equation: Any) -> str:
    name = str(equation.primitive.name)
    reason = _constants(operand.val for operand in equation.invars if hasattr(operand, "val"))
    for inner, consts in called_by(equation):
        reason = reason or _constants(consts) or _search(inner)
    if reason:
        return reason
    takes = [operand.aval for operand in equation.invars if getattr(operand.aval, "ndim", 0)]
    makes = [operand.aval for operand in equation.outvars if getattr(operand.aval, "ndim", 0)]
    if not makes and (not takes or not equation.outvars or name in _INNER):
        return ""
    if name == "broadcast_in_dim" and all(operand.size == 1 for operand in takes):
        return ""
    if name in _INNER:
        return _looped(equation) if name == "scan" else ""
    sizes = {int(operand.size) for operand in (*takes, *makes)}
    if takes and name in _ELEMENT | _SHAPED and len(sizes) == 1:
        return ""
    if not takes:
        return f"`{name}` makes elements by their place; a chunk does not know where it lies"
    return f"`{name}` makes an element from several, or is not known not to; a chunk has only its own"


def _looped(equation: Any) -> str:
    """A loop may carry arrays along, and not walk through them."""
    consts, carry = scan_operands(equation.params)
    walks = len(equation.invars) > consts + carry or len(equation.outvars) > carry
    return "`scan` walks from element to element; a chunk has only its own" if walks else ""


def _constants(values: Any) -> str:
    for value in values:
        shape = tuple(getattr(value, "shape", ()))
        if shape and not _uniform(value):
            return f"it holds a constant of shape {list(shape)}; a chunk does not know where it lies"
    return ""


def _uniform(value: Any) -> bool:
    try:
        array = np.asarray(value)
    except TypeError:  # keys of random numbers
        return False
    return array.size > 0 and array.tobytes() == array.size * array.reshape(-1)[:1].tobytes()


def _numbers(closed: Any) -> Iterator[tuple[str, str]]:
    """The numbers that stand in a function, each with the operation that is given it."""
    yield from (("constant", _text(value)) for value in closed.consts)
    yield from _in_equations(closed.jaxpr)


def _in_equations(jaxpr: Any) -> Iterator[tuple[str, str]]:
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
    """Of an array, which is uniform, its element."""
    array = np.asarray(value)
    return str(array.reshape(-1)[0] if array.size else array)
