"""Exchanges and buckets that share links, held to the order that is found."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_audit_bound import MACHINE, SUM, copy, reduced, result, step
from test_audit_pgle import Executable

from commplan.lowering.jax import _jit
from commplan.lowering.jax._jit import PROFILE
from commplan.lowering.jax.collectives import native
from commplan.lowering.jax.latency_profile import LatencyProfile
from commplan.lowering.jax.link_order import SharedLink, in_order, link_order
from commplan.lowering.jax.typing_shim import jax, jnp, lax

FIRST, SECOND, BUCKET = SharedLink(), SharedLink(number=1), SharedLink("b0")


def asynchronous(line: str, kind: str) -> list[str]:
    name = line.partition(" ")[0]
    start = line.replace(name, f"{name}.s", 1).replace(f"{kind}(", f"{kind}-start(")
    return [start, f"{name} = f32[1000]{{0}} {kind}-done({name}.s)"]


def bucket_of(key: str) -> list[str]:
    line = f'{reduced("sum", "y")}, frontend_attributes={{combiner_key="{key}"}}'
    return asynchronous(line, "all-reduce")


def bucket_first(key: str) -> str:
    """A bucket, then an exchange, whose result is copied: nothing runs under either."""
    exchange = f"%got = f32[1000]{{0}} all-to-all(%x), {SUM.partition(', to')[0]}, dimensions={{0}}"
    return step(
        *bucket_of(key), *asynchronous(exchange, "all-to-all"), copy("used", "got"), result("sum", "used")
    )


def test_what_lets_a_bucket_run_under_computation_goes_first() -> None:
    assert link_order(bucket_first("b0"), MACHINE) == (FIRST, BUCKET)
    assert link_order(bucket_first(""), MACHINE) == ()  # another sum, of which nothing is known
    assert link_order(step(*bucket_of("b0"), copy("other", "x"), result("sum", "other")), MACHINE) == ()


@functools.cache
def mesh() -> Any:
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))


def moved(x: Any, g: Any, *, after: bool = False) -> Any:
    """Two exchanges and a bucket of two arrays. after: which are made of what the second one gives."""

    def local(x: Any, g: Any) -> Any:
        first = lax.all_to_all(x, "data", 0, 0, tiled=True)
        second = lax.all_to_all(jnp.tanh(first), "data", 0, 0, tiled=True)
        with native.combiner_scope("b0"):
            arrays = [lax.psum(part + second.sum() if after else part, "data") for part in (g, 2 * g)]
        return first + second, arrays

    return jax.shard_map(local, mesh=mesh(), in_specs=P("data"), out_specs=(P("data"), P()))(x, g)


def arguments() -> tuple[Any, Any]:
    return jnp.arange(8.0), jnp.arange(6.0).reshape(2, 3)


def kinds(module: Any) -> list[str]:
    found = re.findall(r"stablehlo\.(all_to_all|all_reduce|optimization_barrier)", str(module))
    return [kind.removeprefix("optimization_") for kind in found]


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ([FIRST, BUCKET, SECOND], ["all_to_all", "barrier", *["all_reduce"] * 2, "barrier", "all_to_all"]),
        ([BUCKET, FIRST, SECOND], [*["all_reduce"] * 2, "barrier", *["all_to_all"] * 2]),
    ],
)
def test_barriers_hold_the_order_and_change_no_value(
    order: Sequence[SharedLink], expected: list[str]
) -> None:
    seen: list[Any] = []

    def recompile(_: Any, again: Any) -> Any:
        def rewrite(module: Any) -> Any:
            seen.extend((module, str(module), in_order(module, order)))
            return seen[2]

        return again({}, rewrite)

    results = _jit.jit(moved, {}, recompile=recompile)(*arguments())
    given, before, ordered = seen
    assert str(given) == before and ordered.operation.verify()
    assert kinds(given) == ["all_to_all", "all_to_all", "all_reduce", "all_reduce"]
    assert kinds(ordered) == expected
    jax.tree.map(np.testing.assert_array_equal, results, jax.jit(moved)(*arguments()))


def test_what_waits_by_itself_needs_no_barrier() -> None:
    lowered = jax.jit(functools.partial(moved, after=True)).lower(*arguments())
    ordered = in_order(lowered.compiler_ir("stablehlo"), [FIRST, SECOND, BUCKET])
    assert kinds(ordered) == [*["all_to_all"] * 2, *["all_reduce"] * 2]


@pytest.mark.parametrize(
    ("after", "order"),
    [(True, [BUCKET, FIRST, SECOND]), (False, [FIRST, BUCKET]), (False, [FIRST, SECOND, SharedLink("b1")])],
)
def test_an_order_that_the_step_cannot_have_is_left(after: bool, order: Sequence[SharedLink]) -> None:
    left: list[Any] = []

    def recompile(plain: Any, again: Any) -> Any:
        left.append(again({}, functools.partial(in_order, order=order)))
        return plain

    _jit.jit(functools.partial(moved, after=after), {}, recompile=recompile).lower(*arguments()).compile()
    assert left == [None]


COMPILED = [([PROFILE], False), ([], True), ([PROFILE], True)]


@pytest.mark.parametrize("fastest", [*COMPILED, None])
@pytest.mark.parametrize("can_be_held", [True, False])
def test_the_order_on_the_links_is_compiled_as_well_and_the_fastest_runs(
    fastest: tuple[list[str], bool] | None, *, can_be_held: bool
) -> None:
    fast, slow = bucket_first("b0").replace("1000", "500"), bucket_first("b0")
    seen = list[tuple[list[str], bool]]()

    def again(options: Mapping[str, Any], rewrite: Callable[[Any], Any] | None = None) -> Executable | None:
        seen.append((list(options), rewrite is not None))
        if rewrite is not None and not can_be_held:
            return None
        return Executable(fast if seen[-1] == fastest else slow)

    plain = Executable(slow if fastest else fast)
    chosen = LatencyProfile("estimated", MACHINE).recompile(plain, again)
    held = fastest is not None and fastest[1]
    assert chosen.text == (slow if held and not can_be_held else fast)
    assert seen == (COMPILED if can_be_held else COMPILED[:2])
