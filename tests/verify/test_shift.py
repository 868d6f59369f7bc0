"""`shift`: ranks receive the value of the rank that many places before, and other schedules are refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

import commplan
from commplan.ir import schedule as ir
from commplan.verify import verify

PLAN = """plan shifted

axis stage = 4
axis data  = 2

input x : f32[6] per stage, data
input t : tree per stage

each step {
    y = shift x over stage by 5
    z = shift y over stage by -2 { wire = bf16 }
    u = shift t over stage by 3
    s = reduce y over stage by sum
    output y, z, u, s
}
"""
SHAPES = {"t": {"a": np.zeros(3, np.float32), "n": np.int32(0)}}


def compiled() -> ir.Schedule:
    return commplan.loads(PLAN).compile(shapes=SHAPES).schedule


def shifts(schedule: ir.Schedule) -> list[ir.Collective]:
    return [op for op in schedule.phases[0].ops if isinstance(op, ir.Collective) and op.kind == "shift"]


def edited(schedule: ir.Schedule, old: ir.Op, *new: ir.Op) -> ir.Schedule:
    phase = schedule.phases[0]
    ops = [each for op in phase.ops for each in (new if op is old else (op,))]
    changed = msgspec.structs.replace(phase, ops=tuple(ops))
    return msgspec.structs.replace(schedule, phases=(changed,))


def test_distances_are_taken_modulo_the_axis() -> None:
    assert sorted({op.root for op in shifts(compiled())}) == [1, 2, 3]
    assert verify(compiled()) == ()


@pytest.mark.parametrize("root", [0, 2, 3])
def test_another_distance_is_refused_with_both_terms(root: int) -> None:
    schedule = compiled()
    (first,) = (op for op in shifts(schedule) if op.root == 1)
    problems = verify(edited(schedule, first, msgspec.structs.replace(first, root=root)))
    assert problems[0].code == "CP0766" and problems[0].span is not None and problems[0].span.line == 10
    assert "the rank 1 before this one along stage" in problems[0].message


def test_another_axis_is_refused() -> None:
    schedule = compiled()
    (first,) = (op for op in shifts(schedule) if op.root == 1)
    problems = verify(edited(schedule, first, msgspec.structs.replace(first, axes=("data",))))
    assert {problem.code for problem in problems} == {"CP0766"}


def test_a_shift_that_is_left_out_is_refused() -> None:
    schedule = compiled()
    (first,) = (op for op in shifts(schedule) if op.root == 1)
    copy = ir.Scale(first.result, first.operand, "mul", 1.0, first.span)
    assert {problem.code for problem in verify(edited(schedule, first, copy))} == {"CP0766"}


def test_a_root_out_of_range_is_refused() -> None:
    schedule = compiled()
    (first,) = (op for op in shifts(schedule) if op.root == 1)
    problems = verify(edited(schedule, first, msgspec.structs.replace(first, root=4)))
    assert problems[0].code == "CP0735"


def test_a_saved_schedule_loads_and_is_proved(tmp_path: Path) -> None:
    program = commplan.loads(PLAN).compile(shapes=SHAPES)
    again = commplan.Program.load(program.save(tmp_path / "shifted.json"))
    assert again.schedule == program.schedule and verify(again.schedule) == ()


def test_65536_ranks_cost_what_4_do() -> None:
    plan = commplan.loads(PLAN.replace("stage = 4", "stage = 65_536"))
    assert verify(plan.compile(shapes=SHAPES).schedule) == ()


def test_values_that_move_twice_and_are_added_round_as_the_plan_says() -> None:
    """A value sent in f16, sent in f16 again and added in f32 with wire type bf16 is cast once for both."""
    text = PLAN.replace(
        "z = shift y over stage by -2 { wire = bf16 }",
        "w = shift x over data by 1 { wire = f16 }\n    z = shift w over stage by 1 { wire = f16 }\n"
        "    z = reduce z over stage, data by sum { wire = bf16, accumulate = f32 }",
    )
    schedule = commplan.loads(text).compile(shapes=SHAPES).schedule
    assert verify(schedule) == ()


def test_messages_of_no_bytes_are_refused() -> None:
    schedule = compiled()
    first = shifts(schedule)[0]
    hints = msgspec.structs.replace(first.hints, chunk=0)
    problems = verify(edited(schedule, first, msgspec.structs.replace(first, hints=hints)))
    assert "CP0735" in {problem.code for problem in problems}
