"""Streaming DiLoCo: its plan, and a reference in NumPy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

ISLANDS, FRAGMENTS = 4, 9
RATE, MOMENTUM, ALPHA = 0.3, 0.9, 0.5
# Sizes that islands and fragments do not divide, fewer elements than fragments, a scalar, and an empty leaf.
SHAPES = {"w": (33, 17), "b": (5,), "few": (2,), "empty": (0, 3)}
HEAD = """
plan streaming

axis island = 4
axis data = {data}
input params : tree per island
state center : tree {split}
state momentum : tree {split}
fn outer{outer}
fn mix = blend(alpha = 0.5)
"""
BUILT_IN = " = nesterov(rate = 0.3, momentum = 0.9)"
OPTAX = "(tree, tree, tree) -> tree, tree on device elementwise"
WHOLE = """
at start {
    center = broadcast params over island from 0
    momentum = map zeros(center)
}
every 36 steps in 9 fragments {
    delta = map subtract(center, params)
    delta = reduce delta over island by mean
    center, momentum = map outer(center, momentum, delta)
    params = map mix(params, center)
    output params
}
"""
SPLIT = """
at start {
    shared = broadcast params over island from 0
    center = slice shared over island
    momentum = map zeros(center)
}
every 36 steps in 9 fragments {
    mean = scatter params over island by mean
    delta = map subtract(center, mean)
    center, momentum = map outer(center, momentum, delta)
    shared = gather center over island
    params = map mix(params, shared)
    output params
}
"""


def text(
    *, split: bool, data: int = 1, outer: str = BUILT_IN, fragments: int = FRAGMENTS, hidden: int = 0
) -> str:
    """The plan, whose outer state is whole or split over the islands."""
    head = HEAD.format(data=data, split="split island" if split else "", outer=outer)
    words = f" in {fragments} fragments" * (fragments > 1) + f" hidden under {hidden} steps" * (hidden > 0)
    return head + (SPLIT if split else WHOLE).replace(" in 9 fragments", words)


def nesterov(center: Any, momentum: Any, delta: Any) -> tuple[Any, Any]:
    """The outer update by optax: one step of SGD with Nesterov momentum."""
    optimizer = optax.sgd(RATE, MOMENTUM, nesterov=True)
    state = optimizer.init(center)
    trace = jax.tree.map(lambda _, new: new, state[0].trace, momentum)
    updates, (trace_state, *_) = optimizer.update(delta, (state[0]._replace(trace=trace), *state[1:]), center)
    return optax.apply_updates(center, updates), trace_state.trace


def weights(seed: int, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(ISLANDS, *s)).astype(np.float32) for name, s in shapes.items()}


class Reference:
    """Streaming DiLoCo in float64, fragment by fragment. `rows` is the number of owners of a leaf."""

    def __init__(self, params: Mapping[str, np.ndarray], rows: int, fragments: int = FRAGMENTS) -> None:
        self.rows, self.fragments, self.calls = rows, fragments, 0
        self.params = {name: x.astype(np.float64) for name, x in params.items()}
        self.center = {name: x[0].reshape(-1).copy() for name, x in self.params.items()}
        self.momentum = {name: np.zeros_like(x) for name, x in self.center.items()}

    def owned(self, size: int) -> np.ndarray:
        """The elements of the current fragment of a leaf of `size` elements."""
        width = -(-size // self.rows)
        columns = max(-(-width // self.fragments), 1)
        owner = np.arange(size) % max(width, 1) // columns
        return np.flatnonzero(owner == self.calls % self.fragments)

    def exchange(self, moved: Mapping[str, np.ndarray] | None = None) -> None:
        """One call. `moved` is how far the steps that hide it move the weights."""
        for name, params in self.params.items():
            flat, center, momentum = params.reshape(ISLANDS, -1), self.center[name], self.momentum[name]
            at = self.owned(flat.shape[1])
            delta = center[at] - flat[:, at].mean(0)
            flat = flat + (0 if moved is None else moved[name].astype(np.float64).reshape(flat.shape))
            momentum[at] = delta + MOMENTUM * momentum[at]
            center[at] -= RATE * (delta + MOMENTUM * momentum[at])
            flat[:, at] = ALPHA * flat[:, at] + (1 - ALPHA) * center[at]
            self.params[name] = flat.reshape(params.shape)
        self.calls += 1


def check(params: Mapping[str, Any], state: Mapping[str, Any], reference: Reference) -> None:
    for name, expected in reference.params.items():
        np.testing.assert_allclose(np.asarray(params[name]), expected, rtol=0, atol=2e-6)
        for kind, whole in (("center", reference.center), ("momentum", reference.momentum)):
            actual = np.asarray(state[kind][name]).reshape(-1)[: whole[name].size]
            np.testing.assert_allclose(actual, whole[name], rtol=0, atol=2e-6)
