"""JAX's mesh of the thread, and transfers that a transfer guard lets pass.

Like `_compat`, this is where private names of JAX are touched.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, cast

from jax._src import config as _src_config

from commplan.diagnostics import fail
from commplan.lowering.jax import _compat
from commplan.lowering.jax.typing_shim import jax

Context = contextlib.AbstractContextManager[Any]
_config = cast("Any", _src_config)


def in_mesh(mesh: Any) -> Context:
    """A context in which no mesh but `mesh` is set, as by `jax.set_mesh`; within a trace nothing changes.

    JAX traces and lowers a shard_map of a mesh only if the thread's mesh is that one, or none is set.
    mesh: None for arrays of single devices.
    """
    if _compat.tracing():
        return contextlib.nullcontext()
    concrete: Any = jax.sharding.get_mesh()
    abstract: Any = jax.sharding.get_abstract_mesh()
    if concrete == mesh or (concrete.empty and abstract.empty):
        return contextlib.nullcontext()
    return jax.set_mesh(mesh)


def traced_in(mesh: Any, file: str) -> Context:
    """The same for a shard_map of `mesh` that is about to be traced within another function.

    Raises CP0828 if the thread's mesh has another number of devices: JAX would refuse to lower it.
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
        f"jax.set_mesh has set a mesh of {current.size} devices, and this step runs on {abstract.size}",
        f"the mesh that is set: {sizes}",
        "compile the step with run.jit instead of jax.jit, or call it in `with jax.set_mesh(run.mesh):`",
        file=file,
    )


def explicit() -> Context:
    """A context in which arrays of the host become arrays of devices explicitly, as by `jax.device_put`."""
    return _config.explicit_device_put_scope()


def placed(x: Any, sharding: Callable[[Any], Any] | None) -> Any:
    """`x`, put on devices explicitly if it is an array of the host, or is on the default device by chance.

    sharding: returns the `NamedSharding` of `x`; called only if `x` moves. None for the default device.
    If `x` does not fit it, `x` is returned unchanged, and the checks report it.
    """
    on_host = type(x).__module__ == "numpy"
    if not on_host and (sharding is None or getattr(x, "committed", True)):
        return x
    try:
        if on_host and x.dtype.itemsize > 4:  # JAX 0.10.0 reuses a narrowed copy's type
            x = x.astype(jax.dtypes.canonicalize_dtype(x.dtype), copy=False)
        return jax.device_put(x, sharding and sharding(x))
    except (TypeError, ValueError):
        return x
