"""A process under `jax.distributed` that holds the others is named, and all end: no hang, and no alarm."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest
from support import interpreter, watched_processes
from support.campaign import parameters
from support.ports import free_port

from bench.faults import jax as processes
from bench.faults.campaign import Fault
from commplan.cli import main as command
from commplan.recorder.file import BEGIN, END, VERDICT
from commplan.recorder.reading import read_records
from commplan.runtime.observe.watchdog import EXIT_STATUS

LIMIT_S = 200


class End(NamedTuple):
    status: int
    text: str


def ended(words: list[str], records: Path, stopped: int | None = None) -> dict[int, End]:
    """How three processes end; `stopped` is killed once the others have."""
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    environment["COMMPLAN_RECORDS"] = str(records)
    port = str(free_port())
    jobs = {
        index: subprocess.Popen(
            [*interpreter.words(environment), *(word.format(port=port, index=index) for word in words)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        for index in range(3)
    }
    try:
        order = sorted(jobs, key=lambda index: index == stopped)
        ends: dict[int, End] = {}
        for index in order:
            if index == stopped:
                jobs[index].kill()
            text, _ = jobs[index].communicate(timeout=LIMIT_S)
            ends[index] = End(jobs[index].returncode, text)
        return ends
    finally:
        for job in jobs.values():
            job.kill()


def fault(kind: str, culprit: int, records: Path, stopped: int | None = None) -> dict[int, End]:
    words = ["-m", processes.__name__, *Fault("jax", kind, culprit, 6, 1000, "").words, "{port}", "{index}"]
    return ended(words, records, stopped)


def heads(ends: dict[int, End]) -> dict[int, list[str]]:
    return {index: re.findall(r"error\[CP0834\]: (.*)", end.text) for index, end in ends.items()}


@pytest.mark.parametrize("culprit", parameters([0], [1]))  # process 0 is the coordinator
def test_a_stopped_process_is_named_and_the_others_end(culprit: int, tmp_path: Path, capsys):
    ends = fault("stop", culprit, tmp_path, stopped=culprit)
    assert ends[culprit].status == -signal.SIGKILL
    for index in {0, 1, 2} - {culprit}:
        assert ends[index].status == EXIT_STATUS, ends[index].text
        assert heads(ends)[index] == [f"process {culprit} is stopped (SIGSTOP, or a debugger)"]
        assert "line 7 of <plan>, in `train` waits for it" in ends[index].text
        assert re.search(
            rf"process {culprit} is PID (\d+) on \S+, and lives: kill -CONT \1 lets it end", ends[index].text
        )
    records = {record.rank: record for record in read_records([str(tmp_path)])}
    verdicts = [event.name for event in records[2].events if event.kind == VERDICT]
    assert verdicts == [f"process {culprit} is stopped (SIGSTOP, or a debugger)"]
    begun = [event for event in records[2].events if event.kind == BEGIN]
    assert len(begun) == 13 and begun[-1].name == "line 7 of <plan>, in `train`" and begun[-1].runs == 7
    assert len([event for event in records[2].events if event.kind == END]) == 12
    assert command(["blame", str(tmp_path)]) == 1
    assert f": process {culprit} is stopped" in capsys.readouterr().out
    assert command(["trace", str(tmp_path), "-o", str(tmp_path / "trace.json")]) == 0


def test_a_process_that_keeps_the_lock_is_named_with_its_python(tmp_path: Path):
    """None of its threads can answer: the sidecar requests its stack by a signal, and waits `busy_s`."""
    words = [watched_processes.__file__, "{port}", "{index}", "lock"]
    ends = ended(words, tmp_path, stopped=1)
    for index in (0, 2):
        assert ends[index].status == EXIT_STATUS, ends[index].text
        (head,) = heads(ends)[index]
        assert head.startswith("process 1 has not arrived within ")
        stack = (
            r"note: its Python: \S+ in backtrack, from \S+ in main, from .*; it holds the interpreter's lock"
        )
        assert re.search(stack, ends[index].text)


def test_ctrl_c_ends_a_process_that_waits_in_a_step(tmp_path: Path):
    """JAX's wait lets no signal in; the bound of the watchdog is far away."""
    words = [watched_processes.__file__, "{port}", "{index}", "ctrl-c"]
    ends = ended(words, tmp_path, stopped=1)
    for index in (0, 2):
        assert ends[index].status == 130, ends[index].text
        assert "commplan: interrupted: line 5 of <plan>, in `step` has not ended for" in ends[index].text
        assert "process 1 is stopped (SIGSTOP, or a debugger)" in ends[index].text  # others may have ended
        assert "Traceback" not in ends[index].text


def test_a_process_that_sleeps_is_named_with_what_it_does_and_interrupted(tmp_path: Path):
    ends = fault("sleep", 2, tmp_path)
    for end in ends.values():
        assert end.status == EXIT_STATUS, end.text
        assert "error[CP0834]: process 2 has not arrived within " in end.text
        assert "in `look`, 6 times so far" in end.text
        assert re.search(r"its Python: \S+campaign\.py:\d+ in happen, from ", end.text)
    assert "KeyboardInterrupt" in ends[2].text and "KeyboardInterrupt" not in ends[0].text


@pytest.mark.parametrize("culprit", parameters([0], [1]))
def test_a_killed_process_is_named(culprit: int, tmp_path: Path):
    """By the others, or by the sidecar if JAX aborts them first, as it does without its coordinator."""
    ends = fault("kill", culprit, tmp_path)
    lines = [head for heads_of_process in heads(ends).values() for head in heads_of_process]
    assert lines and all(re.match(rf"process {culprit} (has died|\(.*\) was killed)", head) for head in lines)
    text = "".join(end.text for end in ends.values())
    assert re.search(r"line 7 of <plan>, in `train`( failed| waits for it|, run 7)", text), text
    assert all(ends[index].status in (EXIT_STATUS, -signal.SIGABRT) for index in {0, 1, 2} - {culprit})


def test_a_program_that_ends_early_tells_the_others(tmp_path: Path):
    ends = fault("exit", 1, tmp_path)
    for index in (0, 2):
        assert ends[index].status == EXIT_STATUS, ends[index].text
        assert heads(ends)[index] == ["the program has ended on process 1"]
        assert "line 7 of <plan>, in `train` waits for it" in ends[index].text


def test_an_exception_is_said_on_all(tmp_path: Path):
    ends = fault("raise", 0, tmp_path)
    assert ends[0].status == 1 and "ArithmeticError: loss is not finite" in ends[0].text
    for index in (1, 2):
        assert ends[index].status == EXIT_STATUS, ends[index].text
        assert heads(ends)[index] == [
            "the program has ended on process 0: ArithmeticError: loss is not finite"
        ]


@pytest.mark.parametrize("kind", parameters(["skip"], ["order"]))
def test_another_order_of_steps_is_said_with_both(kind: str, tmp_path: Path):
    ends = fault(kind, 1, tmp_path)
    lines = [head for heads_of_process in heads(ends).values() for head in heads_of_process]
    order = (
        "the processes call their steps in another order: process 1 `look` as call 13, processes 0, 2 `train`"
    )
    assert set(lines) == {order}
    assert all(end.status in (EXIT_STATUS, -signal.SIGABRT) for end in ends.values())


def test_who_does_not_bind_is_named_while_the_others_wait():
    outcome = processes.judged(Fault("jax", "before sleep", 1, 6, 1000, ""))
    assert outcome.right, outcome.text
    waits = "note: process 0 waits in `program.bind` of `faulty`"
    assert f"commplan: process 1 has not arrived within 2 s\n{waits}\n" in outcome.text


@pytest.mark.parametrize("mode", parameters(["late", "fork"], ["none", "rhythm"]))
def test_no_alarm(mode: str, tmp_path: Path):
    """Of a process that said so, without a watchdog, for steps as slow as ever, for the end of a child."""
    ends = ended([watched_processes.__file__, "{port}", "{index}", mode], tmp_path)
    for end in ends.values():
        assert end.status == 0 and "finished" in end.text and "CP0834" not in end.text, end.text
    assert not list(tmp_path.iterdir())


def test_a_phase_outside_of_a_step_is_watched(tmp_path: Path):
    ends = ended([watched_processes.__file__, "{port}", "{index}", "phase"], tmp_path)
    for end in ends.values():
        assert end.status == EXIT_STATUS, end.text
        assert "process 1 has not arrived within " in end.text
        assert "line 5 of <plan>, in `step` waits for it" in end.text
