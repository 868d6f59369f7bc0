"""What a thread says of batches that last, in the record of a run."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from commplan.runtime.input.observe import batch_record

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
