"""The Python stack of a process, requested from outside by a signal."""

from __future__ import annotations

import faulthandler
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

from commplan.recorder import file
from commplan.recorder.file import STACK_SIGNAL, path_of
from commplan.recorder.reading import read_records, writer
from commplan.recorder.stacks import main_stack, stacks

PROGRAM = """
import faulthandler, re, signal, sys, threading, time
from commplan.recorder.file import offer_stacks_of_process, start_recording
def backtrack():
    re.match("(a+)+$", "a" * 40 + "b")  # for years, in C, with the interpreter's lock
def rest():
    time.sleep(600)
if sys.argv[1] == "own":
    signal.signal(signal.SIGRTMIN + 11, lambda *_: None)
offer_stacks_of_process()
assert start_recording("5f0c", "p", 0, 1)
start_recording("5f0d", "p", 0, 1).remove()  # for a run that has ended
threading.Thread(target=rest, daemon=True).start()
if sys.argv[1] == "ignored":
    faulthandler.unregister(signal.SIGRTMIN + 11)
print("ready", flush=True)
{"c": backtrack}.get(sys.argv[1], rest)()
"""
TWICE = """
import os, sys
from commplan.recorder.file import offer_stacks_of_process, start_recording
offer_stacks_of_process()
records = [start_recording(job, "p", 0, 1) for job in ("5f0c", "5f0d")]
if os.fork() == 0:
    sys.exit()  # by the handlers that it has of its parent
os.wait()
print("ready", flush=True)
sys.stdin.readline()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))
    return tmp_path


def test_signals_that_cannot_be_had_cost_no_descriptor(monkeypatch: pytest.MonkeyPatch):
    def refused(*_: object, **__: object) -> None:
        raise RuntimeError("no such signal")

    monkeypatch.setattr(file, "_stacks", [])
    monkeypatch.setattr(file, "_offers", [True])
    monkeypatch.setattr(file, "is_handled", lambda *_: False)
    monkeypatch.setattr(faulthandler, "register", refused)
    before = len(list(Path("/proc/self/fd").iterdir()))
    recording = file.start_recording("5f0c", "p", 0, 1)
    assert recording is not None and writer(recording.path)[1] == 0
    assert len(list(Path("/proc/self/fd").iterdir())) == before + 1  # of the record's memory
    recording.remove()


@pytest.fixture
def started(request: pytest.FixtureRequest) -> Generator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, request.param], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@pytest.mark.parametrize("started", ["c"], indirect=True)
def test_a_process_in_c_that_keeps_the_lock_is_asked(started: subprocess.Popen[str]):
    record = path_of("5f0c", 0)
    main, *other_threads = stacks(record)
    while "match" not in main[0] or not other_threads[0][0].endswith(" in rest"):  # it has yet to come there
        main, *other_threads = stacks(record)
    assert [frame.rpartition(" in ")[2] for frame in main] == ["match", "backtrack", "<module>"]
    assert main_stack(record).startswith(main[1])
    (read,) = read_records([str(record)])  # later bytes are not part of it
    assert read.rank == 0 and started.poll() is None


@pytest.mark.parametrize("started", ["sleep"], indirect=True)
def test_who_is_stopped_or_another_process_is_not_asked(started: subprocess.Popen[str], place: Path):
    record = path_of("5f0c", 0)
    with subprocess.Popen(["sleep", "600"]) as other:
        content = record.read_bytes()
        copy = place / "copy.rec"  # of a process that has ended, whose number another one has now
        copy.write_bytes(
            content.replace(started.pid.to_bytes(8, "little"), other.pid.to_bytes(8, "little"), 1)
        )
        assert stacks(copy) == [] and other.poll() is None
        other.kill()
    started.send_signal(signal.SIGSTOP)
    assert stacks(record) == []
    assert stacks(place / "none.rec") == []


@pytest.mark.parametrize("started", ["sleep"], indirect=True)
def test_a_record_has_no_other_signal_sent(started: subprocess.Popen[str]):
    record = path_of("5f0c", 0)
    for number in (signal.SIGKILL, signal.SIGUSR1, signal.SIGRTMIN + 12, 2**40, -1):
        with record.open("r+b") as file:
            file.seek(STACK_SIGNAL)
            file.write(int(number).to_bytes(8, "little", signed=True))
        assert stacks(record) == []
    assert started.poll() is None


@pytest.mark.parametrize("started", ["ignored"], indirect=True)
def test_a_process_that_does_not_handle_the_signal_gets_none(started: subprocess.Popen[str]):
    assert stacks(path_of("5f0c", 0)) == []
    assert started.poll() is None


@pytest.mark.parametrize("started", ["own"], indirect=True)
def test_a_program_that_uses_the_signal_keeps_it(started: subprocess.Popen[str]):
    assert stacks(path_of("5f0c", 0)) == []


def test_each_record_of_a_process_tells_its_stacks_until_that_ends(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("COMMPLAN_KEEP_RECORDS", "1")
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", TWICE], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        paths = [path_of(job, 0) for job in ("5f0c", "5f0d")]
        for path in paths:
            assert main_stack(path).endswith(" in <module>")
            (read,) = read_records([str(path)])
            assert read.ended == ""  # the child was another process
        process.communicate("\n")
    assert [writer(path)[1] for path in paths] == [0, 0]
    assert [record.ended for record in read_records([str(place)])] == 2 * ["has ended"]
