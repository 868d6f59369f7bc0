"""Computation that hides communication: products of small matrices, one after another, on one thread.

All elements stay 1, which the results must show. The number of products for a time span is calibrated once in
every process, so that the computation alone and with communication is the same work.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.harness.work import Floats, Operation, Work

SIDE = 64  # small enough that no library calls a second thread for it
Array = Any


def jax_products(x: Array, count: Array) -> Array:
    """`count` products after `x` [SIDE, SIDE], under jit."""
    lax: Any = importlib.import_module("jax.lax")

    def product(_: Array, y: Array) -> Array:
        return x @ y * np.float32(1 / SIDE)

    return lax.fori_loop(0, count, product, x)


def numpy_products(x: Array, count: int) -> Array:
    """The same of NumPy arrays or torch tensors."""
    y = x
    for _ in range(count):
        y = x @ y * (1 / SIDE)
    return y


def matrix() -> Array:
    return np.ones((SIDE, SIDE), np.float32)


def after_products(call: Callable[[list[Array]], Any], seconds: float) -> Callable[[list[Array]], Any]:
    """A function to be jitted: `call` of tensors of which the first is ready only after the computation."""
    if not seconds:
        return call
    count = jax_count(seconds)

    def with_computation(xs: list[Array]) -> Any:
        jnp: Any = importlib.import_module("jax.numpy")
        # A value computed from an operand cannot be computed during compilation.
        start = jnp.asarray(matrix()) * (1 + 0 * xs[0][0])
        done = jax_products(start, count)
        return call([xs[0] + (done[0, 0] - 1), *xs[1:]])

    return with_computation


class JaxComputing(Operation):
    """The computation alone, under jit."""

    def __init__(self, work: Work) -> None:
        jax: Any = importlib.import_module("jax")
        self._given = [jax.numpy.zeros(count, "float32") for count in work.counts]
        self._block = jax.block_until_ready
        self._call: Callable[[list[Array]], Array] = jax.jit(after_products(_first, work.seconds))

    def fill(self, variant: int) -> None:
        del variant

    def run(self) -> None:
        self._block(self._call(self._given))

    def results(self) -> list[Floats]:
        return []


class LoopComputing(Operation):
    """The computation alone, in a loop of Python: of a NumPy array or a torch tensor."""

    def __init__(self, x: Array, seconds: float) -> None:
        self._x, self._count = x, loop_count("numpy" if isinstance(x, np.ndarray) else "torch", seconds)

    def fill(self, variant: int) -> None:
        del variant

    def run(self) -> None:
        numpy_products(self._x, self._count)

    def results(self) -> list[Floats]:
        return []


def _first(xs: list[Array]) -> Array:
    return xs[0]


@functools.cache
def jax_count(seconds: float) -> int:
    """How many products take `seconds`."""
    jax: Any = importlib.import_module("jax")
    call = jax.jit(jax_products)

    def run(count: int) -> None:
        jax.block_until_ready(call(matrix(), count))

    return _count(run, seconds)


@functools.cache
def loop_count(library: str, seconds: float) -> int:
    """How many take `seconds`, of arrays of `library`: numpy or torch."""
    x = matrix()
    if library == "torch":
        x = importlib.import_module("torch").from_numpy(x)

    def run(count: int) -> None:
        numpy_products(x, count)

    return _count(run, seconds)


def _count(run: Callable[[int], None], seconds: float) -> int:
    count = 64
    run(count)
    while True:
        taken = min(_time(run, count) for _ in range(3))
        if taken > seconds / 2:
            return max(1, round(count * seconds / taken))
        count *= 2


def _time(run: Callable[[int], None], count: int) -> float:
    before = time.perf_counter()
    run(count)
    return time.perf_counter() - before
