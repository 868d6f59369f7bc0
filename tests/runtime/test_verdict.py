"""What a watchdog concludes from the reports of processes."""

from __future__ import annotations

import pytest

from commplan.runtime.observe.verdict import (
    EXCUSE,
    Patience,
    Report,
    Waiting,
    another_order,
    conclude,
    departure,
    silence,
    stalled,
)

ALL = (0, 1, 2)
PATIENCE = Patience(bound=2.0, late=10.0)
STEP = "line 7 of x.plan, in `train`"
FINISHED = f"{STEP}, 5 times so far"


def report(
    process: int,
    names: str,
    *,
    waits: bool = False,
    idle: float = 20.0,
    late: bool = False,
    aborted: bool = False,
    left: str | None = None,
) -> Report:
    """names: of the calls that it has begun, a letter each; the last has not ended where it `waits`."""
    waiting = Waiting(ALL, len(names), f"`{names[-1]}`", idle) if waits else None
    return Report(
        process, f"process 4{process} on node", {"0,1,2": len(names)}, {"0,1,2": (1, tuple(names))},
        waiting, idle, late, STEP, 5, "" if waits else "data.py:41 in decode", left, aborted,
    )  # fmt: skip


def verdict(*reports: Report, own: int = 0) -> str:
    return conclude(own, {each.process: each for each in reports}, PATIENCE, "\nnote: it waits")


def test_who_has_not_begun_the_step_is_late():
    text = verdict(report(0, "aba", waits=True), report(1, "aba", waits=True), report(2, "ab"))
    assert text.splitlines() == [
        "process 2 has not come within 20.0 s",
        f"note: process 2 (process 42 on node) is alive, in no step for 20.0 s; it last finished {FINISHED}",
        "note: its Python: data.py:41 in decode",
        f"note: {EXCUSE}",
        "note: it waits",
    ]


@pytest.mark.parametrize(
    "other",
    [
        report(2, "ab", idle=1.0),  # it has moved a second ago
        report(2, "ab", late=True),  # it said so
        report(2, "ab", waits=True, idle=1.0),  # it is about to come
    ],
)
def test_who_moves_or_said_so_is_not_late(other: Report):
    assert not verdict(report(0, "aba", waits=True), report(1, "aba", waits=True), other)


def test_who_waits_is_patient_with_the_living():
    assert not verdict(report(0, "aba", waits=True, idle=9.0), report(1, "ab"), report(2, "ab"))


def test_a_step_that_all_are_in_may_compute():
    reports = [report(number, "ab", waits=True) for number in ALL]
    assert not verdict(*reports)
    assert stalled(0, {each.process: each for each in reports}, PATIENCE)


def test_the_fewest_call_in_another_order():
    text = verdict(
        report(0, "abab", waits=True), report(1, "abba", waits=True), report(2, "abab", waits=True)
    )
    assert text.startswith("the processes call their steps in another order: process 1 `b` as call 3,")
    assert "processes 0, 2 `a`" in text and "note: process 1 waits in `a`" in text


def test_calls_that_are_forgotten_are_not_compared():
    reports = {0: report(0, "abab"), 1: report(1, "abab")}
    reports[1] = Report(1, "", {}, {"0,1,2": (3, ("a", "b", "a"))}, None, 0.0, False, "", 0, "")
    assert not another_order("0,1,2", reports)


def test_a_process_in_the_middle_of_an_abort_is_named_without_patience():
    waits = [report(number, "ab", waits=True, idle=0.5) for number in (0, 2)]
    text = verdict(*waits, report(1, "ab", waits=True, idle=0.5, aborted=True))
    assert text.startswith("process 1 was aborted by its runtime")


def test_an_abort_for_an_order_is_said_as_that():
    waits = [report(number, "aba", waits=True, idle=0.5) for number in (0, 2)]
    assert "in another order: process 1 `b`" in verdict(*waits, report(1, "abb", waits=True, aborted=True))


def test_processes_that_wait_in_different_groups_wait_for_one_another():
    recent = {"0,1": (1, ("member",)), "0,1,2": (1, ("whole",))}
    begun = {"0,1": 1, "0,1,2": 0}
    member = Report(0, "", begun, recent, Waiting((0, 1), 1, "`member`", 20.0), 20.0, False, "", 0, "")
    begun = {"0,1": 0, "0,1,2": 1}
    whole = Waiting(ALL, 1, "`whole`", 20.0)
    others = [Report(number, "", begun, recent, whole, 20.0, False, "", 0, "") for number in (1, 2)]
    text = verdict(member, *others)
    assert text.startswith("the processes wait for one another since 20.0 s, in another order of steps")
    assert "note: process 0 waits in `member`" in text and "note: process 1 waits in `whole`" in text


def test_who_does_not_answer_is_named_with_its_state():
    silent = {2: ("has died", ["process 2 is PID 7 on b"]), 1: ("is stopped", ["process 1 is PID 6 on a"])}
    text = silence({0: report(0, "ab", waits=True)}, silent)
    assert text.splitlines() == [
        "process 1 is stopped", "note: process 2 has died", "note: process 1 is PID 6 on a",
        "note: process 2 is PID 7 on b", "note: process 0 waits",
    ]  # fmt: skip


def test_who_has_ended_is_named_with_what_ended_it():
    text = departure(report(2, "ab", left="ArithmeticError: loss"))
    assert text.startswith("the program has ended on process 2: ArithmeticError: loss\nnote: process 2 (")
