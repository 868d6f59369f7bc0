"""overlap: the order of collectives and the chain through them."""

from __future__ import annotations

from support.byhand import F32, HERE, TREE, Maker, compiled, reduce_plan, tree

import commplan
from commplan.compiler import compile_plan
from commplan.ir import plan as graph
from commplan.ir.schedule import Collective, Map, Op, Pack, Schedule, results
from commplan.ir.types import DType


def step(schedule: Schedule) -> tuple[Op, ...]:
    return schedule.phase("step").ops


def collectives(ops: tuple[Op, ...]) -> list[Collective]:
    return [op for op in ops if isinstance(op, Collective)]


def test_one_chain_through_all_collectives() -> None:
    schedule = compiled(reduce_plan("sum"), "bucket{max=16},overlap", grads=tree(a=(4,), b=(4,), c=(4,)))
    ops = collectives(step(schedule))
    assert [op.after for op in ops] == [(), (ops[0].result,), (ops[1].result,)]


def test_the_chain_can_be_left_out() -> None:
    schedule = compiled(reduce_plan("sum"), "bucket{max=16},overlap{chain=false}", grads=tree(a=(4,), b=(4,)))
    assert all(op.after == () for op in collectives(step(schedule)))


def test_leaves_that_are_not_packed_are_no_part_of_the_chain_of_one_process() -> None:
    leaves = tree(a=(4,), b=(4,))
    free = compiled(reduce_plan("sum"), "bucket{in_process=true},overlap{in_process=true}", grads=leaves)
    assert [op.after for op in collectives(step(free))] == [()]
    assert "XLA may join and reorder those of leaves that are not packed" in free.choices[-1].what
    chained = compiled(reduce_plan("sum"), "bucket{max=16},overlap{in_process=true}", grads=leaves)
    assert [len(op.after) for op in collectives(step(chained))] == [0, 1]


def test_each_bucket_is_packed_just_before_it_is_sent() -> None:
    schedule = compiled(reduce_plan("sum"), "bucket{max=16},overlap", grads=tree(a=(4,), b=(4,)))
    assert [type(op) for op in step(schedule)][:4] == [Pack, Collective, Pack, Collective]


def gathers() -> Schedule:
    """Two gathers, written in the reverse order of their readers."""
    maker = Maker(data=2)
    for name in ("late", "early"):
        maker.input(name, split="data")
        maker.value(f"{name}.1")
    maker.fn("use", (TREE,), (TREE,), "device", elementwise=True)
    maker.value("first.0")
    maker.value("second.0")
    maker.phase(
        "step",
        graph.Gather("late.1", "late.0", ("data",), HERE),
        graph.Gather("early.1", "early.0", ("data",), HERE),
        graph.MapStage(("first.0",), "use", ("early.1",), HERE),
        graph.MapStage(("second.0",), "use", ("late.1",), HERE),
        outputs=("first.0", "second.0"),
    )
    all_shapes = tree(w=(4,))
    return compiled(maker.plan(), "bucket{coalesce=false},overlap", late=all_shapes, early=all_shapes)


def test_first_needed_first_sent() -> None:
    schedule = gathers()
    assert [op.result.split(".")[0] for op in collectives(step(schedule))] == ["early", "late"]
    assert "reordered" in schedule.choices[-1].what


def test_a_bucket_is_finished_before_the_next_begins() -> None:
    hints = graph.Hints(wire=DType.BF16, accumulate=DType.F32)
    plan = reduce_plan("sum", hints=hints, data=2)
    schedule = compiled(plan, "bucket{max=16},wire,overlap", grads=tree(a=(4,), b=(4,)))
    order = [(op.kind, op.result.split("/")[1]) for op in collectives(step(schedule))]
    assert order == [("all_to_all", "b0"), ("all_gather", "b0"), ("all_to_all", "b1"), ("all_gather", "b1")]


def test_the_chain_agrees_with_the_data() -> None:
    maker = Maker(data=2)
    maker.fn("use", (F32,), (F32,), "device")
    x = maker.input("x", F32, per="data")
    maker.value("x.1", F32)
    maker.input("w", split="data")
    maker.value("w.1")
    maker.value("v.0", split="data")
    maker.fn("scale", (TREE, F32), (TREE,), "device", elementwise=True)
    maker.phase(
        "step",
        graph.Reduce("x.1", x, ("data",), graph.Reduction("max"), HERE),
        graph.MapStage(("v.0",), "scale", ("w.0", "x.1"), HERE),
        graph.Gather("w.1", "v.0", ("data",), HERE),
        outputs=("w.1",),
    )
    schedule = compiled(maker.plan(), None, w=tree(a=(4,)))
    ops = collectives(step(schedule))
    assert [op.kind for op in ops] == ["all_reduce", "all_gather"]
    assert ops[1].after == (ops[0].result,)


def test_a_phase_without_collectives_is_left_alone() -> None:
    maker = Maker(data=2)
    maker.phase("step", outputs=(maker.input("x", F32),))
    schedule = compiled(maker.plan(), None)
    assert schedule.choices == ()
    assert [results(op) for op in step(schedule)] == []


def test_an_op_that_needs_no_sum_in_flight_runs_before_those_that_do() -> None:
    maker = Maker(data=2)
    maker.fn("grow", (TREE,), (TREE,), "device", elementwise=True)
    first, second = maker.input("first", partial="data"), maker.input("second", partial="data")
    other = maker.input("other")
    for ref in ("first.1", "first.2", "second.1", "other.1"):
        maker.value(ref)
    hints = graph.Hints(overlap="backward")
    reductions = (
        graph.Reduce(ref.replace("0", "1"), ref, ("data",), graph.Reduction("sum"), HERE, hints=hints)
        for ref in (first, second)
    )
    maker.phase(
        "step",
        *reductions,
        graph.MapStage(("first.2",), "grow", ("first.1",), HERE),
        graph.MapStage(("other.1",), "grow", (other,), HERE),
        outputs=("first.2", "second.1", "other.1"),
    )
    leaves = tree(a=(4,))
    shapes = {"first": leaves, "second": leaves, "other": leaves}
    schedule = compile_plan(maker.plan(), shapes, backend="mpi")
    order = [results(op)[0].split("/")[0] for op in step(schedule) if isinstance(op, Collective | Map)]
    assert all(op.is_split for op in collectives(step(schedule)))
    assert order == ["first.1", "other.1", "first.2"]


def test_a_sum_of_the_buffer_of_another_needs_no_order() -> None:
    schedule = compiled(
        reduce_plan(
            "sum", via=graph.Algorithm("hierarchical", (graph.Arg("gpu"), graph.Arg("node"))), node=2, gpu=2
        ),
        None,
        grads=tree(a=(4,)),
    )
    assert [op.after for op in collectives(step(schedule))] == [(), (), ()]


ELASTIC = """plan pulled
axis worker = 4
input own : tree per worker
input other : tree per worker
state center : tree
at start { center = broadcast own over worker from 0 }
each step {
    center = reduce other over worker by sum { overlap = backward }
    pull, center = elastic own with center over worker by sync(eta = 0.25, rho = 0.5)
    output pull
}
"""


def test_a_center_in_flight_is_there_before_the_pull_towards_it() -> None:
    tree_shapes = {"w": {"shape": [4], "dtype": "f32"}}
    shapes: dict[str, object] = {"own": tree_shapes, "other": tree_shapes}
    schedule = commplan.loads(ELASTIC).compile(shapes=shapes, backend="mpi").schedule
    assert any(op.is_split for op in step(schedule))
    order = [ref for op in step(schedule) for ref in results(op)]
    assert order.index("center.2") < order.index("pull.0")
