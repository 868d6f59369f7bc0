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

Arrays = Sequence[Any]  # Arrays, and None for gradients that do not exist.


@dataclass(frozen=True)
class LayerVjp:
    """A layer `body(weights, x) -> y` on flat lists of arrays.

    Attributes:
        consts: The arrays that the body closes over.
        structure: The pytree structure of the result.
        types: The types of its leaves, `jax.typeof` of each.
        needs_weights: Whether the backward pass needs the weights.
    """

    consts: tuple[Array, ...]
    structure: Structure
    types: tuple[Any, ...]
    needs_weights: bool
    _plain: JaxprProgram  # consts and arguments -> y
    _forward: JaxprProgram  # consts, weights, x -> y and the stored residuals
    _recompute: JaxprProgram  # consts, weights -> the other residuals
    _is_stored: tuple[bool, ...]
    _vjp: Structure

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

        `weights` are those of the forward pass; empty if they are not needed.
        """
        recomputed, saved = iter(self._recompute(*consts, *weights)), iter(stored)
        residuals = [next(saved) if is_stored else next(recomputed) for is_stored in self._is_stored]
        vjp: Callable[..., Any] = jax.tree_util.tree_unflatten(self._vjp, residuals)
        full_cotangents = [
            np.zeros(kind.shape, jax.dtypes.float0) if cotangent is None else cotangent
            for cotangent, kind in zip(cotangents, self.types, strict=True)
        ]
        of_consts, of_weights, of_x = map(without_float0, vjp(full_cotangents))
        return of_consts, of_weights, of_x


def without_float0(cotangents: Arrays) -> list[Array | None]:
    """Replace float0 cotangents, which represent no derivative, by None."""
    return [None if x is None or x.dtype == jax.dtypes.float0 else x for x in cotangents]


def layer_vjp(body: Callable[[Any, Any], Any], weights: Any, x: Any) -> LayerVjp:
    """Split the derivative of `body(weights, x)`; both are pytrees of traced arrays."""
    flat_weights, in_weights = jax.tree_util.tree_flatten(weights)
    flat_x, in_x = jax.tree_util.tree_flatten(x)
    split = len(flat_weights)
    structures: list[Structure] = []

    def flat(*arrays: Array) -> list[Array]:
        result = body(
            jax.tree_util.tree_unflatten(in_weights, arrays[:split]),
            jax.tree_util.tree_unflatten(in_x, arrays[split:]),
        )
        leaves, structure = jax.tree_util.tree_flatten(result)
        structures.append(structure)
        return [jnp.asarray(leaf) for leaf in leaves]

    closed = trace(flat, *flat_weights, *flat_x)
    consts, plain = closed.consts, closed.hoisted
    first, second = len(consts), len(consts) + split
    vjps: list[Structure] = []

    def linearized(*arrays: Array) -> list[Array]:
        parts = list(arrays[:first]), list(arrays[first:second]), list(arrays[second:])

        def run(consts: Arrays, weights: Arrays, x: Arrays) -> list[Array]:
            return plain(*consts, *weights, *x)

        results, vjp = jax.vjp(run, *parts)
        residuals, structure = jax.tree_util.tree_flatten(vjp)
        vjps.append(structure)
        return [*results, *residuals]

    whole = trace(linearized, *consts, *flat_weights, *flat_x)
    outs, every = len(plain.result_avals), len(whole.result_avals)
    # A residual is stored if it depends on x.
    is_stored = [any(whole.used([i == out for i in range(every)])[second:]) for out in range(outs, every)]
    recomputed = [*[False] * outs, *(not stored for stored in is_stored)]
    needs = any(whole.used(recomputed)[first:second])
    return LayerVjp(
        consts,
        structures[-1],
        plain.result_avals,
        needs,
        plain,
        whole.restricted([*[True] * outs, *is_stored], second + len(flat_x)),
        whole.restricted(recomputed, second if needs else first),
        tuple(is_stored),
        vjps[-1],
    )
