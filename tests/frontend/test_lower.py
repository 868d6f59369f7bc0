"""Lowering: which ops each stage becomes."""

from __future__ import annotations

from typing import Any

import pytest
from support.byhand import F32, HERE, TREE, Maker, compiled, reduce_plan, tree

from commplan.ir import plan as graph
from commplan.ir.schedule import Collective, Elastic, Exchange, Op, Scale, Schedule, Update, operands, results
from commplan.ir.types import ArrayType, DType, RecordsType


def kinds(ops: tuple[Op, ...]) -> list[str]:
    return [op.kind if isinstance(op, Collective) else type(op).__name__ for op in ops]


def step(schedule: Schedule) -> tuple[Op, ...]:
    return schedule.phase("step").ops


@pytest.mark.parametrize("op", ["sum", "max", "min"])
def test_a_plain_reduction_is_one_collective(op: str) -> None:
    schedule = compiled(reduce_plan(op), "", grads=tree(w=(2,)))
    (collective,) = step(schedule)
    assert isinstance(collective, Collective)
    assert (collective.kind, collective.op, collective.operand, collective.result, collective.nbytes) == (
        "all_reduce", op, "grads.0", "grads.1", 8,
    )  # fmt: skip


def test_a_mean_is_a_sum_and_a_division() -> None:
    reduced, scaled = step(compiled(reduce_plan("mean", a=2, b=3), "", grads=tree(w=(2,))))
    assert isinstance(reduced, Collective)
    assert reduced.axes == ("a", "b")
    assert isinstance(scaled, Scale)
    assert (scaled.how, scaled.by, scaled.result) == ("div", 6.0, "grads.1")


def weighted(weight_per: str, twice: bool = False) -> tuple[Op, ...]:
    maker = Maker(a=2, b=3)
    grads, count = maker.input("grads", partial="a b"), maker.input("count", F32, per=weight_per)
    stages = []
    for result in ("grads.1", "grads.2")[: 1 + twice]:
        maker.value(result)
        op = graph.Reduction("mean", count)
        stages.append(graph.Reduce(result, grads, ("a", "b"), op, HERE))
    maker.phase("step", *stages, outputs=("grads.1",))
    return step(compiled(maker.plan(), "", grads=tree(w=(2,))))


def test_a_weighted_mean() -> None:
    ops = weighted("a b")
    assert kinds(ops) == ["all_reduce", "Scale", "all_reduce"]
    total, share, _ = ops
    assert isinstance(share, Scale)
    assert (share.how, share.by, share.over) == ("mul", "count.0", results(total)[0])


def test_a_weight_is_summed_only_where_it_differs() -> None:
    ops = weighted("b")
    assert kinds(ops) == ["all_reduce", "Scale", "Scale", "all_reduce"]
    assert isinstance(ops[0], Collective)
    assert ops[0].axes == ("b",)
    assert isinstance(ops[1], Scale)
    assert (ops[1].how, ops[1].by) == ("mul", 2.0)  # the same along a: counted twice


def test_one_weight_is_summed_once_a_phase() -> None:
    ops = weighted("a b", twice=True)
    assert sum(isinstance(op, Collective) and op.operand == "count.0" for op in ops) == 1


def test_a_count_never_travels_in_a_narrower_type() -> None:
    maker = Maker(a=2)
    grads, count = maker.input("grads", partial="a"), maker.input("count", F32, per="a")
    maker.value("grads.1")
    hints = graph.Hints(wire=DType.BF16, accumulate=DType.F32)
    maker.phase(
        "step",
        graph.Reduce("grads.1", grads, ("a",), graph.Reduction("mean", count), HERE, hints=hints),
        outputs=("grads.1",),
    )
    ops = step(compiled(maker.plan(), "", grads=tree(w=(2,))))
    kinds = [(op.kind, op.dtype) for op in ops if isinstance(op, Collective)]
    assert kinds == [("all_reduce", DType.F32), ("all_to_all", DType.BF16), ("all_gather", DType.BF16)]


def elastic(mode: Any) -> tuple[Op, ...]:
    maker = Maker(worker=2)
    maker.axis("hub", graph.AxisKind.SERVER, 1)
    server = None if mode == "sync" else "hub"
    params, center = maker.input("params", per="worker"), maker.state("center", server=server)
    eta = maker.input("eta", F32)
    maker.value("pull.0", per="worker")
    maker.value("center.1", server=server)
    stage = graph.ElasticStage("pull.0", "center.1", params, center, ("worker",), mode, eta, 0.1, HERE)
    maker.phase("step", stage, outputs=("pull.0",), updates=("center.1",))
    schedule = compiled(maker.plan(), "", params=tree(w=(2,)), center=tree(w=(2,)))
    assert schedule.phase("step").inputs == ("params.0", "eta.0")
    return step(schedule)


def test_synchronous_elastic_averaging() -> None:
    pull, total, update = elastic("sync")
    assert isinstance(pull, Elastic)
    assert pull.result is None
    assert operands(pull) == ("params.0", "center.0", "eta.0")
    assert isinstance(total, Collective)
    assert (total.operand, total.op) == ("pull.0", "sum")
    assert isinstance(update, Update)
    assert (update.operand, update.delta, update.result) == ("center.0", total.result, "center.1")


@pytest.mark.parametrize("mode", ["round_robin", "async", "hogwild"])
def test_other_elastic_averaging_is_one_op(mode: str) -> None:
    (op,) = elastic(mode)
    assert isinstance(op, Elastic)
    assert (op.result, op.lane) == ("center.1", "network")


def test_an_exchange_is_one_op() -> None:
    maker = Maker(worker=2)
    grads = maker.input("grads", partial="worker")
    weights = maker.state("weights")
    maker.fn("sgd", (TREE, TREE), (TREE,), "device", elementwise=True)
    maker.value("weights.1")
    via = graph.Algorithm("parameter_server", (graph.Arg(2, "owners"),))
    stage = graph.ExchangeStage(
        ("weights.1",), grads, (weights,), "sgd", ("worker",), graph.Reduction("mean"), HERE, via=via
    )
    maker.phase("step", stage, outputs=("weights.1",), updates=("weights.1",))
    (op,) = step(compiled(maker.plan(), "", grads=tree(w=(2,)), weights=tree(w=(2,))))
    assert isinstance(op, Exchange)
    assert (op.op, op.algorithm, op.states) == ("mean", via, ("weights.0",))


def test_a_phase_reads_what_it_uses_and_outputs() -> None:
    maker = Maker(data=2)
    used, unused = maker.input("used"), maker.input("unused")
    state = maker.state("kept")
    maker.value("kept.1")
    maker.phase("start", graph.Broadcast("kept.1", maker.input("seed", per="data"), ("data",), 0, HERE),
                updates=("kept.1",))  # fmt: skip
    maker.phase("evaluate", outputs=(used, state))
    shapes = tree(w=(2,))
    schedule = compiled(maker.plan(), "", used=shapes, unused=shapes, seed=shapes)
    assert schedule.phase("evaluate").inputs == ("used.0",)
    assert schedule.phase("evaluate").states == ("kept.0",)
    assert schedule.phase("start").inputs == ("seed.0",)
    assert unused == "unused.0"


def test_phases_keep_their_kind_and_period() -> None:
    maker = Maker(data=2)
    x = maker.input("x", F32)
    maker.phase("every_4", outputs=(x,))
    maker.phase("evaluate", outputs=(x,))
    schedule = compiled(maker.plan(), "")
    assert [(p.name, p.kind, p.period) for p in schedule.phases] == [
        ("every_4", "every", 4), ("evaluate", "named", 1),
    ]  # fmt: skip


def source_plan() -> graph.Plan:
    """Loaded pixels go out; their count, and pixels scaled by an input, go through the phase."""
    maker = Maker(data=2)
    pixel = ArrayType(DType.U8, (2,))
    maker.sources.append(graph.Source("images", pixel, HERE))
    maker.fn("wide", (pixel,), (ArrayType(DType.F32, (2,)),), "device")
    maker.fn("mix", (ArrayType(DType.F32, (2,)), F32), (ArrayType(DType.F32, (2,)),), "device")
    scale = maker.input("scale", F32)
    maker.value("pixels.0", RecordsType((4,), pixel), split="data")
    maker.value("n.0", ArrayType(DType.I32), per="data")
    maker.value("floats.0", RecordsType((4,), ArrayType(DType.F32, (2,))), split="data")
    maker.value("mixed.0", RecordsType((4,), ArrayType(DType.F32, (2,))), split="data")
    maker.value("total.0", ArrayType(DType.I32))
    maker.phase(
        "step",
        graph.Load("pixels.0", "images", (4,), "exactly_once", 1, HERE, count="n.0", split=("data",)),
        graph.MapStage(("floats.0",), "wide", ("pixels.0",), HERE, per_record=True),
        graph.MapStage(("mixed.0",), "mix", ("floats.0", scale), HERE, per_record=True),
        graph.Reduce("total.0", "n.0", ("data",), graph.Reduction("sum"), HERE),
        outputs=("pixels.0", "mixed.0", "total.0"),
    )
    return maker.plan()


def test_what_depends_on_sources_alone_is_made_ahead() -> None:
    phase = compiled(source_plan(), None).phase("step")
    assert {b.name: b.source_only for b in phase.outputs} == {"pixels": True, "mixed": False, "total": False}
    assert [(b.name, b.value) for b in phase.takes] == [("floats", "floats.0"), ("n", "n.0")]


def test_a_taken_value_gets_a_name_of_its_own() -> None:
    maker = Maker(data=2)
    kind = ArrayType(DType.F32, (2,))
    maker.sources.append(graph.Source("images", kind, HERE))
    x = maker.input("x", kind)
    maker.fn("mix", (kind, kind), (kind,), "device")
    maker.value("x.1", RecordsType((4,), kind))
    maker.value("y.0", RecordsType((4,), kind))
    maker.phase(
        "step",
        graph.Load("x.1", "images", (4,), "exactly_once", 1, HERE),
        graph.MapStage(("y.0",), "mix", ("x.1", x), HERE, per_record=True),
        outputs=("y.0",),
    )
    phase = compiled(maker.plan(), None).phase("step")
    assert [(b.name, b.value) for b in phase.takes] == [("x_1", "x.1")]
