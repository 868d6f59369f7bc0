"""share with measured costs: its choice, the cut, the explanation, and when it keeps the default."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.byhand import HERE, Maker, ensemble_plan

from commplan.compiler import compile_plan
from commplan.cost.calibration import Calibration, MeasuredLevel, only_input
from commplan.diagnostics import CommplanError
from commplan.explain.report import explain_plan
from commplan.input.measured_costs import ConsumerCost, FnCost, InputCosts, SourceCost
from commplan.ir import plan as graph
from commplan.ir.hints import Cache, Hints
from commplan.ir.remark import Choice
from commplan.ir.schedule import Map, Schedule, Share
from commplan.ir.serialization.canonical_json import decode, encode
from commplan.ir.types import ArrayType, BytesType, DType, RecordsType, timed
from commplan.topology import Level, Topology

COSTS = InputCosts(
    "2026-11-21", 2, 1e-10, host="n0",
    source=(SourceCost("images", 2e-5, 0.0, 5e4),),
    fn=(FnCost("decode", 1.7e-3, 0.02), FnCost("augment", 1e-6, 1.0), FnCost("widen", 2e-4)),
)  # fmt: skip
HOSTS = Topology("hosts", (Level("host", 4, 6e-5, 2.4e7),), 2)


def with_step(seconds: float, cpu: float = 0.0) -> InputCosts:
    return msgspec.structs.replace(COSTS, consumer=(ConsumerCost("ensemble", "step", seconds, cpu),))


def built(plan: graph.Plan, costs: InputCosts | None, pipeline: str = "share", **more: Any) -> Schedule:
    calibration = only_input("2026-11-21", costs) if costs else None
    return compile_plan(plan, {}, calibration=calibration, passes=pipeline, **more)


def shares(schedule: Schedule) -> list[Share]:
    return [op for op in schedule.phase("step").ops if isinstance(op, Share)]


def priced(schedule: Schedule) -> Choice:
    return next(choice for choice in schedule.choices if choice.sharing)


def test_what_waits_for_its_input_is_made_by_as_many_as_there_are_cores() -> None:
    schedule = built(ensemble_plan(), COSTS)
    (share,) = shares(schedule)
    assert (share.design, share.readers) == ("single_broadcast", 2)
    choice = priced(schedule)
    assert "input measured 2026-11-21 on n0; no consumer measured" in choice.source
    assert "without sharing" in choice.why
    chosen = next(row for row in choice.sharing if row.taken)
    assert choice.seconds == chosen.wall
    assert chosen.cut == "after `decode`"
    alone = next(row for row in choice.sharing if row.design == "duplicate")
    everybody = next(row for row in choice.sharing if row.design == "all_shared")
    assert everybody.cpu == pytest.approx(1.1 * chosen.cpu, rel=0.01)
    assert 4.0 < alone.cpu / chosen.cpu < 4.4  # four decoders on two cores take turns too
    assert alone.limit == chosen.limit
    assert chosen.distance == pytest.approx(chosen.cpu / chosen.limit, rel=1e-3)
    assert {row.design for row in choice.sharing} == {
        "duplicate", "all_shared", "single_broadcast", "multi_broadcast",
    }  # fmt: skip


def test_where_the_step_computes_longer_members_are_left_alone() -> None:
    schedule = built(ensemble_plan(), with_step(1.0))
    assert shares(schedule) == []
    choice = priced(schedule)
    assert choice.what == "`pixels` of step over member: not shared"
    assert choice.why.startswith(
        "preprocessing is not the bottleneck: a step takes 1 s, waiting for the consumer"
    )
    assert choice.why.endswith("at most 2% of it, and 77% of the CPU time of the input")


def test_a_step_that_its_own_input_slows_down_is_not_left_alone() -> None:
    assert shares(built(ensemble_plan(), with_step(0.025, cpu=0.02)))[0].design == "single_broadcast"


def test_the_pass_can_be_told_to_save_cpu_all_the_same() -> None:
    (share,) = shares(built(ensemble_plan(), with_step(1.0), "share{prefer=cpu}"))
    assert share.design == "single_broadcast"


def test_what_the_plan_pins_stays_and_is_priced() -> None:
    via = graph.Algorithm("multi_broadcast", (graph.Arg(2, "readers"),))
    schedule = built(ensemble_plan(via=via), COSTS)
    (share,) = shares(schedule)
    assert (share.design, share.readers) == ("multi_broadcast", 2)
    choice = priced(schedule)
    assert choice.why.startswith("set in the plan; ")
    (chosen,) = [row for row in choice.sharing if row.taken]
    assert (chosen.design, chosen.readers) == ("multi_broadcast", 2)
    assert len({row.design for row in choice.sharing}) == 4


def test_the_pass_can_be_told_the_design_and_the_readers() -> None:
    schedule = built(ensemble_plan(), COSTS, "share{design=single_broadcast, readers=3}")
    (share,) = shares(schedule)
    assert (share.design, share.readers) == ("single_broadcast", 3)
    assert priced(schedule).why.startswith("set by an option of the pass; ")
    assert shares(built(ensemble_plan(), None, "share{design=multi_broadcast, readers=9}"))[0].readers == 4
    assert shares(built(ensemble_plan(), COSTS, "share{design=none}")) == []


@pytest.mark.parametrize("missing", ["source", "decode", "augment"])
def test_without_all_the_costs_the_rule_decides(missing: str) -> None:
    costs = msgspec.structs.replace(COSTS, fn=tuple(fn for fn in COSTS.fn if fn.name != missing))
    if missing == "source":
        costs = msgspec.structs.replace(COSTS, source=())
    schedule = built(ensemble_plan(), costs)
    assert shares(schedule)[0].design == "all_shared"
    assert not any(choice.sharing for choice in schedule.choices)
    assert "are not measured" in schedule.choices[0].rejected[1]


def test_functions_under_the_lock_are_better_off_in_processes() -> None:
    costs = msgspec.structs.replace(
        COSTS, cores=16, fn=(FnCost("decode", 1.7e-3, 1.0), FnCost("augment", 1e-6))
    )
    why = priced(built(ensemble_plan(), costs)).why
    assert "with worker processes, which do not wait for one lock: `run.batches(workers=" in why
    assert "worker processes" not in priced(built(ensemble_plan(), COSTS)).why


def test_a_cache_is_proposed_if_it_shortens_the_step() -> None:
    why = priced(built(ensemble_plan(), COSTS)).why
    assert "from the second epoch on with a cache, `map decode(..) { cache = SIZE }`" in why
    assert why.endswith("which takes 108 B a record")
    copied = FnCost("decode", 108 * COSTS.copy)
    costs = msgspec.structs.replace(COSTS, source=(SourceCost("images", 0.0),), fn=(copied, *COSTS.fn[1:]))
    fixed = "share{design=single_broadcast, readers=2}"
    then = next(row for row in priced(built(ensemble_plan(), costs, fixed)).sharing if row.taken)
    assert f"; {timed(then.wall)} and {timed(then.cpu)} from the second epoch on" in why


def test_no_cache_is_proposed_where_none_pays() -> None:
    waiting = with_step(1.0)  # for the consumer
    assert "cache" not in priced(built(ensemble_plan(), waiting)).why
    assert "cache" in priced(built(ensemble_plan(), waiting, "share{prefer=cpu}")).why
    quick = msgspec.structs.replace(COSTS, copy=1.0)
    assert "cache" not in priced(built(ensemble_plan(), quick)).why


def test_a_cache_is_proposed_before_random_functions_and_once() -> None:
    plan = chain()
    why = priced(built(plan, COSTS)).why
    assert "`map widen(..) { cache = SIZE }`, which takes 16 B a record" in why
    (phase,) = plan.phases
    ops = [
        msgspec.structs.replace(op, hints=Hints(cache=Cache(1 << 20)))
        if isinstance(op, graph.MapStage) and op.fn == "decode"
        else op
        for op in phase.stages
    ]
    cached = msgspec.structs.replace(plan, phases=(msgspec.structs.replace(phase, stages=tuple(ops)),))
    assert "SIZE" not in priced(built(cached, COSTS)).why


def test_one_member_shares_with_nobody() -> None:
    assert shares(built(ensemble_plan(members=1), COSTS)) == []


def test_between_hosts_links_decide() -> None:
    """A batch of 8 images of 108 bytes is nothing to a link; one of megabytes that are made fast is."""
    calibration = Calibration(
        "2026-11-21", "mpi", ("a", "b", "c", "d"), 1e-6, 1e-10, 5e-5, 1e-5,
        (MeasuredLevel("host", 6e-5, 2.4e7),), input=COSTS,
    )  # fmt: skip
    small = compile_plan(
        ensemble_plan(), {}, topology=HOSTS, calibration=calibration, backend="mpi", passes="share"
    )
    assert shares(small)[0].design == "all_shared"
    assert next(row for row in priced(small).sharing if row.taken).nbytes == 8 * 108 * 3
    large = compile_plan(
        chain(shape=(1000, 1000)), {}, topology=HOSTS, backend="mpi", passes="share",
        calibration=msgspec.structs.replace(calibration, input=quick()),
    )  # fmt: skip
    assert shares(large) == []
    rows = {row.design: row for row in priced(large).sharing}
    assert rows["all_shared"].waits_for == "the links"
    assert rows["duplicate"].memory == 4 * rows["all_shared"].memory  # f32 there, u8 here


def quick() -> InputCosts:
    return msgspec.structs.replace(COSTS, fn=tuple(msgspec.structs.replace(fn, cpu=1e-4) for fn in COSTS.fn))


def chain(shape: tuple[int, ...] = (4,), dtype: DType = DType.F32, outputs: str = "mine.0") -> graph.Plan:
    """raw -> u8 (decode) -> wider (widen) -> augmented per member, all on the host."""
    maker = Maker()
    maker.axis("member", graph.AxisKind.ENSEMBLE, 4)
    maker.sources.append(graph.Source("images", BytesType(), HERE))
    small, wide = ArrayType(DType.U8, shape), ArrayType(dtype, shape)
    maker.fn("decode", (BytesType(),), (small,), "host")
    maker.fn("widen", (small,), (wide,), "host")
    maker.fn("augment", (wide,), (wide,), "host", random=True)
    maker.value("raw.0", RecordsType((8,), BytesType()))
    maker.value("small.0", RecordsType((8,), small))
    maker.value("wide.0", RecordsType((8,), wide))
    maker.value("mine.0", RecordsType((8,), wide), per="member")
    maker.phase(
        "step",
        graph.Load("raw.0", "images", (8,), "exactly_once", 1, HERE),
        graph.MapStage(("small.0",), "decode", ("raw.0",), HERE, per_record=True),
        graph.MapStage(("wide.0",), "widen", ("small.0",), HERE, per_record=True),
        graph.MapStage(("mine.0",), "augment", ("wide.0",), HERE, ("member",), per_record=True),
        outputs=(outputs,),
    )
    return maker.plan("ensemble")


def stages(schedule: Schedule) -> list[str]:
    return [op.fn if isinstance(op, Map) else type(op).__name__ for op in schedule.phase("step").ops]


def test_dear_work_is_done_before_members_part() -> None:
    schedule = built(chain(), COSTS)
    assert stages(schedule) == ["Read", "decode", "widen", "Share", "augment"]
    cuts = [row.cut for row in priced(schedule).sharing if row.design == "single_broadcast"]
    assert cuts == ["after `widen`", "after `decode`"]


def test_between_hosts_cheap_widening_is_done_by_each_member() -> None:
    """Four bytes for one on a slow link, against next to no work."""
    cheap = msgspec.structs.replace(
        COSTS, fn=(FnCost("decode", 1.7e-3), FnCost("widen", 1e-7), FnCost("augment", 1e-7))
    )
    for pipeline, expected in (
        ("share{design=all_shared}", ["Read", "decode", "Share", "widen", "augment"]),
        ("share", ["Read", "decode", "Share", "widen", "augment"]),
    ):
        schedule = built(chain((2000,)), cheap, pipeline, topology=HOSTS, backend="mpi")
        assert stages(schedule) == expected
        (share,) = shares(schedule)
        assert share.operand == "small.0"
        assert [
            op.results for op in schedule.phase("step").ops if isinstance(op, Map) and op.fn == "widen"
        ] == [("wide.0",)]


def test_widening_kept_in_front_limits_the_cuts() -> None:
    plan = chain((2000,))
    fns = tuple(msgspec.structs.replace(fn, elementwise=fn.name == "widen") for fn in plan.fns)
    schedule = built(
        msgspec.structs.replace(plan, fns=fns), COSTS, "share{widening=keep}", topology=HOSTS, backend="mpi"
    )
    cuts = {row.cut for row in priced(schedule).sharing if row.design == "all_shared"}
    assert cuts == {"after `widen`"}


def test_values_that_are_made_together_are_shared_alike() -> None:
    plan = chain()
    (phase,) = plan.phases
    both = (graph.Binding("small", "small.0"), graph.Binding("mine", "mine.0"))
    schedule = built(
        msgspec.structs.replace(plan, phases=(msgspec.structs.replace(phase, outputs=both),)), COSTS
    )
    assert sorted(share.result for share in shares(schedule)) == ["small.0", "wide.0"]
    assert len({(share.design, share.readers) for share in shares(schedule)}) == 1
    first, second = (choice for choice in schedule.choices if choice.by == "share")
    assert first.sharing
    assert second.why == "as for the other values of its flow"


def test_choices_with_costs_are_saved_and_explained() -> None:
    plan = ensemble_plan()
    schedule = built(plan, COSTS)
    assert decode(encode(schedule)) == schedule
    text = explain_plan(plan, schedule).text()
    assert "physical limit: " in text
    (line,) = {line for line in text.splitlines() if line.strip().startswith("> ")}
    assert "single_broadcast(readers = 2)" in line
    assert "multi_broadcast(readers = " in text
    assert "the CPUs of a host" in text


def test_costs_of_the_input_need_no_topology() -> None:
    links = Calibration("2026-11-21", "mpi", ("a", "b"), 1e-6, 1e-10, 5e-5, 1e-5)
    with pytest.raises(CommplanError) as caught:
        compile_plan(ensemble_plan(), {}, calibration=links)
    assert caught.value.diagnostics[0].code == "CP0727"
    both = msgspec.structs.replace(links, input=COSTS)
    assert priced(compile_plan(ensemble_plan(), {}, calibration=both))
