"""Shapes: passed, inferred and split ones, and every kind of error in them."""

from __future__ import annotations

import pytest
from support.byhand import F32, HERE, TREE, Maker, compiled, ensemble_plan, reduce_plan, sharded_plan, tree

from commplan.compiler import compile_plan
from commplan.diagnostics import CommplanError, Diagnostic
from commplan.ir import plan as graph
from commplan.ir.schedule import Leaf, Schedule, Value
from commplan.ir.types import ArrayType, BytesType, DType, RecordsType


def refusals(plan: graph.Plan, **shapes: tuple[Leaf, ...]) -> tuple[Diagnostic, ...]:
    with pytest.raises(CommplanError) as caught:
        compile_plan(plan, shapes, passes="")
    return caught.value.diagnostics


def value(schedule: Schedule, ref: str) -> Value:
    values = [v for v in schedule.entry if v.id == ref]
    values += [v for phase in schedule.phases for v in phase.values if v.id == ref]
    return values[0]


def leaves(schedule: Schedule, ref: str) -> dict[str, tuple[int, ...]]:
    return {leaf.path: leaf.shape for leaf in value(schedule, ref).leaves}


def test_shapes_flow_through_a_sharded_update() -> None:
    shapes = tree(w=(3, 3), b=(5,), s=(), z=(0, 2))
    schedule = compiled(sharded_plan(4), "", params=shapes, grads=shapes)
    cut = {"b": (2,), "s": (), "w": (3,), "z": (0,)}
    assert leaves(schedule, "params.0") == {"b": (5,), "s": (), "w": (3, 3), "z": (0, 2)}
    for ref in ("shard.0", "adam.0", "adam.1", "grads.1", "shard.2"):
        assert leaves(schedule, ref) == cut
        assert value(schedule, ref).whole == shapes
    assert leaves(schedule, "params.1") == {"b": (5,), "s": (), "w": (3, 3), "z": (0, 2)}
    assert value(schedule, "params.1").whole == ()


def test_a_result_bound_to_a_state_takes_its_shapes() -> None:
    shapes, moments = tree(w=(3, 3)), tree(**{"m/w": (3, 3), "v/w": (3, 3)})
    schedule = compiled(sharded_plan(4), "", params=shapes, grads=shapes, adam=moments)
    for ref in ("adam.0", "adam.1", "adam.2"):
        assert leaves(schedule, ref) == {"m/w": (3,), "v/w": (3,)}
    assert leaves(schedule, "shard.2") == {"w": (3,)}


def test_a_state_bound_to_other_shapes() -> None:
    maker = Maker(data=2)
    maker.state("center")
    maker.value("center.1")
    params = maker.input("params", per="data")
    stage = graph.Broadcast("center.1", params, ("data",), 0, HERE)
    maker.phase("start", stage, updates=("center.1",))
    problem = refusals(maker.plan(), params=tree(w=(2,)), center=tree(w=(2,), b=(1,)))[0]
    assert (problem.code, problem.message) == ("CP0705", "`center` has other shapes than state `center`")
    assert problem.notes[0].text == "expected `b` f32[1], found `w` f32[2]"


def test_several_cuts_pad_each_for_itself() -> None:
    maker = Maker(a=2, b=3)
    x = maker.input("x", split="a b")
    maker.value("y.1", split="a")
    maker.phase("step", graph.Gather("y.1", x, ("b",), HERE), outputs=("y.1",))
    schedule = compiled(maker.plan(), "", x=tree(w=(7,), one=(1,)))
    assert leaves(schedule, "x.0") == {"one": (1,), "w": (2,)}  # ceil(ceil(7 / 2) / 3)
    assert leaves(schedule, "y.1") == {"one": (1,), "w": (4,)}


def test_arrays_are_cut_along_the_leading_dimension() -> None:
    maker = Maker(a=2, b=2)
    kind = ArrayType(DType.I32, (7, 3))
    x = maker.input("x", kind)
    maker.value("y.0", kind, split="a")
    maker.value("y.1", kind, split="a b")
    maker.phase(
        "step",
        graph.SliceStage("y.0", x, ("a",), HERE),
        graph.SliceStage("y.1", "y.0", ("b",), HERE),
        outputs=("y.1",),
    )
    schedule = compiled(maker.plan(), "")
    assert leaves(schedule, "y.0") == {"": (4, 3)}
    assert leaves(schedule, "y.1") == {"": (2, 3)}
    assert value(schedule, "y.1").whole == (Leaf("", (7, 3), DType.I32),)


def test_records_are_batched_and_divided() -> None:
    schedule = compiled(ensemble_plan(), "")
    assert leaves(schedule, "pixels.0") == {"": (8, 6, 6, 3)}
    assert leaves(schedule, "raw.0") == {}


def test_records_of_trees_need_the_shapes_of_one_record() -> None:
    maker = Maker(data=2)
    maker.sources.append(graph.Source("rows", TREE, HERE))
    maker.value("row.0", RecordsType((6,), TREE), split="data")
    maker.value("n.0", ArrayType(DType.I32), per="data")
    maker.phase(
        "step",
        graph.Load("row.0", "rows", (6,), "exactly_once", 1, HERE, count="n.0", split=("data",)),
        outputs=("row.0", "n.0"),
    )
    for name in ("rows", "row"):
        schedule = compile_plan(maker.plan(), {name: tree(x=(4,), y=())}, passes="")
        assert leaves(schedule, "row.0") == {"x": (3, 4), "y": (3,)}
        assert leaves(schedule, "n.0") == {"": ()}
    problem = refusals(maker.plan())[0]
    assert problem.code == "CP0701"
    assert "records of source `rows`" in problem.message


def test_trees_made_record_by_record_on_the_device_are_cut_between_records() -> None:
    maker = Maker(data=2)
    kind = ArrayType(DType.U8, (2,))
    maker.sources.append(graph.Source("images", kind, HERE))
    maker.fn("split", (kind,), (TREE,), "device")
    maker.value("x.0", RecordsType((6,), kind), split="data")
    maker.value("y.0", split="data")
    maker.value("all.0")
    maker.phase(
        "step",
        graph.Load("x.0", "images", (6,), "exactly_once", 1, HERE, split=("data",)),
        graph.MapStage(("y.0",), "split", ("x.0",), HERE, per_record=True),
        graph.Gather("all.0", "y.0", ("data",), HERE),
        outputs=("all.0",),
    )
    schedule = compiled(maker.plan(), None, y=tree(a=(5,), b=()))
    assert leaves(schedule, "y.0") == {"a": (3, 5), "b": (3,)}
    assert leaves(schedule, "all.0") == {"a": (6, 5), "b": (6,)}


def test_an_empty_tree_is_a_tree() -> None:
    schedule = compiled(reduce_plan("sum"), None, grads=())
    assert leaves(schedule, "grads.1") == {}


def test_all_missing_shapes_are_one_error() -> None:
    (problem,) = refusals(sharded_plan())
    assert (problem.code, problem.span) == ("CP0701", HERE)
    assert problem.message == "no shapes for 2 trees: `params`, `grads`"
    assert problem.notes[0].text == "`grads` is an input"
    assert 'shapes={"params": tree, "grads": tree}' in problem.notes[1].text
    (problem,) = refusals(sharded_plan(), params=tree(w=(16,)))
    assert problem.message == "no shapes for `grads`, an input of type tree"


def test_a_state_that_nothing_implies() -> None:
    maker = Maker(data=2)
    state = maker.state("acc")
    maker.fn("make", (F32,), (TREE,), "device")
    unit = maker.input("one", F32)
    maker.value("acc.1")
    maker.phase("start", graph.MapStage(("acc.1",), "make", (unit,), HERE), updates=("acc.1",))
    maker.phase("step", outputs=(state,))
    problems = refusals(maker.plan())
    assert [(p.code, p.message) for p in problems] == [
        ("CP0701", "no shapes for `acc`, a state of type tree")
    ]
    schedule = compile_plan(maker.plan(), {"acc": tree(w=(2,))}, passes="")
    assert leaves(schedule, "acc.1") == {"w": (2,)}


def test_a_result_that_is_not_elementwise_needs_shapes() -> None:
    maker = Maker(data=2)
    maker.fn("pick", (TREE,), (TREE,), "device")
    params = maker.input("params")
    maker.value("head.0")
    maker.phase("step", graph.MapStage(("head.0",), "pick", (params,), HERE), outputs=("head.0",))
    problem = refusals(maker.plan(), params=tree(w=(2,)))[0]
    assert "a result of `pick`, which is not elementwise, of type tree" in problem.message
    schedule = compile_plan(maker.plan(), {"params": tree(w=(2,)), "head": tree(v=(9,))}, passes="")
    assert leaves(schedule, "head.0") == {"v": (9,)}


def test_rebinding_a_state_at_start_follows_the_chain() -> None:
    maker = Maker(data=2)
    maker.fn("twice", (TREE,), (TREE,), "device", elementwise=True)
    params = maker.input("params")
    maker.state("w")
    maker.value("w.1")
    maker.value("w.2")
    maker.phase(
        "start",
        graph.MapStage(("w.1",), "twice", (params,), HERE),
        graph.MapStage(("w.2",), "twice", ("w.1",), HERE),
        updates=("w.2",),
    )
    assert leaves(compiled(maker.plan(), "", params=tree(a=(3,))), "w.0") == {"a": (3,)}


def test_shapes_for_an_unknown_name() -> None:
    problem = refusals(reduce_plan(), grads=tree(w=(2,)), grad=tree(w=(2,)))[0]
    assert problem.code == "CP0702"
    assert problem.notes[0].text == "did you mean `grads`?"


def test_given_and_declared_shapes_disagree() -> None:
    maker = Maker(data=2)
    x = maker.input("x", ArrayType(DType.F32, (3,)), partial="data")
    maker.value("x.1", ArrayType(DType.F32, (3,)))
    maker.phase("step", graph.Reduce("x.1", x, ("data",), graph.Reduction("sum"), HERE), outputs=("x.1",))
    compile_plan(maker.plan(), {"x": (Leaf("", (3,), DType.F32),)})
    problem = refusals(maker.plan(), x=(Leaf("", (4,), DType.F32),))[0]
    assert problem.code == "CP0705"
    assert problem.notes[0].text == "expected f32[3], found f32[4]"


def test_shapes_given_for_what_follows_must_be_what_follows() -> None:
    maker = Maker(data=2)
    grads = maker.input("grads", partial="data")
    maker.value("total.0")
    maker.phase(
        "step", graph.Reduce("total.0", grads, ("data",), graph.Reduction("sum"), HERE), outputs=("total.0",)
    )
    shapes = tree(w=(3, 3))
    compiled(maker.plan(), "", grads=shapes, total=shapes)
    problem = refusals(maker.plan(), grads=shapes, total=tree(w=(9,)))[0]
    assert (problem.code, problem.message) == ("CP0705", "`total` has other shapes than the plan implies")


def test_a_center_looks_like_its_workers() -> None:
    maker = Maker(worker=2)
    params, center = maker.input("params", per="worker"), maker.state("center")
    maker.value("pull.0", per="worker")
    maker.value("center.1")
    stage = graph.ElasticStage("pull.0", "center.1", params, center, ("worker",), "sync", 0.1, 0.1, HERE)
    maker.phase("step", stage, outputs=("pull.0",), updates=("center.1",))
    problem = refusals(maker.plan(), params=tree(w=(2,)), center=tree(w=(3,)))[0]
    assert problem.message == "`params` has other shapes than its center"
    assert problem.notes[0].text == "expected `w` f32[3], found `w` f32[2]"


def test_means_need_floats_and_every_wrong_stage_is_named() -> None:
    whole = (Leaf("n", (2,), DType.I32),)
    problem = refusals(reduce_plan("mean"), grads=whole)[0]
    assert (problem.code, problem.message) == (
        "CP0704",
        "a mean needs a float type, and leaf `n` of `grads` is i32",
    )
    compiled(reduce_plan("sum"), grads=whole)
    flags = (Leaf("hit", (2,), DType.BOOL),)
    assert refusals(reduce_plan("sum"), grads=flags)[0].code == "CP0721"
    compiled(reduce_plan("max"), grads=flags)


@pytest.mark.parametrize("how", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", ["i8", "i16", "u16", "u32"])
def test_some_integers_are_moved_and_not_reduced(how: str, dtype: str) -> None:
    problem = refusals(reduce_plan(how), grads=(Leaf("n", (2,), DType(dtype)),))[0]
    assert (problem.code, problem.message) == (
        "CP0721",
        f"leaf `n` of `grads` is {dtype}, which is not reduced",
    )
    assert "convert it to i32 or f32 first" in problem.notes[0].text


@pytest.mark.parametrize("dtype", ["i8", "i16", "u16", "u32"])
def test_integers_that_are_only_moved_have_no_maximum_in_a_mean(dtype: str) -> None:
    mixed = (Leaf("n", (2,), DType(dtype)), Leaf("w", (3,), DType.F32))
    problem = refusals(reduce_plan(hints=graph.Hints(integers="max")), grads=mixed)[0]
    assert (problem.code, problem.message) == (
        "CP0721",
        f"leaf `n` of `grads` is {dtype}, which is not reduced",
    )
    assert "write `{ integers = first }`" in problem.notes[1].text
    compiled(reduce_plan(hints=graph.Hints(integers="first")), grads=mixed)


def test_bytes_have_no_leaves() -> None:
    schedule = compiled(ensemble_plan(), "")
    assert value(schedule, "raw.0").leaves == ()
    assert isinstance(schedule.sources[0].type, BytesType)


def test_parts_that_draw_their_own_numbers_have_no_scalar() -> None:
    maker = Maker(data=4)
    maker.fn("noise", (TREE,), (TREE,), "device", elementwise=True, random=True)
    params = maker.input("params", split="data")
    maker.value("noisy.0", split="data")
    maker.phase("step", graph.MapStage(("noisy.0",), "noise", (params,), HERE), outputs=("noisy.0",))
    assert refusals(maker.plan(), params=tree(w=(4,), s=()))[0].code == "CP0758"
    compiled(maker.plan(), params=tree(w=(4,)))
