"""The derivative of a layer whose gathered weights are not stored.

JAX stores all residuals of the backward pass, including weights and values that depend only on them, such as
casts and transposes. Here the jaxpr identifies residuals that depend only on weights. They are not stored,
but recomputed from weights that are gathered again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from commplan.lowering.jax.jaxprs import JaxprProgram, trace
from commplan.lowering.jax.pytree import Structure

Arrays = Sequence[Any]  # the leaves of a pytree: arrays, and None for gradients that do not exist


@dataclass(frozen=True)
class LayerVjp:
    """A layer `body(weights, x) -> y` on flat lists of arrays.

    Methods receive the arrays that the body closes over (`consts`), gathered weights, and the operand `x`.

    Attributes:
        consts: The arrays that the body closes over.
        structure: The pytree structure of the result.
        types: The types of the leaves of the result, `jax.typeof` of each.
        needs_weights: Whether the backward pass needs the weights, to recompute residuals.
    """

    consts: tuple[Array, ...]
    structure: Structure
    types: tuple[Any, ...]
    needs_weights: bool
    _plain: JaxprProgram  # consts and arguments -> y
    _forward: JaxprProgram  # consts, weights, x -> y and the stored residuals
    _recompute: JaxprProgram  # consts, weights -> the other residuals
    _is_stored: tuple[bool, ...]  # for each residual, whether it is stored or else recomputed
    _vjp: Structure  # the structure of JAX's function of the cotangents, whose leaves are the residuals

    def run(self, consts: Arrays, weights: Arrays, x: Arrays) -> list[Array]:
        """The layer's result."""
        return self._plain(*consts, *weights, *x)

    def forward(self, consts: Arrays, weights: Arrays, x: Arrays) -> tuple[list[Array], list[Array]]:
        """The layer's result, and the stored residuals."""
        results = self._forward(*consts, *weights, *x)
        return results[: len(self.types)], results[len(self.types) :]

    def backward(
        self, consts: Arrays, weights: Arrays, stored: Arrays, cotangents: Arrays
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """The cotangents of consts, weights and x; None for integers.

        Args:
            consts: The arrays that the body closes over.
            weights: The weights of the forward pass; empty if they are not needed.
            stored: The stored residuals of the forward pass.
            cotangents: The cotangents of the result; None for those that do not exist.
        """
        recomputed_residuals = iter(self._recompute(*consts, *weights))
        stored_residuals = iter(stored)
        residuals = [
            next(stored_residuals if is_stored else recomputed_residuals) for is_stored in self._is_stored
        ]
        vjp: Callable[..., Any] = jax.tree_util.tree_unflatten(self._vjp, residuals)
        full_cotangents = [
            np.zeros(kind.shape, jax.dtypes.float0) if cotangent is None else cotangent
            for cotangent, kind in zip(cotangents, self.types, strict=True)
        ]
        consts_cotangents, weights_cotangents, x_cotangents = map(without_float0, vjp(full_cotangents))
        return consts_cotangents, weights_cotangents, x_cotangents


def without_float0(cotangents: Arrays) -> list[Array | None]:
    """Replace float0 cotangents, which represent no derivative, by None."""
    return [None if x is None or x.dtype == jax.dtypes.float0 else x for x in cotangents]


def layer_vjp(body: Callable[[Any, Any], Any], weights: Any, x: Any) -> LayerVjp:
    """Trace the derivative of `body(weights, x)` and select the residuals to store.

    Args:
        body: The layer, a function of pytrees.
        weights: A pytree of gathered weights, or of values with their shapes and dtypes.
        x: A pytree of the operand, or of values with their shapes and dtypes.
    """
    flat_weights, weights_structure = jax.tree_util.tree_flatten(weights)
    flat_x, x_structure = jax.tree_util.tree_flatten(x)
    weight_count = len(flat_weights)
    result_structures: list[Structure] = []  # set by tracing

    def flat_body(*arrays: Array) -> list[Array]:
        result = body(
            jax.tree_util.tree_unflatten(weights_structure, arrays[:weight_count]),
            jax.tree_util.tree_unflatten(x_structure, arrays[weight_count:]),
        )
        leaves, structure = jax.tree_util.tree_flatten(result)
        result_structures.append(structure)
        return [jnp.asarray(leaf) for leaf in leaves]

    traced_body = trace(flat_body, *flat_weights, *flat_x)
    consts, plain = traced_body.consts, traced_body.hoisted
    # Operands are consts, then weights, then x.
    weights_begin = len(consts)
    x_begin = len(consts) + weight_count
    vjp_structures: list[Structure] = []  # set by tracing

    def results_and_residuals(*arrays: Array) -> list[Array]:
        def run(consts: Arrays, weights: Arrays, x: Arrays) -> list[Array]:
            return plain(*consts, *weights, *x)

        results, vjp = jax.vjp(
            run, list(arrays[:weights_begin]), list(arrays[weights_begin:x_begin]), list(arrays[x_begin:])
        )
        residuals, structure = jax.tree_util.tree_flatten(vjp)
        vjp_structures.append(structure)
        return [*results, *residuals]

    linearized = trace(results_and_residuals, *consts, *flat_weights, *flat_x)
    result_count, output_count = len(plain.result_avals), len(linearized.result_avals)

    def depends_on_x(output: int) -> bool:
        return any(linearized.used([index == output for index in range(output_count)])[x_begin:])

    is_stored = [depends_on_x(output) for output in range(result_count, output_count)]
    is_recomputed = [*[False] * result_count, *(not stored for stored in is_stored)]
    needs_weights = any(linearized.used(is_recomputed)[weights_begin:x_begin])
    return LayerVjp(
        consts,
        result_structures[-1],
        plain.result_avals,
        needs_weights,
        plain,
        linearized.restricted([*[True] * result_count, *is_stored], x_begin + len(flat_x)),
        linearized.restricted(is_recomputed, x_begin if needs_weights else weights_begin),
        tuple(is_stored),
        vjp_structures[-1],
    )
