"""decompose and select: the choice if times are known, and if they are not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support.byhand import HERE, Maker, reduce_plan, tree

from commplan.compiler import compile_plan
from commplan.cost.calibration import Calibration
from commplan.cost.collective.cost import CollectiveTime
from commplan.diagnostics import CommplanError
from commplan.ir import plan as graph
from commplan.ir.ops.base import Work
from commplan.ir.remark import Choice
from commplan.ir.schedule import Collective, Schedule
from commplan.ir.types import DType
from commplan.passes.base import PassContext
from commplan.passes.pipeline.manager import Pipeline
from commplan.topology import Level, Topology, load_topology

RACKS = Topology("racks", (Level("host", 4, 6e-5, 25e6), Level("rack", 2, 1.2e-4, 25e6)))
NODES = Topology("nodes", (Level("gpu", 8, 3e-6, 450e9), Level("node", 8, 6e-6, 400e9)))
PUBLIC = Path(__file__).parents[2] / "examples" / "topologies" / "h100_64.toml"  # with public figures
CHOOSING = "decompose,wire,select"


def context(topology: Topology, costs: Any) -> PassContext:
    return PassContext(topology=topology, costs=costs, choices={})  # without a search: each separately


class Told:
    """Given costs: seconds for each query, None if it is impossible."""

    def __init__(self, seconds: Callable[[Work], float | None], *, measured: bool = False) -> None:
        self.seconds, self.measured = seconds, measured
        self.asked: list[Work] = []

    def in_words(self, source: str) -> str:
        return source

    def least_seconds(self, work: Work) -> float:
        return 0.0

    def query(self, work: Work) -> CollectiveTime | None:
        self.asked.append(work)
        seconds = self.seconds(work)
        return None if seconds is None else CollectiveTime(seconds, (), "", 0.0, "told")


def by_name(**seconds: float) -> Told:
    """Seconds by the name of the algorithm, whatever the collective; `other` for all that are not named."""
    other = seconds.get("other", 9.0)
    return Told(lambda work: seconds.get(work.algorithm.name, other))


def chosen(
    plan: graph.Plan,
    costs: Told | None,
    topology: Topology = RACKS,
    *,
    backend: Any = "mpi",
    size: int = 1024,
    passes: str = CHOOSING,
) -> Schedule:
    shapes = {name.rpartition(".")[0]: tree(w=(size,)) for name in plan.inputs}
    bare = compile_plan(plan, shapes, topology=topology, backend=backend, passes="bucket{max=1GiB}")
    return Pipeline.parse(passes).run(bare, context(topology, costs))


def collectives(schedule: Schedule) -> list[Collective]:
    return [op for phase in schedule.phases for op in phase.ops if isinstance(op, Collective)]


def only(schedule: Schedule) -> Collective:
    (collective,) = collectives(schedule)
    return collective


def choice(schedule: Schedule, by: str) -> Choice:
    return next(choice for choice in schedule.choices if choice.by == by)


def test_the_fastest_is_taken_and_the_others_are_kept() -> None:
    schedule = chosen(reduce_plan("sum", data=4), by_name(ring=2.0, halving_doubling=1.0, native=3.0))
    assert str(only(schedule).algorithm) == "halving_doubling"
    remark = choice(schedule, "select")
    assert (remark.seconds, remark.source) == (1.0, "told")
    assert [(other.what, other.seconds) for other in remark.alternatives][:3] == [
        ("ring", 2.0), ("native", 3.0), ("recursive_doubling", 9.0),
    ]  # fmt: skip


def test_of_equally_fast_ways_the_simplest_is_taken() -> None:
    schedule = chosen(reduce_plan("sum", data=4), by_name(ring=1.004, halving_doubling=1.0, native=5.0))
    assert str(only(schedule).algorithm) == "ring"
    assert "within 0.5% of the fastest alone" in choice(schedule, "select").why


@pytest.mark.parametrize(("size", "expected"), [(16, "native"), (1024**2, "ring")])
def test_the_library_of_mpi_wins_ties_only_where_it_is_small(size: int, expected: str) -> None:
    schedule = chosen(reduce_plan("sum", data=4), by_name(other=1.0), size=size)
    assert only(schedule).algorithm.name == expected


def test_what_is_pinned_stays() -> None:
    plan = reduce_plan("sum", graph.Algorithm("chain"), data=4)
    schedule = chosen(plan, by_name(ring=1.0, chain=5.0))
    assert only(schedule).algorithm.name == "chain"
    remark = choice(schedule, "select")
    assert (remark.why, remark.seconds, remark.alternatives[0].what) == ("set in the plan", 5.0, "ring")


def test_messages_are_cut_where_that_is_faster() -> None:
    def seconds(work: Work) -> float:
        best = (work.algorithm.name, work.chunk) == ("ring", 128 * 1024)
        return 1.0 if best else 1.5 if work.algorithm.name == "ring" else 2.0

    op = only(chosen(reduce_plan("sum", data=4), Told(seconds), size=1024**2))
    assert (op.algorithm.name, op.hints.chunk) == ("ring", 128 * 1024)


def test_a_written_chunk_stays() -> None:
    plan = reduce_plan("sum", hints=graph.Hints(chunk=48 * 1024), data=4)
    costs = by_name(ring=1.0)
    assert only(chosen(plan, costs, size=1024**2)).hints.chunk == 48 * 1024
    assert {work.chunk for work in costs.asked} == {None, 48 * 1024}  # None: of native


def test_one_axis_over_two_levels_becomes_a_hierarchy_of_them() -> None:
    schedule = chosen(reduce_plan("sum", data=8), by_name(hierarchical=1.0))
    op = only(schedule)
    assert [key for key, _ in op.algorithm.levels] == ["host", "rack"]
    assert all(how.name != "native" for _, how in op.algorithm.levels)
    assert choice(schedule, "decompose").what.endswith("level by level (host, rack)")


def test_levels_get_the_algorithms_that_make_them_fast() -> None:
    def seconds(work: Work) -> float:
        fast = {("host", "halving_doubling"), ("rack", "recursive_doubling")}
        return 9.0 - sum((key, how.name) in fast for key, how in work.algorithm.levels)

    op = only(chosen(reduce_plan("sum", data=8), Told(seconds)))
    assert str(op.algorithm) == "hierarchical(host = halving_doubling, rack = recursive_doubling)"


def test_a_hierarchy_that_saves_nothing_is_left() -> None:
    schedule = chosen(reduce_plan("sum", data=8), by_name(ring=1.0, hierarchical=1.0))
    assert only(schedule).algorithm.name == "ring"
    assert not [choice for choice in schedule.choices if choice.by == "decompose"]
    assert any(other.what.startswith("hierarchical(") for other in choice(schedule, "select").alternatives)


def test_under_mpi_axes_on_levels_are_one_program() -> None:
    op = only(chosen(reduce_plan("sum", node=8, gpu=8), by_name(hierarchical=1.0), NODES))
    assert [key for key, _ in op.algorithm.levels] == ["gpu", "node"]


def test_under_jax_axes_on_levels_are_collectives_of_their_own() -> None:
    def seconds(work: Work) -> float:
        return 9.0 if len(work.axes) == 2 else 1.0

    schedule = chosen(reduce_plan("sum", node=8, gpu=8), Told(seconds), NODES, backend="jax")
    ops = [(op.kind, op.axes, op.algorithm.name) for op in collectives(schedule)]
    assert ops == [
        ("reduce_scatter", ("gpu",), "native"), ("all_reduce", ("node",), "native"),
        ("all_gather", ("gpu",), "native"),
    ]  # fmt: skip
    remark = choice(schedule, "decompose")
    assert (remark.seconds, remark.alternatives[0].seconds) == (3.0, 9.0)


@pytest.mark.parametrize(("flat", "parts"), [(3.01, 1), (3.1, 3)])
def test_under_jax_a_hierarchy_is_taken_if_it_is_faster(flat: float, parts: int) -> None:
    costs = Told(lambda work: flat if len(work.axes) == 2 else 1.0)
    schedule = chosen(reduce_plan("sum", node=8, gpu=8), costs, NODES, backend="jax")
    assert len(collectives(schedule)) == parts


def test_maxima_are_not_scattered_under_jax() -> None:
    costs = Told(lambda work: 9.0 if len(work.axes) == 2 else 1.0)
    schedule = chosen(reduce_plan("max", node=8, gpu=8), costs, NODES, backend="jax")
    assert only(schedule).axes == ("node", "gpu")


@pytest.mark.parametrize(("ring", "expected"), [(1.0, "native"), (0.9, "ring")])
def test_under_jax_a_program_is_taken_if_it_is_faster(ring: float, expected: str) -> None:
    costs = Told(lambda work: {"native": 1.0, "ring": ring}.get(work.algorithm.name, 9.0))
    op = only(chosen(reduce_plan("sum", data=4), costs, backend="jax"))
    assert op.algorithm.name == expected


def by_the_model(topology: Topology, size: int) -> Choice:
    """The choice of `select` for an all-reduce of f32[size] over 64 GPUs, by the model of `topology`."""
    plan = reduce_plan("sum", data=64)
    schedule = compile_plan(plan, {"grads": tree(w=(size,))}, topology=topology, backend="jax")
    return next(choice for choice in schedule.choices if choice.by == "select")


@pytest.mark.parametrize("size", [16, 1 << 18])
def test_by_public_figures_no_program_is_taken_and_its_time_is_called_a_guess(size: int) -> None:
    public = load_topology(PUBLIC)
    assert public.round is not None
    choice = by_the_model(public, size)
    assert "native" in choice.what
    assert "a guess until calibrated" in choice.source
    assert any(other.what == "recursive_doubling" for other in choice.alternatives)
    silent = by_the_model(replace(public, round=None, devices=None), size)
    assert "a guess" not in silent.source
    assert any(other.what == "recursive_doubling" for other in silent.alternatives)


@pytest.mark.parametrize(("round_", "levels"), [(0.0, True), (1e-4, False)])
def test_rounds_that_are_operations_cost_what_the_topology_says(round_: float, levels: bool) -> None:
    choice = by_the_model(replace(load_topology(PUBLIC), round=round_), 1 << 18)
    assert choice.what.startswith("hierarchical(" if levels else "native")
    assert "a guess until calibrated" in choice.source


@pytest.mark.parametrize("backend", ["jax", "mpi"])
def test_without_costs(backend: Any) -> None:
    """JAX's own always; under MPI by the table, and whatever is chosen the program is proved."""
    plan = reduce_plan("sum", data=4)
    chosen_by: dict[int, tuple[str, str | None]] = {}
    for size in (16, 32 * 1024, 1024**2):
        op = only(chosen(plan, None, backend=backend, size=size))
        chosen_by[size] = (op.algorithm.name, op.form)
    if backend == "jax":
        assert set(chosen_by.values()) == {("native", None)}
    else:
        assert chosen_by[16] == ("native", "call")
        assert chosen_by[1024**2][0] != "native"


def test_levels_that_the_plan_writes_without_costs() -> None:
    two = graph.Algorithm("hierarchical", (graph.Arg("gpu"), graph.Arg("chain", "node")))
    op = only(chosen(reduce_plan("sum", two, node=4, gpu=4), None, NODES))
    assert str(op.algorithm) == "hierarchical(gpu = ring, node = chain)"


def test_levels_too_large_for_programs_stay_as_they_are_written() -> None:
    two = graph.Algorithm("hierarchical", (graph.Arg("gpu"), graph.Arg("node")))
    wide = Topology("wide", (Level("gpu", 4, 3e-6, 450e9), Level("node", 512, 6e-6, 400e9)))
    op = only(chosen(reduce_plan("sum", two, node=512, gpu=4), None, wide))
    assert str(op.algorithm) == "hierarchical(gpu, node)"


def test_levels_that_are_left_to_the_library_are_carried_out_one_by_one() -> None:
    two = graph.Algorithm("hierarchical", (graph.Arg("native", "gpu"), graph.Arg("ring", "node")))
    ops = collectives(chosen(reduce_plan("sum", two, node=4, gpu=4), by_name(ring=1.0), NODES))
    assert [(op.kind, op.algorithm.name) for op in ops] == [
        ("reduce_scatter", "native"), ("all_reduce", "ring"), ("all_gather", "native"),
    ]  # fmt: skip


def test_levels_on_a_narrow_wire_are_carried_out_one_by_one() -> None:
    two = graph.Algorithm("hierarchical", (graph.Arg("gpu"), graph.Arg("node")))
    hints = graph.Hints(wire=DType.BF16, accumulate=DType.F32)
    ops = collectives(chosen(reduce_plan("sum", two, hints, node=4, gpu=4), by_name(), NODES))
    assert {op.kind for op in ops} == {"all_to_all", "all_gather"}
    assert all(op.dtype is DType.BF16 for op in ops)


def test_one_axis_on_a_narrow_wire_stays_flat() -> None:
    hints = graph.Hints(wire=DType.BF16, accumulate=DType.F32)
    ops = collectives(chosen(reduce_plan("sum", hints=hints, data=8), by_name(hierarchical=1.0)))
    assert [op.kind for op in ops] == ["all_to_all", "all_gather"]


def test_collectives_that_overlap_are_started_and_finished_apart() -> None:
    plan = reduce_plan("sum", hints=graph.Hints(overlap="backward"), data=4)
    assert only(chosen(plan, by_name())).form == "split"
    assert only(chosen(plan, by_name(), passes="decompose,wire,select{split=false}")).form == "call"
    assert only(chosen(plan, by_name(), backend="jax")).form is None
    assert only(chosen(reduce_plan("sum", data=4), by_name())).form == "call"


def test_collectives_decided_alike_make_one_choice() -> None:
    plan = reduce_plan("sum", data=4)
    shapes = {"grads": tree(a=(1000,), b=(1000,), c=(500,))}
    bare = compile_plan(plan, shapes, topology=RACKS, backend="mpi", passes="bucket{max=4000}")
    schedule = Pipeline.parse(CHOOSING).run(bare, context(RACKS, by_name(ring=1.0)))
    remarks = [choice for choice in schedule.choices if choice.by == "select"]
    assert [choice.what for choice in remarks] == ["ring for 3 x all_reduce of up to 3.91 KiB over data"]


def test_a_broadcast_keeps_its_root() -> None:
    maker = Maker(data=8)
    params = maker.input("params", per="data")
    maker.value("params.1")
    maker.phase("start", graph.Broadcast("params.1", params, ("data",), 5, HERE), outputs=("params.1",))
    costs = by_name(chain=1.0)
    op = only(chosen(maker.plan(), costs))
    assert (op.algorithm.name, op.root) == ("chain", 5)
    assert {work.root for work in costs.asked} == {5}


def test_one_rank_needs_no_algorithm() -> None:
    op = only(chosen(reduce_plan("sum", data=1), by_name(ring=1.0)))
    assert op.algorithm.name == "native"


def test_a_calibration_needs_a_topology() -> None:
    with pytest.raises(CommplanError) as caught:
        links = Calibration("2026-11-21", "jax", ("a", "b"), 1e-6, 1e-10, 5e-5, 1e-5)
        compile_plan(reduce_plan(), {"grads": tree(w=(4,))}, calibration=links)
    assert caught.value.diagnostics[0].code == "CP0727"


def test_choosing_again_changes_nothing() -> None:
    once = chosen(reduce_plan("sum", data=8), by_name(hierarchical=1.0))
    twice = Pipeline.parse("select").run(once, context(RACKS, by_name(hierarchical=1.0)))
    assert collectives(twice) == collectives(once)
    assert msgspec.structs.replace(twice, choices=(), pipeline="") == msgspec.structs.replace(
        once, choices=(), pipeline=""
    )
