"""`swap`: an all-to-all of blocks; a schedule that leaves it out, or does another one, is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import commplan
from commplan.diagnostics import CommplanError
from commplan.ir import schedule as ir
from commplan.verify import verify

PLAN = """plan swapped

axis expert = 4
axis data   = 2

input x : f32[8, 3] per expert, data
input t : tree per expert partial data
fn work(f32[8, 3]) -> f32[8, 3] on device
fn scale(tree) -> tree on device elementwise linear

each step {
    y = swap x over expert
    z = map work(y)
    w = swap z over expert { wire = bf16 }
    u = swap t over expert
    v = map scale(u)
    v = reduce v over data by sum
    e = reduce y over expert by max
    k = broadcast y over expert from 1
    s = shift y over data by 1
    output w, v, e, k, s
}
"""
SHAPES = {"t": {"a": np.zeros((4, 2), np.float32), "b": np.zeros(12, np.int32)}}


def compiled(passes: str | None = None) -> ir.Schedule:
    how: dict[str, Any] = {} if passes is None else {"passes": passes}
    return commplan.loads(PLAN).compile(shapes=SHAPES, **how).schedule


def edited(schedule: ir.Schedule, old: ir.Op, new: ir.Op) -> ir.Schedule:
    phase = schedule.phases[0]
    ops = tuple(new if op is old else op for op in phase.ops)
    return msgspec.structs.replace(schedule, phases=(msgspec.structs.replace(phase, ops=ops),))


def swaps(schedule: ir.Schedule) -> list[ir.Collective]:
    return [op for op in schedule.phases[0].ops if isinstance(op, ir.Collective) and op.kind == "swap"]


@pytest.mark.parametrize("passes", [None, "wire", "bucket{max=16},wire,select,overlap"])
def test_it_is_proved_beside_other_stages(passes: str | None) -> None:
    schedule = compiled(passes)
    assert len(swaps(schedule)) >= 3 and verify(schedule) == ()


@pytest.mark.parametrize("number", range(4))
def test_a_swap_that_is_left_out_is_refused(number: int) -> None:
    schedule = compiled()
    op = swaps(schedule)[number]
    left_out = ir.Scale(op.result, op.operand, "mul", 1.0, op.span)
    problems = verify(edited(schedule, op, left_out))
    assert problems and {problem.code for problem in problems} == {"CP0766"}


def test_a_swap_over_another_axis_is_refused() -> None:
    schedule = compiled()
    (first, *_) = swaps(schedule)
    problems = verify(edited(schedule, first, msgspec.structs.replace(first, axes=("data",))))
    assert {problem.code for problem in problems} == {"CP0766"}


def test_rows_that_are_not_those_of_leaves_are_refused() -> None:
    """Leaves that are packed one after another cross the rows of the swap."""
    schedule = compiled()
    packs = [op for op in schedule.phases[0].ops if isinstance(op, ir.Pack) and op.ways == 4]
    pack = next(op for op in packs if len({part.leaf for part in op.parts}) == 1)
    problems = verify(edited(schedule, pack, msgspec.structs.replace(pack, ways=1)))
    assert problems


def test_two_swaps_are_not_taken_for_one() -> None:
    text = PLAN.replace("z = map work(y)", "z = swap y over expert")
    once = commplan.loads(text).compile(shapes=SHAPES).schedule
    assert verify(once) == ()


@pytest.mark.parametrize("shape", [(6,), (), (3, 4)])
def test_leaves_without_equal_blocks_are_refused(shape: tuple[int, ...]) -> None:
    shapes = {"t": {"a": np.zeros(shape, np.float32)}}
    with pytest.raises(CommplanError) as caught:
        commplan.loads(PLAN).compile(shapes=shapes)
    (problem,) = caught.value.diagnostics
    assert problem.code == "CP0429" and problem.span is not None and problem.span.line == 15
    assert "leaf `a` of `t`" in problem.message


def test_a_saved_schedule_loads_and_is_proved(tmp_path: Path) -> None:
    program = commplan.loads(PLAN).compile(shapes=SHAPES)
    again = commplan.Program.load(program.save(tmp_path / "swapped.json"))
    assert again.schedule == program.schedule and verify(again.schedule) == ()


def test_4096_ranks_cost_what_4_do() -> None:
    text = PLAN.replace("expert = 4", "expert = 4_096").replace("f32[8, 3]", "f32[8_192, 3]")
    shapes = {"t": {"a": np.zeros((4096, 2), np.float32)}}
    assert verify(commplan.loads(text).compile(shapes=shapes).schedule) == ()
