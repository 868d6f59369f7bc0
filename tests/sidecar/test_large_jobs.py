"""Jobs of up to 4,096 ranks on many hosts: one decision, and its answers from other hosts."""

from __future__ import annotations

import random
import select
import socket
import time
from collections.abc import Mapping

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.campaign import parameters
from support.observed_ranks import BUSY_S, FAR, HERE, LINE, OTHER_LINE, Ranks, began

from commplan.recorder.file import Record
from commplan.recorder.rank_state import Need, RankState, Wait
from commplan.recorder.verdict import Patience, Verdict, blame
from commplan.sidecar import process_table
from commplan.sidecar.mail import Address, SidecarMessage, open_socket, own_addresses, received, send
from commplan.sidecar.states import OpenRecord

HOST = 8  # ranks on a host
SIZES = parameters([96], [1000, 4096])
PATIENCE = Patience(bound=2.0, late=10.0)


def waiting(rank: int, needs: Need, where: str = LINE, runs: int = 5) -> RankState:
    """A rank that waits in `where`, whose last 48 calls are those of all ranks."""
    wait = Wait(where, 20.0, (needs,), f"reached {where}", runs)
    order = tuple((f"line {number % 12} of x.plan", number // 12) for number in range(48))
    return RankState(rank, waits=(wait,), begun={where: runs}, order=order, idle_s=20.0, process="process 7")


def decided(states: list[RankState]) -> Verdict:
    return blame({state.rank: state for state in states}, states[0].rank, PATIENCE)


@pytest.mark.parametrize("ranks", SIZES)
def test_the_one_culprit_of_many_ranks_is_named(ranks: int):
    everyone, culprit = Need.begin(range(ranks), LINE, 5), ranks - 1
    states = [waiting(rank, everyone) for rank in range(ranks)]
    assert decided(states).reasons == {} and decided(states[:1]).reasons == {}
    idle = states[culprit]._replace(waits=(), begun={LINE: 4})
    late = decided([*states[:culprit], idle])
    assert (late.kind, [*late.reasons], len(late.waiting)) == ("late", [culprit], ranks - 1)
    dead = decided([*states[:culprit], idle._replace(condition="dead", how="has died")])
    assert (dead.kind, [*dead.reasons]) == ("down", [culprit])
    assert decided(states[:culprit]).reasons == {}  # without the state of one rank


@pytest.mark.parametrize("ranks", SIZES)
def test_half_of_the_ranks_in_another_order_are_not_blamed_for_the_other_half(ranks: int):
    lines = (LINE, OTHER_LINE)
    needs = [Need.begin(range(ranks), line, 5) for line in lines]
    states = [waiting(rank, needs[rank % 2], lines[rank % 2]) for rank in range(ranks)]
    circle = decided(states)
    assert (circle.kind, circle.reasons, len(circle.waiting)) == ("circle", {}, ranks)
    usual = [waiting(rank, needs[0], lines[0]) for rank in range(2, ranks)]
    odd = [waiting(rank, needs[1], lines[1]) for rank in range(2)]
    assert [*decided([*usual, *odd]).reasons] == [0, 1]


@pytest.mark.parametrize("ranks", SIZES)
def test_all_hosts_of_a_job_answer_and_the_late_rank_is_named(ranks: int, conditions: dict[int, str]):
    """Records of two hosts; the states of the others are copies, sent and received as datagrams."""
    culprit, asked = ranks - 1, "job"
    here, far = Ranks(ranks, range(HOST)), Ranks(ranks, range(HOST, 2 * HOST))
    for recording in (*here.recordings.values(), *far.recordings.values()):
        began(recording, LINE)
    hosts = {tuple(range(n, min(n + HOST, ranks))): FAR._replace(port=n) for n in range(HOST, ranks, HOST)}
    here.job.hosts.add(hosts)
    far.job.hosts.add({tuple(range(HOST)): HERE})
    for members in hosts:
        here.job.receive(SidecarMessage(asked, "hello", members[0]))
    far.job.receive(SidecarMessage(asked, "ask", 0, 1))
    template = far.sent[-1].states
    now = time.monotonic() + BUSY_S
    with open_socket() as sender, open_socket() as receiver:
        places = own_addresses() or ("127.0.0.1",)
        address = Address("here", receiver.getsockname()[1], "key", places[:1])
        for turn in range(2):
            here.job.poll(now + turn)
            serial = here.sent[-1].serial
            for members in hosts:
                states = [s._replace(rank=n, idle_s=60.0) for n, s in zip(members, template, strict=False)]
                if culprit in members:
                    states[-1] = states[-1]._replace(waits=(), begun={LINE: 4})
                send(sender, SidecarMessage(asked, "answer", members[0], serial, tuple(states)), [address])
                select.select([receiver], [], [], 5)
                for message in received(receiver, "key"):
                    here.job.receive(message)
            here.job.poll(now + turn + 0.1)
    assert here.verdict(0).splitlines()[0].startswith(f"rank {culprit} has not arrived within")


def test_sidecars_that_have_not_answered_are_asked_again(conditions: dict[int, str]):
    ranks, lost = Ranks(3, [0]), FAR._replace(port=2)
    ranks.job.hosts.add({(1,): FAR, (2,): lost})
    for rank in (1, 2):
        ranks.job.receive(SidecarMessage("job", "hello", rank))
    began(ranks.recordings[0], LINE)
    now = time.monotonic() + 3
    ranks.job.poll(now)
    ranks.job.receive(SidecarMessage("job", "answer", 1, ranks.sent[-1].serial, (RankState(1),)))
    ranks.job.poll(now + 0.3)
    assert [message.kind for message in ranks.sent].count("ask") == 1
    ranks.job.poll(now + 0.6)
    assert ranks.sent[-1].kind == "ask" and ranks.receivers == [lost]
    assert ranks.sent[-1].serial == ranks.sent[-2].serial

    assert (ranks.sent[-2].is_repeat, ranks.sent[-1].is_repeat) == (False, True)


def test_ranks_of_a_host_whose_answer_is_lost_in_part_are_unknown(conditions: dict[int, str]):
    ranks = Ranks(3, [0])
    ranks.job.hosts.add({(1, 2): FAR})
    ranks.job.receive(SidecarMessage("job", "hello", 1))
    began(ranks.recordings[0], LINE)
    now = time.monotonic() + 3
    for turn in range(3):
        ranks.job.poll(now + 3 * turn)
        needs = Need.begin(range(3), LINE, 5)
        for seconds in (0.6, 1.2):
            states = (waiting(1, needs),)
            ranks.job.receive(SidecarMessage("job", "answer", 1, ranks.sent[-1].serial, states))
            ranks.job.poll(now + 3 * turn + seconds)
        ranks.job.poll(now + 3 * turn + 1.6)
    assert ranks.verdict(0) == ""
    for seconds in (60.0, 61.6, 62.2, 63.8):
        ranks.job.poll(now + seconds)
    assert ranks.verdict(0).startswith("each of ranks 1, 2 does not answer")  # once the host sends nothing


def test_many_hosts_that_ask_while_a_host_reads_its_records_are_answered_at_once(
    conditions: dict[int, str], monkeypatch: pytest.MonkeyPatch
):
    ranks = Ranks(4, [0])
    hosts = [FAR._replace(port=port) for port in (1, 2, 3)]
    ranks.job.hosts.add({(port,): hosts[port - 1] for port in (1, 2, 3)})
    began(ranks.recordings[0], LINE)
    now, reads = [time.monotonic()], list[float]()
    read = process_table.states_here

    def slow(records: Mapping[OpenRecord, Record], noun: str, when: float) -> dict[int, RankState]:
        reads.append(when)
        now[0] += 0.6
        return read(records, noun, when)

    monkeypatch.setattr(process_table, "states_here", slow)
    monkeypatch.setattr(process_table.time, "monotonic", lambda: now[0])
    for rank in (1, 2, 3):
        ranks.job.receive(SidecarMessage("job", "ask", rank, 1))
    assert len(reads) == 1 and [message.kind for message in ranks.sent] == ["answer"] * 3


def test_two_evaluations_of_another_host_do_not_get_the_same_answer(
    conditions: dict[int, str], monkeypatch: pytest.MonkeyPatch
):
    """They must agree, and the Python of a rank is that of its present wait only in the second."""
    ranks, now = Ranks(2, [0]), [time.monotonic()]
    ranks.job.hosts.add({(1,): FAR})
    monkeypatch.setattr(process_table.time, "monotonic", lambda: now[0])
    began(ranks.recordings[0], LINE)
    ranks.job.receive(SidecarMessage("job", "ask", 1, 1))
    ranks.processes[0].stack = "train.py:7 in main"
    now[0] += 0.5
    ranks.job.receive(SidecarMessage("job", "ask", 1, 2))
    assert [message.states[0].stack for message in ranks.sent] == [
        "train.py:100 in load",
        "train.py:7 in main",
    ]


def test_a_host_whose_records_take_long_to_read_waits_longer_for_others(
    conditions: dict[int, str], monkeypatch: pytest.MonkeyPatch
):
    """Their records take as long."""
    ranks = Ranks(2, [0])
    ranks.job.hosts.add({(1,): FAR})
    ranks.job.receive(SidecarMessage("job", "hello", 1))
    began(ranks.recordings[0], LINE)
    monkeypatch.setattr(ranks.job.table, "reading_s", 2.0)
    now = time.monotonic() + 3
    ranks.job.poll(now)
    ranks.job.poll(now + 7.9)
    assert ranks.sent[-1].kind == "ask" and ranks.sent[-1].serial == 1
    ranks.job.poll(now + 8.1)
    ranks.job.poll(now + 9.0)
    assert ranks.sent[-1].serial == 2


@pytest.mark.parametrize("is_repeat", [False, True])
def test_states_of_many_ranks_are_sent_in_several_datagrams(is_repeat: bool):
    stacks = random.Random(1).randbytes(64 * 2000).hex()  # which zlib cannot shorten by much
    needs = Need.begin(range(64), LINE, 5)
    states = tuple(waiting(n, needs)._replace(stack=stacks[4000 * n :][:4000]) for n in range(64))
    message, taken = SidecarMessage("job", "answer", 0, 3, states), dict[int, RankState]()
    with open_socket() as sender, open_socket() as receiver:
        address = Address("far", receiver.getsockname()[1], "k" * 32, (own_addresses() or ("127.0.0.1",))[:1])
        send(sender, msgspec.structs.replace(message, is_repeat=is_repeat), [address])
        while len(taken) < len(states) and select.select([receiver], [], [], 5)[0]:
            taken |= {state.rank: state for each in received(receiver, "k" * 32) for state in each.states}
    assert tuple(taken.values()) == states


def test_an_answer_whose_question_is_asked_again_is_sent_in_single_packets():
    """A network that drops fragments does not lose it."""
    message = SidecarMessage(
        "job", "answer", 0, 3, tuple(RankState(n, stack=str(n) * 99) for n in range(500))
    )
    sizes: dict[bool, list[int]] = {False: [], True: []}

    class Line(socket.socket):
        def sendto(self, data: bytes, *_: object) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
            sizes[is_repeat].append(len(data))
            return len(data)

    with Line(socket.AF_INET, socket.SOCK_DGRAM) as line:
        for is_repeat in sizes:
            send(line, msgspec.structs.replace(message, is_repeat=is_repeat), [FAR])
    assert len(sizes[False]) == 1 and len(sizes[True]) > 1 and max(sizes[True]) <= 1400


@given(st.lists(st.integers(0, 30), max_size=16))
def test_the_ranks_of_a_need_are_those_that_it_was_made_of(ranks: list[int]):
    assert [*Need.begin(ranks, LINE, 1).ranks] == sorted({*ranks})


def test_a_need_of_a_grid_has_few_spans():
    assert Need.begin(range(4096), LINE, 1).spans == ((0, 4096, 1),)
    assert Need.begin(range(3, 4096, 64), LINE, 1).spans == ((3, 4036, 64),)
