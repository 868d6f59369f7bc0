"""Extends `jax.jit` with a callback for each new signature, and a second compilation with a profile.

It also queries which options the compiler accepts, and lists the operations of a lowered step. Like
`_compat`, this module uses private names of JAX.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
from jax._src import lib as _src_lib
from jax._src import tree_util as _src_tree_util
from jax._src import xla_bridge as _src_xla_bridge
from jax._src.interpreters import pxla as _src_pxla

from commplan.lowering.jax import variadic
from commplan.lowering.jax._compat import tracing

_cpp = cast("Any", _src_lib)._jax
_pxla = cast("Any", _src_pxla)
_tree_util = cast("Any", _src_tree_util)
_bridge = cast("Any", _src_xla_bridge)
_client = cast("Any", _src_lib).xla_client
# A program to compile with options, if no backend is initialized.
_EMPTY_MODULE = """module @nothing {
  func.func public @main() -> tensor<i32> {
    %0 = stablehlo.constant dense<0> : tensor<i32>
    return %0 : tensor<i32>
  }
}"""
mlir: Any = cast("Any", _src_lib).mlir.ir
_LOCATION = re.compile(r'"([^"]+)":(\d+):')  # in the text of an operation's location
_JIT_SIGNATURES = 4096  # capacity of the signature cache of one `jit_ahead`
PROFILE = "fdo_profile"  # compiler option: the latency of each instruction
Recompile = Callable[[Any, Callable[[bytes], Any]], Any]  # see `with_profile`


def renamed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A wrapper of `function` with another name, which JAX's logs, HLO and profiles show if it is jitted."""

    def call(*args: Any) -> Any:
        return function(*args)

    call.__name__ = call.__qualname__ = name
    return call


def is_known(name: str, value: Any) -> bool:
    """Whether XLA accepts this compiler option with this value.

    Uses the compiler of the default devices. If no JAX backend is initialized, it uses the CPU compiler,
    because `jax.distributed.initialize` must run before any backend.
    """
    return _is_known(name, value, _bridge.backends_are_initialized())


@functools.cache
def _is_known(name: str, value: Any, is_started: bool) -> bool:
    """`is_known`. The answer may change once a JAX backend is initialized (`is_started`)."""
    try:
        if is_started:
            jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
            return True
        client = _local_client()
        options = _client.CompileOptions()
        options.env_option_overrides = [(name, value)]
        client.compile_and_load(_EMPTY_MODULE, _client.DeviceList(tuple(client.local_devices()[:1])), options)
    except jax.errors.JaxRuntimeError:
        return False
    return True


@functools.cache
def _local_client() -> Any:
    """A CPU client without other processes, which `jax.devices` does not list."""
    return _client.make_cpu_client()


def with_profile(lowered: Any, recompile: Recompile) -> Any:
    """Replace the compilation of `lowered` by `recompile`.

    Args:
        lowered: A `jax.stages.Lowered`, which is changed in place.
        recompile: Called with the executable that XLA compiles without a profile, and with a function that
            compiles with a profile. It returns the executable to use.

    Returns:
        `lowered`.
    """
    lowering = lowered._lowering
    if "compile" in vars(lowering):
        return lowered
    plain = lowering.compile
    cached: list[Any] = []
    compiling = threading.Lock()

    def compile_with_profile(compiler_options: Mapping[str, Any] | None = None, **options: Any) -> Any:
        base_options = dict(compiler_options or {})
        if PROFILE in base_options:
            return plain(compiler_options=base_options, **options)
        is_default = compiler_options is None and all(value is None for value in options.values())
        with compiling:  # once, if several threads call
            if is_default and cached:
                return cached[0]

            def again(profile: bytes) -> Any:
                return plain(compiler_options={**base_options, PROFILE: profile}, **options)

            without = plain(compiler_options=base_options, **options)
            executable = recompile(without, again)
            lowering.has_profile = executable is not without
            if is_default:
                cached.append(executable)
            return executable

    lowering.compile = compile_with_profile
    return lowered


def operations(lowered: Any) -> list[tuple[str, list[str]]]:
    """The operations of a `jax.stages.Lowered`, each with its text and its source locations.

    The text has the name, the types of operands and results, and the attributes. A location is `file:line`;
    the innermost is first.
    """
    listed: list[tuple[str, list[str]]] = []

    def visit(operation: Any) -> Any:
        types = [
            ", ".join(str(value.type) for value in values)
            for values in (operation.operands, operation.results)
        ]
        items = [operation.attributes[index] for index in range(len(operation.attributes))]
        attributes = ", ".join(f"{item.name} = {item.attr}" for item in items)
        locations = [f"{file}:{line}" for file, line in _LOCATION.findall(str(operation.location))]
        listed.append((f"{operation.name} ({types[0]}) -> {types[1]} {{{attributes}}}", locations))
        return mlir.WalkResult.ADVANCE

    lowered.compiler_ir("stablehlo").operation.walk(visit)
    return listed


def has_profile(lowered: Any) -> bool | None:
    """Whether the last compilation of `with_profile` used a profile; None without such a compilation."""
    return getattr(lowered._lowering, "has_profile", None)


def jit(function: Callable[..., Any], compiler_options: Mapping[str, Any], **options: Any) -> Any:
    """`jax.jit(function)` whose compiler options apply only if it is the outermost jit.

    JAX rejects compiler options within another trace, whose compilation determines them.

    Args:
        function: The function.
        compiler_options: Options of XLA.
        **options: Options of `jax.jit`, and `recompile` and `context` of `jit_ahead`.
    """
    if not compiler_options and options.get("recompile") is None and "context" not in options:
        options.pop("recompile", None)
        return jax.jit(function, **options)

    def ignore(*_: Any) -> None:
        pass

    return jit_ahead(function, ignore, compiler_options=dict(compiler_options), **options)


def jit_ahead(
    function: Callable[..., Any],
    ahead: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], None],
    compiler_options: Mapping[str, Any] | None = None,
    recompile: Recompile | None = None,
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    **options: Any,
) -> Any:
    """`jax.jit(function)` that calls `ahead(jitted, args, kwargs)` before it may compile.

    JAX's C++ fast path handles known signatures without calling `ahead`. A program that `ahead` compiles with
    `jitted.lower(...)` is cached and then executed. `ahead` is not called within another trace.

    Args:
        function: The function.
        ahead: Called for each new signature, with the jitted function and its arguments.
        compiler_options: Options of XLA, which apply only if this is the outermost jit; None for none.
        recompile: See `with_profile`; None compiles without a profile.
        context: Returns the context in which the function is traced and compiled.
        **options: Options of `jax.jit`.
    """

    @functools.wraps(function)
    def entered(*args: Any, **kwargs: Any) -> Any:
        if not tracing():  # with `jax_disable_jit`, JAX calls this with arrays
            ahead(jitted, args, kwargs)
        return function(*args, **kwargs)

    def miss(*args: Any, **kwargs: Any) -> Any:
        """Handle a call whose signature the fast path does not know."""
        if tracing():
            return inner._cache_miss(*args, **kwargs)
        with context():
            ahead(fast, args, kwargs)
            if recompile is not None:  # JAX caches the lowered step, so the next line compiles this one
                lower(*args, **kwargs)
            return jitted._cache_miss(*args, **kwargs)

    def lower(*args: Any, **kwargs: Any) -> Any:
        with context():
            lowered = jitted.lower(*args, **kwargs)
        return lowered if recompile is None else with_profile(lowered, recompile)

    # `jitted` is the outermost jit, `inner` runs within another trace, and `fast` calls `miss` before both.
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
    fast._fun, fast._jit_info = outermost, info  # `lower`, `trace` and `eval_shape` use these attributes
    fast.lower = lower
    return fast
