"""Compilations of a step, of which JAX offers less: options that a version may not know, a call before each
new signature without a cost for the others, and a profile that is made of a first compilation.

Like `_compat`, this is where private names of JAX are touched.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

from jax._src import lib as _src_lib
from jax._src import tree_util as _src_tree_util
from jax._src import xla_bridge as _src_xla_bridge
from jax._src.interpreters import pxla as _src_pxla

from commplan.lowering.jax._compat import tracing
from commplan.lowering.jax.collectives import variadic
from commplan.lowering.jax.typing_shim import jax

_cpp, _pxla, _tree_util = cast("Any", _src_lib)._jax, cast("Any", _src_pxla), cast("Any", _src_tree_util)
_bridge, _client = cast("Any", _src_xla_bridge), cast("Any", _src_lib).xla_client
_NOTHING = """module @nothing {
  func.func public @main() -> tensor<i32> {
    %0 = stablehlo.constant dense<0> : tensor<i32>
    return %0 : tensor<i32>
  }
}"""
mlir: Any = cast("Any", _src_lib).mlir.ir
_PLACE = re.compile(r'"([^"]+)":(\d+):')  # in the text of an operation's location
_JIT_SIGNATURES = 4096  # that the fast path of one `jit_ahead` knows
PROFILE = "fdo_profile"  # an option of a compilation: the times of its instructions
Recompile = Callable[[Any, Callable[[bytes], Any]], Any]


def is_known(name: str, value: Any) -> bool:
    """Whether XLA accepts this option of a compilation, with this value.

    Queries the compiler of the default devices; that for CPUs if no backend of JAX has started, since
    `jax.distributed.initialize` comes before any backend.
    """
    return _is_known(name, value, _bridge.backends_are_initialized())


@functools.cache
def _is_known(name: str, value: Any, is_started: bool) -> bool:
    try:
        if is_started:
            jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
            return True
        client, options = _local_client(), _client.CompileOptions()
        options.env_option_overrides = [(name, value)]
        client.compile_and_load(_NOTHING, _client.DeviceList(tuple(client.local_devices()[:1])), options)
    except jax.errors.JaxRuntimeError:
        return False
    return True


@functools.cache
def _local_client() -> Any:
    """A client for CPUs that no other process takes part in, and that `jax.devices` does not list."""
    return _client.make_cpu_client()


def with_profile(lowered: Any, recompile: Recompile) -> Any:
    """Let `lowered`, a `jax.stages.Lowered`, compile to the executable that `recompile` returns.

    `recompile` is called with the executable that XLA compiles without a profile, and with a function that
    compiles with one.
    """
    lowering = lowered._lowering
    if "compile" in vars(lowering):
        return lowered
    plain, kept, compiling = lowering.compile, list[Any](), threading.Lock()

    def compile_with_profile(compiler_options: Mapping[str, Any] | None = None, **options: Any) -> Any:
        own = dict(compiler_options or {})
        if PROFILE in own:
            return plain(compiler_options=own, **options)
        usual = compiler_options is None and all(value is None for value in options.values())
        with compiling:  # once, if several threads call
            if usual and kept:
                return kept[0]

            def again(profile: bytes) -> Any:
                return plain(compiler_options={**own, PROFILE: profile}, **options)

            without = plain(compiler_options=own, **options)
            executable = recompile(without, again)
            lowering.has_profile = executable is not without
            if usual:
                kept.append(executable)
            return executable

    lowering.compile = compile_with_profile
    return lowered


def operations(lowered: Any) -> list[tuple[str, list[str]]]:
    """The operations of a `jax.stages.Lowered`: text, and places in the program, innermost first."""
    listed: list[tuple[str, list[str]]] = []

    def visit(operation: Any) -> Any:
        types = [
            ", ".join(str(value.type) for value in values)
            for values in (operation.operands, operation.results)
        ]
        named = [operation.attributes[place] for place in range(len(operation.attributes))]
        attributes = ", ".join(f"{each.name} = {each.attr}" for each in named)
        places = [f"{file}:{line}" for file, line in _PLACE.findall(str(operation.location))]
        listed.append((f"{operation.name} ({types[0]}) -> {types[1]} {{{attributes}}}", places))
        return mlir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return listed


def has_profile(lowered: Any) -> bool | None:
    """Whether what `with_profile` last compiled of `lowered` has a profile; None where that was not asked."""
    return getattr(lowered._lowering, "has_profile", None)


def jit(function: Callable[..., Any], compiler_options: Mapping[str, Any], **options: Any) -> Any:
    """`jax.jit(function, **options)`, compiled with `compiler_options` where it is the outermost.

    JAX refuses them within another trace, where what is around decides on them.
    """
    if not compiler_options and options.get("recompile") is None and "context" not in options:
        options.pop("recompile", None)
        return jax.jit(function, **options)

    def nothing(*_: Any) -> None:
        pass

    return jit_ahead(function, nothing, compiler_options=dict(compiler_options), **options)


def jit_ahead(
    function: Callable[..., Any],
    ahead: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None],
    compiler_options: Mapping[str, Any] | None = None,
    recompile: Recompile | None = None,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    **options: Any,
) -> Any:
    """`jit(function, ..)` that first calls `ahead(jitted, args, kwargs)` where it may compile.

    `ahead` is called for a signature that the fast path of JAX does not know; other calls never leave that
    path. What `ahead` compiles by `jitted.lower(..)` is what then runs. Not called within another trace.
    recompile: see `with_profile`. context: in which it is traced and compiled.
    """

    @functools.wraps(function)
    def entered(*args: Any, **kwargs: Any) -> Any:
        if not tracing():  # `jax_disable_jit`: the fast path calls this with arrays
            ahead(jitted, args, kwargs)
        return function(*args, **kwargs)

    def miss(*args: Any, **kwargs: Any) -> Any:
        if tracing():
            return inner._cache_miss(*args, **kwargs)
        with context():
            ahead(fast, args, kwargs)
            if recompile is not None:  # JAX caches the lowered step, and compiles that
                lower(*args, **kwargs)
            return jitted._cache_miss(*args, **kwargs)

    def lower(*args: Any, **kwargs: Any) -> Any:
        with context():
            lowered = jitted.lower(*args, **kwargs)
        return lowered if recompile is None else with_profile(lowered, recompile)

    outermost = variadic.compiled_with(compiler_options or {}, entered)
    jitted: Any = jax.jit(outermost, compiler_options=dict(compiler_options or {}) or None, **options)
    inner: Any = jax.jit(entered, **options) if compiler_options else jitted
    info = jitted._jit_info
    fast: Any = functools.wraps(entered)(
        _cpp.pjit(
            jitted.__name__, outermost, miss, info.static_argnums, info.static_argnames,
            _pxla.JitGlobalCppCacheKeys(), _tree_util.dispatch_registry,
            _pxla.cc_shard_arg, _cpp.PjitFunctionCache(capacity=_JIT_SIGNATURES),
        )
    )  # fmt: skip
    fast._fun, fast._jit_info = outermost, info  # what `lower`, `trace` and `eval_shape` read
    fast.lower = lower
    return fast
