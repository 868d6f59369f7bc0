"""The message for a job without any live process."""

from __future__ import annotations

import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from commplan.recorder.file import (
    BEGIN,
    EVENT,
    EVENTS,
    FAILED,
    HEAD,
    MAGIC,
    NAMES,
    VERDICT,
    Recording,
    append_end,
    put_name,
)
from commplan.recorder.last_words import last_words, read_jobs
from commplan.sidecar.ending import described

KILLED, TERMINATED = "was killed (SIGKILL)", "was ended (SIGTERM)"


@pytest.fixture(name="place")
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))
    return tmp_path


def words(*ends: tuple[int, str, float], killed: int = 0) -> str:
    """The message about ranks that ended so, at these seconds."""
    paths: list[Path] = []
    for rank, end, seconds in ends:
        recording = Recording("job", "killed", rank, 3)
        paths.append(recording.path)
        append_end(recording.path, end, seconds)
    text = last_words(read_jobs(paths), "rank", killed)
    for path in paths:
        path.unlink()
    return text


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (None, "has died"),
        (0, ""),
        (3 << 8, "exited with status 3 in the middle of its program"),
        (int(signal.SIGKILL), KILLED),
        (int(signal.SIGABRT) | 0x80, "was aborted (SIGABRT)"),
        (int(signal.SIGBUS), "crashed (SIGBUS)"),
        (int(signal.SIGTERM), TERMINATED),
        (40, "was ended by signal 40"),
    ],
)
def test_how_a_process_ended(status: int | None, text: str) -> None:
    assert described(status) == text


@pytest.mark.usefixtures("place")
def test_the_first_that_died_by_itself_is_named() -> None:
    text = words((0, TERMINATED, 5.0), (1, KILLED, 5.0), (2, TERMINATED, 5.1))
    head, first, second, *_ = text.splitlines()
    assert head.startswith("error[CP0834]: rank 1 (process ") and head.endswith(KILLED)
    assert first.endswith(TERMINATED) and second.endswith(TERMINATED)
    assert "lack of memory" not in text and "other hosts" not in text
    text = words((1, KILLED, 5.0), killed=2)
    assert "the kernel killed 2 processes on this host for lack of memory" in text and "other hosts" in text


@pytest.mark.usefixtures("place")
def test_a_process_that_was_killed_after_others_were_asked_to_end_is_not_named() -> None:
    assert words((0, TERMINATED, 5.0), (1, KILLED, 6.0)) == ""
    assert words((0, TERMINATED, 5.0)) == ""
    assert last_words([], "rank", 0) == ""


@pytest.mark.parametrize("damage", ["cut", "capacity", "head", "names", "link"])
def test_a_damaged_record_is_left_as_it_is(place: Path, damage: str) -> None:
    recording = Recording("job", "killed", 0, 2)
    path = recording.path
    fields = {"capacity": (HEAD - 8, 0), "head": (HEAD, 2**63 - 1), "names": (NAMES, -5)}
    if damage in fields:
        at, value = fields[damage]
        struct.pack_into("<q", recording.memory, at, value)
    if damage == "cut":
        path = place / "cut.rec"
        path.write_bytes(recording.path.read_bytes()[:200])
    if damage == "link":
        path = place / "link.rec"
        path.symlink_to(recording.path)
    before = path.read_bytes()
    with pytest.raises((OSError, ValueError)):
        append_end(path, KILLED, 5.0)
    assert path.read_bytes() == before
    if damage not in fields:
        append_end(recording.path, KILLED, 5.0)
    assert (b"was killed" in recording.path.read_bytes()) == (damage not in fields)


@pytest.mark.parametrize("kind", [VERDICT, FAILED])
@pytest.mark.usefixtures("place")
def test_a_failure_that_a_rank_has_recorded_is_not_reported_again(kind: int) -> None:
    recording = Recording("job", "killed", 0, 2)
    append_end(recording.path, KILLED, 5.0)
    assert "rank 0 (process" in last_words(read_jobs([recording.path]), "rank", 0)
    put_name(recording.memory, 1, "line 5")
    EVENT.pack_into(recording.memory, EVENTS + EVENT.size, 1, kind, 1, 1, 1, 0)
    struct.pack_into("<q", recording.memory, HEAD, 2)
    assert last_words(read_jobs([recording.path]), "rank", 0) == ""


@pytest.mark.usefixtures("place")
def test_processes_that_were_aborted_for_another_order_are_explained() -> None:
    """A communication library aborts processes whose messages do not match."""
    paths: list[Path] = []
    for rank, step in enumerate(("train", "look", "train")):
        recording = Recording("job", "steps", rank, 3)
        put_name(recording.memory, 0, f"line 7 of x.plan, in `{step}`")
        EVENT.pack_into(recording.memory, EVENTS, 1, BEGIN, 0, 1, 1, 0)
        struct.pack_into("<q", recording.memory, HEAD, 1)
        append_end(recording.path, "was aborted (SIGABRT)", 5.0 + rank)
        paths.append(recording.path)
    text = last_words(read_jobs(paths), "process", 0)
    order = (
        "the processes call their steps in another order: process 1 `look` as call 1, processes 0, 2 `train`"
    )
    assert text.startswith(f"error[CP0834]: {order}\n")
    assert "note: process 0 (process " in text and "was aborted (SIGABRT) in line 7 of x.plan" in text


@pytest.mark.usefixtures("place")
def test_an_exception_on_another_process_explains_an_abort(monkeypatch: pytest.MonkeyPatch) -> None:
    recordings = [Recording("job", "steps", rank, 2) for rank in range(2)]
    monkeypatch.setattr(sys, "last_value", ArithmeticError("loss"), raising=False)
    recordings[0].remove()
    append_end(recordings[1].path, "was aborted (SIGABRT)", 5.0)
    with subprocess.Popen(["true"]) as ended:
        ended.wait()
    struct.pack_into("<q", recordings[0].memory, len(MAGIC) + 8, ended.pid)
    text = last_words(read_jobs([recordings[1].path]), "process", 0)
    head, note, *_ = text.splitlines()
    assert head == "error[CP0834]: the program has ended on process 0: ArithmeticError: loss"
    assert "process 1 (process " in note and note.endswith("was aborted (SIGABRT)")
