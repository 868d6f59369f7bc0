"""Contexts that set the thread's mesh, and transfers of arrays that JAX considers explicit.

Like `_compat`, this module uses private names of JAX.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

import jax
from jax._src import config as _src_config

from commplan.diagnostics import fail
from commplan.lowering.jax import _compat

Context = contextlib.AbstractContextManager[Any]
_config = cast("Any", _src_config)


def in_mesh(mesh: Any) -> Context:
    """A context in which the thread's mesh (`jax.set_mesh`) is `mesh` or unset; no effect inside a trace.

    JAX traces and lowers a shard_map only if the thread's mesh is that of the shard_map, or is not set.

    Args:
        mesh: The mesh of the shard_map; None for arrays on single devices.
    """
    if _compat.tracing():
        return contextlib.nullcontext()
    concrete: Any = jax.sharding.get_mesh()
    abstract: Any = jax.sharding.get_abstract_mesh()
    if concrete == mesh or (concrete.empty and abstract.empty):
        return contextlib.nullcontext()
    return jax.set_mesh(mesh)


def traced_in(mesh: Any, file: str) -> Context:
    """`in_mesh` for a shard_map of `mesh` that may be traced within another function.

    Args:
        mesh: The mesh of the shard_map.
        file: The plan's file, for errors.

    Raises:
        CommplanError: CP0828 if the thread's mesh has a different number of devices, which JAX cannot lower.
    """
    current: Any = jax.sharding.get_abstract_mesh()
    abstract = mesh.abstract_mesh
    if not _compat.tracing() or current.empty or current == abstract or current.manual_axes:
        return in_mesh(mesh)
    if current.size == abstract.size:
        return jax.sharding.use_abstract_mesh(abstract)
    sizes = ", ".join(f"{name} = {size}" for name, size in dict(current.shape).items())
    return fail(
        "CP0828",
        f"jax.set_mesh has set a mesh of {current.size} devices, but this step runs on {abstract.size}",
        f"the axes of that mesh: {sizes}",
        "compile the step with run.jit instead of jax.jit, or call it in `with jax.set_mesh(run.mesh):`",
        file=file,
    )


def explicit() -> Context:
    """A context in which NumPy arrays are transferred explicitly, as by `jax.device_put`."""
    return _config.explicit_device_put_scope()


def placed(x: Any, sharding: Callable[[Any], Any] | None) -> Any:
    """Move `x` to devices explicitly if it is a NumPy array, or an uncommitted array.

    Args:
        x: Any value. For devices of several processes it is the whole array, equal in all processes.
        sharding: Returns the `NamedSharding` of `x`; called only if `x` moves. None for the default device,
            to which only NumPy arrays move.

    Returns:
        The array. `x` itself if the transfer fails, so that later checks can report the reason.
    """
    on_host = type(x).__module__ == "numpy"
    if not on_host and (sharding is None or getattr(x, "committed", True)):
        return x
    try:
        if on_host and x.dtype.itemsize > 4:  # JAX 0.10.0 reuses the type of a narrowed copy
            x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)
        target: Any = sharding and sharding(x)
        if target is None or target.is_fully_addressable:
            return jax.device_put(x, target)
        # `device_put` would compare the arrays of all processes, in a collective at each call.
        host = x if on_host else jax.device_get(x)
        with explicit():
            return jax.make_array_from_callback(x.shape, target, host.__getitem__)
    except (TypeError, ValueError):
        return x
