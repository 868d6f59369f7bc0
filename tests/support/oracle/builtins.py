"""Built-in functions in NumPy, written without reading their definitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from commplan.ir.stages.builtins import Builtin
from commplan.pytree import flatten

from .numbers import Array, convert

Arrays = Sequence[Array]


def _nesterov(xs: Arrays, rate: Any, momentum: Any) -> Arrays:
    weights, velocity, gradient = xs
    velocity = gradient + momentum * velocity
    lookahead = gradient + momentum * velocity
    return weights - rate * lookahead, velocity


_RESULTS: Mapping[str, Callable[..., Arrays]] = {
    "zeros": lambda xs: [np.zeros_like(xs[0])],
    "add": lambda xs: [np.add(*xs)],
    "subtract": lambda xs: [np.subtract(*xs)],
    "scale": lambda xs, factor: [np.multiply(xs[0], factor)],
    "blend": lambda xs, alpha: [xs[0] * alpha + xs[1] * (1 - alpha)],
    "sgd": lambda xs, rate: [xs[0] - xs[1] * rate],
    "nesterov": _nesterov,
}


def builtin(body: Builtin, *trees: Any) -> Any:
    """The results on trees of NumPy arrays: floats in f32 or f64, integers in their own type."""
    flat = [flatten(tree) for tree in trees]
    columns = zip(*([np.asarray(leaf) for _, leaf in pairs] for pairs, _ in flat), strict=True)
    answers = [_on_arrays(body, column) for column in columns]
    count = 2 if body.name == "nesterov" else 1
    rebuilds = [rebuild for _, rebuild in flat[:count]]
    results = [rebuild([answer[at] for answer in answers]) for at, rebuild in enumerate(rebuilds)]
    return results if count > 1 else results[0]


def _on_arrays(body: Builtin, xs: Arrays) -> Arrays:
    if body.dtype is not None:
        return [convert(xs[0], body.dtype)]
    factors: list[Any] = [*body.factors]
    if xs[0].dtype.kind in "fV":
        wide: Any = np.float64 if any(x.dtype == np.float64 for x in xs) else np.float32
        xs, factors = [x.astype(wide) for x in xs], [wide(factor) for factor in factors]
    else:
        factors = [np.array(int(factor), np.int64).astype(xs[0].dtype) for factor in factors]
    with np.errstate(all="ignore"):
        return [np.asarray(y) for y in _RESULTS[body.name](xs, *factors)]
