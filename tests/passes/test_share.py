"""share: the end of member-independent work, the design, and the functions moved after the share."""

from __future__ import annotations

from typing import Any

import pytest
from support.byhand import HERE, Maker, compiled, ensemble_plan

from commplan.ir import plan as graph
from commplan.ir.schedule import Map, Op, Read, Schedule, Share, results
from commplan.ir.types import ArrayType, BytesType, DType, RecordsType

U8 = ArrayType(DType.U8, (4,))
WIDE = ArrayType(DType.F32, (4,))


def ops(schedule: Schedule) -> tuple[Op, ...]:
    return schedule.phase("step").ops


def shares(schedule: Schedule) -> list[Share]:
    return [op for op in ops(schedule) if isinstance(op, Share)]


def test_pixels_are_shared_before_the_work_of_each_member() -> None:
    schedule = compiled(ensemble_plan(), "share")
    read, decode, share, augment = ops(schedule)
    assert isinstance(read, Read)
    assert isinstance(share, Share)
    assert results(decode) == ("pixels.0/own",)
    assert (share.operand, share.result, share.design, share.axes) == (
        "pixels.0/own", "pixels.0", "all_shared", ("member",),
    )  # fmt: skip
    assert isinstance(augment, Map)
    assert augment.operands == ("pixels.0",)
    (choice,) = schedule.choices
    assert choice.what == "`pixels` of step over member: all_shared"
    assert "864 B a step" in choice.why
    assert choice.rejected[0] == "duplicate: each of 4 members would do all the work"


@pytest.mark.parametrize("name", ["duplicate", "all_shared", "single_broadcast", "multi_broadcast"])
def test_what_the_plan_pins_stays(name: str) -> None:
    args = (graph.Arg(2, "readers"),) if name.endswith("broadcast") else ()
    schedule = compiled(ensemble_plan(via=graph.Algorithm(name, args)), "share")
    (share,) = shares(schedule)
    assert (share.design, share.readers) == (name, 2 if args else None)
    assert schedule.choices[0].why == "set in the plan"


def test_one_member_shares_with_nobody() -> None:
    assert shares(compiled(ensemble_plan(members=1), "share")) == []


def test_the_pass_can_be_told() -> None:
    schedule = compiled(ensemble_plan(), "share{design=none}")
    assert shares(schedule) == []
    assert schedule.choices[0].what == "`pixels` of step over member: not shared"
    (share,) = shares(compiled(ensemble_plan(), "share{design=duplicate}"))
    assert share.design == "duplicate"


def pipeline(
    *,
    outputs: tuple[str, ...],
    per_load: bool = False,
    clock: bool = False,
    wide: dict[str, bool] | None = None,
) -> graph.Plan:
    """raw -> u8 (decode) -> f32 (widen, host) -> jittered (per member)."""
    maker = Maker()
    maker.axis("member", graph.AxisKind.ENSEMBLE, 2)
    maker.sources.append(graph.Source("images", BytesType(), HERE))
    maker.fn("decode", (BytesType(),), (U8,), "host")
    maker.fn("widen", (U8,), (WIDE,), "host", **(wide or {}))
    maker.fn("jitter", (WIDE,), (WIDE,), "host", random=True)
    where: dict[str, Any] = {"per": "member"} if per_load or clock else {}
    batch = (4, 4) if clock else (4,)
    maker.value("raw.0", RecordsType(batch, BytesType()), **where)
    maker.value("small.0", RecordsType(batch, U8), **where)
    maker.value("wide.0", RecordsType(batch, WIDE), **where)
    maker.value("mine.0", RecordsType(batch, WIDE), per="member")
    maker.phase(
        "step",
        graph.Load(
            "raw.0", "images", batch, "exactly_once", 1, HERE, per=("member",) if per_load else (),
            clock="member" if clock else None,
        ),
        graph.MapStage(("small.0",), "decode", ("raw.0",), HERE, per_record=True),
        graph.MapStage(("wide.0",), "widen", ("small.0",), HERE, per_record=True),
        graph.MapStage(("mine.0",), "jitter", ("wide.0",), HERE, ("member",), per_record=True),
        outputs=outputs,
    )  # fmt: skip
    return maker.plan()


def chain(schedule: Schedule) -> list[str]:
    return [op.fn if isinstance(op, Map) else type(op).__name__ for op in ops(schedule)]


def test_the_longest_prefix_is_shared() -> None:
    schedule = compiled(pipeline(outputs=("mine.0",)), "share")
    assert chain(schedule) == ["Read", "decode", "widen", "Share", "jitter"]


def test_widening_goes_behind_the_move() -> None:
    schedule = compiled(pipeline(outputs=("mine.0",), wide={"elementwise": True}), "share")
    assert chain(schedule) == ["Read", "decode", "Share", "widen", "jitter"]
    choice = schedule.choices[-1]
    assert choice.what == "`wide`: shared before `widen`"
    assert choice.why == "widen only widens: 16 B a step are moved, not 64 B"
    narrow = compiled(pipeline(outputs=("mine.0",), wide={"elementwise": True}), "share{widening=keep}")
    assert chain(narrow) == ["Read", "decode", "widen", "Share", "jitter"]


@pytest.mark.parametrize("flags", [{}, {"elementwise": True, "random": True}])
def test_what_may_do_more_than_widen_stays(flags: dict[str, bool]) -> None:
    schedule = compiled(pipeline(outputs=("mine.0",), wide=flags), "share")
    assert chain(schedule) == ["Read", "decode", "widen", "Share", "jitter"]


def test_two_ends_are_shared_and_work_goes_on_from_the_own_part() -> None:
    schedule = compiled(pipeline(outputs=("small.0", "mine.0")), "share")
    assert sorted(share.result for share in shares(schedule)) == ["small.0", "wide.0"]
    widen = next(op for op in ops(schedule) if isinstance(op, Map) and op.fn == "widen")
    assert widen.operands == ("small.0/own",)


def test_members_with_an_order_of_their_own_share_nothing() -> None:
    assert shares(compiled(pipeline(outputs=("mine.0",), per_load=True), "share")) == []


def test_members_with_their_own_clocks_take_units_and_it_is_said() -> None:
    schedule = compiled(pipeline(outputs=("mine.0",), clock=True), "share")
    assert shares(schedule) == []
    assert schedule.choices[0].what == "`raw`: shared in units of 4 records"
    assert "have independent clocks" in schedule.choices[0].why


def test_reading_alone_is_not_worth_a_slot() -> None:
    maker = Maker()
    maker.axis("member", graph.AxisKind.ENSEMBLE, 2)
    maker.sources.append(graph.Source("images", BytesType(), HERE))
    maker.fn("decode", (BytesType(),), (U8,), "host", random=True)
    maker.value("raw.0", RecordsType((4,), BytesType()))
    maker.value("mine.0", RecordsType((4,), U8), per="member")
    maker.phase(
        "step",
        graph.Load("raw.0", "images", (4,), "exactly_once", 1, HERE),
        graph.MapStage(("mine.0",), "decode", ("raw.0",), HERE, ("member",), per_record=True),
        outputs=("mine.0",),
    )
    schedule = compiled(maker.plan(), "share")
    assert shares(schedule) == []
    assert schedule.choices[0].what == "`raw` of step over member: duplicate"


def test_counts_are_not_shared() -> None:
    maker = Maker()
    maker.axis("member", graph.AxisKind.ENSEMBLE, 2)
    maker.sources.append(graph.Source("rows", U8, HERE))
    maker.value("rows.0", RecordsType((4,), U8))
    maker.value("n.0", ArrayType(DType.I32))
    maker.phase(
        "step",
        graph.Load("rows.0", "rows", (4,), "at_least_once", 1, HERE, count="n.0"),
        outputs=("rows.0", "n.0"),
    )
    assert [share.result for share in shares(compiled(maker.plan(), "share"))] == ["rows.0"]
