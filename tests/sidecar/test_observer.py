"""The observer of jobs: alarms, evaluations that must agree, hosts, and verdicts."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
from support.observed_ranks import (
    BOUND_S,
    BUSY_S,
    LINE,
    OTHER_LINE,
    FakeProcess,
    Ranks,
    began,
    joins,
    put,
    waiting,
)

from commplan.hang_limits import HangLimits
from commplan.recorder import live
from commplan.recorder.file import Recording
from commplan.recorder.lane import Lane
from commplan.recorder.rank_state import Comparison, RankState
from commplan.runtime.observe.joint_calls import JointCalls
from commplan.sidecar import decision


def test_a_rank_that_waits_within_its_bound_is_not_evaluated(conditions: dict[int, str]):
    ranks = waiting(Ranks(3, range(3)), late=1)
    conditions[101] = "stopped"
    ranks.poll(1.0)
    assert ranks.verdict(0) == ""


def test_a_stopped_rank_is_named_on_all_ranks_once_two_looks_agree(conditions: dict[int, str]):
    ranks = waiting(Ranks(3, range(3)), late=1)
    conditions[101] = "stopped"
    ranks.job.poll(time.monotonic() + 3)
    assert ranks.verdict(0) == ""
    ranks.poll(3.6)
    for rank in range(3):
        text = ranks.verdict(rank)
        assert text.startswith("rank 1 is stopped (SIGSTOP, or a debugger)\nnote: rank 1 is PID 101 on ")
        assert "note: ranks 0, 2 wait" in text


def test_a_late_rank_is_printed_after_the_first_runs_and_named_after_busy_s(conditions: dict[int, str]):
    ranks = waiting(Ranks(3, range(3)), late=1)
    ranks.poll(3.0)
    said = ranks.processes[0].said
    assert "rank 1 has not arrived within" in said and f"note: {LINE} waits for it" in said
    assert "its Python: train.py:101 in load" in said and "the limit is 30 s" in said
    assert ranks.verdict(0) == ""
    ranks.poll(BUSY_S + 1)
    assert ranks.processes[0].said == said and not ranks.processes[2].said
    assert "the limit is 30 s" in ranks.verdict(2)


def test_first_runs_may_compile(conditions: dict[int, str]):
    ranks = Ranks(2, range(2))
    began(ranks.recordings[0], LINE, runs=1)
    ranks.poll(20.0)
    assert ranks.processes[0].said == ""
    ranks.poll(25.0)
    assert "rank 1 has not arrived within" in ranks.processes[0].said


@pytest.mark.parametrize("field", ["late", "left"])
def test_a_rank_that_announces_late_work_or_has_ended_is_not_named(field: str, conditions: dict[int, str]):
    ranks = waiting(Ranks(3, range(3)), late=1)
    put(ranks.recordings[1], **{field: 1})
    ranks.poll(1000.0)
    assert ranks.verdict(0) == "" and ranks.processes[0].said == ""


def test_a_rank_that_waits_for_a_disk_is_busy_and_named_after_busy_s(conditions: dict[int, str]):
    """Also if all ranks had worked for longer than that before the others began to wait."""
    ranks = waiting(Ranks(3, range(3)), late=1)
    conditions[101], ranks.processes[1].stack = "stuck in the kernel", ""
    put(ranks.recordings[1], moved=time.monotonic_ns() - int(1.5 * BUSY_S * 1e9))
    ranks.poll(3.0)
    said = ranks.processes[0].said
    assert "rank 1 has not arrived within" in said and "the limit is 30 s" in said
    assert "rank 1 (process 101 on " in said and ") waits for a disk or a file system, in no" in said
    assert ranks.verdict(0) == ""
    ranks.poll(BUSY_S + 1)
    assert ranks.verdict(0).startswith("rank 1 is stuck in the kernel")


def test_a_rank_that_waits_for_a_disk_in_a_collective_is_named_after_the_bound(conditions: dict[int, str]):
    ranks = Ranks(3, range(3))
    for recording in ranks.recordings.values():
        began(recording, LINE)
    conditions[101] = "stuck in the kernel"
    ranks.poll(3.0)
    assert ranks.verdict(0).startswith("rank 1 is stuck in the kernel")


def test_a_rank_that_waits_for_a_disk_in_a_collective_is_not_named_for_a_late_one(conditions: dict[int, str]):
    """It may write a file while another thread of it runs the collective."""
    ranks = waiting(Ranks(3, range(3)), late=2)
    conditions[101] = "stuck in the kernel"
    ranks.poll(3.0)
    assert ranks.verdict(0) == "" and "rank 2 has not arrived within" in ranks.processes[0].said
    ranks.poll(BUSY_S + 1)
    assert ranks.verdict(0).startswith("rank 2 has not arrived within")


def test_a_rank_that_waits_for_a_disk_in_a_comparison_is_named_after_busy_s(conditions: dict[int, str]):
    ranks = comparing(Ranks(3, range(3)), [0, 1])
    conditions[102] = "stuck in the kernel"
    ranks.poll(BUSY_S - 5)
    assert ranks.verdict(0) == "" and "rank 2 has not arrived within" in ranks.processes[0].said
    ranks.poll(BUSY_S + 1)
    assert ranks.verdict(0).startswith("rank 2 is stuck in the kernel")


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_writes_its_last_file_keeps_others_until_busy_s(late: int, conditions: dict[int, str]):
    ranks = Ranks(2, range(2))
    for rank in range(2):
        began(ranks.recordings[rank], LINE, ends=True)
    put(ranks.recordings[0], left=2, parting=time.monotonic_ns())
    put(ranks.recordings[1], late=late)
    conditions[101] = "stuck in the kernel"
    ranks.poll(BUSY_S - 5)
    assert ranks.verdict(0) == ""
    ranks.poll(BUSY_S + 5)
    assert bool(ranks.verdict(0)) is not bool(late)


def test_the_limits_are_those_of_the_operation_that_waits(conditions: dict[int, str]):
    """A job has several if a process binds programs for different meshes."""
    ranks = waiting(Ranks(2, range(2)), late=1)
    put(ranks.recordings[1], bound_ns=10**12, busy_ns=10**13)
    ranks.poll(3.0)
    assert "the limit is 30 s" in ranks.processes[0].said


def test_another_order_is_named_after_the_bound_with_both_lines(conditions: dict[int, str]):
    ranks = Ranks(3, range(3))
    for rank in range(3):
        began(ranks.recordings[rank], LINE if rank else OTHER_LINE)
    ranks.poll(3.0)
    assert "the ranks have waited for each other for" in ranks.verdict(0)
    assert f"rank 0 waits in {OTHER_LINE}" in ranks.verdict(1) and f"rank 1 waits in {LINE}" in ranks.verdict(
        1
    )


def test_a_rank_without_the_lock_is_shown_as_holding_it(conditions: dict[int, str]):
    ranks = waiting(Ranks(2, range(2)), late=1)
    ranks.processes[1].stack, ranks.processes[1].queried_at = "", 1.0
    ranks.poll(3.0)
    assert "its Python: an unknown line; it holds the interpreter's lock" in ranks.processes[0].said


def test_only_the_stacks_that_are_shown_are_taken(
    conditions: dict[int, str], monkeypatch: pytest.MonkeyPatch
):
    """Other hosts wait for an answer meanwhile."""
    ranks, paths = Ranks(8, range(8)), list[Path]()
    monkeypatch.setattr(decision, "main_stack", lambda path: paths.append(path) or "train.py:9 in save")
    for rank, recording in ranks.recordings.items():
        began(recording, LINE, runs=5 - (rank > 0), ends=rank > 0)
        ranks.processes[rank].stack, ranks.processes[rank].queried_at = "", 1.0
    ranks.poll(3.0)
    assert ranks.processes[0].said.count("train.py:9 in save; it holds the interpreter's lock") == 4
    assert paths == [ranks.recordings[rank].path for rank in range(1, 5)]


def test_on_hang_report_prints_once_and_ends_nothing(conditions: dict[int, str]):
    ranks = waiting(Ranks(2, range(2)), late=1)
    for recording in ranks.recordings.values():
        put(recording, ends=0)
    conditions[101] = "stopped"
    ranks.poll(3.0)
    ranks.poll(5.0)
    assert ranks.verdict(0) == "" and ranks.processes[0].said.count("rank 1 is stopped") == 1


def test_a_late_rank_is_printed_once_though_the_state_of_another_is_known_only_at_times(
    conditions: dict[int, str], monkeypatch: pytest.MonkeyPatch
):
    ranks = waiting(Ranks(3, range(2)), late=1)
    for seconds in range(60, 100, 10):
        away = {2: RankState(2)} if seconds % 20 else {}
        monkeypatch.setattr(ranks.job.hosts, "query", mock.Mock(return_value=away))
        ranks.poll(seconds)
    text = ranks.processes[0].said
    assert text.count("not arrived within") == text.count("the state of rank 2 is unknown here") == 1


def test_on_hang_report_does_not_end_ranks_that_wait_for_the_dead_at_their_end(conditions: dict[int, str]):
    ranks = Ranks(2, range(2))
    for rank, recording in ranks.recordings.items():
        began(recording, LINE, ends=True)
        put(recording, ends=0, left=2 * (rank == 0), parting=time.monotonic_ns() * (rank == 0))
    ranks.processes[1].seconds = 1.0  # it has died
    ranks.poll(3.0)
    ranks.poll(5.0)
    assert ranks.verdict(0) == "" and ranks.processes[0].said.count("rank 1 has died, and all others") == 1


def comparing(ranks: Ranks, waiting: Sequence[int]) -> Ranks:
    """All ranks have made comparison 3, and `waiting` wait in comparison 4 of all ranks."""
    for rank, recording in ranks.recordings.items():
        is_waiting, now = rank in waiting, time.monotonic_ns()
        began(recording, LINE, ends=True)
        put(recording, comparison=3 + is_waiting, group=1, compares=now * is_waiting)
    return ranks


def test_a_comparison_ends_soon_if_a_rank_has_ended_its_program(conditions: dict[int, str]):
    ranks = comparing(Ranks(3, range(3)), [0, 1])
    put(ranks.recordings[2], left=1)
    ranks.poll(1.0)
    assert ranks.verdict(0) == ""
    ranks.poll(BOUND_S + 0.1)
    first, note, waiting = ranks.verdict(0).splitlines()
    assert (first, waiting) == ("the program has ended on rank 2", "note: ranks 0, 1 wait")
    assert f"last finished {LINE}, 5 times so far" in note and ranks.verdict(2) == ranks.verdict(0)


def test_a_comparison_ends_if_a_rank_is_stopped_and_not_if_it_is_late(conditions: dict[int, str]):
    ranks = comparing(Ranks(3, range(3)), [0, 1])
    ranks.poll(3.0)
    ranks.poll(1000 * BUSY_S)
    text = ranks.processes[0].said
    assert text.count("rank 2 has not arrived within 3.") == 1 and ranks.verdict(0) == ""
    assert "note: its Python: train.py:102 in load" in text
    assert "note: the comparison of a step waits for it\nnote: run.jit(step, timeout=SECONDS) " in text
    conditions[102] = "stopped"
    ranks.poll(2000 * BUSY_S)
    assert ranks.verdict(0).startswith("rank 2 is stopped")


def test_a_rank_that_has_compared_or_waits_in_a_collective_does_not_end_a_comparison(
    conditions: dict[int, str],
):
    ranks = comparing(Ranks(3, range(3)), [0])
    began(ranks.recordings[1], LINE, runs=6, ends=True)
    put(ranks.recordings[1], comparison=4, left=1)
    began(ranks.recordings[2], LINE, runs=6)
    ranks.poll(BUSY_S - 5)
    assert ranks.verdict(0) == ""
    assert "rank 0 has not arrived within" in ranks.processes[2].said  # it may execute an earlier step


def test_a_comparison_does_not_keep_a_rank_in_a_collective_from_its_verdict(conditions: dict[int, str]):
    ranks = comparing(Ranks(4, range(4)), [0])
    put(ranks.recordings[0], comparison=1, group=0)  # of this rank alone, for the moment
    put(ranks.recordings[3], comparison=4, left=1)
    began(ranks.recordings[1], LINE, runs=6)
    began(ranks.recordings[3], LINE, runs=6, ends=True)
    conditions[102] = "stopped"
    ranks.poll(BOUND_S + 1)
    assert ranks.verdict(1).startswith("rank 2 is stopped")


@pytest.mark.parametrize(
    ("runs", "first"),
    [
        ("train", "rank 1 differs from rank 0"),
        ("evaluate", "rank 1 calls `train` while rank 0 runs `evaluate`"),
    ],
)
def test_a_rank_that_compares_a_step_while_others_run_it_is_refused(
    runs: str, first: str, conditions: dict[int, str]
):
    ranks = Ranks(3, range(3))
    for recording in ranks.recordings.values():
        began(recording, LINE)
        joins(recording, 5, name=runs, group=1)
    joins(ranks.recordings[1], 5, compares="rank 1", group=1)
    ranks.poll(1.5)
    for rank in range(3):
        assert ranks.verdict(rank).splitlines() == [
            f"CP0854: {first}",
            "note: rank 1 calls it at run.py:7 in main, and waits for the others to compare it",
            "note: rank 0 runs a step that all have compared before, at train.py:100 in load",
            "note: a fix" if runs == "train" else "note: every rank calls the same steps in the same order",
        ]


def test_a_comparison_of_long_names_is_shown_with_both_sides_and_its_line(conditions: dict[int, str]):
    ranks, place = Ranks(3, range(3)), f"/{'目' * 400}/run.py:7 in main"
    for recording in ranks.recordings.values():
        began(recording, LINE)
        joins(recording, 5, group=1)
    calls = JointCalls(ranks.recordings[1], 1)
    calls.number, calls.name = 4, "train"
    message = f"rank 1 calls `train` with {'参' * 600}: f32[2], {{}} with f32[3]"
    step = mock.Mock(comparison=Comparison("rank 1", "train", message, "a fix", place))
    with calls.ahead(step), calls.waiting():
        ranks.poll(1.5)
    first, calls_at, *_, fix = ranks.verdict(0).splitlines()
    assert first == f"CP0854: {message.replace('{}', 'rank 0')}" and fix == "note: a fix"
    assert "目/run.py:7 in main, and waits for the others to compare it" in calls_at


def test_ranks_that_compare_different_steps_get_no_verdict_but_their_own_error(conditions: dict[int, str]):
    ranks = Ranks(2, range(2))
    for rank, recording in ranks.recordings.items():
        began(recording, LINE, ends=True)
        joins(recording, 5, compares=f"rank {rank}", name=("train", "evaluate")[rank], group=1)
    ranks.poll(1000.0)
    assert ranks.verdict(0) == "" and ranks.processes[0].said == ""


def test_steps_of_ranks_that_compare_with_others_are_not_compared(conditions: dict[int, str]):
    """On a grid of 2 x 2, ranks compare along its second axis; rank 1 runs an earlier step or prepares it."""
    ranks = Ranks(4, [])
    for rank in range(4):
        recording = ranks.recordings[rank] = Recording("job", "x", rank, 4, {"row": 2, "column": 2})
        live.put_limits(recording, HangLimits(BOUND_S, BUSY_S))
        ranks.processes[rank] = FakeProcess(100 + rank)
        ranks.job.table.track(recording.path, ranks.processes[rank])
        began(recording, LINE, ends=True)
        joins(recording, 9 if rank > 1 else 4, group=0b10)
    joins(ranks.recordings[0], 5, compares="rank 0", group=0b10)
    ranks.poll(2.0)
    assert ranks.verdict(0) == ""
    live.put_comparison(ranks.recordings[1], live.position(5, 0), None, 0b10, is_ahead=True)
    ranks.poll(10.0)
    assert ranks.verdict(0) == ""
    joins(ranks.recordings[1], 5, group=0b10)
    ranks.poll(20.0)
    assert ranks.verdict(0).startswith("CP0854: rank 0 differs from rank 1")


def test_a_comparison_waits_for_the_ranks_along_its_axes(conditions: dict[int, str]):
    ranks = Ranks(2, [])
    for rank in range(4):
        recording = ranks.recordings[rank] = Recording("job", "x", rank, 4, {"row": 2, "column": 2})
        live.put_limits(recording, HangLimits(BOUND_S, BUSY_S))
        ranks.processes[rank] = FakeProcess(100 + rank)
        ranks.job.table.track(recording.path, ranks.processes[rank])
        put(recording, left=int(rank in (1, 2)))
    put(ranks.recordings[0], comparison=1, group=0b10, compares=time.monotonic_ns())
    ranks.poll(3.0)
    assert ranks.verdict(0).startswith("the program has ended on rank 1\nnote: rank 0 waits")


def test_ranks_at_their_end_wait_for_the_living_and_not_for_the_dead(conditions: dict[int, str]):
    ranks = Ranks(3, range(3))
    for rank in range(3):
        began(ranks.recordings[rank], LINE, ends=True)
        put(ranks.recordings[rank], left=2 * (rank < 2), parting=time.monotonic_ns() * (rank < 2))
    ranks.poll(20.0)
    assert ranks.processes[0].said == ""
    ranks.poll(30.0)
    assert "this process has ended and waits for rank 2" in ranks.processes[0].said
    ranks.processes[2].seconds = 1.0  # it has died
    ranks.poll(40.0)
    assert ranks.verdict(0).startswith("rank 2 has died, and all others have ended")


def test_a_rank_at_its_end_prints_that_another_waits_for_a_disk(conditions: dict[int, str]):
    ranks = Ranks(2, range(2))
    for rank, recording in ranks.recordings.items():
        began(recording, LINE, ends=True)
        put(recording, left=2 * (rank == 0), parting=time.monotonic_ns() * (rank == 0))
    conditions[101] = "stuck in the kernel"
    ranks.poll(BUSY_S - 5)
    said = ranks.processes[0].said
    assert "this process has ended and waits for rank 1" in said
    assert "waits for a disk or a file system, in no collective for" in said


def test_a_rank_that_has_died_at_its_end_waits_for_no_other(conditions: dict[int, str]):
    ranks = Ranks(3, range(3))
    for rank, recording in ranks.recordings.items():
        began(recording, LINE, ends=True)
        put(recording, left=2 * (rank == 0), parting=time.monotonic_ns() * (rank == 0))
    ranks.processes[0].seconds = 1.0
    ranks.poll(30.0)
    assert not any(process.said for process in ranks.processes.values())


def test_a_server_that_reports_is_not_named_and_a_busy_one_is(conditions: dict[int, str]):
    ranks = Ranks(2, [0], "requests")
    server = Recording("job", "x", 1, 2, lane="server")
    live.put_limits(server, HangLimits(BOUND_S, BUSY_S))
    ranks.job.table.track(server.path, FakeProcess(101))
    request = Lane(ranks.recordings[0])
    name = request.name(LINE, "request")
    request.awaits(name, request.begin(name, 7, 0), 1)
    put(ranks.recordings[0], waits=time.monotonic_ns(), moved=time.monotonic_ns())
    live.put_served(server, waits=False, patient=True, moved=True)
    ranks.poll(BUSY_S + 1)
    assert ranks.verdict(0) == ""
    put(server, served=1)  # long ago
    ranks.poll(BUSY_S + 5)
    assert "rank 1 has not arrived within" in ranks.verdict(0)
