"""What differs between the versions of JAX that are supported (0.9 up to 0.11.2), and nothing else.

Everything that touches a private name of JAX stands here too, but for what compiles: `_jit`.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from jax._src import config as _src_config
from jax._src import core as _src_core
from jax._src import distributed as _distributed
from jax._src import lib as _src_lib
from jax._src import xla_bridge as _src_xla_bridge
from jax._src.interpreters import partial_eval as _src_partial_eval
from jax._src.interpreters import pxla as _pxla
from jax.experimental import xla_metadata as _xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, PartitionSpec

from commplan.lowering.jax.typing_shim import jax, jnp, lax

Array = Any  # a jax.Array or a tracer of one

_config, _core = cast("Any", _src_config), cast("Any", _src_core)
_partial_eval = cast("Any", _src_partial_eval)
_cpp = cast("Any", _src_lib)._jax
TERMS = hasattr(_core, "ManualAxisType")  # JAX 0.10: types that tell unreduced from varying


def varying_axes(x: Array) -> frozenset[str]:
    """The manual mesh axes over which JAX types `x` as varying; empty with `check_vma=False`."""
    return varying_in(jax.typeof(x))


def varying_in(aval: Any) -> frozenset[str]:
    """The same of a type."""
    manual = getattr(aval, "mat", None)  # 0.10: ManualAxisType
    return frozenset(manual.varying if manual is not None else getattr(aval, "vma", ()))


def explicit_axes(mesh: Any) -> frozenset[str]:
    """The axes of the mesh whose shardings are part of JAX's types."""
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return frozenset(name for name, kind in kinds if kind is AxisType.Explicit)


def entries(spec: Any) -> tuple[Any, ...]:
    """What a partition spec says of each dimension."""
    partitions = getattr(spec, "partitions", None)
    return tuple(spec if partitions is None else partitions)


def unreduced_axes(spec: Any) -> frozenset[str]:
    """The axes over which an array of this partition spec is the terms of a sum that JAX has yet to make.

    Other reductions than sums, which JAX 0.11 has too, are none of a plan's terms. None in JAX 0.9.
    """
    kind = getattr(spec, "unreduced_kind", None)
    if not TERMS or (kind is not None and kind.name != "sum"):
        return frozenset()
    return frozenset(getattr(spec, "unreduced", None) or ())


def reduced_axes(spec: Any) -> frozenset[str]:
    """The axes over which the derivative of an array of this partition spec is unreduced."""
    return frozenset(getattr(spec, "reduced", None) or ())


def with_terms(spec: Any, axes: Collection[str]) -> Any:
    """`spec`, unreduced over `axes`."""
    return PartitionSpec(*entries(spec), unreduced=frozenset(axes)) if axes else spec


def with_reduced(spec: Any, axes: Collection[str]) -> Any:
    """`spec`, reduced over `axes`."""
    return PartitionSpec(*entries(spec), reduced=frozenset(axes)) if axes else spec


def as_varying(x: Array, axes: Sequence[str]) -> Array:
    """`x`, typed as varying over `axes` too. No communication; its transpose is a sum over `axes`."""
    missing = tuple(axis for axis in axes if axis not in varying_axes(x))
    if not missing or not _config._check_vma.value:  # 0.9 makes of it what it cannot transpose
        return x
    return lax.pcast(x, missing, to="varying")


def is_cast_to_varying(primitive: Any) -> bool:
    """Whether `primitive` types a value as varying and does nothing else."""
    return primitive.name in ("pcast", "pvary")


def optimization_barrier(xs: Any) -> Any:
    """`lax.optimization_barrier` of a pytree, whose leaves keep their types: JAX 0.9 types all alike."""

    def typed(new: Array, old: Array) -> Array:
        return assume_same(new, sorted(varying_axes(new) - varying_axes(old)))

    return jax.tree_util.tree_map(typed, lax.optimization_barrier(xs), xs)


def tracks_varying(axis: str) -> bool:
    """Whether the shard_map around us types its values (`check_vma=True`). `axis` is one of its axes."""
    return axis in varying_axes(lax.axis_index(axis))


def manual_axes() -> dict[str, int]:
    """The axes, and their sizes, of the shard_map around us; empty outside of one."""
    mesh: Any = jax.sharding.get_abstract_mesh()
    sizes = dict(mesh.shape)
    return {name: int(sizes[name]) for name in mesh.manual_axes}


def new_if_empty(x: Array) -> Array:
    """`x`; where it has no elements another array like it.

    XLA of JAX 0.11.1 and 0.11.2 crashes where a shard_map returns an empty argument as it is.
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


def all_gather_text(key: str, mine: str, processes: Sequence[int], timeout_s: float) -> dict[int, str]:
    """The text of each of `processes` of `jax.distributed`. All call this alike, once for a `key`.

    Nothing runs on devices: what is under way neither waits nor is waited for. Raises what `barrier` does.
    """
    cast("Any", _distributed).global_state.client.key_value_set(f"{key}/{jax.process_index()}", mine)
    barrier(key, processes, timeout_s)
    return texts(key)


def texts(key: str) -> dict[int, str]:
    """The text of each process that has come to `all_gather_text` so far."""
    client = cast("Any", _distributed).global_state.client
    return {int(name.rpartition("/")[2]): answer for name, answer in client.key_value_dir_get(key)}


def coordinator() -> str:
    """HOST:PORT of the coordinator of `jax.distributed`."""
    return str(cast("Any", _distributed).global_state.coordinator_address)


def barrier(key: str, processes: Sequence[int], timeout_s: float) -> None:
    """Wait for all of `processes`. Raises a JaxRuntimeError on those that come, where one is not in time."""
    cast("Any", _distributed).global_state.client.wait_at_barrier(key, int(timeout_s * 1e3), list(processes))


def cpu_devices() -> list[Any]:
    """The CPU devices of all processes, also where JAX_PLATFORMS has left the CPU out: then those of a client
    of our own, which all processes of `jax.distributed` make together, and which `jax.devices` does not list.
    """
    try:
        return list(jax.devices("cpu"))
    except RuntimeError:
        return list(_cpu_client().devices())


@functools.cache
def _cpu_client() -> Any:
    return cast("Any", _src_xla_bridge).make_cpu_client()


def has_dma(device: Any) -> bool:
    """Whether `device` has memory of its own, and its client registers that of the host for direct copies:
    JAX 0.10 and newer."""
    return device.platform != "cpu" and hasattr(device.client, "dma_map")


def collect_garbage() -> None:
    """Let go of what JAX has held for copies that are over; else it waits for the next call of JAX."""
    _cpp.collect_garbage()


# Whether no function is being traced around us, by jit, grad, vmap or scan.
untraced: Callable[[], bool] = _core.trace_state_clean


def tracing() -> bool:
    """Whether a function is being traced around us, by jit, grad, vmap or scan."""
    return not untraced()


def recording() -> Any:
    """The trace that writes down what is done around us, that of jit or of a loop's body; None without one.

    What differentiates or vectorises passes them on to it.
    """
    trace = _core.trace_ctx.trace
    while trace is not None and not isinstance(trace, _partial_eval.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    return trace


@dataclass(frozen=True)
class Program:
    """A jaxpr whose constants are given: `program(*arguments)` evaluates it. types: of its results."""

    jaxpr: Any
    consts: tuple[Array, ...] = ()

    def __call__(self, *arguments: Array) -> list[Array]:
        return list(_core.eval_jaxpr(self.jaxpr, self.consts, *arguments))

    @property
    def types(self) -> tuple[Any, ...]:
        return tuple(var.aval for var in self.jaxpr.outvars)

    @property
    def hoisted(self) -> Program:
        """The program that takes its constants as its first arguments."""
        return Program(_partial_eval.convert_constvars_jaxpr(self.jaxpr))

    def used(self, results: Sequence[bool]) -> list[bool]:
        """Which arguments those of `results` that are true depend on."""
        return list(_partial_eval.dce_jaxpr(self.jaxpr, tuple(results))[1])

    def restricted(self, results: Sequence[bool], count: int) -> Program:
        """The program of the first `count` arguments that gives these results, which need no others."""
        wanted = tuple(number < count for number in range(len(self.jaxpr.invars)))
        return Program(_partial_eval.dce_jaxpr(self.jaxpr, tuple(results), wanted)[0], self.consts)


def traced(function: Callable[..., Any], *arguments: Array) -> Program:
    """`function` as a program; what it closes over are its constants."""
    closed = jax.make_jaxpr(function)(*arguments)
    return Program(closed.jaxpr, tuple(closed.consts))


def is_traced(x: Array) -> bool:
    """Whether `x` is a tracer."""
    return isinstance(x, _core.Tracer)


def permute(x: Array, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> Array:
    """`lax.ppermute` between ranks counted row-major over `axes`, first named major.

    JAX 0.10 counts them in the order of the mesh, however its axes are named.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    sizes = {name: int(size) for name, size in dict(mesh.shape).items() if name in axes}
    ways = [sizes[axis] for axis in axes]
    order = [axes.index(name) for name in sizes]
    places = np.arange(math.prod(ways)).reshape([ways[i] for i in order]).transpose(np.argsort(order))
    number = places.reshape(-1).tolist()
    return lax.ppermute(x, tuple(sizes), [(number[src], number[dst]) for src, dst in pairs])


def all_gather_same(x: Array, axes: tuple[str, ...]) -> Array:
    """`lax.all_gather` along the leading dimension, its result typed as the same over `axes`.

    Where nothing is typed it is `lax.all_gather` itself, whose derivative sums over ranks: that of the other
    expects JAX to have done so where it typed a use as varying.
    """
    if not any(map(tracks_varying, axes)):
        return lax.all_gather(x, axes, tiled=True)
    return lax.all_gather(x, axes, tiled=True, to="invarying")


def broadcast_native(x: Array, axes: tuple[str, ...], root: int) -> Array:
    """XLA's collective broadcast from `root`, counted row-major over `axes`; typed the same. GPUs only."""
    return assume_same(lax.pbroadcast(x, axes, root), axes)


def combined_apart(key: str) -> Any:
    """A context in which collectives are combined by XLA with those of the same `key` alone."""
    return cast("Any", _xla_metadata).set_xla_metadata(combiner_key=key)


def put(kind: Any, sharding: Any, pieces: Sequence[Any], devices: Sequence[Any]) -> Array:
    """An array of the type `kind` from its pieces, those of `devices` in the order of the sharding.

    What `jax.make_array_from_callback` does in the end; what it finds out before costs more than this.
    """
    return cast("Any", _pxla).batched_device_put(kind, sharding, pieces, list(devices))


def assume_same(x: Array, axes: Sequence[str]) -> Array:
    """`x`, typed as the same over `axes`: only for what was proved. Compiles to nothing."""
    dropped = tuple(axis for axis in axes if axis in varying_axes(x))
    return _same.bind(x, axes=dropped) if dropped else x


def terms(x: Array, axes: Sequence[str]) -> Array:
    """`x`, unreduced over `axes` by its type, typed as varying: each rank's own term. Compiles to nothing."""
    return _term.bind(x, axes=tuple(axes)) if axes and _config._check_vma.value else x


_term: Any = Primitive("commplan_term")


def _term_type(aval: Any, *, axes: tuple[str, ...]) -> Any:
    mat = aval.mat
    kind = {"unreduced_kind": None} if hasattr(mat, "unreduced_kind") else {}
    typed = mat.update(varying=mat.varying | set(axes), unreduced=mat.unreduced - set(axes), **kind)
    return aval.update(manual_axis_type=typed)


_same: Any = Primitive("commplan_same")


def _same_type(aval: Any, *, axes: tuple[str, ...]) -> Any:
    if hasattr(aval, "mat"):
        return aval.update(manual_axis_type=aval.mat.update(varying=aval.mat.varying - set(axes)))
    return aval.update(vma=aval.vma - set(axes))


def _same_lowering(ctx: Any, x: Any, *, axes: tuple[str, ...]) -> list[Any]:
    return [x]


def _same_batch(args: Sequence[Any], dims: Sequence[Any], *, axes: tuple[str, ...]) -> tuple[Any, Any]:
    return _same.bind(args[0], axes=axes), dims[0]


def _same_transpose(cotangent: Any, x: Any, *, axes: tuple[str, ...]) -> list[Any]:
    return [cotangent if type(cotangent) is ad.Zero else as_varying(cotangent, axes)]


_same.def_abstract_eval(_same_type)
_term.def_abstract_eval(_term_type)
for _typed in (_same, _term):
    cast("Any", mlir).register_lowering(_typed, _same_lowering)
cast("Any", ad).deflinear2(_same, _same_transpose)
cast("Any", batching).primitive_batchers[_same] = _same_batch


def warning_when_transposed(x: Array, text: str) -> Array:
    """`x`; JAX warns with `text` when it takes the transpose of this for a reverse-mode derivative."""
    return _warning.bind(x, text=text)


_warning: Any = Primitive("commplan_warning")


def _warning_transpose(cotangent: Any, x: Any, *, text: str) -> list[Any]:
    warnings.warn(text, RuntimeWarning, stacklevel=2)
    return [cotangent]


def _warning_batch(args: Sequence[Any], dims: Sequence[Any], *, text: str) -> tuple[Any, Any]:
    return _warning.bind(args[0], text=text), dims[0]


def _warning_type(aval: Any, *, text: str) -> Any:
    return aval


def _warning_lowering(ctx: Any, x: Any, *, text: str) -> list[Any]:
    return [x]


_warning.def_abstract_eval(_warning_type)
cast("Any", mlir).register_lowering(_warning, _warning_lowering)
cast("Any", ad).deflinear2(_warning, _warning_transpose)
cast("Any", batching).primitive_batchers[_warning] = _warning_batch
