"""The derivative of a layer whose weights are not kept: what its backward pass needs of them is made again.

JAX keeps for the backward pass whatever it needs, weights and what was made of them (casts, transposes)
included. Here the jaxpr tells those apart: what depends on the weights alone is left out, and made again from
weights that are gathered a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from commplan.lowering.jax.jaxprs import TracedProgram, traced
from commplan.lowering.jax.pytree import Structure
from commplan.lowering.jax.typing_shim import jax, jnp

Array = Any
Arrays = Sequence[Array]
Jaxpr = Any


@dataclass(frozen=True)
class LayerVjp:
    """A layer `body(weights, x) -> y`, on flat lists of arrays.

    consts: what the body closes over. structure: of the result. types: of its leaves, `jax.typeof` each.
    needs_weights: whether the backward pass needs weights at all.
    """

    consts: tuple[Array, ...]
    structure: Structure
    types: tuple[Any, ...]
    needs_weights: bool
    _plain: TracedProgram  # consts and arguments -> y
    _forward: TracedProgram  # consts, weights, x -> y and what is kept
    _again: TracedProgram  # consts, weights -> what is not
    _kept: tuple[bool, ...]
    _vjp: Structure

    def run(self, consts: Arrays, weights: Arrays, x: Arrays) -> list[Array]:
        """The layer's result."""
        return self._plain(*consts, *weights, *x)

    def forward(self, consts: Arrays, weights: Arrays, x: Arrays) -> tuple[list[Array], list[Array]]:
        """The layer's result, and what is kept for the backward pass."""
        results = self._forward(*consts, *weights, *x)
        return results[: len(self.types)], results[len(self.types) :]

    def backward(
        self, consts: Arrays, weights: Arrays, kept: Arrays, cotangents: Arrays
    ) -> tuple[list[Array], list[Array], list[Array]]:
        """The cotangents of consts, weights and x; None for whole numbers, here and there.

        weights: those of the forward pass; none where they are not needed.
        """
        remade, saved = iter(self._again(*consts, *weights)), iter(kept)
        residuals = [next(saved) if keep else next(remade) for keep in self._kept]
        vjp: Callable[..., Any] = jax.tree_util.tree_unflatten(self._vjp, residuals)
        given = [
            np.zeros(kind.shape, jax.dtypes.float0) if cotangent is None else cotangent
            for cotangent, kind in zip(cotangents, self.types, strict=True)
        ]
        of_consts, of_weights, of_x = map(without_float0, vjp(given))
        return of_consts, of_weights, of_x


def without_float0(cotangents: Arrays) -> list[Array | None]:
    """None where there is no derivative."""
    return [None if x is None or x.dtype == jax.dtypes.float0 else x for x in cotangents]


def layer_vjp(body: Callable[[Any, Any], Any], weights: Any, x: Any) -> LayerVjp:
    """`body(weights, x)` taken apart; both are pytrees of arrays, traced."""
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

    closed = traced(flat, *flat_weights, *flat_x)
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

    whole = traced(linearized, *consts, *flat_weights, *flat_x)
    outs, every = len(plain.types), len(whole.types)
    # A residual is kept where it depends on x.
    kept = [any(whole.used([i == out for i in range(every)])[second:]) for out in range(outs, every)]
    left = [*[False] * outs, *(not keep for keep in kept)]
    needs = any(whole.used(left)[first:second])
    return LayerVjp(
        consts,
        structures[-1],
        plain.types,
        needs,
        plain,
        whole.restricted([*[True] * outs, *kept], second + len(flat_x)),
        whole.restricted(left, second if needs else first),
        tuple(kept),
        vjps[-1],
    )
