"""The computation of a phase: when leaves are ready, and the exposed time after it."""

from __future__ import annotations

import pytest
from support.byhand import reduce_plan, tree

from commplan.compiler import compile_plan
from commplan.cost import Predictor, StepComputation, predict
from commplan.cost.schedule.list_scheduler import LaneTask, run_tasks
from commplan.cost.schedule.prediction import PhaseTime
from commplan.ir import plan as graph
from commplan.ir.types import DType
from commplan.topology import Level, Topology

RATE = 25e6
FLAT = Topology("flat", (Level("host", 4, 1e-6, RATE),))
LEAVES = tree(a=(1_000_000,), b=(1_000_000,))  # 4 MB each
EACH = 1.5 * 4e6 / RATE  # seconds of one leaf's reduction


def reduced(
    step: StepComputation | None = None,
    order: tuple[str, ...] = (),
    bucket: str = "bucket{max=4MiB}",
    hints: graph.Hints = graph.NO_HINTS,
) -> PhaseTime:
    plan = reduce_plan("sum", hints=hints, data=4)
    schedule = compile_plan(
        plan, {"grads": LEAVES}, topology=FLAT, passes=f"{bucket},select,overlap",
        order={"grads": order} if order else None,
    )  # fmt: skip
    orders = {"grads": order} if order else None
    return predict(schedule, Predictor(FLAT, schedule.axes), step, order=orders).phases[0]


def test_a_task_waits_for_its_release_and_its_lane_with_it() -> None:
    tasks = [
        LaneTask(("a",), (), 1.0, release=2.0),
        LaneTask(("a",), (), 1.0),
        LaneTask(("b",), (), 1.0, release=0.5),
    ]
    assert [(each.start, each.end) for each in run_tasks(tasks)] == [(2.0, 3.0), (3.0, 4.0), (0.5, 1.5)]


def test_without_a_step_one_is_assumed_that_takes_as_long_as_the_busiest_link() -> None:
    phase = reduced()
    assert phase.computation == pytest.approx(2 * EACH)
    # The first leaf is ready after half of it; the second one's reduction is exposed.
    assert phase.exposed == pytest.approx(EACH, rel=0.01)
    assert phase.alone == pytest.approx(2 * EACH, rel=0.01)
    assert phase.seconds == phase.computation + phase.exposed
    assert phase.critical[0].label == "computation"


def test_the_assumed_step_does_not_depend_on_what_was_chosen() -> None:
    first, second = reduced(bucket="bucket{max=1GiB}"), reduced()
    assert first.computation == second.computation
    assert first.exposed == pytest.approx(2 * EACH, rel=0.01)
    narrow = reduced(hints=graph.Hints(wire=DType.BF16))
    assert narrow.computation == first.computation and narrow.exposed < first.exposed


def test_a_step_that_is_given_says_when_leaves_are_ready() -> None:
    late = StepComputation(10.0, (("grads", "b", 1.0), ("grads", "a", 10.0)), "measured")
    phase = reduced(late)
    assert phase.computation == 10.0
    assert phase.exposed == pytest.approx(EACH, rel=0.01)
    early = StepComputation(10.0, (("grads", "b", 1.0), ("grads", "a", 2.0)), "measured")
    assert reduced(early).exposed == 0.0
    other = StepComputation(10.0, (("weights", "a", 1.0),), "measured")
    assert reduced(other).computation == 0.0


def test_leaves_are_ready_in_the_order_that_is_given() -> None:
    assert reduced(order=("a", "b")).exposed == pytest.approx(EACH, rel=0.01)


def test_under_mpi_nothing_runs_beside_a_reduction_that_does_not_ask_for_it() -> None:
    for hints, computes in ((graph.NO_HINTS, False), (graph.Hints(overlap="backward"), True)):
        plan = reduce_plan("sum", hints=hints, data=4)
        schedule = compile_plan(plan, {"grads": LEAVES}, topology=FLAT, backend="mpi")
        prediction = predict(schedule, Predictor(FLAT, schedule.axes, backend="mpi"))
        assert (prediction.phases[0].computation > 0) is computes
        assert ("assumed" in prediction.step) is computes
