"""The observer of jobs on several hosts: messages, silent hosts, and records of other sidecars."""

from __future__ import annotations

import os
import select
import time

import pytest
from support.observed_ranks import BOUND_S, BUSY_S, FAR, HERE, LINE, FakeProcess, Ranks, began, waiting

from commplan.hang_limits import HangLimits
from commplan.recorder import live
from commplan.recorder.file import Recording
from commplan.recorder.rank_state import RankState, Wait
from commplan.sidecar import hosts
from commplan.sidecar.mail import Address, SidecarMessage, open_socket, own_addresses, received, send


def test_hosts_that_join_a_job_later_have_as_long_to_be_heard(
    conditions: dict[int, str], monkeypatch: pytest.MonkeyPatch
):
    ranks, now = Ranks(4, range(2)), time.monotonic()
    monkeypatch.setattr(hosts.time, "monotonic", lambda: now + 100)
    ranks.job.hosts.add({(2, 3): FAR})
    for seconds, times in ((101, 0), (129, 0), (131, 1), (140, 1)):
        ranks.job.poll(now + seconds)
        assert ranks.processes[0].said.count("no datagrams from far") == times


def test_hosts_that_are_never_heard_are_reported_on_a_process_that_runs(conditions: dict[int, str]):
    ranks = Ranks(4, range(2))
    ranks.job.hosts.add({(2, 3): FAR})
    ranks.processes[0].seconds = 1.0
    ranks.poll(31.0)
    assert ranks.processes[0].said == "" and "no datagrams from far: ranks" in ranks.processes[1].said


def state(rank: int, *, waits: bool) -> RankState:
    wait = Wait(LINE, 3.0, missing=f"reached {LINE}", runs=5)
    return RankState(rank, waits=(wait,) if waits else (), idle_s=60.0, process="process 7 on far")


def test_ranks_of_other_hosts_are_asked_and_a_host_that_is_silent_is_named(conditions: dict[int, str]):
    ranks = Ranks(4, range(2))
    ranks.job.hosts.add({(2, 3): FAR})
    for recording in ranks.recordings.values():
        began(recording, LINE)
    now = time.monotonic()
    ranks.poll(BUSY_S + 3)
    assert ranks.sent[0].kind == "hello" and ranks.verdict(0) == ""  # never heard, so not known to be silent
    ranks.job.receive(SidecarMessage("job", "hello", 2))
    ranks.job.poll(now + BUSY_S + 10)
    (question,) = [message for message in ranks.sent[-1:] if message.kind == "ask"]
    for rank in (2, 3):
        answer = SidecarMessage("job", "answer", 2, question.serial, (state(rank, waits=rank == 2),))
        ranks.job.receive(answer)
    ranks.job.poll(now + BUSY_S + 10.2)
    ranks.job.poll(now + BUSY_S + 11)
    for rank in (2, 3):
        answer = SidecarMessage("job", "answer", 2, ranks.sent[-1].serial, (state(rank, waits=rank == 2),))
        ranks.job.receive(answer)
    ranks.job.poll(now + BUSY_S + 11.2)
    assert "rank 3 has not arrived within" in ranks.verdict(1) and "process 7 on far" in ranks.verdict(1)
    assert ranks.sent[-1].kind == "verdict" and ranks.sent[-1].text == ranks.verdict(0)


def test_a_host_that_falls_silent_is_named(conditions: dict[int, str]):
    ranks = Ranks(4, range(2))
    ranks.job.hosts.add({(2, 3): FAR})
    ranks.job.receive(SidecarMessage("job", "hello", 2))
    for recording in ranks.recordings.values():
        began(recording, LINE)
    now = time.monotonic()
    for seconds in (3.0, 4.6, 5.2, 6.8):
        ranks.job.poll(now + seconds)
    assert ranks.verdict(0).splitlines()[0] == (
        "each of ranks 2, 3 does not answer: it is stopped or dead, or host far cannot be reached"
    )


def test_a_sidecar_that_replaces_a_killed_one_is_reached_at_its_own_address(conditions: dict[int, str]):
    ranks, new = Ranks(4, range(2)), FAR._replace(port=7, key="new")
    ranks.job.hosts.add({(2, 3): FAR})
    ranks.job.receive(SidecarMessage("job", "hello", 2, address=FAR))
    ranks.job.receive(SidecarMessage("job", "hello", 2, address=new))
    assert (ranks.sent[-1].kind, ranks.sent[-1].is_reply, ranks.sent[-1].address) == ("hello", True, HERE)
    assert ranks.receivers == [new]
    sent = len(ranks.sent)
    ranks.job.receive(SidecarMessage("job", "hello", 3, address=new, is_reply=True))
    assert len(ranks.sent) == sent
    for recording in ranks.recordings.values():
        began(recording, LINE)
    ranks.job.poll(time.monotonic() + 3)
    assert ranks.sent[-1].kind == "ask" and ranks.receivers == [new]


def test_questions_are_answered_and_verdicts_are_written(conditions: dict[int, str]):
    ranks = waiting(Ranks(4, range(2)), late=1)
    ranks.job.hosts.add({(2, 3): FAR})
    ranks.job.receive(SidecarMessage("job", "ask", 2, 9))
    answers = [message for message in ranks.sent if message.kind == "answer"]
    assert [(answer.serial, answer.sender) for answer in answers] == [(9, 0)]
    first, second = answers[0].states
    assert first.waits[0].where == LINE and second.stack == "train.py:101 in load"
    assert [*first.waits[0].needs[0].ranks] == [0, 1, 2, 3]
    ranks.job.receive(SidecarMessage("job", "verdict", 7, text="of no host of the job"))
    ranks.job.receive(SidecarMessage("job", "verdict", 2, text="rank 3 is stopped", line=LINE))
    assert ranks.verdict(0) == "rank 3 is stopped"


def test_a_record_that_was_removed_is_read_from_its_descriptor(conditions: dict[int, str]):
    ranks = Ranks(2, [0])
    recording = Recording("job", "x", 1, 2, {"data": 2}, "")
    live.put_limits(recording, HangLimits(BOUND_S, BUSY_S))
    descriptor = os.open(recording.path, os.O_RDWR)
    recording.path.unlink()
    ranks.job.table.track(recording.path, FakeProcess(101), descriptor=descriptor)
    assert ranks.job.table.ranks == {0, 1} and [each.rank for each in ranks.job.table] == [0, 1]


def test_a_rank_without_a_record_is_said_to_be_unknown(conditions: dict[int, str]):
    ranks = Ranks(3, [0, 1])
    for recording in ranks.recordings.values():
        began(recording, LINE)
    ranks.poll(60)
    ranks.poll(70)
    assert ranks.processes[0].said.count("the state of rank 2 is unknown here\n") == 1


def test_datagrams_reach_the_sidecar_whose_key_they_have():
    with open_socket() as one, open_socket() as other:
        places = own_addresses() or ("127.0.0.1",)
        message = SidecarMessage("job", "answer", 0, 3, (state(2, waits=True),))
        for key in ("wrong", "right"):
            send(one, message, [Address("far", other.getsockname()[1], key, places[:1])])
        assert other.recv(5) == b"wrong"
        select.select([other], [], [], 5)
        assert list(received(other, "right")) == [message]
