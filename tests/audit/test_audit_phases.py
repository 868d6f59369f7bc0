"""Compiled phases, on a mesh of two axes and on one with more axes than the plan."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import twins
from jax.sharding import PartitionSpec as P

from commplan.diagnostics import Span
from commplan.lowering.audit import CompiledStep, Expected, audit_text, compare, expected
from commplan.lowering.audit.expect import groups_of

SHAPES = {"w": ((33, 5), "float32"), "v": ((7,), "bfloat16"), "s": ((), "float32")}


def step_of(run: Any, mesh: Any, phase: str, same: dict[str, Any]) -> CompiledStep:
    """Phase `phase` inside a shard_map, its tree inputs made there from one number of each rank."""
    call = run.phases[phase]

    def body(x: Any) -> Any:
        numbers = itertools.count(2)  # XLA makes equal sums once

        def fill(s: Any) -> Any:
            return run.varying(jnp.full(s.shape, next(numbers), s.dtype)) * x.reshape(()).astype(s.dtype)

        inputs = {name: jax.tree.map(fill, twins.leaves_like(shape)) for name, shape in same.items()}
        states = {name: jax.tree.map(fill, twins.leaves_like(SHAPES)) for name in run.context.states}
        out, new = call(states, **inputs)
        leaves = jax.tree.leaves((out, new))
        return sum(jnp.sum(leaf.astype(jnp.float32)) for leaf in leaves).reshape(1)

    spec = P(mesh.axis_names)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return audit_text(twins.hlo(mapped, jax.ShapeDtypeStruct((8,), "float32")))


def test_a_weighted_mean_in_an_ensemble() -> None:
    mesh = twins.mesh_of(jax.devices(), member=2, data=4)
    run = twins.bind("weighted_mean", mesh, {"grads": twins.leaves_like(SHAPES)})
    scalar = {"loss": ((), "float32"), "count": ((), "float32"), "grads": SHAPES}
    step = step_of(run, mesh, "step", scalar)
    expected_ops = expected(run.program.schedule, "step", mesh)
    assert str(compare(expected_ops, step)).startswith("6 collectives, as planned, joined into ")
    assert {item.groups for item in expected_ops if item.op == "sum"} == {((0, 1, 2, 3), (4, 5, 6, 7))}
    assert [item.groups for item in expected_ops if item.op == "min"] == [((0, 4), (1, 5), (2, 6), (3, 7))]


def test_elastic_averaging_reduces_the_pull_and_nothing_else() -> None:
    mesh = twins.mesh_of(jax.devices(), spare=1, worker=8)
    shapes = twins.leaves_like(SHAPES)
    run = twins.bind("easgd_sync", mesh, {"params": shapes, "center": shapes})
    step = step_of(run, mesh, "every_4", {"params": SHAPES, "eta": ((), "float32")})
    expected_ops = expected(run.program.schedule, "every_4", mesh)
    assert {item.kind for item in expected_ops} == {"all_reduce"}
    assert str(compare(expected_ops, step)) == "3 collectives, as planned, joined into 1"


def test_ranks_are_counted_row_major() -> None:
    class Mesh:
        shape = {"a": 2, "b": 3, "c": 2}  # noqa: RUF012

    assert groups_of(("b",), Mesh()) == ((0, 2, 4), (1, 3, 5), (6, 8, 10), (7, 9, 11))
    assert groups_of(("c", "a"), Mesh()) == ((0, 6, 1, 7), (2, 8, 3, 9), (4, 10, 5, 11))
    assert groups_of(("a", "b", "c"), Mesh()) == (tuple(range(12)),)


HLO = """\
HloModule jit_step, is_scheduled=true, num_partitions=4

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (x: f32[8], y: f32[4]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = f32[4]{0} parameter(1)
  %first = f32[8]{0} all-reduce(%x), channel_id=1, replica_groups={}, to_apply=%sum, metadata={op_name="a"}
  %second = f32[4]{0} all-reduce(%y), channel_id=2, replica_groups={{0,1},{2,3}}, to_apply=%sum
  ROOT %third = f32[16]{0} all-gather(%y), channel_id=3, replica_groups={{0,1,2,3}}, dimensions={0}
}
"""


def item(kind: str, count: int, *groups: tuple[int, ...], dtype: str = "f32") -> Expected:
    op = "sum" if kind == "all_reduce" else None
    return Expected(kind, op, dtype, count, groups, ("data",), Span(3, 1, 3, 9))


ALL = (0, 1, 2, 3)
FIRST = item("all_reduce", 8, ALL)
SECOND = item("all_reduce", 4, (0, 1), (2, 3))
THIRD = item("all_gather", 4, ALL)


@pytest.mark.parametrize(
    ("expected_ops", "report"),
    [
        ([FIRST, SECOND, THIRD], "3 collectives, as planned"),
        (
            [FIRST, SECOND, item("all_gather", 4, (0, 1), (2, 3))],
            "changed: all_gather f32[4] over data (line 3): groups (0, 1, 2, 3) instead of (0, 1), (2, 3)",
        ),
        (
            [item("all_reduce", 8, ALL, dtype="bf16"), SECOND, THIRD],
            "changed: all_reduce(sum) bf16[8] over data (line 3): dtype f32 instead of bf16",
        ),
        (
            [FIRST, SECOND, item("all_gather", 4, (3, 2, 1, 0))],
            "changed: all_gather f32[4] over data (line 3): groups (0, 1, 2, 3) instead of (3, 2, 1, 0)",
        ),
        ([FIRST, SECOND], "extra: all_gather f32[4] over 1 x 4 ranks (third)"),
        ([FIRST, SECOND, THIRD, THIRD], "missing: all_gather f32[4] over data (line 3)"),
        (
            [SECOND, FIRST, THIRD],
            "moved: all_reduce(sum) f32[8] over data (line 3) is issued at another position (first)",
        ),
    ],
)  # fmt: skip
def test_differences_are_named(expected_ops: list[Expected], report: str) -> None:
    assert str(compare(expected_ops, audit_text(HLO))).splitlines() == [report]


def test_a_comparison_may_look_at_one_scope() -> None:
    report = compare([FIRST], audit_text(HLO), scope="a")
    assert report.ok
    assert [collective.name for collective in report.found] == ["first"]
