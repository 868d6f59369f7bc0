"""Training steps compiled ahead of time for 4 x 8 H100: the plan's collectives, under the backward GEMMs.

No GPU is needed and nothing runs. Without autotuning the choice of kernels is only indicative. The
collectives, their order, groups and dtypes, and the ops between start and done are exact.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from commplan.diagnostics import Span
from commplan.ir.plan import Algorithm, Arg
from commplan.ir.schedule import Collective, Spread
from commplan.ir.types import DType
from commplan.lowering.audit import (
    CompiledCollective,
    CompiledStep,
    Machine,
    audit_text,
    compare,
    estimate,
    expected,
    target,
)
from commplan.lowering.jax.aot import devices
from commplan.lowering.jax.collectives.lax_backend import LaxBackend

sys.path.insert(0, str(Path(__file__).parents[1]))
import twins

LAYERS, WIDTH = 6, 2048
ROWS = 32768  # of a rank: enough that computation could hide communication
Tree = Any


@pytest.fixture(scope="module")
def h100() -> Any:
    return devices(target("h100:4x8"))


def layers(dtype: str) -> Tree:
    """The shapes of a stack of layers, 2048 wide."""
    params = {"b": jax.ShapeDtypeStruct((WIDTH,), dtype), "w": jax.ShapeDtypeStruct((WIDTH, WIDTH), dtype)}
    return {f"layer{i}": params for i in range(LAYERS)}


def loss(params: Tree, x: Any) -> Any:
    for name in sorted(params):
        x = jax.nn.relu(x @ params[name]["w"] + params[name]["b"])
    return jnp.mean(x.astype(jnp.float32) ** 2)


def step_of(run: Any, split: str) -> Callable[..., Any]:
    """A training step through the plan, parameters donated as they are in training."""

    @run.spmd(params="same", x=f"split {split}")
    def train(state: Tree, params: Tree, x: Any) -> Any:
        grads = jax.grad(loss)(run.varying(params), x)
        out, state = run.step(state, grads=grads)
        return state, twins.sgd(params, out.grads)

    return train


def default_step(mesh: Mesh) -> Callable[..., Any]:
    """A typical JAX program without a plan: every gradient summed, left to XLA to combine."""
    axes = mesh.axis_names

    def train(params: Tree, x: Any) -> Any:
        grads = jax.grad(loss)(twins.vary(params, axes), x)
        return twins.sgd(params, jax.tree.map(lambda g: lax.psum(g, axes) / mesh.size, grads))

    return jax.shard_map(train, mesh=mesh, in_specs=(P(), P(axes)), out_specs=P())


def audited(
    function: Callable[..., Any], *arguments: Any, donate: Any = 1, jit: Callable[..., Any] = jax.jit
) -> CompiledStep:
    step = audit_text(jit(function, donate_argnums=donate).lower(*arguments).compile().as_text())
    print(step.timeline())
    return step


def inputs(mesh: Mesh, dtype: str, rows: int = ROWS) -> tuple[Tree, Any]:
    sharding = NamedSharding(mesh, P(mesh.axis_names))
    x = jax.ShapeDtypeStruct((mesh.size * rows, WIDTH), dtype, sharding=sharding)
    return twins.placed(mesh, P(), layers(dtype)), x


def by_bucket(step: CompiledStep, count: int) -> list[Sequence[CompiledCollective]]:
    """The collectives of each bucket: of every kind one, in the order of buckets."""
    kinds = dict.fromkeys(collective.kind for collective in step.collectives)
    each = [[collective for collective in step.collectives if collective.kind == kind] for kind in kinds]
    assert [len(collective) for collective in each] == [count] * len(each)
    return list(zip(*each, strict=True))


def hidden(step: CompiledStep) -> int:
    return sum(len(step.hidden(collective)) for collective in step.collectives)


def assert_under_the_backward_pass(step: CompiledStep, buckets: int) -> None:
    """Every bucket but the last is issued before the backward pass ends, with matrix products under it."""
    groups = by_bucket(step, buckets)
    for group in groups[:-1]:
        assert step.before(group[0]) < len(step.products)
        assert any(step.hidden(collective) for collective in group)
    starts = [step.before(group[0]) for group in groups]
    assert starts == sorted(set(starts))


CASES = {
    "data_parallel": (
        {"data": 32},
        [("axis data = 8", "axis data = 32"), (", wire = bf16, accumulate = f32", "")],
        ["all_reduce"],
    ),
    "data_parallel_wire": ({"data": 32}, [("axis data = 8", "axis data = 32")], ["all_to_all", "all_gather"]),
    "data_parallel_int8": (
        {"data": 32},
        [("axis data = 8", "axis data = 32"), ("wire = bf16, accumulate = f32", "wire = int8(block = 32)")],
        ["all_to_all", "all_gather"],
    ),
    "two_level": ({"node": 4, "gpu": 8}, [], ["reduce_scatter", "all_reduce", "all_gather"]),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CASES)
def test_the_plans_collectives_and_no_others(h100: Any, name: str, dtype: str) -> None:
    sizes, changes, kinds = CASES[name]
    mesh = twins.mesh_of(h100, **sizes)
    limit = "20 MiB" if dtype == "float32" else "10 MiB"
    bucket = "64 MiB" if name == "two_level" else "25 MiB"
    plan = twins.plan(
        name.removesuffix("_wire").removesuffix("_int8"),
        (f"bucket = {bucket}", f"bucket = {limit}"),
        *changes,
    )
    shapes = layers(dtype)
    names = ["grads"] if name == "two_level" else ["params", "grads"]
    run = plan.compile(mesh, shapes=dict.fromkeys(names, shapes)).bind(mesh)
    params, x = inputs(mesh, dtype)

    # Levels that fly together need XLA's leave, which `run.jit` gives.
    jit = run.jit if name == "two_level" else jax.jit
    step = audited(step_of(run, ", ".join(sizes)), {}, params, x, jit=jit)

    expected_ops = expected(run.program.schedule, "step", mesh, "gpu")
    assert str(compare(expected_ops, step)) == f"{len(expected_ops)} collectives, as planned"
    assert sorted(collective.kind for collective in step.collectives) == sorted(kinds * LAYERS)
    sent = "bf16" if name.endswith("wire") or dtype == "bfloat16" else "f32"
    sent = "u8" if name.endswith("int8") else sent
    assert {collective.dtypes for collective in step.collectives} == {(sent,)}
    assert_under_the_backward_pass(step, LAYERS)
    # Two products a layer: of three collectives a bucket one is exposed. Blocks take time of their own.
    if len(kinds) < 3 and sent != "u8":
        assert all(step.hidden(collective) for collective in step.collectives[: -len(kinds)])
    assert [move for move in step.copies_of(WIDTH * WIDTH) if move.kind == "copy"] == []


def test_blocks_are_decoded_where_they_are_read(h100: Any) -> None:
    """Neither the packed nor the decoded buffer of floats is written: kernels read the bytes instead."""
    mesh, shapes = twins.mesh_of(h100, data=32), layers("float32")
    sizes, changes, _ = CASES["data_parallel_int8"]
    plan = twins.plan("data_parallel", ("bucket = 25 MiB", "bucket = 20 MiB"), *changes)
    run = plan.compile(mesh, shapes={"params": shapes, "grads": shapes}).bind(mesh)
    params, x = inputs(mesh, "float32")

    text = jax.jit(step_of(run, *sizes), donate_argnums=1).lower({}, params, x).compile().as_text()

    entry = text[text.index("\nENTRY ") :]
    counts = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"= f32\[([\d,]+)\]", entry)]
    assert WIDTH * WIDTH in counts  # the gradient of a layer, and the weights
    assert WIDTH * WIDTH + WIDTH not in counts  # a bucket


def test_levels_of_neighboring_buckets_are_busy_at_once(h100: Any) -> None:
    mesh = twins.mesh_of(h100, node=4, gpu=8)
    run = twins.bind("two_level", mesh, {"grads": layers("bfloat16")}, ("bucket = 64 MiB", "bucket = 10 MiB"))
    params, x = inputs(mesh, "bfloat16")
    machine = target("h100:4x8").machine

    step = audited(step_of(run, "node, gpu"), {}, params, x, jit=run.jit)
    alone = audited(step_of(run, "node, gpu"), {}, params, x)  # one at a time, by XLA's own options

    between = [collective for collective in step.collectives if collective.kind == "all_reduce"]
    inside = [collective for collective in step.collectives if collective.kind != "all_reduce"]
    assert sum(any(a.start < i.start < a.done for i in inside) for a in between) >= LAYERS - 2
    assert estimate(step, machine).exposed < 0.75 * estimate(alone, machine).exposed


@pytest.mark.parametrize("rows", [1024, ROWS])
def test_more_is_hidden_than_xla_hides_alone(h100: Any, rows: int) -> None:
    """Why buckets are chained: left alone, XLA makes two all-reduces of twelve gradients."""
    mesh = twins.mesh_of(h100, data=32)
    plan = twins.plan("data_parallel", *CASES["data_parallel"][1], ("bucket = 25 MiB", "bucket = 10 MiB"))
    shapes = layers("bfloat16")
    run = plan.compile(mesh, shapes={"params": shapes, "grads": shapes}).bind(mesh)
    params, x = inputs(mesh, "bfloat16", rows)

    step = audited(step_of(run, "data"), {}, params, x)
    default = audited(default_step(mesh), params, x, donate=0)

    assert (len(step.collectives), len(default.collectives)) == (LAYERS, 2)
    assert step.covered == pytest.approx((LAYERS - 1) / LAYERS, rel=0.01)
    assert default.covered == pytest.approx(1 / 2, rel=0.01)
    assert hidden(step) >= hidden(default)
    for bus in (100e9, 300e9):
        machine = Machine(flops=600e12, memory=2.5e12, bus=bus)
        assert estimate(step, machine).exposed < estimate(default, machine).exposed
    assert step.before(step.collectives[0]) < default.before(default.collectives[0])


def test_sharded_update(h100: Any) -> None:
    """Reduce-scatters run under the backward pass; shards are gathered after the update, in plan order."""
    mesh = twins.mesh_of(h100, data=32)
    shapes = layers("float32")
    plan = twins.plan(
        "sharded_update",
        ("axis data = 8", "axis data = 32"),
        ("by mean", "by mean { bucket = 20 MiB }"),
        ("gather shard over data", "gather shard over data { bucket = 640 KiB }"),
    )
    program = plan.compile(mesh, shapes={"params": shapes, "grads": shapes, "adam": shapes})
    run = program.bind(mesh, functions={"adam_init": lambda shard: shard, "adam_update": twins.momentum})

    @run.spmd(params="same", x="split data")
    def train(state: Tree, params: Tree, x: Any) -> Any:
        grads = jax.grad(loss)(run.varying(params), x)
        out, state = run.step(state, params=params, grads=grads)
        return state, out.params

    params, x = inputs(mesh, "float32")
    flat = jax.tree.map(lambda s: jax.ShapeDtypeStruct((s.size,), s.dtype), shapes)
    step = audited(train, {"adam": twins.placed(mesh, P("data"), flat)}, params, x, donate=(0, 1))

    expected_ops = expected(run.program.schedule, "step", mesh, "gpu")
    assert str(compare(expected_ops, step)) == f"{len(expected_ops)} collectives, as planned"
    scatters = [collective for collective in step.collectives if collective.kind == "reduce_scatter"]
    gathers = [collective for collective in step.collectives if collective.kind == "all_gather"]
    assert step.collectives == (*scatters, *gathers)
    assert len(scatters) == len(gathers) == LAYERS
    assert all(step.hidden(collective) for collective in scatters[:-1])


def test_a_broadcast_is_xlas_own(h100: Any) -> None:
    mesh = twins.mesh_of(h100, data=32)
    shapes = layers("bfloat16")
    plan = twins.plan("data_parallel", ("axis data = 8", "axis data = 32"))
    run = plan.compile(mesh, shapes={"params": shapes, "grads": shapes}).bind(mesh)

    def start(params: Tree) -> Tree:
        return run.start({}, params=params)[0].params

    each = jax.tree.map(lambda s: jax.ShapeDtypeStruct((32, *s.shape), s.dtype), shapes)
    step = audited(start, twins.placed(mesh, P("data"), each), donate=0)
    expected_ops = expected(run.program.schedule, "start", mesh, "gpu")
    assert {(item.kind, item.dtype) for item in expected_ops} == {("broadcast", "bf16")}
    assert str(compare(expected_ops, step)) == f"{len(expected_ops)} collectives, as planned"


def test_rounds_of_a_program_are_permutes_that_start_early(h100: Any) -> None:
    """All ranks send and receive in every round. The rounds of the last bucket have nothing to run under: XLA
    makes them synchronous, and since JAX 0.11 writes them as one instruction."""
    mesh = twins.mesh_of(h100, node=4, gpu=8)
    text = """plan ladder
axis node = 4
axis gpu = 8
input grads : tree partial node, gpu
each step {
    grads = reduce grads over node, gpu by mean
            via hierarchical(gpu = native, node = ring) { bucket = 25 MiB }
    output grads
}
"""
    shapes = layers("bfloat16")
    run = commplan.loads(text).compile(mesh, shapes={"grads": shapes}).bind(mesh)
    params, x = inputs(mesh, "bfloat16")
    step = audited(step_of(run, "node, gpu"), {}, params, x, donate=1)
    expected_ops = expected(run.program.schedule, "step", mesh, "gpu")
    report = compare(expected_ops, step)
    assert {difference.kind for difference in report.differences} <= {"moved"}, str(report)
    permutes = [collective for collective in step.collectives if collective.kind == "permute"]
    buckets = [collective for collective in step.collectives if collective.kind == "reduce_scatter"]
    assert len(permutes) == 6 * len(buckets) > 0
    assert {collective.dtypes for collective in permutes} == {("bf16",)}
    assert all(
        collective.done > collective.start and not collective.synchronous for collective in permutes[:-6]
    )
    assert any(step.hidden(collective) and not collective.synchronous for collective in permutes)


def scanned_loss(params: Tree, x: Any, tap: Callable[[Tree], Tree]) -> Any:
    def body(h: Any, layer: Tree) -> Any:
        layer = tap(layer)
        return h + jax.nn.relu(h @ layer["up"]) @ layer["down"], None

    x, _ = lax.scan(body, x, params)
    return jnp.mean(x.astype(jnp.float32) ** 2)


def test_a_tapped_scan_reduces_inside_the_loop(h100: Any) -> None:
    """Without the tap nothing overlaps: the gradients of all layers are ready only after the loop."""
    mesh = twins.mesh_of(h100, data=32)
    up = jax.ShapeDtypeStruct((LAYERS, WIDTH, 4 * WIDTH), "bfloat16")
    down = jax.ShapeDtypeStruct((LAYERS, 4 * WIDTH, WIDTH), "bfloat16")
    stack = {"down": down, "up": up}
    layer = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape[1:], s.dtype), stack)
    plan = twins.plan(
        "data_parallel",
        ("axis data = 8", "axis data = 32"),
        (", wire = bf16, accumulate = f32", ""),
        ("bucket = 25 MiB", "bucket = 64 MiB"),
    )
    params = twins.placed(mesh, P(), stack)
    x = jax.ShapeDtypeStruct((32 * ROWS, WIDTH), "bfloat16", sharding=NamedSharding(mesh, P("data")))

    tapped = plan.compile(mesh, shapes={"params": layer, "grads": layer}).bind(mesh)

    @tapped.spmd(params="same", x="split data")
    def inside(state: Tree, params: Tree, x: Any) -> Any:
        return state, twins.sgd(params, jax.grad(scanned_loss)(params, x, tapped.tap))

    step = audited(inside, {}, params, x)
    assert len(step.collectives) == 2  # each large gradient separately
    for reduce in step.collectives:
        assert len(reduce.loops) == 1
        assert (reduce.kind, reduce.dtypes, reduce.count) == ("all_reduce", ("bf16",), 4 * WIDTH * WIDTH)
        assert step.before(reduce) >= 1
    assert any(step.hidden(reduce) for reduce in step.collectives)

    whole = plan.compile(mesh, shapes={"params": stack, "grads": stack}).bind(mesh)

    @whole.spmd(params="same", x="split data")
    def outside(state: Tree, params: Tree, x: Any) -> Any:
        grads = jax.grad(scanned_loss)(whole.varying(params), x, lambda layer: layer)
        out, state = whole.step(state, grads=grads)
        return state, twins.sgd(params, out.grads)

    late = audited(outside, {}, params, x)
    assert all(not collective.loops and not late.hidden(collective) for collective in late.collectives)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_more_operations_than_by_hand(h100: Any, dtype: str) -> None:
    """The twin: an expert's program for GPUs, one bucket a layer, chained by barriers."""
    mesh = twins.mesh_of(h100, data=32)
    limit = "20 MiB" if dtype == "float32" else "10 MiB"
    changes = [*CASES["data_parallel"][1], ("bucket = 25 MiB", f"bucket = {limit}")]
    shapes = layers(dtype)
    run = twins.bind("data_parallel", mesh, {"params": shapes, "grads": shapes}, *changes)

    def by_hand(params: Tree, x: Any) -> Tree:
        grads = jax.grad(loss)(twins.vary(params, ["data"]), x)
        leaves, tree = jax.tree.flatten(grads)
        out, previous = list(leaves), None
        for layer in reversed(range(LAYERS)):
            chosen = (2 * layer + 1, 2 * layer)
            flat = twins.pack(leaves, chosen)
            if previous is not None:
                flat, _ = lax.optimization_barrier((flat, previous))
            previous = lax.psum(flat, "data")
            twins.unpack(previous, leaves, chosen, out)
        return twins.sgd(params, jax.tree.unflatten(tree, [g / jnp.asarray(32, g.dtype) for g in out]))

    params, x = inputs(mesh, dtype)
    mapped = jax.shard_map(by_hand, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    planned = audited(step_of(run, "data"), {}, params, x)
    twin = audited(mapped, params, x, donate=0)

    assert [str(collective) for collective in planned.collectives] == [
        str(collective) for collective in twin.collectives
    ]
    assert planned.timeline() == twin.timeline()
    assert planned.ops == twin.ops
    assert planned.fused_ops == twin.fused_ops


def test_members_reduce_among_themselves(h100: Any) -> None:
    """An ensemble of four, eight GPUs each: a gradient stays within its member."""
    mesh = twins.mesh_of(h100, member=4, data=8)
    shapes = layers("float32")
    plan = twins.plan(
        "ensemble_training",
        ("ensemble member = 2", "ensemble member = 4"),
        ("axis     data   = 4", "axis     data   = 8"),
    )
    program = plan.compile(mesh, shapes={"params": shapes, "grads": shapes})
    functions = {"decode": lambda record: (record, 0), "augment": lambda pixels, rng: pixels}
    run = program.bind(mesh, functions=functions)

    @run.spmd(params="per member", x="per member split data")
    def train(state: Tree, params: Tree, x: Any) -> Any:
        grads = jax.grad(loss)(run.varying(params), x)
        out, state = run.step(state, grads=grads)
        return state, twins.sgd(params, out.grads)

    each = jax.tree.map(lambda s: jax.ShapeDtypeStruct((4, *s.shape), s.dtype), shapes)
    x = jax.ShapeDtypeStruct(
        (4, 8 * ROWS, WIDTH), "float32", sharding=NamedSharding(mesh, P("member", "data"))
    )
    step = audited(train, {}, twins.placed(mesh, P("member"), each), x)
    expected_ops = expected(run.program.schedule, "step", mesh, "gpu")
    assert str(compare(expected_ops, step)) == f"{len(expected_ops)} collectives, as planned"
    members = tuple(tuple(range(8 * member, 8 * member + 8)) for member in range(4))
    assert {collective.groups for collective in step.collectives} == {members}


def test_an_older_gpu_gets_the_same_collectives() -> None:
    mesh = twins.mesh_of(devices(target("a100:1x8")), data=8)
    shapes = layers("bfloat16")
    run = twins.bind(
        "data_parallel", mesh, {"params": shapes, "grads": shapes}, ("bucket = 25 MiB", "bucket = 10 MiB")
    )
    step = audited(step_of(run, "data"), {}, *inputs(mesh, "bfloat16"))
    expected_ops = expected(run.program.schedule, "step", mesh, "gpu")
    assert len(expected_ops) == 2 * LAYERS
    assert str(compare(expected_ops, step)) == f"{len(expected_ops)} collectives, as planned"


def test_a_broadcast_within_groups_is_xlas_own(h100: Any) -> None:
    """From node to node and then within them, if both levels are parts of one axis."""
    mesh = twins.mesh_of(h100, data=32)
    spread = {"data": (Spread("gpu", 8), Spread("node", 4))}
    how = Algorithm("hierarchical", (Arg("native", "gpu"), Arg("native", "node")))
    op = Collective(
        "broadcast", "y.1", "x.1", ("data",), DType.F32, 0, Span(1, 1, 1, 9), algorithm=how, root=9
    )
    backend = LaxBackend("gpu", {"data": 32}, spread=spread)
    step = jax.shard_map(lambda x: backend.move(x, op), mesh=mesh, in_specs=P("data"), out_specs=P())
    x = jax.ShapeDtypeStruct((32 * 4096,), "float32", sharding=NamedSharding(mesh, P("data")))
    broadcasts = audited(step, x, donate=())
    assert [collective.kind for collective in broadcasts.collectives] == ["broadcast", "broadcast"]
    between, within = (collective.groups for collective in broadcasts.collectives)
    assert between[1] == (9, 1, 17, 25) and len(between) == 8
    assert within[1] == (9, 8, 10, 11, 12, 13, 14, 15) and len(within) == 4
