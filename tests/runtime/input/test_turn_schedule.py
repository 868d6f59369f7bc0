"""Readers that take turns: when they begin, who makes what then, and that deaths change nothing."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from test_failover import Ensemble, fine

from commplan.diagnostics import Span
from commplan.input.work_partition import division
from commplan.runtime.input import turn_schedule as rosters
from commplan.runtime.input.shm.segment import Blame, Wanted, opened
from commplan.runtime.input.shm.shm_control import Control
from commplan.runtime.input.turn_schedule import TurnSchedule

ROWS, BATCHES = 16, 150
ALWAYS, WHERE_NOTHING_WAITS = 1.0, 0.0  # when they take turns


@pytest.fixture(name="ensemble")
def _ensemble() -> Iterator[Ensemble]:
    with Ensemble() as made:
        yield made


def makers(told: Sequence[dict[str, Any]]) -> list[int]:
    """How many processes made each batch."""
    by = {record: said["index"] for said in told for record in said["made"]}
    seen = told[0]["seen"]["0"]
    batches = [seen[low : low + ROWS] for low in range(0, len(seen), ROWS)]
    return [len({by[record] for record in batch}) for batch in batches]


def start(ensemble: Ensemble, each: dict[int, dict[str, Any]] | None = None, **orders: Any) -> None:
    ensemble.start(
        4, each, members=4, records=ROWS * BATCHES, epochs=1, design="all_shared", plan={"batch": ROWS},
        **orders,
    )  # fmt: skip


@pytest.mark.skipif(rosters._times() is None, reason="the kernel does not say for how long a thread waits")
def test_processes_on_one_core_take_turns(ensemble: Ensemble) -> None:
    start(ensemble, cores=[min(os.sched_getaffinity(0))], waits=ALWAYS)
    told = [fine(said) for said in ensemble.told()]
    assert all(Counter(said["seen"]["0"]) == Counter(range(ROWS * BATCHES)) for said in told)
    assert Counter(record for said in told for record in said["made"]) == Counter(range(ROWS * BATCHES))
    found = makers(told)
    assert found[:4] == [4] * 4 and found[-4:] == [1] * 4
    assert all(said["made"] for said in told)


def test_all_make_each_batch_where_making_waits(ensemble: Ensemble) -> None:
    start(ensemble, cores=[min(os.sched_getaffinity(0))], idle=1e-3, waits=WHERE_NOTHING_WAITS)
    told = [fine(said) for said in ensemble.told()]
    assert makers(told) == [4] * BATCHES


def test_turns_of_the_dead_are_made_by_heirs(ensemble: Ensemble) -> None:
    core = [min(os.sched_getaffinity(0))]
    start(ensemble, {1: {"die_after": 120}, 2: {"die_after": 126}}, cores=core, waits=ALWAYS)
    first, dead, other, last = ensemble.told()
    assert dead is None and other is None
    for said in (fine(first), fine(last)):
        assert Counter(said["seen"]["0"]) == Counter(range(ROWS * BATCHES))


@pytest.fixture(name="roster")
def _roster() -> TurnSchedule:
    blame = Blame("share values over member", Span(1, 1, 1, 2), "tested.plan")
    wanted = Wanted("roster", 3, 1 << 16, 1 << 14, {}, blame)
    control = Control(opened(wanted, 0), 3, 0)
    control.say_cores({5})
    return TurnSchedule(control, {0: division("all_shared", (0, 0, 0))}, (0, 1, 2), (0, 1, 2), 4, 2)


def test_turns_begin_behind_what_anybody_may_have_begun(roster: TurnSchedule) -> None:
    for spent in (0, 1000):  # nothing is known; then it is
        assert roster.at(0, 100).parts == 3 and roster.turn(1, 100) == 100 and roster.follows(100) < 0
        roster.control.word(1, "spent").value = spent
        roster.look(3)
    since = 3 + 4 + 2 + 2
    assert roster.at(0, since - 1).parts == 3 and roster.turn(2, since - 1) == since - 1
    assert [roster.at(0, since + n).readers for n in range(4)] == [(0,), (1,), (2,), (0,)]
    assert [roster.turn(2, since + n) - since for n in range(4)] == [2, 2, 2, 5]
    assert [roster.heard(since + n) for n in range(2)] == [((0, 0),), ((1, 1),)]
    assert roster.follows(since + 7) == since + 6, "one core makes one batch at a time"


def test_a_core_that_waits_a_little_goes_on_with_a_second_batch(roster: TurnSchedule) -> None:
    roster.control.word(1, "spent").value, roster.control.word(0, "waited").value = 1000, 100
    roster.look(3)
    assert roster.follows(30) == 28


def test_waits_keep_everybody_at_each_batch(roster: TurnSchedule) -> None:
    roster.control.word(1, "spent").value = 1000
    roster.control.word(2, "waited").value = 800
    roster.look(3)
    assert roster.control.turns.value == 0
    roster.control.word(2, "waited").value = 200
    roster.look(4)
    assert roster.control.turns.value == 0, "it is looked at now and then"
    roster.look(64 + 3)
    assert roster.control.turns.value == 64 + 3 + 8
