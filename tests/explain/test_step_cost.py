"""The line of a plan to change first."""

from __future__ import annotations

from pathlib import Path

import pytest

import commplan
from commplan.cost import Predictor, StepComputation, predict
from commplan.explain.step_cost import exposed_by_line, step_costs
from commplan.ir.schedule import Schedule
from commplan.topology import load_topology

CLUSTER = load_topology(Path(__file__).parents[2] / "examples" / "topologies" / "h100_64.toml")
PLAN = """\
plan two
axis node = 4
axis gpu = 8
input small : f32[1024] partial gpu
input large : f32[67108864] partial node, gpu
each step {
    small = reduce small over gpu by mean
    large = reduce large over node, gpu by mean
    output small, large
}
every 8 steps {
    small = reduce small over gpu by sum
    output small
}
"""


@pytest.fixture(name="schedule", scope="module")
def _schedule() -> Schedule:
    return commplan.loads(PLAN).compile(topology=CLUSTER).schedule


def test_the_line_that_exposes_most_comes_first(schedule: Schedule) -> None:
    prediction = predict(schedule, Predictor(CLUSTER, schedule.axes))
    assert schedule.origin is not None
    (cost,) = step_costs(schedule.origin.plan, schedule, prediction)
    time = prediction.phase("step")
    assert (cost.phase, cost.exposed, cost.seconds) == ("step", time.exposed, time.seconds)
    assert cost.first is not None and (cost.first.line, cost.first.exposed) == (8, exposed_by_line(time)[8])
    assert sum(exposed_by_line(time).values()) == pytest.approx(time.exposed)
    assert any("best alternative that was tried" in text for text in cost.first.advice)
    assert "change first: line 8, " in "\n".join(cost.lines())


def test_lines_that_share_buckets_are_named() -> None:
    program = commplan.loads(
        PLAN.replace("partial gpu", "partial node, gpu").replace("over gpu", "over node, gpu")
    ).compile(topology=CLUSTER)
    schedule = program.schedule
    assert schedule.origin is not None
    (cost,) = step_costs(schedule.origin.plan, schedule, predict(schedule, Predictor(CLUSTER, schedule.axes)))
    assert cost.first is not None and "its buckets carry `large` too" in cost.first.advice


def test_a_step_that_hides_its_communication_has_nothing_to_change(schedule: Schedule) -> None:
    step = StepComputation(1.0, (("small", "", 0.1), ("large", "", 0.1)), "measured on a device", 0.25)
    assert schedule.origin is not None
    (cost,) = step_costs(
        schedule.origin.plan, schedule, predict(schedule, Predictor(CLUSTER, schedule.axes), step)
    )
    assert (cost.first, cost.exposed, cost.seconds, cost.after) == (None, 0.0, 1.25, 0.25)
    assert cost.lines()[0] == "computation 1 s, and 250 ms after the phase, measured on a device"


@pytest.mark.parametrize(("axes", "advised"), [("gpu", True), ("node, gpu", False)])
def test_a_narrow_wire_is_advised_inside_a_node_alone(axes: str, advised: bool) -> None:
    text = PLAN.replace("partial node, gpu", f"partial {axes}").replace("over node, gpu", f"over {axes}")
    schedule = commplan.loads(text).compile(topology=CLUSTER).schedule
    assert schedule.origin is not None
    (cost,) = step_costs(schedule.origin.plan, schedule, predict(schedule, Predictor(CLUSTER, schedule.axes)))
    assert cost.first is not None
    assert any("{ wire = bf16 }" in text for text in cost.first.advice) == advised
