"""Identity primitives that change the type of a value over mesh axes, or warn when they are transposed."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, cast

import jax
from jax import Array, lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from commplan.lowering.jax import _compat

_same: Any = Primitive("commplan_same")  # of `assume_same`
_term: Any = Primitive("commplan_term")  # of `terms`
_warning: Any = Primitive("commplan_warning")  # of `warning_when_transposed`


def assume_same(x: Array, axes: Sequence[str]) -> Array:
    """`x`, typed as the same over `axes`; only for values that are proved the same.

    Its derivative is the identity: the cotangent is this rank's, without a sum.
    """
    dropped = tuple(axis for axis in axes if axis in _compat.varying_axes(x))
    return _same.bind(x, axes=dropped) if dropped else x


def optimization_barrier(xs: Any) -> Any:
    """`lax.optimization_barrier` of a pytree that preserves the types of leaves. JAX 0.10.0 does not."""

    def typed(new: Array, old: Array) -> Array:
        return assume_same(new, sorted(_compat.varying_axes(new) - _compat.varying_axes(old)))

    return jax.tree_util.tree_map(typed, lax.optimization_barrier(xs), xs)


def terms(x: Array, axes: Sequence[str]) -> Array:
    """`x`, typed as varying instead of unreduced over `axes`: this rank's term of the sum. No derivative."""
    unreduced = tuple(axis for axis in axes if axis in _compat.unreduced_in(jax.typeof(x)))
    return _term.bind(x, axes=unreduced) if unreduced else x


def warning_when_transposed(x: Array, text: str) -> Array:
    """`x`. JAX warns with `text` when it transposes this operation for a derivative."""
    return _warning.bind(x, text=text)


def _same_type(aval: Any, *, axes: tuple[str, ...]) -> Any:
    return _compat.with_varying(aval, _compat.varying_in(aval) - set(axes))


def _term_type(aval: Any, *, axes: tuple[str, ...]) -> Any:
    return _compat.with_varying_terms(aval, axes)


def _warning_type(aval: Any, *, text: str) -> Any:
    return aval


def _same_transpose(cotangent: Any, x: Any, *, axes: tuple[str, ...]) -> list[Any]:
    return [cotangent if type(cotangent) is ad.Zero else _compat.as_varying(cotangent, axes)]


def _warning_transpose(cotangent: Any, x: Any, *, text: str) -> list[Any]:
    warnings.warn(text, RuntimeWarning, stacklevel=2)
    return [cotangent]


def _identity(ctx: Any, x: Any, **parameters: Any) -> list[Any]:
    return [x]


def _batched(primitive: Any) -> Any:
    def batch(args: Sequence[Any], dims: Sequence[Any], **parameters: Any) -> tuple[Any, Any]:
        return primitive.bind(args[0], **parameters), dims[0]

    return batch


for _primitive, _type in ((_same, _same_type), (_term, _term_type), (_warning, _warning_type)):
    _primitive.def_abstract_eval(_type)
    cast("Any", mlir).register_lowering(_primitive, _identity)
for _primitive, _transpose in ((_same, _same_transpose), (_warning, _warning_transpose)):
    cast("Any", ad).deflinear2(_primitive, _transpose)
    cast("Any", batching).primitive_batchers[_primitive] = _batched(_primitive)
