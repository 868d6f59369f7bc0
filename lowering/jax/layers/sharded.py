"""Runs layers whose weights are sharded over ranks, for `run.layers`.

In the forward pass a layer's weights are gathered while the `prefetch` layers before it compute, and dropped
after use. The backward pass gathers them again in reverse order, and scatters the gradient of each layer as
soon as it is available. For n layers there are n gathers in the forward pass, n - 1 in the backward pass,
since the last layer's weights are still present, and n scatters. A gather starts after the layer `prefetch`
layers earlier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from commplan.lowering.jax import _compat
from commplan.lowering.jax.layers.exchange import ShardedLayer
from commplan.lowering.jax.layers.vjp import Arrays, LayerVjp, without_float0
from commplan.lowering.jax.primitives import optimization_barrier

# The number of latest reduce-scatters for which the gathers of the backward pass do not wait.
SCATTERS_IN_FLIGHT = 2


@dataclass(frozen=True)
class Layer:
    """A layer.

    Attributes:
        vjp: Its computation and derivative. Layers of one kind share it.
        exchange: The exchange of its weights.
    """

    vjp: LayerVjp
    exchange: ShardedLayer


@dataclass
class GatherWindow:
    """The gathered weights that have not been used yet.

    Gathers are ordered, so that XLA does not combine those of different layers.

    Attributes:
        layers: All layers.
        shards: This rank's weights of each layer.
        weights: The gathered weights by the index of the layer.
        last: The index of the layer that was gathered last; -1 before the first one.
    """

    layers: Sequence[Layer]
    shards: Sequence[Arrays]
    weights: dict[int, list[Array]] = field(default_factory=dict[int, list[Array]])
    last: int = -1

    def fetch(self, number: int, values: Arrays) -> Arrays:
        """Gather the weights of layer `number` after `values`, unless they are already present.

        Returns the values, which callers must use instead of the original.
        """
        if number in self.weights:
            return values
        exchange = self.layers[number].exchange
        shards, values = exchange.after(self.shards[number], values)
        if latest := self.weights.get(self.last):
            shards, latest[-1:] = exchange.after(shards, latest[-1:])
        self.weights[number], self.last = exchange.gather(shards), number
        return values


def run_unrolled(layers: Sequence[Layer], shards: Sequence[Arrays], x: Arrays, prefetch: int) -> list[Array]:
    """Apply `layers` one after the other.

    Args:
        layers: The layers; at least one.
        shards: This rank's weights of each layer.
        x: The leaves of the operand of the first layer.
        prefetch: The number of layers before a layer during which its weights are gathered.

    Returns:
        The leaves of the result of the last layer.
    """
    last = len(layers) - 1
    needs = [layer.vjp.needs_weights for layer in layers]
    consts = {id(layer.vjp): layer.vjp.consts for layer in layers}  # layers of one kind share their constants
    kind_of = [list(consts).index(id(layer.vjp)) for layer in layers]  # the index of its constants

    def forward(consts: Any, shards: Sequence[Arrays], x: Arrays, *, keeps: bool) -> tuple[Any, Any]:
        window = GatherWindow(layers, shards)
        residuals: list[Arrays] = []
        weights: Arrays = ()
        for number, layer in enumerate(layers):
            for upcoming in range(number, min(number + prefetch, last) + 1):
                x = window.fetch(upcoming, x)
            weights = window.weights.pop(number)
            if keeps:
                x, saved = layer.vjp.forward(consts[kind_of[number]], weights, x)
                residuals.append(saved)
            else:
                x = layer.vjp.run(consts[kind_of[number]], weights, x)
            # Otherwise XLA may recompute x in the backward pass from the weights (rows of an embedding).
            x = optimization_barrier(x)
        return x, (consts, shards, residuals, weights if needs[last] else [])

    def backward(residuals: Any, cotangents: Arrays) -> tuple[Any, Any, Any]:
        consts, shards, saved, weights = residuals
        cotangents = without_float0(cotangents)
        window = GatherWindow(layers, shards, {last: weights}, last)
        gradients: list[Arrays] = [[] for _ in range(len(layers) + SCATTERS_IN_FLIGHT)]
        const_sums: list[Any] = [None for _ in consts]  # gradients of the constants of each kind of layer
        for number in reversed(range(len(layers))):
            scattered = number + SCATTERS_IN_FLIGHT
            for upcoming in range(number, max(number - prefetch, 0) - 1, -1):
                if needs[upcoming]:
                    # A gather waits for the computation, and for all but the latest reduce-scatters.
                    ordered = window.fetch(upcoming, [*cotangents, *gradients[scattered]])
                    cotangents, gradients[scattered] = ordered[: len(cotangents)], ordered[len(cotangents) :]
            weights, kind = window.weights.pop(number, []), kind_of[number]
            const_gradients, gradient, cotangents = layers[number].vjp.backward(
                consts[kind], weights, saved[number], cotangents
            )
            const_sums[kind] = (
                const_gradients if const_sums[kind] is None else _sum(const_sums[kind], const_gradients)
            )
            # The reduce-scatters of layers are ordered, the last layer first.
            exchange = layers[number].exchange
            gradient, gradients[number + 1] = exchange.gradients_after(gradient, gradients[number + 1])
            gradients[number] = exchange.scatter(gradient)
        return const_sums, gradients[: len(layers)], cotangents

    operands = [list(arrays) for arrays in consts.values()], [list(leaves) for leaves in shards]
    return _differentiable(forward, backward)(*operands, list(x))


def run_scanned(layer: Layer, shards: Arrays, x: Arrays, prefetch: int) -> list[Array]:
    """As `run_unrolled`, for layers of one kind under `lax.scan`. `shards` have a leading layer dimension.

    The weights of the first `prefetch` layers are gathered before the loop, and the last `prefetch` layers
    run after it, so the loop gathers no unused weights. The backward pass reuses the weights of the last
    layer.

    Args:
        layer: The computation and exchange of all layers.
        shards: This rank's weights of all layers; each leaf is stacked along its leading dimension.
        x: The leaves of the operand of the first layer, with the types of the layer's result.
        prefetch: The number of layers before a layer during which its weights are gathered.

    Returns:
        The leaves of the result of the last layer.
    """
    vjp, exchange = layer.vjp, layer.exchange
    count = shards[0].shape[0]  # of layers
    ahead = min(prefetch, count - 1)  # the number of layers whose weights are gathered ahead
    in_loop = count - ahead  # the number of layers in the loop of the forward pass

    def gathered(shards: Arrays, number: Any) -> list[Array]:
        return exchange.gather(_row(shards, number))

    def forward(consts: Arrays, shards: Arrays, x: Arrays, *, keeps: bool) -> tuple[Any, Any]:
        def compute(weights: Arrays, x: Arrays) -> tuple[list[Any], list[Any]]:
            return vjp.forward(consts, weights, x) if keeps else (vjp.run(consts, weights, x), [])

        def step(carry: Any, number: Any) -> tuple[Any, Arrays]:
            x, window = carry
            window = [*window, gathered(shards, number + ahead)]
            x, saved = compute(window[0], x)
            return (x, window[1:]), saved

        window = [gathered(shards, number) for number in range(ahead)]  # weights not used yet, in order
        (x, window), stack = lax.scan(step, (x, window), np.arange(in_loop, dtype=np.int32))
        residuals: list[Arrays] = []
        for weights in window:
            x, saved = compute(weights, x)
            residuals.append(saved)
        last_weights: list[Any] = window[-1:] if vjp.needs_weights else [[]] * len(window[-1:])
        return x, (consts, shards, stack, residuals, last_weights)

    def backward(residuals: Any, cotangents: Arrays) -> tuple[Any, Any, Any]:
        # `stack` has the residuals of the layers in the loop, `saved_after` those of the layers after it.
        consts, shards, stack, saved_after, window = residuals

        def fetch(number: Any) -> list[Array]:
            return gathered(shards, number) if vjp.needs_weights else []

        def compute(number: Any, saved: Arrays, carry: Any) -> Any:
            (weights, *window), cotangents, const_sums, gradients = carry
            const_gradients, gradient, cotangents = vjp.backward(consts, weights, saved, cotangents)
            row_gradients = exchange.scatter(gradient)
            gradients = [
                None if row is None else lax.dynamic_update_index_in_dim(stacked, row, number, 0)
                for stacked, row in zip(gradients, row_gradients, strict=True)
            ]
            return window, cotangents, _sum(const_sums, const_gradients), gradients

        def step(carry: Any, number: Any) -> tuple[Any, None]:
            carry = ([*carry[0], fetch(number - ahead)], *carry[1:])
            return compute(number, _row(stack, number), carry), None

        # The window has the weights of the next `ahead` layers, the last layer first.
        window = [*window, *(fetch(count - 1 - k) for k in range(1, ahead))]
        carry: Any = (window, without_float0(cotangents), _zeros(consts), _zeros(shards))
        for number in reversed(range(in_loop, count)):
            if number >= ahead:
                carry = ([*carry[0], fetch(number - ahead)], *carry[1:])
            carry = compute(number, saved_after[number - in_loop], carry)
        if in_loop > ahead:
            carry, _ = lax.scan(step, carry, np.arange(in_loop - 1, ahead - 1, -1, dtype=np.int32))
        for number in reversed(range(min(in_loop, ahead))):
            carry = compute(number, _row(stack, number), carry)
        _, cotangents, const_sums, gradients = carry
        return const_sums, gradients, cotangents

    return _differentiable(forward, backward)(list(vjp.consts), list(shards), list(x))


def _differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., list[Array]]:
    """A function of constants, shards and operand with this derivative.

    Args:
        forward: Returns the result, and with `keeps` also the residuals for `backward`.
        backward: Returns the gradients of the three arguments, from the residuals and the cotangents.
    """

    @jax.custom_vjp
    def call(consts: Any, shards: Any, x: Any) -> list[Array]:
        return forward(consts, shards, x, keeps=False)[0]

    call.defvjp(partial(forward, keeps=True), backward)
    return call


def _row(stack: Arrays, number: Any) -> list[Array]:
    return [lax.dynamic_index_in_dim(leaf, number, 0, keepdims=False) for leaf in stack]


def _sum(xs: Arrays, ys: Arrays) -> list[Any]:
    """The sums of pairs of gradients; None if the gradient does not exist."""
    return [None if x is None else x + y for x, y in zip(xs, ys, strict=True)]


def _zeros(arrays: Arrays) -> list[Any]:
    """Zeros like those of `arrays` that have a derivative; None for the others."""
    return [
        _compat.as_varying(jnp.zeros_like(x), sorted(_compat.varying_axes(x)))
        if jnp.issubdtype(x.dtype, jnp.inexact)
        else None
        for x in arrays
    ]
