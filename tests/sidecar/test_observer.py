"""The observer of jobs: alarms, evaluations that must agree, hosts, and verdicts."""

from __future__ import annotations

import json
import re
import struct
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from commplan.hang_limits import HangLimits
from commplan.recorder import live
from commplan.recorder.file import BEGIN, END, EVENT, EVENTS, HEAD, LIVE, Call, Details, Recording, put_name
from commplan.recorder.lane import Lane
from commplan.recorder.verdict import Comparison, RankState, Wait
from commplan.sidecar import observer, states
from commplan.sidecar.mail import Address, SidecarMessage, open_socket, own_addresses, received, send
from commplan.sidecar.observer import Job

LINE, OTHER_LINE = "line 6 of x.plan", "line 7 of x.plan"
BOUND_S, BUSY_S = 2.0, 30.0
FAR, HERE = Address("far", 1, "key", ("10.0.0.2",)), Address("here", 2, "own", ("10.0.0.1",))


class FakeProcess:
    """A process of the tests. `said`: the text that was printed on its standard error."""

    def __init__(self, number: int) -> None:
        self.number, self.seconds, self.queried_at = number, 0.0, 0.0
        self.stack, self.said = f"train.py:{number} in load", ""

    def ask_stack(self) -> None:
        pass

    def say(self, text: str) -> None:
        self.said += text


class Ranks:
    """A job of `ranks` ranks, of which those in `local` are on this host. `sent`: messages to other hosts."""

    def __init__(self, ranks: int, local: Sequence[int], lane: str = "") -> None:
        self.sent: list[SidecarMessage] = []
        self.receivers: list[Address] = []
        self.job = Job("job", self.send, HERE)
        self.recordings: dict[int, Recording] = {}
        self.processes: dict[int, FakeProcess] = {}
        for rank in local:
            axes = {"data": ranks} if not lane else None
            recording = self.recordings[rank] = Recording("job", "x", rank, ranks, axes, lane)
            live.put_limits(recording, HangLimits(BOUND_S, BUSY_S))
            process = self.processes[rank] = FakeProcess(100 + rank)
            self.job.add(recording.path, process)

    def send(self, message: SidecarMessage, to: Sequence[Address]) -> None:
        self.sent.append(message)
        self.receivers = list(to)

    def look(self, after_s: float = 0.0) -> None:
        """Look twice, at this time and when the first result is confirmed."""
        now = time.monotonic() + after_s
        self.job.look(now)
        self.job.look(now + 0.6)

    def verdict(self, rank: int) -> str:
        """The verdict in the record of a rank, whenever it applies."""
        recording = self.recordings[rank]
        (effective,) = struct.unpack_from("<q", recording.memory, LIVE + 128)
        return recording.memory[LIVE + 144 : LIVE + 4000].split(b"\0")[0].decode() if effective else ""


def put(recording: Recording, **fields: int) -> None:
    """Write fields of the `Live` block, as the engine does."""
    for name, value in fields.items():
        struct.pack_into("<q", recording.memory, LIVE + 8 * live.Live._fields.index(name), value)


def began(recording: Recording, line: str, *, runs: int = 5, ends: bool = False) -> None:
    """Record that a rank has begun `line` for the `runs`th time, and finished it before."""
    details = Details("all_reduce", "ring", 0, "f32", 0, "", ("data",))
    index = int(line == OTHER_LINE)
    put_name(recording.memory, index, f"{line}\0{details.text()}")
    now, (head,) = time.monotonic_ns(), struct.unpack_from("<q", recording.memory, HEAD)
    events = [(kind, run) for run in range(1, runs + 1) for kind in (BEGIN, END)]
    for kind, run in events if ends else events[:-1]:
        at = EVENTS + EVENT.size * head
        when = now - (runs - run) * 10_000_000 + (kind == END) * 1000
        EVENT.pack_into(recording.memory, at, when, kind, index, 100 * index + run, run, 0)
        head += 1
    struct.pack_into("<q", recording.memory, HEAD, head)
    put(recording, moved=now, waits=0 if ends else now)


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))


@pytest.fixture(name="conditions")
def _conditions(monkeypatch: pytest.MonkeyPatch) -> dict[int, str]:
    """The conditions of processes by number; the others are alive."""
    conditions: dict[int, str] = {}
    monkeypatch.setattr(states, "process_state", lambda number: conditions.get(number, "alive"))
    return conditions


def waiting(ranks: Ranks, late: int) -> Ranks:
    """All ranks but `late` wait in line 6."""
    for rank, recording in ranks.recordings.items():
        began(recording, LINE, runs=5 - (rank == late), ends=rank == late)
    return ranks


def test_a_rank_that_waits_within_its_bound_is_not_evaluated(conditions: dict[int, str]):
    ranks = waiting(Ranks(3, range(3)), late=1)
    conditions[101] = "stopped"
    ranks.look(1.0)
    assert ranks.verdict(0) == ""


def test_a_stopped_rank_is_named_on_all_ranks_once_two_looks_agree(conditions: dict[int, str]):
    ranks = waiting(Ranks(3, range(3)), late=1)
    conditions[101] = "stopped"
    ranks.job.look(time.monotonic() + 3)
    assert ranks.verdict(0) == ""
    ranks.look(3.6)
    for rank in range(3):
        text = ranks.verdict(rank)
        assert text.startswith("rank 1 is stopped (SIGSTOP, or a debugger)\nnote: rank 1 is PID 101 on ")
        assert "note: ranks 0, 2 wait" in text


def test_a_late_rank_is_printed_after_the_first_runs_and_named_after_busy_s(conditions: dict[int, str]):
    ranks = waiting(Ranks(3, range(3)), late=1)
    ranks.look(3.0)
    said = ranks.processes[0].said
    assert "rank 1 has not arrived within" in said and f"note: {LINE} waits for it" in said
    assert "its Python: train.py:101 in load" in said and "the limit is 30 s" in said
    assert ranks.verdict(0) == ""
    ranks.look(BUSY_S + 1)
    assert ranks.processes[0].said == said and not ranks.processes[2].said
    assert "the limit is 30 s" in ranks.verdict(2)


def test_first_runs_may_compile(conditions: dict[int, str]):
    ranks = Ranks(2, range(2))
    began(ranks.recordings[0], LINE, runs=1)
    ranks.look(20.0)
    assert ranks.processes[0].said == ""
    ranks.look(25.0)
    assert "rank 1 has not arrived within" in ranks.processes[0].said


@pytest.mark.parametrize("field", ["late", "left"])
def test_a_rank_that_announces_late_work_or_has_ended_is_not_named(field: str, conditions: dict[int, str]):
    ranks = waiting(Ranks(3, range(3)), late=1)
    put(ranks.recordings[1], **{field: 1})
    ranks.look(1000.0)
    assert ranks.verdict(0) == "" and ranks.processes[0].said == ""


def test_another_order_is_named_after_the_bound_with_both_lines(conditions: dict[int, str]):
    ranks = Ranks(3, range(3))
    for rank in range(3):
        began(ranks.recordings[rank], LINE if rank else OTHER_LINE)
    ranks.look(3.0)
    assert "the ranks wait for one another since" in ranks.verdict(0)
    assert f"rank 0 waits in {OTHER_LINE}" in ranks.verdict(1) and f"rank 1 waits in {LINE}" in ranks.verdict(
        1
    )


def test_a_rank_without_the_lock_is_shown_as_holding_it(conditions: dict[int, str]):
    ranks = waiting(Ranks(2, range(2)), late=1)
    ranks.processes[1].stack, ranks.processes[1].queried_at = "", 1.0
    ranks.look(3.0)
    assert "its Python: it holds the interpreter's lock" in ranks.processes[0].said


def test_on_hang_report_prints_once_and_ends_nothing(conditions: dict[int, str]):
    ranks = waiting(Ranks(2, range(2)), late=1)
    for recording in ranks.recordings.values():
        put(recording, ends=0)
    conditions[101] = "stopped"
    ranks.look(3.0)
    ranks.look(5.0)
    assert ranks.verdict(0) == "" and ranks.processes[0].said.count("rank 1 is stopped") == 1


def test_on_hang_report_does_not_end_ranks_that_wait_for_the_dead_at_their_end(conditions: dict[int, str]):
    ranks = Ranks(2, range(2))
    for rank, recording in ranks.recordings.items():
        began(recording, LINE, ends=True)
        put(recording, ends=0, left=2 * (rank == 0), parting=time.monotonic_ns() * (rank == 0))
    ranks.processes[1].seconds = 1.0  # it has died
    ranks.look(3.0)
    ranks.look(5.0)
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
    ranks.look(1.0)
    assert ranks.verdict(0) == ""
    ranks.look(BOUND_S + 0.1)
    first, note, waiting = ranks.verdict(0).splitlines()
    assert (first, waiting) == ("the program has ended on rank 2", "note: ranks 0, 1 wait")
    assert f"last finished {LINE}, 5 times so far" in note and ranks.verdict(2) == ranks.verdict(0)


def test_a_comparison_ends_if_a_rank_is_stopped_and_not_if_it_is_late(conditions: dict[int, str]):
    ranks = comparing(Ranks(3, range(3)), [0, 1])
    ranks.look(3.0)
    ranks.look(1000 * BUSY_S)
    text = ranks.processes[0].said
    assert text.count("rank 2 has not arrived within 3.") == 1 and ranks.verdict(0) == ""
    assert "note: its Python: train.py:102 in load" in text
    assert "note: the comparison of a step waits for it\nnote: run.jit(step, timeout=SECONDS) " in text
    conditions[102] = "stopped"
    ranks.look(2000 * BUSY_S)
    assert ranks.verdict(0).startswith("rank 2 is stopped")


def test_a_rank_that_has_compared_or_waits_in_a_collective_does_not_end_a_comparison(
    conditions: dict[int, str],
):
    ranks = comparing(Ranks(3, range(3)), [0])
    began(ranks.recordings[1], LINE, runs=6, ends=True)
    put(ranks.recordings[1], comparison=4, left=1)
    began(ranks.recordings[2], LINE, runs=6)
    ranks.look(BUSY_S - 5)
    assert ranks.verdict(0) == ""
    assert "rank 0 has not arrived within" in ranks.processes[2].said  # it may execute an earlier step


def test_a_comparison_does_not_keep_a_rank_in_a_collective_from_its_verdict(conditions: dict[int, str]):
    ranks = comparing(Ranks(4, range(4)), [0])
    put(ranks.recordings[0], comparison=1, group=0)  # of this rank alone, for the moment
    put(ranks.recordings[3], comparison=4, left=1)
    began(ranks.recordings[1], LINE, runs=6)
    began(ranks.recordings[3], LINE, runs=6, ends=True)
    conditions[102] = "stopped"
    ranks.look(BOUND_S + 1)
    assert ranks.verdict(1).startswith("rank 2 is stopped")


def test_a_comparison_waits_for_the_ranks_along_its_axes(conditions: dict[int, str]):
    ranks = Ranks(2, [])
    for rank in range(4):
        recording = ranks.recordings[rank] = Recording("job", "x", rank, 4, {"row": 2, "column": 2})
        live.put_limits(recording, HangLimits(BOUND_S, BUSY_S))
        ranks.processes[rank] = FakeProcess(100 + rank)
        ranks.job.add(recording.path, ranks.processes[rank])
        put(recording, left=int(rank in (1, 2)))
    put(ranks.recordings[0], comparison=1, group=0b10, compares=time.monotonic_ns())
    ranks.look(3.0)
    assert ranks.verdict(0).startswith("the program has ended on rank 1\nnote: rank 0 waits")


def test_ranks_at_their_end_wait_for_the_living_and_not_for_the_dead(conditions: dict[int, str]):
    ranks = Ranks(3, range(3))
    for rank in range(3):
        began(ranks.recordings[rank], LINE, ends=True)
        put(ranks.recordings[rank], left=2 * (rank < 2), parting=time.monotonic_ns() * (rank < 2))
    ranks.look(20.0)
    assert ranks.processes[0].said == ""
    ranks.look(30.0)
    assert "this process has ended and waits for rank 2" in ranks.processes[0].said
    ranks.processes[2].seconds = 1.0  # it has died
    ranks.look(40.0)
    assert ranks.verdict(0).startswith("rank 2 has died, and all others have ended")


def test_a_server_that_reports_is_not_named_and_a_busy_one_is(conditions: dict[int, str]):
    ranks = Ranks(2, [0], "requests")
    server = Recording("job", "x", 1, 2, lane="server")
    live.put_limits(server, HangLimits(BOUND_S, BUSY_S))
    ranks.job.add(server.path, FakeProcess(101))
    request = Lane(ranks.recordings[0])
    name = request.name(LINE, "request")
    request.awaits(name, request.begin(name, 7, 0), 1)
    put(ranks.recordings[0], waits=time.monotonic_ns(), moved=time.monotonic_ns())
    live.put_served(server, waits=False, patient=True, moved=True)
    ranks.look(BUSY_S + 1)
    assert ranks.verdict(0) == ""
    put(server, served=1)  # long ago
    ranks.look(BUSY_S + 5)
    assert "rank 1 has not arrived within" in ranks.verdict(0)


def state(rank: int, *, waits: bool) -> RankState:
    wait = Wait(LINE, 3.0, missing=f"reached {LINE}", runs=5)
    return RankState(rank, waits=(wait,) if waits else (), idle_s=60.0, process="process 7 on far")


def test_ranks_of_other_hosts_are_asked_and_a_host_that_is_silent_is_named(conditions: dict[int, str]):
    ranks = Ranks(4, range(2))
    ranks.job.add_hosts({(2, 3): FAR})
    for recording in ranks.recordings.values():
        began(recording, LINE)
    now = time.monotonic()
    ranks.look(BUSY_S + 3)
    assert ranks.sent[0].kind == "hello" and ranks.verdict(0) == ""  # never heard, so not known to be silent
    ranks.job.take(SidecarMessage("job", "hello", 2))
    ranks.job.look(now + BUSY_S + 10)
    (question,) = [message for message in ranks.sent[-1:] if message.kind == "ask"]
    for rank in (2, 3):
        answer = SidecarMessage("job", "answer", 2, question.serial, state(rank, waits=rank == 2))
        ranks.job.take(answer)
    ranks.job.look(now + BUSY_S + 10.2)
    ranks.job.look(now + BUSY_S + 11)
    for rank in (2, 3):
        answer = SidecarMessage("job", "answer", 2, ranks.sent[-1].serial, state(rank, waits=rank == 2))
        ranks.job.take(answer)
    ranks.job.look(now + BUSY_S + 11.2)
    assert "rank 3 has not arrived within" in ranks.verdict(1) and "process 7 on far" in ranks.verdict(1)
    assert ranks.sent[-1].kind == "verdict" and ranks.sent[-1].text == ranks.verdict(0)


def test_a_host_that_falls_silent_is_named(conditions: dict[int, str]):
    ranks = Ranks(4, range(2))
    ranks.job.add_hosts({(2, 3): FAR})
    ranks.job.take(SidecarMessage("job", "hello", 2))
    for recording in ranks.recordings.values():
        began(recording, LINE)
    now = time.monotonic()
    for seconds in (3.0, 4.6, 5.2, 6.8):
        ranks.job.look(now + seconds)
    assert "rank 2 does not answer: it is stopped or dead, or host far cannot be reached" in ranks.verdict(0)


def test_a_sidecar_that_replaces_a_killed_one_is_reached_at_its_own_address(conditions: dict[int, str]):
    ranks, new = Ranks(4, range(2)), FAR._replace(port=7, key="new")
    ranks.job.add_hosts({(2, 3): FAR})
    ranks.job.take(SidecarMessage("job", "hello", 2, address=FAR))
    ranks.job.take(SidecarMessage("job", "hello", 2, address=new))
    assert (ranks.sent[-1].kind, ranks.sent[-1].is_reply, ranks.sent[-1].address) == ("hello", True, HERE)
    assert ranks.receivers == [new]
    sent = len(ranks.sent)
    ranks.job.take(SidecarMessage("job", "hello", 3, address=new, is_reply=True))
    assert len(ranks.sent) == sent
    for recording in ranks.recordings.values():
        began(recording, LINE)
    ranks.job.look(time.monotonic() + 3)
    assert ranks.sent[-1].kind == "ask" and ranks.receivers == [new]


def test_questions_are_answered_and_verdicts_are_written(conditions: dict[int, str]):
    ranks = waiting(Ranks(4, range(2)), late=1)
    ranks.job.add_hosts({(2, 3): FAR})
    ranks.job.take(SidecarMessage("job", "ask", 2, 9))
    answers = [message for message in ranks.sent if message.kind == "answer"]
    assert [(answer.serial, answer.sender) for answer in answers] == [(9, 0), (9, 0)]
    first, second = (answer.state for answer in answers)
    assert first is not None and first.waits[0].where == LINE
    assert {need.rank for need in first.waits[0].needs} == {0, 1, 2, 3}
    assert second is not None and second.stack == "train.py:101 in load"
    ranks.job.take(SidecarMessage("job", "verdict", 7, text="of no host of the job"))
    ranks.job.take(SidecarMessage("job", "verdict", 2, text="rank 3 is stopped", line=LINE))
    assert ranks.verdict(0) == "rank 3 is stopped"


def test_datagrams_reach_the_sidecar_whose_key_they_have():
    with open_socket() as one, open_socket() as other:
        places = own_addresses() or ("127.0.0.1",)
        message = SidecarMessage("job", "answer", 0, 3, state(2, waits=True))
        for key in ("wrong", "right"):
            send(one, message, [Address("far", other.getsockname()[1], key, places[:1])])
        other.settimeout(5)
        assert other.recv(5) == b"wrong"
        assert list(received(other, "right")) == [message]


STEP = "line 7 of x.plan, in `train`"


class Processes(Ranks):
    """A job of three processes of which whole steps are recorded: all have begun step 4 and ended step 3."""

    def __init__(self, groups: Sequence[tuple[int, ...]] = ((0, 1, 2),)) -> None:
        super().__init__(3, [])
        self.observer = observer.Observer(self.send, HERE)
        self.processes = {number: FakeProcess(100 + number) for number in range(3)}
        self.of_group: dict[tuple[int, ...], dict[int, Recording]] = {group: {} for group in groups}
        for group, recordings in self.of_group.items():
            for number in group:
                name = "".join(map(str, group))
                recordings[number] = recording = Recording(name, "x", number, 3)
                live.put_limits(recording, HangLimits(BOUND_S, BUSY_S))
                path, process = recording.path, self.processes[number]
                self.observer.add("job", path, process, "process", group)
        self.recordings = self.of_group[groups[0]]
        (self.job,) = self.observer.jobs


def in_step(recording: Recording, number: int, *, ends: bool = False, name: str = STEP) -> None:
    """Record that a process has begun step `number`, and ended it before if `ends`."""
    began(recording, name, runs=number, ends=ends)
    put(recording, comparison=number)


def test_a_process_whose_program_has_ended_is_named_after_a_second_with_its_reason(
    conditions: dict[int, str],
):
    processes = Processes()
    for number, recording in processes.recordings.items():
        in_step(recording, 5 - (number == 1), ends=number == 1)
    processes.look(0.3)
    assert processes.verdict(0) == ""
    processes.recordings[1].put_end("has ended with ArithmeticError: loss is not finite")
    live.put_left(processes.recordings[1])
    processes.job.look(time.monotonic() + 1.5)
    first, *notes = processes.verdict(0).splitlines()
    assert first == "the program has ended on process 1: ArithmeticError: loss is not finite"
    assert re.fullmatch(rf"note: process 1 \(process 101 on \S+\) last finished {STEP}, 4 times .*", notes[0])
    assert processes.sent == []


def test_a_step_that_all_processes_have_begun_is_printed_and_ends_nothing(conditions: dict[int, str]):
    processes = Processes()
    for recording in processes.recordings.values():
        in_step(recording, 5)
    processes.look(1000.0)
    assert re.fullmatch(
        rf"commplan: {STEP} has not ended for \d+ s; no process is late for it\n", processes.processes[0].said
    )
    assert processes.verdict(0) == ""


def test_a_process_in_a_step_of_another_mesh_is_not_late(conditions: dict[int, str]):
    """Processes 0 and 1 wait for one another on two meshes: process 2 holds both."""
    whole, pair = (0, 1, 2), (1, 2)
    processes = Processes([whole, pair])
    for number in whole:
        in_step(processes.of_group[whole][number], 5 - (number > 0), ends=number > 0)
    for number in pair:
        in_step(processes.of_group[pair][number], 9 - (number == 2), ends=number == 2)
    processes.look(BUSY_S + 1)
    assert processes.verdict(0).startswith("process 2 has not arrived within")
    assert "process 1 " not in processes.verdict(0)


def test_processes_that_compile_are_waited_for_though_only_one_knows_the_lines(conditions: dict[int, str]):
    processes = Processes()
    for number, recording in processes.recordings.items():
        in_step(recording, 5, name="`train`" if number else STEP)
    processes.look(1000.0)
    assert processes.verdict(0) == "" and "in another order" not in processes.processes[0].said


def compares(recording: Recording, number: int) -> None:
    comparison = Comparison("process 1", "train", "process 1 differs from {}", "a fix", "run.py:7 in main")
    recording.put_call(Call(json.dumps(comparison), 0.0))
    live.put_comparison(recording, number, time.monotonic(), is_ahead=True)


def test_a_process_that_compares_a_step_while_others_run_it_is_refused(conditions: dict[int, str]):
    processes = Processes()
    for recording in processes.recordings.values():
        in_step(recording, 5)
    compares(processes.recordings[1], 5)
    processes.look(1.5)
    assert processes.verdict(2).splitlines() == [
        "CP0854: process 1 differs from process 0",
        "note: process 1 calls it at run.py:7 in main, and waits for the others to compare it",
        "note: process 0 runs a step that all have compared before, at train.py:100 in load",
        "note: a fix",
    ]


def test_processes_that_prepare_the_step_or_run_an_earlier_one_are_waited_for(conditions: dict[int, str]):
    processes = Processes()
    for number, recording in processes.recordings.items():
        in_step(recording, 4 + (number < 2))
    live.put_comparison(processes.recordings[0], 5, None, is_ahead=True)
    compares(processes.recordings[1], 5)
    processes.look(1.5)
    assert processes.verdict(0) == "" and processes.processes[1].said == ""


def test_a_step_that_fails_is_explained_by_the_process_that_has_died(conditions: dict[int, str]):
    processes = Processes()
    for recording in processes.recordings.values():
        in_step(recording, 5, ends=True)
    live.put_failure(processes.recordings[0], is_aborted=False)
    processes.look(0.1)
    assert live.is_answered(processes.recordings[0]) and processes.verdict(0) == ""
    live.put_failure(processes.recordings[0], is_aborted=False)
    assert not live.is_answered(processes.recordings[0])
    conditions[102] = "dead"
    processes.look(3.0)
    assert processes.verdict(0).startswith("process 2 has died")


def test_a_process_whose_thread_does_not_run_is_late_in_the_next_step(conditions: dict[int, str]):
    """The end of its step is not recorded, since a thread of it holds the interpreter's lock."""
    processes = Processes()
    for number, recording in processes.recordings.items():
        in_step(recording, 5 - (number == 1))
    put(processes.recordings[1], beat=1)
    processes.processes[1].stack, processes.processes[1].queried_at = "", 1.0
    processes.look(BUSY_S + 1)
    assert processes.verdict(0).startswith("process 1 has not arrived within")
    assert "its Python: it holds the interpreter's lock" in processes.verdict(0)


def test_other_hosts_evaluate_soon_once_a_process_has_ended_elsewhere(conditions: dict[int, str]):
    processes = Processes()
    in_step(processes.recordings[0], 5, ends=True)
    processes.job.add_hosts({(7,): FAR})
    live.put_left(processes.recordings[0])
    processes.look(0.1)
    assert [message.kind for message in processes.sent].count("gone") == 1
    ranks = Ranks(4, range(2))
    ranks.job.add_hosts({(2, 3): FAR})
    for recording in ranks.recordings.values():
        put(recording, bound_ns=10**12)
        began(recording, LINE)
    ranks.look(3.0)
    assert [message.kind for message in ranks.sent] == ["hello"]
    ranks.job.take(SidecarMessage("job", "gone", 2))
    ranks.look(3.0)
    assert ranks.sent[-1].kind == "ask"


@pytest.mark.parametrize("ends", [True, False])
def test_a_stopped_process_is_named(ends: bool, conditions: dict[int, str]):
    """Also if it was stopped before its thread recorded the end of its last step."""
    processes = Processes()
    for number, recording in processes.recordings.items():
        in_step(recording, 5 - (number == 0), ends=ends and number == 0)
    conditions[100] = "stopped"
    processes.look(BOUND_S + 1)
    assert processes.verdict(1).startswith(
        "process 0 is stopped (SIGSTOP, or a debugger)\nnote: process 0 is PID"
    )
