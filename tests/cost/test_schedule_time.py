"""Schedules in time: lanes, overlap, critical paths, unknown costs, and the trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.byhand import HERE, ensemble_plan, reduce_plan, sharded_plan, tree

import commplan
from commplan import dsl
from commplan.compiler import compile_plan
from commplan.cost import Predictor, predict
from commplan.cost.schedule.list_scheduler import (
    LaneTask,
    TaskTiming,
    critical_path,
    run_tasks,
    shares_of_links,
)
from commplan.cost.schedule.trace import trace
from commplan.ir.plan import Algorithm, AxisKind, Hints
from commplan.ir.schedule import Axis, Collective, Leaf, Pack, Phase, Schedule, Spread, Value
from commplan.ir.types import DType, Placement
from commplan.topology import Level, Topology, load_topology

ROOT = Path(__file__).parents[2]
FLAT = Topology("flat4", (Level("host", 4, 60e-6, 25e6),))
CLUSTER = load_topology(ROOT / "examples" / "topologies" / "h100_65536.toml")


# Tasks


def spans(*tasks: LaneTask) -> list[tuple[float, float]]:
    return [(timing.start, timing.end) for timing in run_tasks(tasks)]


def test_a_lane_serves_one_task_after_another_and_lanes_run_side_by_side() -> None:
    times = spans(
        LaneTask(("a",), (), 2.0),
        LaneTask(("b",), (), 3.0),
        LaneTask(("a",), (), 1.0),
        LaneTask(("b",), (0,), 1.0),
    )
    assert times == [(0, 2), (0, 3), (2, 3), (3, 4)]


def test_flows_on_one_link_slow_each_other_down() -> None:
    both = (1.0,)
    times = spans(LaneTask(("a",), (), 2.0, both), LaneTask(("b",), (), 1.0, both))
    assert times == [(0, pytest.approx(3.0)), (0, pytest.approx(2.0))]


def test_flows_end_where_a_float_cannot_hold_how_long_they_take() -> None:
    flow = (1.0,)
    times = spans(
        LaneTask(("a",), (), 1e20), LaneTask(("b",), (0,), 1.0, flow), LaneTask(("c",), (0,), 2.0, flow)
    )
    assert times == [(0, 1e20)] * 1 + [(1e20, 1e20)] * 2


def test_flows_that_leave_room_do_not() -> None:
    times = spans(LaneTask(("a",), (), 2.0, (0.5, 0.0)), LaneTask(("b",), (), 2.0, (0.5, 1.0)))
    assert times == [(0, 2.0), (0, 2.0)]


def test_a_flow_that_needs_less_than_its_share_of_a_link_is_not_slowed() -> None:
    """The first flow is limited by its own link, and uses a tenth of the second one's."""
    first, second = LaneTask(("a",), (), 1.0, (1.0, 0.1)), LaneTask(("b",), (), 1.0, (0.0, 1.0))
    assert spans(first, second) == [(0.0, 1.0), (0.0, pytest.approx(1.1))]


@given(st.lists(st.tuples(*[st.floats(0.0, 1.0)] * 3), min_size=2, max_size=6))
def test_shares_fill_links_and_slow_only_flows_of_a_full_one(uses: list[tuple[float, float, float]]) -> None:
    flows = tuple(use for use in uses if any(share > 1e-6 for share in use))
    if not flows:
        return
    rates = shares_of_links(flows)
    assert all(0 < rate <= 1 for rate in rates)
    loads = [sum(r * use[link] for r, use in zip(rates, flows, strict=True)) for link in range(3)]
    assert max(loads) <= 1 + 1e-6
    for rate, use in zip(rates, flows, strict=True):  # one that is slowed has at least an equal share
        full = [link for link in range(3) if use[link] > 0 and rate * use[link] >= 1 / len(flows) - 1e-6]
        assert rate == 1 or full


def test_a_task_may_wait_for_another_to_begin() -> None:
    times = spans(LaneTask(("net",), (), 5.0, (0.1,)), LaneTask(("device",), (), 1.0, begun=(0,)))
    assert times == [(0, 5.0), (0, 1.0)]


def test_a_task_on_two_lanes_blocks_both() -> None:
    times = spans(
        LaneTask(("net", "device"), (), 2.0), LaneTask(("device",), (), 1.0), LaneTask(("net",), (), 1.0)
    )
    assert times == [(0, 2), (2, 3), (2, 3)]


def test_the_critical_path_is_who_was_waited_for() -> None:
    played = run_tasks(
        [
            LaneTask(("a",), (), 1.0),
            LaneTask(("b",), (), 3.0),
            LaneTask(("a",), (0, 1), 1.0),
            LaneTask(("b",), (), 0.5),
        ]
    )
    assert critical_path(played) == [1, 2]
    assert critical_path(()) == []
    assert played[0] == TaskTiming(0.0, 1.0, None)


# Schedules


def exchange(form: Any = None, backend: Any = "mpi") -> Schedule:
    """A collective of 25 MB, and packing of 25 MB that does not need it."""
    leaf = Leaf("", (6_250_000,), DType.F32)
    where = Placement()
    values = [Value(ref, "flat", (leaf,), where) for ref in ("y.1", "z.1")]
    ops = (
        Collective("all_reduce", "y.1", "x.0", ("data",), DType.F32, leaf.nbytes, HERE, "sum",
                   algorithm=Algorithm("ring"), form=form),
        Pack("z.1", (), HERE, after=("y.1",) if form == "split" else ()),
    )  # fmt: skip
    entry = (Value("x.0", "flat", (leaf,), where),)
    phase = Phase("step", "step", HERE, 1, ops, ("x.0",), (), (), (), tuple(values))
    axis = Axis("data", AxisKind.REPLICA, 4, (Spread("host", 4),))
    return Schedule("made", "", (axis,), (), (), ("x.0",), (), entry, (phase,), backend=backend)


def timed(schedule: Schedule, topology: Topology = FLAT, **compute: float) -> Any:
    return predict(schedule, Predictor(topology, schedule.axes, backend=schedule.backend), compute=compute)


@pytest.mark.parametrize(("form", "hidden"), [("split", True), ("call", False)])
def test_packing_runs_under_a_split_collective_and_after_a_blocking_one(form: str, hidden: bool) -> None:
    move, pack = timed(exchange(form)).phases[0].ops
    assert move.seconds == pytest.approx(1.5, rel=0.01)
    assert (pack.start < move.seconds) is hidden


def test_a_phase_tells_its_bytes_its_bound_and_its_path() -> None:
    phase = timed(exchange("call")).phases[0]
    assert dict(phase.nbytes)["host"] == pytest.approx(1.5 * 25e6)
    assert phase.bound == pytest.approx(1.5, rel=0.001)
    assert 1.0 <= phase.distance < 1.01
    assert [part.label for part in phase.critical] == ["all_reduce via ring", "pack"]
    assert phase.network == pytest.approx(1.5, rel=0.01)
    assert phase.compute == pytest.approx(25e6 / 20e9)


def test_costs_that_nobody_knows_are_named_and_given_ones_are_charged() -> None:
    schedule = compile_plan(
        sharded_plan(), {name: tree(w=(8, 8)) for name in ("params", "grads", "adam")}, topology=FLAT
    )
    unknown = timed(schedule).unknown
    assert unknown == ("function `adam_init`", "function `adam_update`")
    charged = timed(schedule, adam_init=1.0, adam_update=2.0)
    assert charged.unknown == ()
    assert [round(phase.seconds) for phase in charged.phases] == [1, 2]
    assert all(phase.seconds >= phase.bound for phase in charged.phases)


@pytest.mark.parametrize("via", ["duplicate", "all_shared", "single_broadcast"])
def test_sharing_is_charged_as_what_it_sends(via: str) -> None:
    schedule = compile_plan(ensemble_plan(via=Algorithm(via)), {}, topology=FLAT)
    prediction = timed(schedule, images=0.0, decode=0.0, augment=0.0)
    moved = sum(op.alone for phase in prediction.phases for op in phase.ops if op.op == "share")
    assert (moved > 0) is (via != "duplicate")
    assert prediction.unknown == ()


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "plans").glob("*.plan")), ids=lambda p: p.stem)
def test_every_example_is_simulated(path: Path) -> None:
    plan, diagnostics = dsl.load(path.read_text(), str(path))
    assert plan is not None, diagnostics
    shapes = {v.name: tree(w=(64, 64), b=(64,)) for v in plan.values if type(v.type).__name__ == "TreeType"}
    sizes = {axis.name: 4 for axis in plan.axes if axis.size is None}
    try:
        schedule = compile_plan(plan, shapes, axes=sizes, topology=CLUSTER)
    except commplan.CommplanError as error:
        pytest.skip(f"needs other shapes: {error.diagnostics[0].code}")
    simulation = timed(schedule, CLUSTER)
    assert len(simulation.phases) == len(plan.phases)
    assert all(phase.seconds >= phase.bound for phase in simulation.phases)
    traced(trace(simulation))


def test_three_levels_of_65536_ranks() -> None:
    maker = reduce_plan(op="mean", hints=Hints(), pod=256, node=32, gpu=8)
    schedule = compile_plan(maker, {"grads": tree(w=(25_000_000,))}, topology=CLUSTER)
    prediction = predict(schedule, Predictor(CLUSTER, schedule.axes))
    assert prediction.ranks == 65536
    assert prediction.phases[0].seconds > prediction.phases[0].bound > 0
    assert len(prediction.phases[0].ops) < 500


# The trace


def traced(data: bytes) -> list[dict[str, Any]]:
    """The events, after checking each against the format."""
    document = json.loads(data)
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    named: set[tuple[int, int]] = set()
    for event in document["traceEvents"]:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name")
            assert isinstance(event["args"]["name"], str)
            named.add((event["pid"], event["tid"]))
        else:
            assert event["ts"] >= 0
            assert event["dur"] > 0
            assert (event["pid"], event["tid"]) in named
    return document["traceEvents"]


def test_a_trace_has_a_track_for_each_lane_and_a_color_for_each_line() -> None:
    schedule = compile_plan(
        sharded_plan(), {name: tree(w=(8, 8)) for name in ("params", "grads", "adam")}, topology=FLAT
    )
    events = traced(trace(timed(schedule, adam_init=1.0, adam_update=2.0)))
    tracks = {event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert tracks == {"device", "network:host"}
    complete = [event for event in events if event["ph"] == "X"]
    assert len({event["cname"] for event in complete}) == len({event["args"]["line"] for event in complete})
    ends: dict[tuple[int, int], float] = {}
    for event in sorted(complete, key=lambda event: event["ts"]):
        track = event["pid"], event["tid"]
        assert event["ts"] >= ends.get(track, 0.0) - 1e-6  # a lane does one thing at a time
        ends[track] = event["ts"] + event["dur"]
