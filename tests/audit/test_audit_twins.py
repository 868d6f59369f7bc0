"""The lowering equals an expert's program: compiled steps against hand-written twins, on CPU devices.

The tolerance is zero: the same collectives in the same order, and the same number of operations of each kind,
inside and outside fusions.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import twins
from jax.sharding import PartitionSpec as P
from support import interpreter

from commplan.ir.schedule import Schedule
from commplan.ir.serialization.canonical_json import decode
from commplan.lowering.audit import CompiledCollective, CompiledStep, audit_text, compare, expected

NAMES = ("data_parallel", "data_parallel_wire", "two_level", "sharded_update")


def of_32_devices(name: str, directory: Path) -> twins.Pair:
    """The pair `name`, compiled in a separate process with 32 devices."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "32"}
    subprocess.run(
        [*interpreter.words(environment), twins.__file__, name, str(directory)], check=True, env=environment
    )
    schedule = decode((directory / "schedule.json").read_bytes(), "schedule.json")
    texts = [(directory / f"{kind}.hlo").read_text() for kind in ("planned", "by_hand")]
    return twins.Pair(schedule, *texts)


@pytest.fixture(scope="module", params=NAMES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Schedule, CompiledStep, CompiledStep]:
    name: str = request.param
    if name == "two_level":
        twin = of_32_devices(name, tmp_path_factory.mktemp(name))
    else:
        twin = twins.PAIRS[name](jax.devices())
    return twin.schedule, audit_text(twin.planned), audit_text(twin.by_hand)


def plain(collective: CompiledCollective) -> tuple[object, ...]:
    return (
        collective.kind,
        collective.op,
        collective.inputs,
        collective.outputs,
        collective.groups,
        collective.loops,
    )


def test_the_same_collectives_in_the_same_order(pair: tuple[Schedule, CompiledStep, CompiledStep]) -> None:
    _, planned, by_hand = pair
    assert len(planned.collectives) > 1
    assert list(map(plain, planned.collectives)) == list(map(plain, by_hand.collectives))


def test_they_are_those_of_the_schedule(pair: tuple[Schedule, CompiledStep, CompiledStep]) -> None:
    schedule, planned, by_hand = pair
    sizes = {axis.name: axis.size for axis in schedule.axes}
    expected_ops = expected(schedule, "step", Mesh(sizes))
    assert str(compare(expected_ops, planned)) == f"{len(expected_ops)} collectives, as planned"
    assert compare(expected_ops, by_hand).ok
    assert [item.nbytes for item in expected_ops] == [collective.nbytes for collective in planned.collectives]


def test_each_names_its_plan_line(pair: tuple[Schedule, CompiledStep, CompiledStep]) -> None:
    schedule, planned, by_hand = pair
    expected_ops = expected(schedule, "step", Mesh({axis.name: axis.size for axis in schedule.axes}))
    for collective, item in zip(planned.collectives, expected_ops, strict=True):
        assert f"/commplan/step/line{item.span.line}/" in collective.op_name
    assert compare(expected_ops, planned, scope="commplan/step").ok
    assert not compare(expected_ops, by_hand, scope="commplan/step").found


def test_no_more_operations(pair: tuple[Schedule, CompiledStep, CompiledStep]) -> None:
    _, planned, by_hand = pair
    assert sum(count for _, count in planned.ops) > 20
    assert planned.ops == by_hand.ops
    assert planned.fused_ops == by_hand.fused_ops


def test_no_more_copies_of_the_buckets(pair: tuple[Schedule, CompiledStep, CompiledStep]) -> None:
    _, planned, by_hand = pair
    smallest = min(collective.nbytes for collective in planned.collectives)
    written = [sorted(move.nbytes for move in step.copies_of(smallest)) for step in (planned, by_hand)]
    assert written[0] == written[1]
    assert not [move for move in planned.copies_of(smallest) if move.kind == "copy"]


class Mesh:
    def __init__(self, sizes: dict[str, int]) -> None:
        self.shape = sizes


def test_without_the_dependency_the_buckets_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chain preserves the buckets: without it XLA:CPU combines them to one all-reduce."""
    monkeypatch.setattr(twins, "after", lambda x, previous, axis: x)
    twin = twins.data_parallel(jax.devices())
    expected_ops = expected(twin.schedule, "step", Mesh({"data": 8}))
    report = compare(expected_ops, audit_text(twin.by_hand))
    assert [difference.kind for difference in report.differences] == ["merged"]
    assert str(report).startswith("merged: 4 collectives became 1: all_reduce(sum) f32[")
    assert compare(expected_ops, audit_text(twin.planned)).ok


def test_a_hierarchy_without_buckets_pads_the_leaf() -> None:
    mesh = twins.mesh_of(jax.devices(), node=2, gpu=4)
    plan = twins.plan("two_level", ("axis node = 4", "axis node = 2"), ("axis gpu  = 8", "axis gpu  = 4"))
    shapes = {"grads": {"w": jax.ShapeDtypeStruct((7, 5), "float32")}}
    run = plan.compile(mesh, shapes=shapes, passes="overlap").bind(mesh)

    def body(x: Any) -> Any:
        grads = jnp.full((7, 5), x[0])
        return run.step({}, grads={"w": grads})[0].grads

    mapped = jax.shard_map(body, mesh=mesh, in_specs=P(("node", "gpu")), out_specs=P())
    step = audit_text(twins.hlo(mapped, jax.ShapeDtypeStruct((8,), "float32")))
    expected_ops = expected(run.program.schedule, "step", Mesh({"node": 2, "gpu": 4}))
    assert [(item.kind, item.count, len(item.groups)) for item in expected_ops] == [
        ("reduce_scatter", 36, 2),
        ("all_reduce", 9, 4),
        ("all_gather", 9, 2),
    ]
    assert str(compare(expected_ops, step)) == "3 collectives, as planned"


def test_a_broadcast_moves_bits() -> None:
    mesh = twins.mesh_of(jax.devices(), data=8)
    shapes = twins.leaves_like(twins.MIXED)
    run = twins.bind("data_parallel", mesh, {"params": shapes, "grads": shapes})

    def start(params: Any) -> Any:
        return run.start({}, params=params)[0].params

    each = jax.tree.map(lambda s: jax.ShapeDtypeStruct((8, *s.shape), s.dtype), shapes)
    step = audit_text(twins.hlo(start, twins.placed(mesh, P("data"), each)))
    expected_ops = expected(run.program.schedule, "start", Mesh({"data": 8}))
    assert {(item.kind, item.dtype) for item in expected_ops} == {
        ("all_reduce", "u32"),
        ("all_reduce", "u16"),
    }
    assert str(compare(expected_ops, step)) == "10 collectives, as planned, joined into 2"
