"""Sizes of axes: unbound, contradictory, unknown, and the rules of stages that need them."""

from __future__ import annotations

import msgspec
import pytest
from support.byhand import HERE, Maker, ensemble_plan, reduce_plan, tree

from commplan.compiler import compile_plan
from commplan.diagnostics import CommplanError
from commplan.dsl import load
from commplan.frontend.bind_axes import bind_axes, check_mesh
from commplan.ir import plan as graph
from commplan.ir.types import BytesType, RecordsType


def refusal(code: str, plan: graph.Plan, **sizes: int) -> str:
    with pytest.raises(CommplanError) as caught:
        bind_axes(plan, sizes)
    assert [d.code for d in caught.value.diagnostics] == [code]
    return str(caught.value)


def with_size(plan: graph.Plan, size: int | None) -> graph.Plan:
    return msgspec.structs.replace(
        plan, axes=tuple(msgspec.structs.replace(axis, size=size) for axis in plan.axes)
    )


def test_declared_sizes_need_nothing() -> None:
    assert [(a.name, a.size) for a in bind_axes(reduce_plan(data=4), {})] == [("data", 4)]


def test_an_unbound_axis_is_bound() -> None:
    assert bind_axes(with_size(reduce_plan(), None), {"data": 6})[0].size == 6


def test_an_unbound_axis_without_size() -> None:
    text = refusal("CP0706", with_size(reduce_plan(), None))
    assert "axis `data` has no size yet" in text
    assert "--axis data=N" in text


def test_another_size_than_declared() -> None:
    text = refusal("CP0708", reduce_plan(data=4), data=8)
    assert "has size 8, but the plan declares 4" in text
    assert "declare `data = ?`" in text


def test_a_size_below_one() -> None:
    assert "at least 1" in refusal("CP0708", with_size(reduce_plan(), None), data=0)


def test_an_unknown_axis() -> None:
    assert "did you mean `data`?" in refusal("CP0709", reduce_plan(data=4), dta=4)


def test_all_problems_of_axes_in_one_go() -> None:
    plan = with_size(reduce_plan(data=2, node=2), None)
    with pytest.raises(CommplanError) as caught:
        bind_axes(plan, {"data": 0, "nod": 1})
    assert sorted(d.code for d in caught.value.diagnostics) == ["CP0706", "CP0708", "CP0709"]


def test_the_mesh_lacks_an_ensemble() -> None:
    with pytest.raises(CommplanError) as caught:
        check_mesh(ensemble_plan(members=2), {"data": 4})
    text = str(caught.value)
    assert "CP0707" in text
    assert "expected an axis `member` of size 2, found data=4" in text
    assert "members are spread over devices too: add an axis `member` of size 2 to the mesh" in text
    assert "`ensemble member = ?` in the plan takes any size" in text


def test_the_mesh_lacks_an_axis() -> None:
    with pytest.raises(CommplanError) as caught:
        check_mesh(reduce_plan(data=4), {})
    assert "found no axes" in str(caught.value)
    assert "add an axis `data` of size 4 to the mesh" in str(caught.value)
    assert "size 1" not in str(caught.value)


def test_a_mesh_needs_no_servers_and_may_have_more_axes() -> None:
    maker = Maker(data=2)
    maker.axis("hub", graph.AxisKind.SERVER, 1)
    check_mesh(maker.plan(), {"data": 2, "model": 4})


def load_plan(batch: tuple[int, ...], split: str = "", clock: str | None = None) -> graph.Plan:
    maker = Maker(data=None)
    maker.axis("member", graph.AxisKind.ENSEMBLE, None)
    maker.sources.append(graph.Source("images", BytesType(), HERE))
    maker.value("raw.0", RecordsType(batch, BytesType()), split=split)
    stage = graph.Load(
        "raw.0", "images", batch, "exactly_once", 1, HERE, clock=clock, split=tuple(split.split())
    )
    maker.phase("step", stage)
    return maker.plan()


def test_a_batch_is_split_evenly() -> None:
    plan = load_plan((64,), split="data")
    assert bind_axes(plan, {"data": 4, "member": 1})
    text = refusal("CP0710", plan, data=3, member=1)
    assert "a batch of 64 records cannot be split evenly over the 3 ranks of `data`" in text
    assert "the nearest that can are 63 and 66" in text


def test_own_clocks_name_a_size_for_each_member() -> None:
    plan = load_plan((32, 64), clock="member")
    assert bind_axes(plan, {"data": 1, "member": 2})
    assert "2 batch sizes for the 3 members of `member`" in refusal("CP0710", plan, data=1, member=3)


def test_a_root_is_a_rank() -> None:
    maker = Maker(data=None)
    params = maker.input("params", per="data")
    maker.value("params.1")
    maker.phase("start", graph.Broadcast("params.1", params, ("data",), 5, HERE))
    assert bind_axes(maker.plan(), {"data": 6})
    assert "the root 5 is out of range: `data` has 4 ranks" in refusal("CP0710", maker.plan(), data=4)


def test_readers_are_members() -> None:
    via = graph.Algorithm("multi_broadcast", (graph.Arg(3, "readers"),))
    plan = with_size(ensemble_plan(via=via), None)
    assert bind_axes(plan, {"member": 3})
    assert "3 readers are more than the 2 members of `member`" in refusal("CP0710", plan, member=2)


@pytest.mark.parametrize(("mode", "fits", "too_many"), [("sync", 9, 10), ("async", 10, None)])
def test_an_elastic_center_does_not_overshoot(mode: str, fits: int, too_many: int | None) -> None:
    maker = Maker(worker=None)
    maker.axis("hub", graph.AxisKind.SERVER, 1)
    params = maker.input("params", per="worker")
    center = maker.state("center", server=None if mode == "sync" else "hub")
    maker.value("pull.0", per="worker")
    maker.value("center.1", server=None if mode == "sync" else "hub")
    stage = graph.ElasticStage("pull.0", "center.1", params, center, ("worker",), mode, 0.5, 0.2, HERE)
    maker.phase("step", stage, outputs=("pull.0",), updates=("center.1",))
    assert bind_axes(maker.plan(), {"worker": fits})
    if too_many:
        text = refusal("CP0710", maker.plan(), worker=too_many)
        assert "`sync` is unstable: eta * rho * p = 1, and it must be below 1, with p = 10 workers" in text


def test_owners_are_workers() -> None:
    text = """plan p
axis data = ?
fn new(f32[4]) -> f32[4] on device
fn sgd(f32[4], f32[4]) -> f32[4] on device elementwise
input fresh : f32[4]
input g : f32[4] partial data
state w : f32[4]
at start {
    w = map new(fresh)
}
each step {
    w = exchange g into w with sgd over data by sum via parameter_server(owners = 3)
}
"""
    plan, problems = load(text, "p.plan")
    assert plan is not None, problems
    assert bind_axes(plan, {"data": 3})
    with pytest.raises(CommplanError) as caught:
        bind_axes(plan, {"data": 2})
    (problem,) = caught.value.diagnostics
    assert problem.code == "CP0710"
    assert problem.message == "3 owners are more than the 2 workers of `data`"
    assert problem.span is not None
    assert problem.span.line == 12


def test_every_stage_that_the_sizes_break_is_reported() -> None:
    text = """plan p
axis data = ?
source images : f32[3]
input params : tree per data
at start {
    params = broadcast params over data from 5
    output params
}
each step {
    x = load images batch 10 visit exactly_once seed 1
    output x
}
"""
    plan, problems = load(text, "p.plan")
    assert plan is not None, problems
    with pytest.raises(CommplanError) as caught:
        bind_axes(plan, {"data": 4})
    assert [(d.code, d.span.line if d.span else 0) for d in caught.value.diagnostics] == [
        ("CP0710", 6), ("CP0710", 10),
    ]  # fmt: skip


def test_compile_binds_before_it_looks_at_shapes() -> None:
    with pytest.raises(CommplanError) as caught:
        compile_plan(with_size(reduce_plan(), None), {"grads": tree(w=(3,))})
    assert caught.value.diagnostics[0].code == "CP0706"


def test_an_axis_has_no_more_ranks_than_can_be_counted() -> None:
    assert "no machine has so many ranks" in refusal("CP0708", with_size(reduce_plan(), None), data=2**63)


def test_servers_are_fewer_than_ranks_can_be() -> None:
    plan, problems = load("plan p\nserver hub = ?\n", "p.plan")
    assert plan is not None, problems
    assert bind_axes(plan, {"hub": 2**16})[0].size == 2**16
    with pytest.raises(CommplanError) as caught:
        bind_axes(plan, {"hub": 2**16 + 1})
    assert caught.value.diagnostics[0].code == "CP0708"


PLAN = """plan p
axis a = 2
axis b = 3
ensemble m = 3
source s : f32[4]
fn new() -> f32[4] on device
fn f(f32[4], f32[4]) -> f32[4] on device elementwise
input w : f32[4] per a, b
input g : f32[4] partial a, b
"""
STATE = """state c : f32[4]
at start {
    c = map new()
}
"""


@pytest.mark.parametrize(
    ("code", "stage"),
    [
        ("CP0409", "w = broadcast w over a, b from 6"),
        ("CP0415", "x = load s batch 9 split a, b visit exactly_once seed 1"),
        ("CP0417", "x = load s batch [6, 6] over m split a visit exactly_once seed 1"),
        ("CP0608", "c = exchange g into c with f over a, b by sum via parameter_server(owners = 9)"),
        ("CP0426", "w, c = elastic w with c over a, b by sync(eta = 0.5, rho = 0.5)"),
    ],
)
def test_checker_and_compiler_say_the_same(code: str, stage: str) -> None:
    """A rule that needs sizes is checked by the checker if they are written, otherwise by the compiler."""
    text = f"{PLAN}{STATE * (' c ' in stage)}each step {{\n    {stage}\n    output {stage[0]}\n}}\n"
    plan, (checked,) = load(text, "p.plan")
    assert (plan, checked.code) == (None, code)
    plan, problems = load(text.replace("= 2\n", "= ?\n").replace("= 3\n", "= ?\n"), "p.plan")
    assert plan is not None, problems
    with pytest.raises(CommplanError) as caught:
        bind_axes(plan, {"a": 2, "b": 3, "m": 3})
    (bound,) = caught.value.diagnostics
    assert (bound.code, bound.message) == ("CP0710", checked.message)
    assert [note.text for note in bound.notes] == [note.text for note in checked.notes if note.span is None]
