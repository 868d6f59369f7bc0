"""Global arrays on Explicit mesh axes, whose types carry their sharding and their pending sums."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from commplan.diagnostics import fail
from commplan.lowering.jax import _compat


def explicit_axes(mesh: Any) -> frozenset[str]:
    """The axes of the mesh that are Explicit: JAX's types contain the sharding over them."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind is AxisType.Explicit)


def resharded(declared: PartitionSpec, mesh: Any, sizes: Mapping[str, int], file: str, x: Array) -> Array:
    """Reshard `x` to `declared` along the plan's Explicit axes; its sharding along other axes stays.

    Args:
        declared: The sharding that the plan declares.
        mesh: The mesh of the run.
        sizes: The plan's axes and their sizes.
        file: The plan's file, for errors.
        x: A global array.

    Returns:
        `x` itself if it has this sharding already.

    Raises:
        CommplanError: CP0813 if `x` is unreduced over an axis over which `declared` is not; nothing
            is summed here.
    """
    x = jnp.asarray(x)
    explicit = explicit_axes(mesh)
    current = [_names(entry) for entry in _compat.entries(jax.typeof(x).sharding.spec)]
    target = [_names(entry) for entry in _compat.entries(declared)]
    target += [()] * (x.ndim - len(target))
    entries = [
        tuple(name for name in new if name in explicit) + tuple(name for name in old if name not in sizes)
        for old, new in zip(current, target, strict=True)
    ]
    terms = _compat.unreduced_axes(declared) & explicit
    pending = sorted((_compat.unreduced_axes(jax.typeof(x).sharding.spec) & sizes.keys()) - terms)
    if pending:
        over, kind = ", ".join(pending), jax.typeof(x).str_short(short_dtypes=True)
        fail(
            "CP0813",
            f"an argument of type {kind} is unreduced over {over}",
            f"the plan expects a value that is the same over {over}: JAX has not summed it yet",
            "declare it `partial` in the plan, whose phase then sums it, or let JAX sum it first:"
            f" jax.reshard(x, jax.{PartitionSpec(*entries)!r})",
            file=file,
        )
    reduced = jax.typeof(x).sharding.spec.reduced & sizes.keys()
    if entries == current and not reduced:
        return x
    return jax.reshard(x, NamedSharding(mesh, _compat.with_terms(PartitionSpec(*entries), terms)))


def unreduced_over(tree: Any, axes: Collection[str]) -> bool:
    """Whether the types of all leaves of `tree` are unreduced over exactly `axes`; False without leaves."""
    specs = [getattr(getattr(_typeof(x), "sharding", None), "spec", None) for x in jax.tree.leaves(tree)]
    return bool(specs) and all(
        spec is not None and _compat.unreduced_axes(spec) == frozenset(axes) for spec in specs
    )


def has_reduced(mesh: Any, axes: Collection[str]) -> bool:
    """Whether types outside shard_map can be `reduced` over `axes`: all of them must be Explicit.

    `mesh` is that of a machine; False for a communicator and for a mesh without Explicit axes.
    """
    explicit = explicit_axes(mesh) if hasattr(mesh, "axis_types") else frozenset[str]()
    return bool(explicit) and frozenset(axes) <= explicit


def reduced_over(mesh: Any, axes: Collection[str], x: Array) -> Array:
    """Give `x` a type that is `reduced` over `axes` of `mesh`: its derivative is unreduced over them.

    Nothing is summed. The result is `x` as an array of the same type if `axes` is empty.
    """
    x = jnp.asarray(x)
    if not axes:
        return x
    entries = _compat.entries(jax.typeof(x).sharding.spec)
    return jax.reshard(x, NamedSharding(mesh, PartitionSpec(*entries, reduced=frozenset(axes))))


def _typeof(x: Any) -> Any:
    """The JAX type of an array or tracer, or None for other values."""
    return jax.typeof(x) if hasattr(x, "aval") else None


def _names(entry: Any) -> tuple[str, ...]:
    """The axes of one dimension of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
