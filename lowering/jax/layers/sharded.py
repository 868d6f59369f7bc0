"""Layers one after another, of whose weights each rank keeps a shard.

Forward, a layer's weights are gathered while `prefetch` layers before it compute, and dropped after use.
The backward pass gathers them again, in the other order, and scatters the gradient of each layer where it is
made. With n layers there are n gathers forward, n - 1 backward (the last layer's weights are still there) and
n scatters; a gather is not begun before the layer `prefetch` before its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np

from commplan.lowering.jax import _compat
from commplan.lowering.jax.layers.vjp import LayerVjp, without_float0
from commplan.lowering.jax.primitives import optimization_barrier
from commplan.lowering.jax.typing_shim import jax, jnp, lax

Array = Any
SCATTERS_IN_FLIGHT = 2  # that the gathers of the backward pass do not wait for
Arrays = Sequence[Array]


class LayerExchange(Protocol):
    """How the weights of a layer travel."""

    def gather(self, shards: Arrays) -> list[Array]:
        """The whole leaves, typed as each rank's own."""
        ...

    def scatter(self, gradients: Arrays) -> list[Array]:
        """The shards' gradient of this rank's terms of that of the whole leaves."""
        ...

    def after(self, shards: Arrays, values: Arrays) -> tuple[list[Array], list[Array]]:
        """Both; a gather of the first is not begun before each of the second exists, which are used on."""
        ...

    def gradients_after(self, gradients: Arrays, values: Arrays) -> tuple[list[Array], list[Array]]:
        """The same of gradients that are to be scattered."""
        ...


@dataclass(frozen=True)
class Layer:
    """A layer: what it computes and how its weights travel."""

    vjp: LayerVjp
    exchange: LayerExchange


@dataclass
class GatherWindow:
    """Weights that were gathered and not used yet, by the layer's number; gathers are begun one after
    another, so that XLA combines none of two layers. last: the layer gathered last."""

    layers: Sequence[Layer]
    shards: Sequence[Arrays]
    weights: dict[int, list[Array]] = field(default_factory=dict[int, list[Array]])
    last: int = -1

    def fetch(self, number: int, values: Arrays) -> Arrays:
        """Gather a layer's weights after `values`, which are given back to be used on."""
        if number in self.weights:
            return values
        exchange = self.layers[number].exchange
        shards, values = exchange.after(self.shards[number], values)
        if latest := self.weights.get(self.last):
            shards, latest[-1:] = exchange.after(shards, latest[-1:])
        self.weights[number], self.last = exchange.gather(shards), number
        return values


def unrolled(layers: Sequence[Layer], shards: Sequence[Arrays], x: Arrays, prefetch: int) -> list[Array]:
    """What the last of `layers` makes of `x`, each taking what the one before makes."""
    last = len(layers) - 1
    needs = [layer.vjp.needs_weights for layer in layers]
    consts = {id(layer.vjp): layer.vjp.consts for layer in layers}  # layers alike close over the same
    own = [list(consts).index(id(layer.vjp)) for layer in layers]

    def forward(consts: Any, shards: Sequence[Arrays], x: Arrays, *, keeps: bool) -> tuple[Any, Any]:
        window, kept = GatherWindow(layers, shards), list[Arrays]()
        weights: Arrays = ()
        for number, layer in enumerate(layers):
            for ahead in range(number, min(number + prefetch, last) + 1):
                x = window.fetch(ahead, x)
            weights = window.weights.pop(number)
            if keeps:
                x, saved = layer.vjp.forward(consts[own[number]], weights, x)
                kept.append(saved)
            else:
                x = layer.vjp.run(consts[own[number]], weights, x)
            # Else XLA may make x again in the backward pass, from the weights (rows of an embedding).
            x = optimization_barrier(x)
        return x, (consts, shards, kept, weights if needs[last] else [])

    def backward(residuals: Any, cotangents: Arrays) -> tuple[Any, Any, Any]:
        consts, shards, kept, weights = residuals
        cotangents = without_float0(cotangents)
        window = GatherWindow(layers, shards, {last: weights}, last)
        gradients: list[Arrays] = [[] for _ in range(len(layers) + SCATTERS_IN_FLIGHT)]
        of_consts: list[Any] = [None for _ in consts]
        for number in reversed(range(len(layers))):
            done = number + SCATTERS_IN_FLIGHT
            for ahead in range(number, max(number - prefetch, 0) - 1, -1):
                if needs[ahead]:
                    both = window.fetch(ahead, [*cotangents, *gradients[done]])
                    cotangents, gradients[done] = both[: len(cotangents)], both[len(cotangents) :]
            weights, place = window.weights.pop(number, []), own[number]
            more, whole, cotangents = layers[number].vjp.backward(
                consts[place], weights, kept[number], cotangents
            )
            of_consts[place] = more if of_consts[place] is None else _sum(of_consts[place], more)
            exchange = layers[number].exchange
            whole, gradients[number + 1] = exchange.gradients_after(whole, gradients[number + 1])
            gradients[number] = exchange.scatter(whole)
        return of_consts, gradients[: len(layers)], cotangents

    given = [list(own) for own in consts.values()], [list(leaves) for leaves in shards]
    return _differentiable(forward, backward)(*given, list(x))


def scanned(layer: Layer, shards: Arrays, x: Arrays, prefetch: int) -> list[Array]:
    """As `unrolled`, of layers alike under `lax.scan`; a leading dimension of `shards` counts them.

    The first weights are gathered before a loop, and the last `prefetch` layers are computed behind it, so
    that no loop gathers what nobody uses; those of the last layer stay for the backward pass.
    """
    vjp, exchange = layer.vjp, layer.exchange
    count = shards[0].shape[0]
    ahead = min(prefetch, count - 1)
    behind = count - ahead  # the number of the first layer that is computed behind the loop

    def gathered(shards: Arrays, number: Any) -> list[Array]:
        return exchange.gather(_row(shards, number))

    def forward(consts: Arrays, shards: Arrays, x: Arrays, *, keeps: bool) -> tuple[Any, Any]:
        def compute(weights: Arrays, x: Arrays) -> tuple[list[Array], list[Array]]:
            return vjp.forward(consts, weights, x) if keeps else (vjp.run(consts, weights, x), [])

        def step(carry: Any, number: Any) -> tuple[Any, Arrays]:
            x, window = carry
            window = [*window, gathered(shards, number + ahead)]
            x, saved = compute(window[0], x)
            return (x, window[1:]), saved

        window = [gathered(shards, number) for number in range(ahead)]
        (x, window), stack = lax.scan(step, (x, window), np.arange(behind, dtype=np.int32))
        kept: list[Arrays] = []
        for weights in window:
            x, saved = compute(weights, x)
            kept.append(saved)
        return x, (consts, shards, stack, kept, window[-1:] if vjp.needs_weights else [[]] * len(window[-1:]))

    def backward(residuals: Any, cotangents: Arrays) -> tuple[Any, Any, Any]:
        consts, shards, stack, kept, window = residuals

        def fetch(number: Any) -> list[Array]:
            return gathered(shards, number) if vjp.needs_weights else []

        def compute(number: Any, saved: Arrays, carry: Any) -> Any:
            (weights, *window), cotangents, of_consts, gradients = carry
            more, whole, cotangents = vjp.backward(consts, weights, saved, cotangents)
            own = exchange.scatter(whole)
            gradients = [
                None if row is None else lax.dynamic_update_index_in_dim(stack, row, number, 0)
                for stack, row in zip(gradients, own, strict=True)
            ]
            return window, cotangents, _sum(of_consts, more), gradients

        def step(carry: Any, number: Any) -> tuple[Any, None]:
            carry = ([*carry[0], fetch(number - ahead)], *carry[1:])
            return compute(number, _row(stack, number), carry), None

        window = [*window, *(fetch(count - 1 - k) for k in range(1, ahead))]
        carry: Any = (window, without_float0(cotangents), _zeros(consts), _zeros(shards))
        for number in reversed(range(behind, count)):
            if number >= ahead:
                carry = ([*carry[0], fetch(number - ahead)], *carry[1:])
            carry = compute(number, kept[number - behind], carry)
        if behind > ahead:
            carry, _ = lax.scan(step, carry, np.arange(behind - 1, ahead - 1, -1, dtype=np.int32))
        for number in reversed(range(min(behind, ahead))):
            carry = compute(number, _row(stack, number), carry)
        _, cotangents, of_consts, gradients = carry
        return of_consts, gradients, cotangents

    return _differentiable(forward, backward)(list(vjp.consts), list(shards), list(x))


def _differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., list[Array]]:
    @jax.custom_vjp
    def call(consts: Any, shards: Any, x: Any) -> list[Array]:
        return forward(consts, shards, x, keeps=False)[0]

    call.defvjp(partial(forward, keeps=True), backward)
    return call


def _row(stack: Arrays, number: Any) -> list[Array]:
    return [lax.dynamic_index_in_dim(leaf, number, 0, keepdims=False) for leaf in stack]


def _sum(xs: Arrays, ys: Arrays) -> list[Array]:
    return [None if x is None else x + y for x, y in zip(xs, ys, strict=True)]


def _zeros(arrays: Arrays) -> list[Array]:
    """Zeros of the types of those of `arrays` that have a derivative."""
    return [
        _compat.as_varying(jnp.zeros_like(x), sorted(_compat.varying_axes(x)))
        if jnp.issubdtype(x.dtype, jnp.inexact)
        else None
        for x in arrays
    ]
