"""The search: sizes of buckets and algorithms together, by the time of the phase that is exposed."""

from __future__ import annotations

from typing import Any

import pytest
from support.byhand import HERE, Maker, reduce_plan, tree
from support.campaign import parameters

import commplan
from bench import choices
from bench.choice_cases import case
from bench.choices import faster_pins
from commplan.compiler import compile_plan
from commplan.cost import Predictor, predict
from commplan.ir import plan as graph
from commplan.ir.remark import Choice
from commplan.ir.schedule import Collective, Schedule
from commplan.passes.base import Choices
from commplan.passes.search import search, trials
from commplan.passes.search.candidates import even_size, filled
from commplan.passes.search.remarks import Searched
from commplan.topology import Level, Topology, parse_topology

KIB, MIB = 1024, 1024**2
BACKWARD = graph.Hints(overlap="backward")


def machine(latency: float = 6e-5, rate: float = 25e6) -> Topology:
    return Topology("flat", (Level("host", 4, latency, rate),))


NODES = Topology(
    "nodes", (Level("gpu", 8, 3e-6, 450e9), Level("node", 4, 6e-6, 100e9)), call=8e-6, round=7e-6
)


def many(count: int, nbytes: int) -> dict[str, tuple[int, ...]]:
    return {f"w{index:03}": (nbytes // 4,) for index in range(count)}


def compiled(
    leaves: dict[str, tuple[int, ...]], topology: Topology, backend: Any, hints: graph.Hints, via: Any = None,
    pipeline: str | None = None, **axes: int,
) -> Schedule:  # fmt: skip
    plan = reduce_plan("sum", via, hints=hints, **axes or {"data": 4})
    return compile_plan(plan, {"grads": tree(**leaves)}, topology=topology, backend=backend, passes=pipeline)


def exposed(schedule: Schedule, topology: Topology) -> float:
    return predict(schedule, Predictor(topology, schedule.axes, backend=schedule.backend)).phases[0].exposed


def collectives(schedule: Schedule) -> list[Collective]:
    return [op for op in schedule.phases[0].ops if isinstance(op, Collective)]


def remark(schedule: Schedule) -> Choice:
    return next(choice for choice in schedule.choices if choice.by == "search")


def test_the_lower_the_latency_the_more_buckets() -> None:
    counts = [
        len(collectives(compiled(many(64, MIB), machine(latency), "jax", graph.NO_HINTS)))
        for latency in (1e-6, 1e-2, 1.0)
    ]
    assert counts[0] > counts[1] > counts[2] >= 1


@pytest.mark.parametrize(("hints", "several"), [(graph.NO_HINTS, False), (BACKWARD, True)])
def test_under_mpi_what_runs_beside_nothing_travels_in_one(hints: graph.Hints, several: bool) -> None:
    ops = collectives(compiled(many(40, 48 * KIB), machine(1e-3), "mpi", hints))
    assert (len(ops) > 1) is several


def test_buckets_and_levels_are_chosen_together() -> None:
    """A hierarchy wins with buckets that are too small for the backend's own."""
    schedule = compiled(many(64, 8 * MIB), NODES, "jax", graph.NO_HINTS, node=4, gpu=8)
    assert {op.axes for op in collectives(schedule)} == {("gpu",), ("node",)}
    native = compiled(
        many(64, 8 * MIB), NODES, "jax", graph.NO_HINTS, graph.Algorithm("native"), node=4, gpu=8
    )
    assert exposed(schedule, NODES) < exposed(native, NODES)


def test_the_remark_says_what_else_was_tried_and_what_that_would_expose() -> None:
    schedule = compiled(many(64, 8 * MIB), NODES, "jax", graph.NO_HINTS, node=4, gpu=8)
    choice = remark(schedule)
    assert choice.what.startswith("hierarchical(gpu, node) in buckets of up to ")
    assert "next to the assumed computation of" in choice.why
    assert "schedules tried, not of all" in choice.why
    assert choice.seconds == pytest.approx(exposed(schedule, NODES), rel=1e-3)
    seconds = [other.seconds or 0.0 for other in choice.alternatives]
    assert seconds == sorted(seconds) and seconds[0] >= (choice.seconds or 0.0) * (1 - search.NEAR)


def test_a_spent_budget_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "SCHEDULES", 4)
    schedule = compiled(many(16, MIB), machine(), "jax", graph.NO_HINTS)
    assert "of 4 schedules tried" in remark(schedule).why
    assert "the budget is spent" in remark(schedule).why


def test_what_is_written_stays() -> None:
    leaves = many(16, MIB)
    schedule = compiled(leaves, machine(), "jax", graph.Hints(bucket=2 * MIB), graph.Algorithm("native"))
    assert len(collectives(schedule)) == 8
    assert not [choice for choice in schedule.choices if choice.by == "search"]
    passes = "bucket{max=4MiB},decompose,select"
    assert len(collectives(compiled(leaves, machine(), "jax", graph.NO_HINTS, pipeline=passes))) == 4


def test_choosing_is_the_same_again() -> None:
    once, twice = (compiled(many(16, MIB), NODES, "mpi", BACKWARD, node=4, gpu=8) for _ in range(2))
    assert once == twice


def test_sizes_of_messages_are_chosen_with_the_rest() -> None:
    """For the class of its sizes 32 KiB are faster, at its own size that is one message more."""
    generated = case(13)
    topology = parse_topology(generated.topology)
    program = commplan.loads(generated.text()).compile(
        shapes=generated.shapes, topology=topology, backend="mpi"
    )
    chosen = program.schedule
    pinned = choices.exposed(generated, generated.text(0, option="chunk = 64 KiB"), topology)
    assert exposed(chosen, topology) <= pinned * (1 + search.NEAR)
    assert "in messages of" in remark(chosen).what
    assert {op.hints.chunk for op in collectives(chosen)} != {None}


@pytest.mark.parametrize(
    ("seed", "stage", "via", "option"),
    [
        pytest.param(1010, 0, "hierarchical(gpu, node)", "", id="one algorithm for two stages"),
        pytest.param(18, 0, "", "bucket = 16 MiB", id="buckets of two stages apart"),
        pytest.param(46, 0, "hierarchical(gpu, node)", "", id="sizes for each of two algorithms"),
        pytest.param(1911, 0, "native", "", id="sizes for an algorithm that is slower in one bucket"),
        pytest.param(116, 0, "", "bucket = 16 MiB", id="smaller buckets of two stages"),
        pytest.param(
            168, 0, "hierarchical(gpu, node)", "", id="sizes for an algorithm that is the fastest alone"
        ),
        pytest.param(170, 0, "hierarchical(gpu, node)", "", id="few leaves, divided evenly"),
        pytest.param(1761, 0, "", "bucket = 16 MiB", id="sizes near the usual one"),
        pytest.param(
            516, 0, "hierarchical(node, gpu, pod)", "", id="small buckets for another order of levels"
        ),
        pytest.param(1557, 0, "binomial_tree", "", id="two even buckets of four leaves"),
        pytest.param(1631, 0, "hierarchical(gpu, node)", "", id="small buckets for a hierarchy only"),
        pytest.param(44, 0, "", "bucket = 1 MiB", id="a hierarchy in several collectives"),
        pytest.param(90, 0, "", "bucket = 1 MiB", id="a size between two slower ones"),
        pytest.param(190, 0, "", "bucket = 1 MiB", id="sizes behind a slower one"),
        pytest.param(208, 0, "", "bucket = 1 MiB", id="leaves of a scatter have all rows"),
        pytest.param(618, 0, "hierarchical(gpu, node)", "", id="message sizes for a slower algorithm"),
        pytest.param(1230, 0, "ring", "", id="a program that is not among the fastest alone"),
        pytest.param(1474, 0, "", "bucket = 16 MiB", id="sizes of two stages changed at once"),
        pytest.param(
            359,
            0,
            "hierarchical(gpu = native, node = halving_doubling)",
            "",
            id="halving and doubling on one level",
            marks=pytest.mark.campaign,
        ),
        pytest.param(233, 0, "", "bucket = 1 MiB", id="sizes that split leaves, behind slow ones"),
        pytest.param(
            1429,
            0,
            "hierarchical(gpu, node, pod)",
            "",
            id="three levels and two stages",
            marks=pytest.mark.campaign,
        ),
        pytest.param(988, 1, "native", "", id="sizes of shared buckets for separate ones"),
        pytest.param(1083, 0, "hierarchical(gpu, node)", "", id="another order of levels for each of two"),
        pytest.param(1130, 0, "native", "", id="algorithms of two stages exchanged"),
    ],
)
def test_what_a_pin_brings_is_found_without_it(seed: int, stage: int, via: str, option: str) -> None:
    generated = case(seed)
    topology = parse_topology(generated.topology)
    chosen, pinned = (
        choices.exposed(generated, text, topology)
        for text in (generated.text(), generated.text(stage, via, option))
    )
    assert chosen <= pinned * (1 + search.NEAR)


def test_separate_buckets_are_a_runner_up() -> None:
    """Two small trees in one bucket are one message less."""
    names = ("a", "b")
    plan = commplan.loads(
        "plan two\naxis data = 4\n"
        + "".join(f"input {name} : f32[256] partial data\n" for name in names)
        + "each step {\n"
        + "".join(f"    {name} = reduce {name} over data by sum\n" for name in names)
        + "".join(f"    output {name}\n" for name in names)
        + "}\n"
    )
    schedule = plan.compile(topology=machine(1e-2), backend="jax").schedule
    assert len(collectives(schedule)) == 1
    assert "separate" not in remark(schedule).what
    assert any("separate bucket" in other.what for other in remark(schedule).alternatives)


def test_leaves_are_divided_evenly() -> None:
    leaves = (5, 4, 1, 8)
    assert [even_size(leaves, count) for count in (1, 2, 3)] == [18, 9, 8]
    assert [len(filled(leaves, even_size(leaves, count))) for count in (1, 2, 3)] == [1, 2, 3]
    assert filled(leaves, 4) == [[5], [4], [1], [8]]


def test_no_size_is_tried_below_those_that_get_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: set[int | None] = set()
    predicted = trials.Trials.predicted

    def recorded(self: trials.Trials, table: Choices) -> Searched | None:
        sizes.update(choice.bucket for choice in self.key(table))
        return predicted(self, table)

    monkeypatch.setattr(trials.Trials, "predicted", recorded)
    compiled(many(64, MIB), machine(1.0), "jax", graph.NO_HINTS)
    assert 16 * MIB in sizes and MIB not in sizes


@pytest.mark.parametrize("seed", parameters((502, 503), range(40)))
def test_no_pin_is_faster_than_the_choice(seed: int) -> None:
    assert faster_pins(case(seed), 3) == []


def test_stages_that_are_written_at_one_place_are_chosen_apart() -> None:
    maker = Maker(data=4)
    stages: list[graph.Reduce] = []
    for name, op in (("first", "sum"), ("second", "max")):
        ref = maker.input(name, partial="data") if op == "sum" else maker.input(name, per="data")
        maker.value(f"{name}.1")
        reduction = graph.Reduction(op)  # pyright: ignore[reportArgumentType]
        stages.append(graph.Reduce(f"{name}.1", ref, ("data",), reduction, HERE))
    maker.phase("step", *stages, outputs=("first.1", "second.1"))
    leaves = tree(w=(64,))
    schedule = compile_plan(maker.plan(), {"first": leaves, "second": leaves}, topology=machine())
    assert [choice.by for choice in schedule.choices].count("search") == 2
    assert [op.stages for op in collectives(schedule)] == [("first.1",), ("second.1",)]
