"""The built-in functions of a schedule, as functions of pytrees."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from commplan.ir.schedule import Schedule
from commplan.ir.stages.builtins import Builtin
from commplan.ir.types import DType
from commplan.lowering.builtins import on_leaves


def builtin_functions(schedule: Schedule) -> dict[str, Callable[..., Any]]:
    """The built-in functions of `schedule` by name; they need not be bound."""
    return {fn.name: functools.partial(_on_trees, fn.body) for fn in schedule.fns if fn.body is not None}


def _on_trees(body: Builtin, *trees: Any) -> Any:
    """The result of `body`, or a tuple of results; result i has the structure of operand i."""
    operands = [jax.tree_util.tree_flatten(tree) for tree in trees]
    leaves = [[jnp.asarray(x) for x in xs] for xs, _ in operands]
    pairs = zip(operands, on_leaves(body, leaves, _dtype, jnp.full), strict=False)
    results = tuple(jax.tree_util.tree_unflatten(structure, ys) for (_, structure), ys in pairs)
    return results if body.definition.results > 1 else results[0]


def _dtype(dtype: DType) -> Any:
    """The dtype of arrays. If 64-bit types are disabled in JAX it has 32 bits, which `functions` reports."""
    return jax.dtypes.canonicalize_dtype(dtype.numpy_name)
