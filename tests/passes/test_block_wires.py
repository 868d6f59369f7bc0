"""wire with block formats: the ops of each collective, their bytes, and the proof."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace
from support.byhand import compiled, reduce_plan, tree

import commplan
from commplan.ir import plan as graph
from commplan.ir.codec import Codec
from commplan.ir.schedule import Cast, Collective, Decode, Encode, Leaf, LocalSum, Op, Pack, Phase, Schedule
from commplan.ir.types import DType
from commplan.topology import Level, Topology
from commplan.verify import verify
from commplan.verify.claims import claims

GIVEN = tree(w=(9, 11), b=(2,))  # 101 elements
INT4 = Codec("int4", 32)


def hinted(codec: Codec = INT4, **more: Any) -> graph.Hints:
    return graph.Hints(codec=codec, **more)


def ops(schedule: Schedule) -> tuple[Op, ...]:
    return schedule.phase("step").ops


def kinds(schedule: Schedule) -> list[str]:
    return [op.kind if isinstance(op, Collective) else type(op).__name__ for op in ops(schedule)]


def moves(schedule: Schedule) -> list[tuple[str, int]]:
    return [(op.kind, op.nbytes) for op in ops(schedule) if isinstance(op, Collective)]


def test_a_mean_is_encoded_before_and_after_the_sum() -> None:
    schedule = compiled(reduce_plan("mean", hints=hinted(bucket=1000), data=4), "bucket,wire", grads=GIVEN)
    assert kinds(schedule) == [
        "Pack", "Encode", "all_to_all", "Decode", "LocalSum", "Scale", "Encode", "all_gather", "Decode",
        "Unpack",
    ]  # fmt: skip
    # 101 elements are padded to 4 x 32: a row of 32 has 16 bytes and a scale.
    assert moves(schedule) == [("all_to_all", 4 * 18), ("all_gather", 18)]
    assert [op.rows for op in ops(schedule) if isinstance(op, Encode)] == [4, 1]
    assert schedule.choices[-1].what == "`grads.1/b0`: sent in int4(block = 32), added in f32"
    assert "7.11 x the bytes" in schedule.choices[-1].rejected[0]


def test_padding_is_dropped_from_a_buffer_that_is_read_whole() -> None:
    leaves = (Leaf("", (100,), DType.F32),)
    schedule = compiled(reduce_plan("sum", hints=hinted(), data=2), "wire", grads=leaves)
    assert kinds(schedule)[-1] == "Unpack"
    assert {op.width for op in ops(schedule) if isinstance(op, Decode)} == {64}


@pytest.mark.parametrize(
    ("codec", "size", "nbytes"),
    [
        (Codec("int8", 32), 32, 34),
        (Codec("int8", 32), 33, 37),
        (Codec("int4", 32), 33, 21),
        (Codec("int4", 8), 8, 6),
        (Codec("f8e4m3", 64), 65, 69),
        (Codec("int8", 8), 0, 0),
    ],
)
def test_bytes_of_a_row(codec: Codec, size: int, nbytes: int) -> None:
    assert codec.nbytes(size) == nbytes


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_values_of_16_bits_are_added_in_f32(dtype: str) -> None:
    leaves = (Leaf("w", (8,), DType(dtype)),)
    schedule = compiled(reduce_plan("mean", hints=hinted(), data=4), "bucket,wire", grads=leaves)
    assert [op.dtype for op in ops(schedule) if isinstance(op, Decode)] == [DType.F32, DType(dtype)]
    assert not [op for op in ops(schedule) if isinstance(op, Cast)]


def test_integer_leaves_are_sent_as_they_are() -> None:
    leaves = (Leaf("n", (8,), DType.I32), Leaf("w", (8,), DType.F32))
    schedule = compiled(reduce_plan("sum", hints=hinted(), data=4), "bucket,wire", grads=leaves)
    assert ("all_reduce", 32) in moves(schedule)
    assert len([op for op in ops(schedule) if isinstance(op, Encode)]) == 2


def test_one_rank_sends_nothing() -> None:
    schedule = compiled(reduce_plan("mean", hints=hinted(), data=1), None, grads=GIVEN)
    assert not [op for op in ops(schedule) if isinstance(op, Encode | Decode)]


PLAN = """plan moved
axis data = 4
input g : tree partial data
input p : tree per data
each step {
    p = broadcast p over data from 2 { wire = f8e4m3(block = 32) }
    g = scatter g over data by mean { wire = int8(block = 32) }
    g = gather g over data via ring { wire = int4(block = 32) }
    output g, p
}
"""
SHAPES = {"w": {"shape": [9, 5], "dtype": "bf16"}, "s": {"shape": [], "dtype": "f32"}}


def moved(passes: str | None = None) -> Schedule:
    return commplan.loads(PLAN).compile(shapes={"g": SHAPES, "p": SHAPES}, passes=passes).schedule


@pytest.mark.parametrize("passes", [None, "", "bucket{max=64},overlap", "bucket{max=1MiB},fuse_update"])
def test_moves_and_scatters_with_any_pipeline(passes: str | None) -> None:
    schedule = moved(passes)
    codecs = [(op.codec.name, op.rows) for op in ops(schedule) if isinstance(op, Encode)]
    # A scalar is not scattered but reduced, and not gathered.
    assert {("f8e4m3", 1), ("int8", 4), ("int8", 1), ("int4", 1)} == set(codecs)
    assert verify(schedule) == ()
    assert claims(schedule).not_checked[-1] == "which values of a block format share a scale"


def test_levels_are_not_crossed_one_by_one() -> None:
    topology = Topology("pod", (Level("gpu", 4, 2e-6, 450e9), Level("node", 4, 5e-6, 5e9)))
    plan = commplan.loads(
        "plan p\naxis node = 4\naxis gpu = 4\ninput g : f32[1000000] partial node, gpu\n"
        "each step {\n    g = reduce g over node, gpu by mean { wire = int8(block = 32) }\n    output g\n}\n"
    )
    schedule = plan.compile(topology=topology).schedule
    axes = {op.axes for op in ops(schedule) if isinstance(op, Collective)}
    assert axes == {("node", "gpu")}


def edited(schedule: Schedule, number: int, **fields: Any) -> Schedule:
    """`schedule` with other fields of the op `number` of its phase."""
    (phase,) = schedule.phases
    sequence = [*phase.ops]
    sequence[number] = replace(sequence[number], **fields)
    return replace(schedule, phases=(replace(phase, ops=tuple(sequence)),))


def refused(schedule: Schedule) -> str:
    problems = verify(schedule)
    assert problems
    return problems[0].message


def test_another_format_or_a_missing_rounding_is_refused() -> None:
    schedule = compiled(reduce_plan("mean", hints=hinted(), data=4), "bucket,wire", grads=GIVEN)
    assert verify(schedule) == ()
    encodes = [index for index, op in enumerate(ops(schedule)) if isinstance(op, Encode | Decode)]
    for index in encodes:
        assert verify(edited(schedule, index, codec=Codec("int4", 64)))
        assert verify(edited(schedule, index, rows=2))
    other = replace(ops(schedule)[0], span=ops(schedule)[0].span)
    assert isinstance(other, Pack)
    plan = schedule.origin
    assert plan is not None
    exact = compiled(reduce_plan("mean", data=4), "bucket,wire", grads=GIVEN)
    assert "int4(block = 32)" in refused(replace(exact, origin=plan, plan_digest=schedule.plan_digest))


def test_bytes_are_not_added_or_cut() -> None:
    schedule = compiled(reduce_plan("sum", hints=hinted(), data=4), "bucket,wire", grads=GIVEN)
    phase: Phase = schedule.phases[0]
    at = next(index for index, op in enumerate(phase.ops) if isinstance(op, LocalSum))
    wrong = replace(phase.ops[at], operand="grads.1/b0/swapped")
    other = replace(schedule, phases=(replace(phase, ops=(*phase.ops[:at], wrong, *phase.ops[at + 1 :])),))
    assert "reads `grads.1/b0/swapped`, which is encoded" in " ".join(each.message for each in verify(other))
