"""The observer of jobs whose processes record whole steps."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence

import pytest
from support.observed_ranks import BOUND_S, BUSY_S, FAR, HERE, LINE, FakeProcess, Ranks, began, joins, put

from commplan.hang_limits import HangLimits
from commplan.recorder import live
from commplan.recorder.file import LIVE, Recording
from commplan.sidecar import observer
from commplan.sidecar.mail import SidecarMessage

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
    joins(recording, number)


def test_a_process_whose_program_has_ended_is_named_after_a_second_with_its_reason(
    conditions: dict[int, str],
):
    processes = Processes()
    for number, recording in processes.recordings.items():
        in_step(recording, 5 - (number == 1), ends=number == 1)
    processes.poll(0.3)
    assert processes.verdict(0) == ""
    processes.recordings[1].put_end("has ended with ArithmeticError: loss is not finite")
    live.put_left(processes.recordings[1])
    processes.job.poll(time.monotonic() + 1.5)
    first, *notes = processes.verdict(0).splitlines()
    assert first == "the program has ended on process 1: ArithmeticError: loss is not finite"
    assert re.fullmatch(rf"note: process 1 \(process 101 on \S+\) last finished {STEP}, 4 times .*", notes[0])
    assert processes.sent == []


def test_a_step_that_all_processes_have_begun_is_printed_and_ends_nothing(conditions: dict[int, str]):
    processes = Processes()
    for recording in processes.recordings.values():
        in_step(recording, 5)
    processes.poll(1000.0)
    assert re.fullmatch(
        rf"commplan: {STEP} has not ended for \d+ s; no process is late for it\n", processes.processes[0].said
    )
    assert processes.verdict(0) == ""


def test_a_damaged_record_does_not_keep_others_from_their_verdict(conditions: dict[int, str]):
    processes = Processes()
    for recording in processes.recordings.values():
        in_step(recording, 5)
    os.truncate(processes.recordings[2].path, 100)
    conditions[101] = "stopped"
    processes.poll(BOUND_S + 1)
    for record in processes.job.table[:2]:
        assert os.pread(record.descriptor, 4096, LIVE + 144).startswith(b"process 1 is stopped")


def test_an_evaluation_that_fails_is_reported_once(
    conditions: dict[int, str], monkeypatch: pytest.MonkeyPatch
):
    def fail(*_: object) -> None:
        raise KeyError("of the sidecar")

    processes = Processes()
    monkeypatch.setattr(processes.job, "poll", fail)
    for _ in range(3):
        processes.observer.poll()
    text = processes.processes[0].said
    assert text.startswith("commplan: ranks that block others are not reported: Traceback")
    assert text.count("KeyError: 'of the sidecar'") == 1


def test_a_process_in_a_step_of_another_mesh_is_not_late(conditions: dict[int, str]):
    """Processes 0 and 1 wait for one another on two meshes: process 2 holds both."""
    whole, pair = (0, 1, 2), (1, 2)
    processes = Processes([whole, pair])
    for number in whole:
        in_step(processes.of_group[whole][number], 5 - (number > 0), ends=number > 0)
    for number in pair:
        in_step(processes.of_group[pair][number], 9 - (number == 2), ends=number == 2)
    processes.poll(BUSY_S + 1)
    assert processes.verdict(0).startswith("process 2 has not arrived within")
    assert "process 1 " not in processes.verdict(0)


def test_processes_that_compile_are_waited_for_though_only_one_knows_the_lines(conditions: dict[int, str]):
    processes = Processes()
    for number, recording in processes.recordings.items():
        in_step(recording, 5, name="`train`" if number else STEP)
    processes.poll(1000.0)
    assert processes.verdict(0) == "" and "in another order" not in processes.processes[0].said


def test_a_process_that_compares_a_step_while_others_run_it_is_refused(conditions: dict[int, str]):
    processes = Processes()
    for recording in processes.recordings.values():
        in_step(recording, 5)
    joins(processes.recordings[1], 5, compares="process 1")
    processes.poll(1.5)
    assert processes.verdict(2).splitlines() == [
        "CP0854: process 1 differs from process 0",
        "note: process 1 calls it at run.py:7 in main, and waits for the others to compare it",
        "note: process 0 runs a step that all have compared before, at train.py:100 in load",
        "note: a fix",
    ]


def test_the_line_of_a_process_that_holds_the_lock_is_unknown_in_a_message_about_its_step(
    conditions: dict[int, str],
):
    processes = Processes()
    for recording in processes.recordings.values():
        in_step(recording, 5)
    joins(processes.recordings[1], 5, compares="process 1")
    processes.processes[0].stack, processes.processes[0].queried_at = "", 1.0
    processes.poll(1.5)
    assert ", at an unknown line; it holds the interpreter's lock\n" in processes.verdict(2)


def test_processes_that_prepare_the_step_or_run_an_earlier_one_are_waited_for(conditions: dict[int, str]):
    processes = Processes()
    for number, recording in processes.recordings.items():
        in_step(recording, 4 + (number < 2))
    live.put_comparison(processes.recordings[0], live.position(5, 1), None, is_ahead=True)
    joins(processes.recordings[1], 5, compares="process 1")
    processes.poll(1.5)
    assert processes.verdict(0) == "" and processes.processes[1].said == ""


def test_a_step_that_fails_is_explained_by_the_process_that_has_died(conditions: dict[int, str]):
    processes = Processes()
    for recording in processes.recordings.values():
        in_step(recording, 5, ends=True)
    live.put_failure(processes.recordings[0], is_aborted=False)
    processes.poll(0.1)
    assert live.is_answered(processes.recordings[0]) and processes.verdict(0) == ""
    live.put_failure(processes.recordings[0], is_aborted=False)
    assert not live.is_answered(processes.recordings[0])
    conditions[102] = "dead"
    processes.poll(3.0)
    assert processes.verdict(0).startswith("process 2 has died")


@pytest.mark.parametrize("waits", [True, False])
def test_processes_that_jax_aborts_are_not_named_for_the_one_that_has_died(
    waits: bool, conditions: dict[int, str]
):
    processes = Processes()
    for number, recording in processes.recordings.items():
        in_step(recording, 5, ends=number > 0 and not waits)
    processes.processes[0].seconds = 1.0
    for number in (1, 2):
        live.put_failure(processes.recordings[number], is_aborted=True)
    processes.poll(1.0)
    text = processes.verdict(1)
    assert text.startswith("process 0 has died\n") and "abort" not in text and "process 0 wait" not in text


@pytest.mark.parametrize("condition", ["alive", "stuck in the kernel"])
def test_a_process_whose_thread_does_not_run_is_late_in_the_next_step(
    condition: str, conditions: dict[int, str]
):
    """The end of its step is not recorded, since a thread of it holds the interpreter's lock."""
    processes = Processes()
    conditions[101] = condition
    for number, recording in processes.recordings.items():
        in_step(recording, 5 - (number == 1))
    put(processes.recordings[1], beat=1)
    processes.processes[1].stack, processes.processes[1].queried_at = "", 1.0
    processes.poll(3.0)
    assert processes.verdict(0) == "" and "process 1 has not arrived within" in processes.processes[0].said
    processes.poll(BUSY_S + 1)
    if condition == "alive":
        assert processes.verdict(0).startswith("process 1 has not arrived within")
        assert "its Python: an unknown line; it holds the interpreter's lock" in processes.verdict(0)
    else:
        assert processes.verdict(0).startswith("process 1 is stuck in the kernel")


def test_a_process_that_waits_for_a_disk_in_a_step_is_named_after_busy_s(conditions: dict[int, str]):
    """It may write a file while devices compute the step."""
    processes = Processes()
    for recording in processes.recordings.values():
        in_step(recording, 5)
    conditions[101] = "stuck in the kernel"
    processes.poll(BUSY_S - 5)
    assert processes.verdict(0) == ""
    processes.poll(BUSY_S + 1)
    assert processes.verdict(0).startswith("process 1 is stuck in the kernel")


@pytest.mark.parametrize("condition", ["alive", "stuck in the kernel"])
def test_a_step_that_fails_is_not_explained_by_a_process_that_works(
    condition: str, conditions: dict[int, str]
):
    processes = Processes()
    for recording in processes.recordings.values():
        in_step(recording, 5, ends=True)
    conditions[101] = condition
    live.put_failure(processes.recordings[0], is_aborted=False)
    processes.poll(1.0)
    assert live.is_answered(processes.recordings[0]) and processes.verdict(0) == ""


def test_other_hosts_evaluate_soon_once_a_process_has_ended_elsewhere(conditions: dict[int, str]):
    processes = Processes()
    in_step(processes.recordings[0], 5, ends=True)
    processes.job.hosts.add({(7,): FAR})
    live.put_left(processes.recordings[0])
    processes.poll(0.1)
    assert [message.kind for message in processes.sent].count("gone") == 1
    ranks = Ranks(4, range(2))
    ranks.job.hosts.add({(2, 3): FAR})
    for recording in ranks.recordings.values():
        put(recording, bound_ns=10**12)
        began(recording, LINE)
    ranks.poll(3.0)
    assert [message.kind for message in ranks.sent] == ["hello"]
    ranks.job.receive(SidecarMessage("job", "gone", 2))
    ranks.poll(3.0)
    assert ranks.sent[-1].kind == "ask"


@pytest.mark.parametrize("ends", [True, False])
def test_a_stopped_process_is_named(ends: bool, conditions: dict[int, str]):
    """Also if it was stopped before its thread recorded the end of its last step."""
    processes = Processes()
    for number, recording in processes.recordings.items():
        in_step(recording, 5 - (number == 0), ends=ends and number == 0)
    conditions[100] = "stopped"
    processes.poll(BOUND_S + 1)
    assert processes.verdict(1).startswith(
        "process 0 is stopped (SIGSTOP, or a debugger)\nnote: process 0 is PID"
    )


@pytest.mark.parametrize("fault", ["alive", "stopped", "stuck in the kernel", "dead", "ended", "order"])
def test_on_hang_report_names_the_process_without_a_limit_and_ends_none(
    fault: str, conditions: dict[int, str]
):
    processes = Processes()
    for number, recording in processes.recordings.items():
        is_culprit = number == 1
        name = f"`{'look' if is_culprit and fault == 'order' else 'train'}`"
        in_step(
            recording, 5 - (is_culprit and fault != "order"), ends=is_culprit and fault != "order", name=name
        )
        put(recording, ends=0)
    conditions[101] = fault
    processes.processes[1].seconds = float(fault == "dead")
    if fault == "ended":
        live.put_left(processes.recordings[1])
    for seconds in (3.0, BUSY_S + 3, 100 * BUSY_S):
        processes.poll(seconds)
    said = processes.processes[0].said
    assert "process 1" in said and "the limit is" not in said
    assert [processes.verdict(number) for number in range(3)] == ["", "", ""]
