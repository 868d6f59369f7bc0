"""Private names of JAX, and differences between its supported versions (0.10.0 to 0.12).

Only this module, `_jit` (compilation), `_context` and `_lineage` import from `jax._src`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax._src import core as _src_core
from jax._src import distributed as _src_distributed
from jax._src import lib as _src_lib
from jax._src import xla_bridge as _src_xla_bridge
from jax._src.interpreters import partial_eval as _src_partial_eval
from jax._src.interpreters import pxla as _src_pxla
from jax.sharding import PartitionSpec

_core, _partial_eval = cast("Any", _src_core), cast("Any", _src_partial_eval)
_cpp = cast("Any", _src_lib)._jax


def varying_axes(x: Array) -> frozenset[str]:
    """The manual mesh axes over which JAX types `x` as varying; empty with `check_vma=False`."""
    return varying_in(jax.typeof(x))


def varying_in(aval: Any) -> frozenset[str]:
    """The manual mesh axes over which the type `aval` is varying."""
    manual = getattr(aval, "mat", None)
    return frozenset(manual.varying) if manual is not None else frozenset()  # references have none


def unreduced_in(aval: Any) -> frozenset[str]:
    """The manual mesh axes over which a value of type `aval` is an unreduced sum."""
    return frozenset(aval.mat.unreduced)


def with_varying(aval: Any, varying: Collection[str]) -> Any:
    """The type `aval`, varying over exactly `varying`."""
    return aval.update(manual_axis_type=aval.mat.update(varying=frozenset(varying)))


def with_varying_terms(aval: Any, axes: Collection[str]) -> Any:
    """The type `aval`, varying instead of unreduced over `axes`."""
    varying = aval.mat.varying | set(axes)
    unreduced = aval.mat.unreduced - set(axes)
    # `update` of JAX 0.11 and newer keeps `unreduced_kind`, which requires unreduced axes.
    manual = type(aval.mat)(varying=varying, unreduced=unreduced, reduced=aval.mat.reduced)
    return aval.update(manual_axis_type=manual)


def entries(spec: Any) -> tuple[Any, ...]:
    """The entries of a partition spec, one for each dimension."""
    return tuple(getattr(spec, "partitions", spec))  # JAX 0.10.0 iterates, newer ones have `partitions`


def unreduced_axes(spec: Any) -> frozenset[str]:
    """The axes over which an array with this partition spec is an unreduced sum.

    JAX 0.11 and newer have other reductions, too. No plan uses them, and the result for them is empty.
    """
    kind = getattr(spec, "unreduced_kind", None)
    return frozenset(spec.unreduced) if kind is None or kind.name == "sum" else frozenset()


def with_terms(spec: Any, axes: Collection[str]) -> Any:
    """`spec`, unreduced over `axes`."""
    return PartitionSpec(*entries(spec), unreduced=frozenset(axes)) if axes else spec


def as_varying(x: Array, axes: Sequence[str]) -> Array:
    """`x`, typed as varying over `axes` too. No communication; its transpose is a sum over `axes`."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    return lax.pcast(x, missing, to="varying") if missing else x


def tracks_varying(axis: str) -> bool:
    """Whether the enclosing shard_map types its values (`check_vma=True`). `axis` is one of its axes."""
    return axis in varying_axes(lax.axis_index(axis))


def manual_axes() -> dict[str, int]:
    """The axes of the enclosing shard_map with their sizes; empty outside of one."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    sizes = dict(mesh.shape)
    return {name: int(sizes[name]) for name in mesh.manual_axes}


def new_if_empty(x: Array) -> Array:
    """`x`, or if it has no elements another array like it. Values without a NumPy dtype are unchanged.

    XLA of JAX 0.11.1 and 0.11.2 crashes if a shard_map returns an empty argument unchanged.
    """
    if not hasattr(x, "dtype") or x.size or not jnp.issubdtype(x.dtype, np.generic):
        return x
    return as_varying(jnp.zeros(x.shape, x.dtype), tuple(varying_axes(x)))


def shard_map(body: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`jax.shard_map(body, **options)`; see `new_if_empty`."""

    @functools.wraps(body)
    def wrapped(*args: Any) -> Any:
        return jax.tree_util.tree_map(new_if_empty, body(*args))

    return jax.shard_map(wrapped, **options)


# Whether no function is being traced by jit, grad, vmap or scan.
untraced: Callable[[], bool] = _core.trace_state_clean


def tracing() -> bool:
    """Whether a function is being traced by jit, grad, vmap or scan."""
    return not untraced()


def recording() -> Any:
    """The trace that records the current operations, of jit or of a loop body; None if there is none.

    The traces of derivatives and of vmap are skipped, since they pass operations on to it.
    """
    trace = _core.trace_ctx.trace
    while trace is not None and not isinstance(trace, _partial_eval.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace


# Converts the constants of a jaxpr to its first arguments.
with_constants_as_arguments: Callable[[Any], Any] = _partial_eval.convert_constvars_jaxpr


def without_dead_code(
    jaxpr: Any, results: Sequence[bool], required: Sequence[bool]
) -> tuple[Any, list[bool]]:
    """Eliminate dead code.

    Args:
        jaxpr: The jaxpr.
        results: For each result, whether it is kept.
        required: For each argument, whether it is kept even if it is unused.

    Returns:
        The reduced jaxpr, and for each argument whether it is kept.
    """
    jaxpr, used = _partial_eval.dce_jaxpr(jaxpr, tuple(results), tuple(required))
    return jaxpr, list(used)


def keep_unused(primitive: Any) -> None:
    """Prevent dead code elimination from removing equations of `primitive` and their operands."""

    def rule(_: Any, *args: Any) -> Any:  # the equation is last; JAX 0.12 passes another argument
        return [True] * len(args[-1].invars), args[-1]

    _partial_eval.dce_rules[primitive] = rule


def jaxpr_and_constants(entry: Any) -> tuple[Any, tuple[Array, ...]]:
    """The jaxpr and the constants of `entry`, which is a jaxpr, or a closed jaxpr before JAX 0.12."""
    return getattr(entry, "jaxpr", entry), tuple(getattr(entry, "consts", ()))


def scan_operands(parameters: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carried values among the operands of a `scan`."""
    if "ft_in" in parameters:  # JAX 0.12
        consts, carry, _ = map(len, parameters["ft_in"].unpack())
        return consts, carry
    return int(parameters["num_consts"]), int(parameters["num_carry"])


def put(kind: Any, sharding: Any, pieces: Sequence[Any], devices: Sequence[Any]) -> Array:
    """Create an array of type `kind` from pieces on `devices`, in the order of the sharding.

    `jax.make_array_from_callback` ends in this call, and takes longer to prepare it than the call takes.
    """
    return cast("Any", _src_pxla).batched_device_put(kind, sharding, pieces, list(devices))


def coordination() -> Any:
    """The state of `jax.distributed`: `client`, `coordinator_address`."""
    return cast("Any", _src_distributed).global_state


def cpu_devices() -> list[Any]:
    """The CPU devices of all processes.

    If JAX_PLATFORMS excludes the CPU, they belong to a separate client. All processes of `jax.distributed`
    must create it together, and `jax.devices` does not list its devices.
    """
    try:
        return list(jax.devices("cpu"))
    except RuntimeError:
        return list(_cpu_client().devices())


@functools.cache
def _cpu_client() -> Any:
    """A client for the CPU that JAX does not know. Created once, since each has its own devices."""
    return cast("Any", _src_xla_bridge).make_cpu_client()


def collect_garbage() -> None:
    """Release the buffers of completed copies now instead of at JAX's next call."""
    _cpp.collect_garbage()
