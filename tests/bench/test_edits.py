"""Edits of schedule files: the campaign runs, and its judge tells wrong schedules apart."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from bench.edits.__main__ import main
from bench.edits.generate import Generator, put, spots
from bench.edits.judge import Judge
from bench.edits.plans import PLANS, Base, bases, leaf
from commplan.ir.schedule import Schedule


def base(name: str) -> Base:
    return next(bases(tuple(plan for plan in PLANS if plan.name == name)))


def edited(schedule: Schedule, phase: int, op: int, **fields: Any) -> Schedule:
    changed: Any = schedule
    for name, value in fields.items():
        for part in name.split("__")[:-1]:
            assert hasattr(schedule.phases[phase].ops[op], part)
        changed = put(changed, ("phases", phase, "ops", op, *name.split("__")), value)
    return changed


def place(schedule: Schedule, phase: int, struct: str, /, **fields: Any) -> int:
    """The first op of this kind that has these fields."""
    ops = enumerate(schedule.phases[phase].ops)
    return next(
        number
        for number, op in ops
        if type(op).__name__ == struct and all(getattr(op, name) == value for name, value in fields.items())
    )


def test_the_oracle_tells_a_wrong_root():
    known = base("sums")
    judge, at = Judge(known), place(known.schedule, 0, "Collective", kind="broadcast")
    assert judge(known.schedule) == ("fields", "")
    way, difference = judge(edited(known.schedule, 0, at, root=3))
    assert way == "oracle" and "output" not in difference and "off by" in difference


def test_batches_tell_records_that_are_left_out():
    known = base("loads")
    at = place(known.schedule, 2, "Map", fn="decode")
    way, difference = Judge(known)(edited(known.schedule, 2, at, hints__on_error="skip"))
    assert way == "batches" and difference.startswith("only one of them gives stops")


def test_members_of_own_clocks_load_their_batches():
    """They are compared member by member."""
    known = base("clocks")
    judge, at = Judge(known), place(known.schedule, 0, "Read", source="s")
    assert {name.partition(" at ")[0] for name in judge.batches.values} >= {"step member 0", "step member 1"}
    way, difference = judge(edited(known.schedule, 0, at, seed=2))
    assert way == "batches" and difference


def test_edits_of_the_origin_are_compared_with_the_plan_for_their_leaves():
    known = base("sums")
    judge, other = Judge(known), known.compiled_for({"g": {"w": leaf(2, 2)}, "p": {"w": leaf(2, 2)}})
    assert judge.instance(known.schedule) is judge
    assert judge(other.schedule)[1] == ""
    at = place(other.schedule, 0, "Collective", kind="broadcast")
    way, difference = judge(edited(other.schedule, 0, at, root=3))
    assert way == "origin and oracle" and "off by" in difference


def test_a_run_tells_what_a_weak_type_becomes():
    known = base("calls")
    at = place(known.schedule, 3, "Map", fn="times")
    _, difference = Judge(known)(edited(known.schedule, 3, at, operands=("x.0", "x.0")))
    assert difference


def test_edits_reach_every_kind_of_field():
    known = list(bases(tuple(plan for plan in PLANS if plan.name in ("cuts", "moves"))))
    generator = Generator([one.schedule for one in known], 0)
    labels = {spot.label for spot in spots(known[0].schedule)}
    made = itertools.islice(generator.edits(known[0].schedule, 0), 300)
    assert len(labels & {label for edit in made for label in edit.labels}) > 0.6 * len(labels)


def test_accepted_edits_of_cuts_and_moves_compute_the_same(capsys: pytest.CaptureFixture[str]):
    """A slice of the campaign."""
    assert main(["--edits", "64", "--plans", "cuts,moves", "--seed", "5"]) == 0
    assert "edits: 64 of 8 schedules" in capsys.readouterr().out
