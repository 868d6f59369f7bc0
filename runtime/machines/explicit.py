"""Global arrays on Explicit axes of a mesh, whose types say where they lie and what is left to sum."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from jax.sharding import AxisType, NamedSharding, PartitionSpec

from commplan.diagnostics import fail
from commplan.lowering.jax import _compat
from commplan.lowering.jax.typing_shim import jax, jnp

Array = Any


def explicit_axes(mesh: Any) -> frozenset[str]:
    """The axes of the mesh whose shardings are part of JAX's types."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind is AxisType.Explicit)


def resharded(own: PartitionSpec, mesh: Any, sizes: Mapping[str, int], file: str, x: Array) -> Array:
    """`x` as `own` says along the plan's axes, those of `sizes`; along others as it is.

    Nothing is summed: raises CP0813 for an array that is the terms of a sum, where `own` does not say so.
    """
    x = jnp.asarray(x)
    explicit = explicit_axes(mesh)
    held = [_names(entry) for entry in _compat.entries(jax.typeof(x).sharding.spec)]
    wanted = [_names(entry) for entry in _compat.entries(own)]
    wanted += [()] * (x.ndim - len(wanted))
    entries = [
        tuple(name for name in new if name in explicit) + tuple(name for name in old if name not in sizes)
        for old, new in zip(held, wanted, strict=True)
    ]
    terms = _compat.unreduced_axes(own) & explicit
    odd = sorted((_compat.unreduced_axes(jax.typeof(x).sharding.spec) & sizes.keys()) - terms)
    if odd:
        over, kind = ", ".join(odd), jax.typeof(x).str_short(short_dtypes=True)
        fail(
            "CP0813",
            f"an argument of type {kind} should be the same over {over}",
            f"JAX has not summed it over {over}: it is unreduced",
            "declare it `partial` in the plan, whose phase then sums it; or let JAX do it first:"
            f" jax.reshard(x, jax.{PartitionSpec(*entries)!r})",
            file=file,
        )
    reduced = jax.typeof(x).sharding.spec.reduced & sizes.keys()
    if entries == held and not reduced:
        return x
    return jax.reshard(x, NamedSharding(mesh, _compat.with_terms(PartitionSpec(*entries), terms)))


def unreduced_over(tree: Any, axes: Collection[str]) -> bool:
    """Whether each array of `tree` is the terms of a sum over `axes`, and over no other, by its type."""
    specs = [getattr(getattr(_typeof(x), "sharding", None), "spec", None) for x in jax.tree.leaves(tree)]
    return bool(specs) and all(
        spec is not None and _compat.unreduced_axes(spec) == frozenset(axes) for spec in specs
    )


def has_reduced(mesh: Any, axes: Collection[str]) -> bool:
    """Whether arrays outside of a shard_map can be typed as `reduced_over` types them: on Explicit axes."""
    explicit = explicit_axes(mesh) if hasattr(mesh, "axis_types") else frozenset[str]()
    return bool(explicit) and frozenset(axes) <= explicit


def reduced_over(mesh: Any, axes: Collection[str], x: Array) -> Array:
    """`x`, typed as one whose derivative is unreduced over `axes` of `mesh`; nothing is summed."""
    x = jnp.asarray(x)
    if not axes:
        return x
    entries = _compat.entries(jax.typeof(x).sharding.spec)
    return jax.reshard(x, NamedSharding(mesh, PartitionSpec(*entries, reduced=frozenset(axes))))


def _typeof(x: Any) -> Any:
    return jax.typeof(x) if hasattr(x, "aval") else None


def _names(entry: Any) -> tuple[str, ...]:
    """The axes of one dimension of a spec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
