"""Updates bucket by bucket: schedules that put elements where others belong are found out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from support.exchanges import SHAPES, plan_text

import commplan
from commplan.ir.schedule import Collective, Map, Pack, Schedule, Slice, Unpack
from commplan.verify import verify

TREE: Any = {key: {"shape": list(shape), "dtype": "f32"} for key, shape in SHAPES.items()}
PASSES = "place,bucket{max=64},fuse_update"
ALL = f"{PASSES},decompose,wire,select,overlap"


def compiled(via: str, passes: str = PASSES, **axes: int) -> Schedule:
    text = plan_text(axes or {"worker": 4}, via)
    return commplan.loads(text).compile(shapes={"params": TREE, "grads": TREE}, passes=passes).schedule


def changed(schedule: Schedule, change: Callable[[list[Any]], None]) -> Schedule:
    """`schedule` with the ops of its step changed in place."""
    step = schedule.phase("step")
    ops = list(step.ops)
    change(ops)
    phases = tuple(msgspec.structs.replace(p, ops=tuple(ops)) if p is step else p for p in schedule.phases)
    return msgspec.structs.replace(schedule, phases=phases)


def edit(ops: list[Any], which: Callable[[Any], bool], number: int, **changes: Any) -> None:
    at = [index for index, op in enumerate(ops) if which(op)][number]
    ops[at] = msgspec.structs.replace(ops[at], **changes)


def found(schedule: Schedule) -> list[tuple[str, str]]:
    return [(problem.code, problem.message) for problem in verify(schedule)]


def of(op_type: type, /, **fields: Any) -> Callable[[Any], bool]:
    return lambda op: (
        isinstance(op, op_type) and all(getattr(op, key) == value for key, value in fields.items())
    )


def moved(parts: Any, first: int, **changes: Any) -> Any:
    return tuple(msgspec.structs.replace(p, **changes) if i == first else p for i, p in enumerate(parts))


@pytest.mark.parametrize("passes", [PASSES, ALL])
@pytest.mark.parametrize("via", ["via parameter_server", "", "via parameter_server(owners = 3)"])
def test_what_the_compiler_makes_is_sound(via: str, passes: str) -> None:
    assert found(compiled(via, passes)) == []
    assert found(compiled(via, passes, rack=2, worker=3)) == []


def test_two_leaves_of_a_bucket_exchanged_where_they_come_back() -> None:
    schedule = compiled("via parameter_server")
    (end,) = (op for op in schedule.phase("step").ops if isinstance(op, Unpack) and op.result == "weights.2")
    by_leaf = {part.leaf: part for part in end.parts}
    b, c = by_leaf[1], by_leaf[2]  # in one bucket: two columns, and one
    assert b.value == c.value
    parts = [msgspec.structs.replace(p, offset=1 if p is b else 0 if p is c else p.offset) for p in end.parts]
    wrong = changed(schedule, lambda ops: edit(ops, lambda op: op is end, 0, parts=tuple(parts)))
    messages = [message for code, message in found(wrong) if code == "CP0766"]
    assert messages[0].startswith(
        "output `weights` of phase `step`, leaf `b`, element 0: the plan says update("
    )
    assert "of row each of 4 of leaf 1" in messages[0]


def in_pieces() -> Schedule:
    """An update of one leaf that is cut into buckets."""
    big: Any = {"w": {"shape": [4096], "dtype": "f32"}}
    text = plan_text({"worker": 4}, "via parameter_server")
    return (
        commplan.loads(text)
        .compile(shapes={"params": big, "grads": big}, passes="place,bucket{max=1000},fuse_update")
        .schedule
    )


def test_an_update_that_gets_other_elements_of_the_weights() -> None:
    """Half a leaf is paired with the gradient of the other half."""
    schedule = in_pieces()
    packs = [op for op in schedule.phase("step").ops
             if isinstance(op, Pack) and op.parts[0].value == "weights.0/shard"]  # fmt: skip
    assert len(packs) > 2
    other = packs[1].parts[0].start
    parts = moved(packs[0].parts, 0, start=other)
    wrong = changed(schedule, lambda ops: edit(ops, lambda op: op is packs[0], 0, parts=parts))
    assert {code for code, _ in found(wrong)} == {"CP0766"}
    assert f"parts from 0, {other} on are combined" in found(wrong)[0][1]


def test_a_piece_that_is_updated_with_the_sum_of_another() -> None:
    schedule = in_pieces()
    maps = [op for op in schedule.phase("step").ops if isinstance(op, Map)]
    first, second = maps[0].operands, maps[1].operands
    wrong = changed(
        schedule, lambda ops: edit(ops, lambda op: op is maps[1], 0, operands=(*second[:2], first[2]))
    )
    assert {code for code, _ in found(wrong)} == {"CP0766"}


def test_weights_cut_along_other_axes_than_their_gradients() -> None:
    schedule = compiled("via parameter_server(within = rack)", "place", rack=2, worker=2)
    (cut,) = (op for op in schedule.phase("step").ops if isinstance(op, Slice))
    step = schedule.phase("step")
    values = tuple(
        msgspec.structs.replace(v, placement=msgspec.structs.replace(v.placement, split=("rack", "worker")))
        if v.id == cut.result else v for v in step.values
    )  # fmt: skip
    ops = tuple(msgspec.structs.replace(op, axes=("rack", "worker")) if op is cut else op for op in step.ops)
    new = msgspec.structs.replace(step, values=values, ops=ops)
    wrong = msgspec.structs.replace(schedule, phases=tuple(new if p is step else p for p in schedule.phases))
    assert {code for code, _ in found(wrong)} == {"CP0734"}
    assert "is split worker, rack, expected per rack, worker" in found(wrong)[0][1]


@pytest.mark.parametrize(
    ("owners", "says"),
    [((0, 0), "a rank owns two parts of `weights.0`: [0, 0]"),
     ((0, 9), "there is no such owner among 4 ranks: [0, 9]")],
)  # fmt: skip
def test_parts_with_the_same_owner_or_none(owners: tuple[int, ...], says: str) -> None:
    schedule = compiled("via parameter_server(owners = 2)", "place")
    wrong = changed(schedule, lambda ops: edit(ops, of(Slice), 0, owners=owners))
    assert ("CP0735", says) in found(wrong)


def test_a_reduction_to_one_rank_gives_the_others_nothing() -> None:
    """Its result may not be taken to be the same on all ranks."""
    schedule = compiled("via parameter_server(owners = 2)", "place")
    step = schedule.phase("step")
    first = next(op for op in step.ops if isinstance(op, Collective) and op.kind == "reduce")
    values = tuple(
        msgspec.structs.replace(v, placement=msgspec.structs.replace(v.placement, per=()))
        if v.id == first.result else v for v in step.values
    )  # fmt: skip
    new = msgspec.structs.replace(step, values=values)
    wrong = msgspec.structs.replace(schedule, phases=tuple(new if p is step else p for p in schedule.phases))
    assert ("CP0734", f"`{first.result}` is same, expected per worker") in found(wrong)
    rootless = changed(schedule, lambda ops: edit(ops, of(Collective, kind="reduce"), 0, root=None))
    assert ("CP0735", "reduce and root None cannot be combined") in found(rootless)
