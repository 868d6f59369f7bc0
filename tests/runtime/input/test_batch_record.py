"""The entries that a thread writes about long batches into the record of a run."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any, cast

import pytest

from commplan.recorder.file import Call, Recording
from commplan.recorder.lane import Lane
from commplan.recorder.reading import read_call
from commplan.runtime.input.observe import batch_record
from commplan.runtime.input.program import FIRST_BATCH

# pyright: reportPrivateUsage=false


def test_one_record_that_fails_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looks: list[str] = []

    class Ended(BaseException):
        """Of the thread, which otherwise never ends."""

    class Record:
        def __init__(self, name: str) -> None:
            self.name = name

        def look(self) -> None:
            looks.append(self.name)
            if self.name == "broken":
                raise OSError("the disk is full")
            if looks.count(self.name) == 3:
                raise Ended

    records = [Record("broken"), Record("whole")]
    watched = cast("Any", set(records))
    monkeypatch.setattr(batch_record, "_watched", watched)
    monkeypatch.setattr(batch_record, "TICK_S", 0.001)
    failures: list[type[BaseException]] = []

    def run() -> None:
        try:
            batch_record._look()
        except Ended as end:
            failures.append(type(end))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert failures == [Ended] and looks.count("broken") == 1
    assert "the disk is full" in caplog.text


def test_a_record_that_is_closed_says_of_no_call_that_it_lasts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))
    recording = Recording("5f0c", "plan", 0, 1)
    record = batch_record.BatchRecord(Lane(recording), "line 9 of x.plan", FIRST_BATCH, None)
    record._call = lambda: Call("source `a`", time.monotonic() - 60.0, "a.py:3 in f")
    record.look()
    call = read_call(recording.path)
    assert call is not None and call.text == "source `a`"
    record.close()
    assert read_call(recording.path) is None
