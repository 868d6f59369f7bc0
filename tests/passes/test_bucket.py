"""bucket: order, sizes, dtypes, giant leaves, neighbors that share."""

from __future__ import annotations

from typing import Any

import pytest
from support.byhand import F32, HERE, Maker, compiled, reduce_plan, replaced, sharded_plan, tree

import commplan
from commplan.compiler import compile_plan
from commplan.diagnostics import CommplanError
from commplan.ir import plan as graph
from commplan.ir.schedule import Collective, Leaf, Op, Pack, Schedule, Unpack
from commplan.ir.types import DType

LEAVES = tree(a=(2,), b=(3,), c=(4,), d=(5,))


def packed(schedule: Schedule, phase: str = "step") -> list[list[tuple[str, int, int]]]:
    """The leaves in each buffer: (path, first element, elements)."""
    buckets: list[list[tuple[str, int, int]]] = []
    values = {v.id: v for v in (*schedule.entry, *schedule.phase(phase).values)}
    for op in schedule.phase(phase).ops:
        if isinstance(op, Pack):
            buckets.append([(values[p.value].leaves[p.leaf].path, p.start, p.size) for p in op.parts])
    return buckets


def collectives(ops: tuple[Op, ...]) -> list[Collective]:
    return [op for op in ops if isinstance(op, Collective)]


def test_the_last_leaf_is_ready_first() -> None:
    schedule = compiled(reduce_plan("sum"), "bucket{max=32}", grads=LEAVES)
    assert packed(schedule) == [[("d", 0, 5)], [("c", 0, 4), ("b", 0, 3)], [("a", 0, 2)]]


def test_an_order_is_followed() -> None:
    order = {"grads": ("b", "d", "a", "c")}
    schedule = compile_plan(reduce_plan("sum"), {"grads": LEAVES}, order=order, passes="bucket{max=32}")
    assert packed(schedule) == [[("b", 0, 3), ("d", 0, 5)], [("a", 0, 2), ("c", 0, 4)]]
    assert "in the specified order" in schedule.choices[0].why


@pytest.mark.parametrize("paths", [("a", "b"), ("a", "b", "c", "d", "e"), ("a", "a", "b", "c", "d")])
def test_an_order_names_every_leaf_once(paths: tuple[str, ...]) -> None:
    with pytest.raises(CommplanError) as caught:
        compile_plan(reduce_plan(), {"grads": LEAVES}, order={"grads": paths})
    assert caught.value.diagnostics[0].code == "CP0711"


def test_an_order_for_a_name_that_is_not_there() -> None:
    with pytest.raises(CommplanError) as caught:
        compile_plan(reduce_plan(), {"grads": LEAVES}, order={"gards": ("a",)})
    assert caught.value.diagnostics[0].code == "CP0711"


def test_the_stage_has_the_last_word_on_sizes() -> None:
    plan = reduce_plan("sum", hints=graph.Hints(bucket=20))
    schedule = compiled(plan, "bucket{max=1000}", grads=LEAVES)
    assert [len(bucket) for bucket in packed(schedule)] == [1, 1, 2]
    assert "the stage's limit is 20 B" in schedule.choices[0].why


def test_a_large_leaf_travels_alone_and_whole() -> None:
    shapes = tree(a=(1,), big=(16,), c=(1,), d=(1,))
    schedule = compiled(reduce_plan("sum"), "bucket{max=16}", grads=shapes)
    assert packed(schedule) == [[("d", 0, 1), ("c", 0, 1)], [("big", 0, 16)], [("a", 0, 1)]]
    why = schedule.choices[0].why
    assert "1 leaf larger than 16 B has a separate bucket, whole" in why
    assert "pieces of leaves" not in why


def test_a_giant_leaf_is_cut_into_equal_runs() -> None:
    """More than four limits: pieces of at most two."""
    shapes = tree(big=(17,), huge=(24,), whole=(16,))
    schedule = compiled(reduce_plan("sum"), "bucket{max=16}", grads=shapes)
    assert packed(schedule) == [
        [("whole", 0, 16)], [("huge", 0, 8)], [("huge", 8, 8)], [("huge", 16, 8)],
        [("big", 0, 6)], [("big", 6, 6)], [("big", 12, 5)],
    ]  # fmt: skip
    why = schedule.choices[0].why
    assert "1 leaf larger than 16 B has a separate bucket" in why
    assert "6 buckets are equal pieces of leaves larger than 64 B" in why


def test_rows_count_when_a_leaf_is_large() -> None:
    """Four rows of float32: 16 bytes a column, 64 bytes are four columns, 256 stay whole."""
    shapes = tree(giant=(17, 4), large=(16, 4), small=(4, 4))
    plan = sharded_plan(4)
    schedule = compiled(plan, "bucket{max=64}", params=shapes, grads=shapes)
    scatters = [packs for packs in packed(schedule) if packs[0][2] < 17][:4]
    assert scatters == [[("small", 0, 4)], [("large", 0, 16)], [("giant", 0, 6)], [("giant", 6, 6)]]


def test_a_bucket_holds_one_dtype() -> None:
    leaves = (
        Leaf("a", (2,), DType.F32), Leaf("b", (2,), DType.BF16), Leaf("c", (2,), DType.F32),
        Leaf("d", (), DType.I32), Leaf("e", (0, 3), DType.F64),
    )  # fmt: skip
    schedule = compiled(reduce_plan("sum"), "bucket", grads=leaves)
    assert packed(schedule) == [[("d", 0, 1)], [("b", 0, 2)], [("c", 0, 2), ("a", 0, 2)]]
    assert [(op.dtype, op.nbytes) for op in collectives(schedule.phase("step").ops)] == [
        (DType.I32, 4), (DType.BF16, 4), (DType.F32, 16),
    ]  # fmt: skip


def test_an_empty_tree_needs_no_collective() -> None:
    schedule = compiled(reduce_plan("sum"), "bucket", grads=())
    (op,) = schedule.phase("step").ops
    assert isinstance(op, Unpack)
    assert op.parts == ()


def test_scatter_packs_rows_and_reduces_scalars() -> None:
    shapes = tree(w=(3, 3), s=())
    schedule = compiled(sharded_plan(4), "bucket", params=shapes, grads=shapes)
    scatter, scalar, gather = collectives(schedule.phase("step").ops)
    assert (scatter.kind, scatter.nbytes, scalar.kind, gather.kind) == (
        "reduce_scatter", 48, "all_reduce", "all_gather",
    )  # fmt: skip
    packs = {op.result: op for op in schedule.phase("step").ops if isinstance(op, Pack)}
    assert packs[scatter.operand].ways == 4
    assert packs[scalar.operand].ways == 1
    assert gather.nbytes == 12  # the scalar does not travel


def neighbors(second: dict[str, Any] | None = None, between: bool = False) -> Schedule:
    maker = Maker(data=2)
    a, b = maker.input("a", partial="data"), maker.input("b", F32, partial="data")
    maker.value("a.1")
    maker.value("b.1", F32)
    first = graph.Reduce("a.1", a, ("data",), graph.Reduction("sum"), HERE)
    other: Any = graph.Reduce("b.1", b, ("data",), graph.Reduction("sum"), HERE)
    stages: list[graph.Stage] = [first]
    if between:
        maker.input("c", per="data")
        maker.value("c.1")
        stages.append(graph.Broadcast("c.1", "c.0", ("data",), 0, HERE))
    stages.append(replaced(other, **(second or {})))
    maker.phase("step", *stages, outputs=("a.1", "b.1"))
    shapes = {"a": tree(w=(3,))} | ({"c": tree(w=(3,))} if between else {})
    return compile_plan(maker.plan(), shapes, passes="bucket")


def test_neighbors_share_a_bucket() -> None:
    schedule = neighbors()
    assert packed(schedule) == [[("w", 0, 3), ("", 0, 1)]]
    assert schedule.choices[0].what.startswith("`a`, `b`: 1 bucket, 16 B")


@pytest.mark.parametrize(
    "second",
    [{"op": graph.Reduction("max")}, {"hints": graph.Hints(bucket=100)}, {"via": graph.Algorithm("ring")}],
)
def test_neighbors_that_differ_do_not(second: dict[str, Any]) -> None:
    assert len(collectives(neighbors(second).phase("step").ops)) == 2


def test_what_has_a_collective_between_is_no_neighbor() -> None:
    assert len(collectives(neighbors(between=True).phase("step").ops)) == 3


def test_what_needs_the_first_result_does_not_share() -> None:
    maker = Maker(a=2, b=2)
    maker.fn("again", (F32,), (F32,), "device")
    x = maker.input("x", F32, per="a")
    maker.value("x.1", F32)
    maker.input("y", F32, per="a")
    maker.value("z.0", F32, per="a")
    maker.value("z.1", F32)
    maker.fn("add", (F32, F32), (F32,), "device")
    maker.phase(
        "step",
        graph.Reduce("x.1", x, ("a",), graph.Reduction("sum"), HERE),
        graph.MapStage(("z.0",), "add", ("x.1", "y.0"), HERE),
        graph.Reduce("z.1", "z.0", ("a",), graph.Reduction("sum"), HERE),
        outputs=("z.1",),
    )
    assert len(collectives(compiled(maker.plan(), "bucket").phase("step").ops)) == 2


def test_coalescing_can_be_left_out() -> None:
    maker = Maker(data=2)
    for name in "ab":
        maker.input(name, F32, partial="data")
        maker.value(f"{name}.1", F32)
    stages = [graph.Reduce(f"{n}.1", f"{n}.0", ("data",), graph.Reduction("sum"), HERE) for n in "ab"]
    maker.phase("step", *stages, outputs=("a.1", "b.1"))
    assert len(collectives(compiled(maker.plan(), "bucket").phase("step").ops)) == 1
    assert len(collectives(compiled(maker.plan(), "bucket{coalesce=false}").phase("step").ops)) == 2


def test_a_stage_is_not_cut_into_buckets_without_end() -> None:
    plan = reduce_plan("sum", hints=graph.Hints(bucket=8))
    with pytest.raises(CommplanError) as caught:
        compiled(plan, "bucket", grads=tree(w=(10**13,), b=(3,)))
    (problem,) = caught.value.diagnostics
    assert problem.code == "CP0724"
    assert "at most 100,000" in problem.message
    notes = " ".join(note.text for note in problem.notes)
    assert "{ bucket = 382MiB }" in notes
    enough = reduce_plan("sum", hints=graph.Hints(bucket=400 * 1024**2))
    assert collectives(compiled(enough, "bucket", grads=tree(w=(10**12,))).phase("step").ops)


@pytest.mark.parametrize("shape", [(10**23,), (2**31, 2**31, 2**31)])
def test_more_bytes_than_can_be_counted_are_no_value(shape: tuple[int, ...]) -> None:
    with pytest.raises(CommplanError) as caught:
        compiled(reduce_plan("sum"), "bucket", grads=tree(w=shape))
    assert [problem.code for problem in caught.value.diagnostics] == ["CP0725"]
    assert "leaf `w` of `grads`" in caught.value.diagnostics[0].message


@pytest.mark.parametrize(
    ("hints", "buffers"),
    [
        (graph.Hints(), 0),
        (graph.Hints(bucket=1000), 1),
        (graph.Hints(overlap="update"), 2),
        (graph.Hints(overlap="backward"), 0),
    ],
)
def test_ranks_of_one_process_pack_only_if_a_stage_asks_for_buffers(hints: graph.Hints, buffers: int) -> None:
    leaves = tree(a=(2,), b=(2,))
    schedule = compiled(reduce_plan("sum", hints=hints), "bucket{in_process=true}", grads=leaves)
    assert len(packed(schedule)) == buffers
    (choice,) = schedule.choices
    assert ("each leaf separately" in choice.what) is (buffers == 0)
    assert schedule.pipeline == "lower,bucket{in_process=true},wire"


JOINED = """plan joined
axis a = 2
source records : u8[4]
input x : f32[4] split a
fn widen(u8[4]) -> f32[4] on device
each step {
    raw = load records batch 4 split a visit exactly_once seed 1
    wide = map widen(raw)
    y = gather x over a
    z = gather wide over a
    output y, z
}
"""


def test_loaded_values_travel_with_others():
    """The plan makes `y` of no load, although its bucket holds a batch too."""
    phase = commplan.loads(JOINED).compile(passes="bucket,wire").schedule.phases[0]
    (buffer,) = [op for op in phase.ops if isinstance(op, Pack)]
    assert [part.value for part in buffer.parts] == ["x.0", "wide.0"]
