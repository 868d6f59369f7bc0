"""What is said of a job of which nobody is left, from how its processes ended."""

from __future__ import annotations

import signal
import struct
from pathlib import Path

import pytest

from commplan.recorder.file import EVENT, EVENTS, FAILED, HEAD, NAMES, VERDICT, Recording, put_name
from commplan.sidecar.ending import described
from commplan.sidecar.judgement import Ended, judgement, note

KILLED, TERMINATED = int(signal.SIGKILL), int(signal.SIGTERM)


def end(rank: int, status: int | None, seconds: float, *records: Path) -> Ended:
    return Ended(100 + rank, f"rank {rank}", status, seconds, records)


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (None, "has died"),
        (0, ""),
        (3 << 8, "exited with status 3 in the middle of its program"),
        (KILLED, "was killed (SIGKILL)"),
        (int(signal.SIGABRT) | 0x80, "was aborted (SIGABRT)"),
        (int(signal.SIGBUS), "crashed (SIGBUS)"),
        (TERMINATED, "was ended (SIGTERM)"),
        (40, "was ended by signal 40"),
    ],
)
def test_how_a_process_ended(status: int | None, text: str) -> None:
    assert described(status) == text


def test_the_first_that_nobody_asked_to_end_is_named() -> None:
    text = judgement([end(0, TERMINATED, 5.0), end(1, KILLED, 5.0), end(2, TERMINATED, 5.1)], 0)
    assert text.startswith("error[CP0834]: rank 1 (process 101) was killed (SIGKILL)\n")
    assert text.index("rank 0 (process 100) was ended (SIGTERM)") < text.index("rank 2 (process 102)")
    assert "want of memory" not in text
    assert "meanwhile the kernel has killed 2 for want of memory" in judgement([end(1, KILLED, 5.0)], 2)


def test_who_is_killed_after_others_were_asked_to_end_is_not() -> None:
    assert judgement([end(0, TERMINATED, 5.0), end(1, KILLED, 6.0)], 0) == ""
    assert judgement([end(0, TERMINATED, 5.0)], 0) == ""


@pytest.mark.parametrize("damage", ["cut", "capacity", "head", "names", "link"])
def test_a_damaged_record_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))
    recording = Recording("job", "killed", 0, 2)
    path = recording.path
    fields = {"capacity": (HEAD - 8, 0), "head": (HEAD, 2**63 - 1), "names": (NAMES, -5)}
    if damage in fields:
        at, value = fields[damage]
        struct.pack_into("<q", recording.memory, at, value)
    if damage == "cut":
        path = tmp_path / "cut.rec"
        path.write_bytes(recording.path.read_bytes()[:200])
    if damage == "link":
        path = tmp_path / "link.rec"
        path.symlink_to(recording.path)
    before = path.read_bytes()
    note([path], "was killed (SIGKILL)")
    assert path.read_bytes() == before
    note([recording.path], "was killed (SIGKILL)")
    assert (b"was killed" in recording.path.read_bytes()) == (damage not in fields)


@pytest.mark.parametrize("kind", [VERDICT, FAILED])
def test_what_a_rank_has_recorded_is_not_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))
    recording = Recording("job", "killed", 0, 2)
    ends = [end(0, KILLED, 5.0, recording.path)]
    assert "rank 0" in judgement(ends, 0)
    put_name(recording.memory, 0, "line 5")
    EVENT.pack_into(recording.memory, EVENTS, 1, kind, 0, 1, 1, 0)
    struct.pack_into("<q", recording.memory, HEAD, 1)
    assert judgement(ends, 0) == ""
