"""Step profiles: the file, and invalid ones."""

from __future__ import annotations

import pytest

import commplan
from commplan.cost import StepComputation, check_step
from commplan.cost.schedule.step_profile import (
    GradientTime,
    StepProfile,
    parse_step_profile,
    write_step_profile,
)
from commplan.diagnostics import CommplanError

PROFILE = StepProfile(
    "2026-11-26", "cpu", 0.02, 0.001, "median of 9 runs",
    (GradientTime("grads", "b", 0.005), GradientTime("grads", "a", 0.02)),
)  # fmt: skip
PLAN = """\
plan small
axis data = 8
input grads : tree partial data
each step {
    grads = reduce grads over data by mean { bucket = 1 KiB }
    output grads
}
"""
SHAPES = {"grads": {name: {"shape": [256], "dtype": "f32"} for name in ("a", "b")}}


def test_a_profile_is_read_as_it_was_written() -> None:
    assert parse_step_profile(write_step_profile(PROFILE)) == PROFILE
    ready = (("grads", "b", 0.005), ("grads", "a", 0.02))
    assert PROFILE.computation == StepComputation(0.02, ready, "measured on cpu, 2026-11-26", 0.001)


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ("version = 2", "has version 2, expected 1"),
        ("seconds = -1.0", "is malformed"),
        ("seconds = inf", "is malformed|not finite"),
        ("seconds = 0.01", "leaf `a` of `grads` is available after 0.02 s"),
        ("speed = 1", "is malformed"),
        ("[[[", "is not TOML"),
    ],
)
def test_malformed_profiles_are_refused(wrong: str, why: str) -> None:
    key = wrong.partition(" = ")[0]
    lines = [line for line in write_step_profile(PROFILE).splitlines() if not line.startswith(f"{key} =")]
    if wrong.startswith("seconds"):
        lines = write_step_profile(PROFILE).replace("seconds = 0.02\nafter", "after").splitlines()
    with pytest.raises(CommplanError, match=why) as refused:
        parse_step_profile("\n".join([wrong, *lines]))
    assert refused.value.diagnostics[0].code == "CP0772"


def test_gradients_are_sent_in_the_order_in_which_the_step_makes_them() -> None:
    plan = commplan.loads(PLAN)
    last_first = plan.compile(shapes=SHAPES).schedule.phases
    assert plan.compile(shapes=SHAPES, step=PROFILE.computation).schedule.phases == last_first
    first_first = StepComputation(0.02, (("grads", "a", 0.005), ("grads", "b", 0.02)), "")
    other = plan.compile(shapes=SHAPES, step=first_first).schedule.phases
    assert other == plan.compile(shapes=SHAPES, order={"grads": ["a", "b"]}).schedule.phases != last_first


def test_a_step_of_another_plan_is_refused() -> None:
    schedule = commplan.loads(PLAN).compile(shapes=SHAPES).schedule
    check_step(PROFILE.computation, schedule)
    for name, path, near in (
        ("grad", "a", "did you mean `grads`?"),
        ("grads", "c", "leaves of `grads`: a, b"),
    ):
        other = StepComputation(1.0, ((name, path, 1.0),), "measured")
        with pytest.raises(CommplanError, match="not an input") as refused:
            check_step(other, schedule)
        (diagnostic,) = refused.value.diagnostics
        assert (diagnostic.code, diagnostic.notes[0].text) == ("CP0772", near)
