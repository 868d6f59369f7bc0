"""Correct plans pass the check, and their graphs have the meaning of the plans."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import pytest

from commplan.diagnostics import Span
from commplan.dsl import load
from commplan.ir import plan as ir
from commplan.ir.serialization.text import parse_plan, print_plan
from commplan.ir.types import ArrayType, DType, Placement, RecordsType, TreeType

TESTS = Path(__file__).parents[1]
FEATURES = sorted((TESTS / "plans").glob("*.plan"))
EXAMPLES = sorted((TESTS.parent / "examples" / "plans").glob("*.plan"))
GOLDEN = Path(__file__).parent / "golden" / "ensemble_training.plan_graph.txt"
S = TypeVar("S")


def _check(path: Path) -> ir.Plan:
    plan, diagnostics = load(path.read_text(encoding="utf-8"), path.name)
    assert plan is not None, "\n".join(map(str, diagnostics))
    assert not diagnostics
    return plan


def _feature(name: str) -> ir.Plan:
    return _check(TESTS / "plans" / f"{name}.plan")


def _stages(plan: ir.Plan, kind: type[S], phase: str = "step") -> list[S]:
    return [stage for stage in plan.phase(phase).stages if isinstance(stage, kind)]


def _output(plan: ir.Plan, name: str, phase: str = "step") -> ir.Value:
    return plan.value(next(out.value for out in plan.phase(phase).outputs if out.name == name))


def test_examples_are_there() -> None:
    assert len(EXAMPLES) >= 15
    assert len(FEATURES) >= 18


@pytest.mark.parametrize("path", EXAMPLES + FEATURES, ids=lambda path: path.stem)
def test_plan_checks_clean_and_is_well_formed(path: Path) -> None:
    plan = _check(path)
    assert plan.name == path.stem
    ids = [value.id for value in plan.values]
    assert len(ids) == len(set(ids))
    for phase in plan.phases:
        defined = {*plan.inputs, *(plan.states if phase.kind != "start" else ())}
        for stage in phase.stages:
            read, results = _reads(stage), _makes(stage)
            assert defined.issuperset(read), f"{stage} reads what is not there"
            assert defined.isdisjoint(results)
            defined.update(results)
        for binding in (*phase.outputs, *phase.updates):
            assert binding.value in defined
        for binding in phase.updates:
            state, value = plan.value(f"{binding.name}.0"), plan.value(binding.value)
            assert (state.type, state.placement) == (value.type, value.placement)
    assert parse_plan(print_plan(plan)) == plan


def _reads(stage: ir.Stage) -> list[ir.Ref]:
    match stage:
        case ir.Load():
            return []
        case ir.MapStage():
            return list(stage.operands)
        case ir.MergeStage():
            return [stage.whole, stage.piece]
        case ir.ExchangeStage():
            return [stage.gradient, *stage.states, *([stage.op.weight] if stage.op.weight else [])]
        case ir.ElasticStage():
            scalars = [x for x in (stage.eta, stage.rho) if isinstance(x, str)]
            return [stage.operand, stage.center, *scalars]
        case ir.Reduce() | ir.Scatter():
            return [stage.operand, *([stage.op.weight] if stage.op.weight else [])]
        case _:
            return [stage.operand]


def _makes(stage: ir.Stage) -> list[ir.Ref]:
    match stage:
        case ir.Load():
            return [stage.result, *([stage.count] if stage.count else [])]
        case ir.MapStage() | ir.ExchangeStage():
            return list(stage.results)
        case ir.ElasticStage():
            return [stage.pull, stage.result]
        case _:
            return [stage.result]


def test_golden_graph_of_a_rich_plan() -> None:
    plan = _check(TESTS.parent / "examples" / "plans" / "ensemble_training.plan")
    assert print_plan(plan) == GOLDEN.read_text(encoding="utf-8")


def test_hiding_makes_versions() -> None:
    plan = _feature("hiding")
    assert [value.id for value in plan.values] == ["g.0", "g.1", "g.2", "g.3"]
    partial = [value.placement.partial for value in plan.values]
    assert partial == [("node", "gpu"), ("node", "gpu"), ("node",), ()]
    assert _output(plan, "g").id == "g.3"
    assert plan.inputs == ("g.0",)


def test_versions_go_on_over_phases() -> None:
    plan = _check(TESTS.parent / "examples" / "plans" / "ensemble_training.plan")
    assert [value.id for value in plan.values if value.name == "raw"] == ["raw.0", "raw.1"]


def test_sizes_that_are_not_known() -> None:
    plan = _feature("any_size")
    assert [axis.size for axis in plan.axes] == [None, None]
    assert [axis.kind for axis in plan.axes] == [ir.AxisKind.REPLICA, ir.AxisKind.ENSEMBLE]
    assert _stages(plan, ir.Broadcast, "start")[0].root == 1000


def test_loads() -> None:
    plan = _feature("loads")
    load_ = _stages(plan, ir.Load)[0]
    assert (load_.split, load_.per, load_.clock, load_.tail) == (("gpu", "node"), ("member",), None, "pad")
    assert (load_.batch, load_.seed, load_.visit) == ((64,), 17, "exactly_once")
    assert load_.hints == ir.Hints(
        on_error="skip", on_failure="continue", cores=2, prefetch=4, device_prefetch=2
    )
    image, count = _output(plan, "image"), _output(plan, "n")
    assert image.type == RecordsType((64,), ArrayType(DType.U8, (8, 8)))
    assert image.placement == Placement(per=("member",), split=("gpu", "node"))
    assert count.type == ArrayType(DType.I32)
    assert count.placement == Placement(per=("member", "node", "gpu"))
    assert _stages(plan, ir.MapStage)[0].per_record
    assert _stages(plan, ir.Load, "start")[0].tail == "drop"


def test_caches() -> None:
    decode, narrow, _ = _stages(_feature("caches"), ir.MapStage)
    assert decode.hints == ir.Hints(cores=2, cache=ir.Cache(64 << 20))
    assert narrow.hints.cache == ir.Cache(4096)
    (embed,) = _stages(_feature("caches"), ir.MapStage, "text")
    assert embed.hints.cache == ir.Cache(3 << 29, "words.rows")


def test_the_only_axis_is_the_default_of_split() -> None:
    plan = _feature("default_split")
    assert _stages(plan, ir.Load)[0].split == ("data",)
    assert _output(plan, "n").placement == Placement(per=("data",))


def test_own_clocks_make_values_per_member() -> None:
    plan = _feature("own_clocks")
    load_ = _stages(plan, ir.Load)[0]
    assert (load_.clock, load_.per, load_.batch) == ("member", (), (32, 32, 64))
    pixels = _output(plan, "pixels")
    assert pixels.placement == Placement(per=("member",), split=("data",))
    assert pixels.type == RecordsType((32, 32, 64), ArrayType(DType.U8, (8,)))
    assert _output(plan, "n").placement == Placement(per=("member", "data"))


def test_device_fns_on_records_and_on_whole_values() -> None:
    plan = _feature("device_maps")
    normalize, augment, whole = _stages(plan, ir.MapStage)
    assert (normalize.per_record, augment.per_record, whole.per_record) == (True, True, False)
    assert (normalize.per, augment.per) == ((), ("member",))
    assert _output(plan, "brightness").type == ArrayType(DType.F32, (64,))
    assert _output(plan, "brightness").placement == Placement(split=("data",))
    y = _output(plan, "y")
    assert y.type == ArrayType(DType.U8, (64, 8, 8))
    assert y.placement == Placement(per=("member",), split=("data",))
    assert _output(plan, "x").placement == Placement()


def test_placements_as_written() -> None:
    plan = _feature("placements")
    placed = {value.name: value.placement for value in plan.values if value.id.endswith(".0")}
    assert placed["everywhere"] == placed["spelled"] == Placement()
    assert placed["both"] == Placement(per=("member", "gpu"))
    assert placed["terms"] == Placement(per=("member",), partial=("node", "gpu"))
    assert placed["mixed"] == Placement(per=("node",), partial=("gpu",))
    assert placed["cut"] == Placement(split=("gpu", "node"))
    assert placed["cut_terms"] == Placement(partial=("node",), split=("gpu",))
    assert _output(plan, "cut_terms").placement == Placement(split=("gpu",))


def test_cuts_are_a_list() -> None:
    plan = _feature("cuts")
    split = {value.id: value.placement.split for value in plan.values}
    assert [split[f"g.{i}"] for i in range(5)] == [(), ("gpu",), ("gpu", "node"), ("gpu",), ()]
    assert [split[f"p.{i}"] for i in range(4)] == [(), ("node",), ("node", "gpu"), ("node",)]
    first = _stages(plan, ir.Scatter)[0]
    assert first.hints == ir.Hints(bucket=1 << 20, overlap="backward", wire=DType.BF16)
    assert first.via == ir.Algorithm("ring")
    assert plan.value(first.result).placement == Placement(partial=("node",), split=("gpu",))


def test_operators() -> None:
    plan = _feature("operators")
    ops = [(stage.op, stage.across) for stage in _stages(plan, ir.Reduce)]
    assert ops == [
        (ir.Reduction("sum"), False),
        (ir.Reduction("mean"), False),
        (ir.Reduction("mean", "m.0"), False),
        (ir.Reduction("max"), False),
        (ir.Reduction("min"), False),
        (ir.Reduction("min"), True),
        (ir.Reduction("mean", "m.0"), True),
    ]
    assert _output(plan, "best").placement == Placement()
    assert _output(plan, "spread").placement == Placement(per=("data",))


def test_algorithms() -> None:
    plan = _feature("algorithms")
    assert [str(stage.via) for stage in _stages(plan, ir.Reduce)] == [
        "hierarchical(gpu, node)",
        "hierarchical(gpu = ring, node = double_tree)",
        "native",
        "hierarchical(node, gpu = native)",
    ]
    assert _stages(plan, ir.Reduce)[0].hints == ir.Hints(bucket=64 * 1024**2, chunk=32 * 1024)
    assert _stages(plan, ir.Broadcast, "start")[0].root == 31


def test_linear_fns_keep_terms() -> None:
    plan = _feature("linear_terms")
    maps = _stages(plan, ir.MapStage)
    placements = [plan.value(ref).placement for stage in maps for ref in stage.results]
    assert placements == [Placement(partial=("data",))] * 3


def test_states_are_set_and_updated() -> None:
    plan = _feature("phases")
    assert [phase.name for phase in plan.phases] == ["step", "every_10", "evaluate", "start"]
    assert [phase.kind for phase in plan.phases] == ["step", "every", "named", "start"]
    assert plan.phase("every_10").period == 10
    assert plan.phase("step").outputs == (ir.Binding("total", "total.0"),)
    assert plan.phase("step").updates == (ir.Binding("total", "total.1"),)
    assert plan.phase("evaluate").updates == ()
    assert plan.phase("step").span == Span(4, 1, 4, 10)


def test_states_on_a_server() -> None:
    plan = _feature("server_states")
    stage = _stages(plan, ir.ExchangeStage)[0]
    assert stage.results == ("weights.2", "moment.2")
    assert (stage.gradient, stage.states, stage.fn) == ("grads.0", ("weights.0", "moment.0"), "sgd")
    assert stage.op == ir.Reduction("mean", "count.0")
    assert stage.hints == ir.Hints(chunk=32768, staleness=2, wire=DType.BF16)
    on_hub = Placement(per=("member",), server="hub")
    assert {v.placement for v in plan.values if v.name in ("weights", "moment")} == {on_hub}
    assert (
        str(_stages(_feature("owners"), ir.ExchangeStage)[0].via)
        == "parameter_server(owners = 8, within = rack)"
    )


def test_elastic_modes() -> None:
    plan = _feature("elastic_modes")
    stages = [stage for phase in plan.phases for stage in phase.stages if isinstance(stage, ir.ElasticStage)]
    assert [(s.mode, s.eta, s.rho) for s in stages] == [
        ("sync", 0.5, 0.499),
        ("round_robin", "eta.0", 0.9),
        ("async", 0.05, 0.1),
        ("hogwild", 0.05, 0.1),
    ]
    assert [plan.value(s.pull).placement for s in stages] == [Placement(per=("member", "worker"))] * 4
    assert plan.value(stages[0].result).placement == Placement(per=("member",))
    assert plan.value(stages[1].result).placement == Placement(per=("member",), server="master")


def test_fns_that_take_nothing() -> None:
    plan = _feature("made_on_device")
    (stage,) = _stages(plan, ir.MapStage, "start")
    assert (stage.operands, stage.per, stage.per_record) == ((), ("member",), False)
    assert plan.value(stage.results[0]).type == TreeType()
    assert plan.value(stage.results[0]).placement == Placement(per=("member",))
