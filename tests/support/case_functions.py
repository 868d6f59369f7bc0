"""The functions that random plans name, and the types that their arrays are stored in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from commplan.pytree import flatten

Tree = Any


def storage(dtype: str) -> np.dtype[Any]:
    """The NumPy type of that name, bfloat16 by way of `ml_dtypes`."""
    if dtype != "bfloat16":
        return np.dtype(dtype)
    import ml_dtypes  # noqa: PLC0415 - only where bfloat16 is asked for

    return np.dtype(ml_dtypes.bfloat16)


def each(function: Callable[..., Any]) -> Callable[..., Any]:
    """Apply `function`, which takes leaves of NumPy or JAX, to every leaf of trees."""

    def on_trees(*trees: Tree) -> Tree:
        flat = [flatten(tree) for tree in trees]
        columns = zip(*([leaf for _, leaf in pairs] for pairs, _ in flat), strict=True)
        return flat[0][1]([function(*column) for column in columns])

    return on_trees


def _bump(x: Any) -> Any:
    return ~x if x.dtype == bool else x + 1


def _double(x: Any) -> Any:
    return x if x.dtype == bool else x + x


def _blend(x: Any, y: Any) -> Any:
    return x ^ y if x.dtype == bool else x + y


FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "keep": each(lambda x: x), "bump": each(_bump), "double": each(_double), "blend": each(_blend),
}  # fmt: skip
