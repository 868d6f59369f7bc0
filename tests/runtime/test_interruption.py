"""Ctrl-C while a step waits: a program that catches it and continues is left alone."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from commplan.recorder import live
from commplan.runtime.observe import interruption, watchdog


class EndedError(Exception):
    pass


def test_a_verdict_is_taken_though_standard_error_is_a_pipe_without_a_reader(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread of the watchdog ends the process afterwards."""

    def write(_: str) -> None:
        raise BrokenPipeError

    verdict = live.WrittenVerdict("CP0834", "process 1 is stopped", (), "")
    process: Any = SimpleNamespace(_verdict=verdict, _is_printed=False, _settled=threading.Event())
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=write))
    watchdog.Watchdog._print_verdict(process)
    monkeypatch.undo()
    assert process._settled.is_set()


@pytest.mark.parametrize("began_s", [1.0, 60.0])
def test_a_step_that_began_after_it_is_another_one(began_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread may wait at the same place of the program as when Ctrl-C came, in a later step."""

    def leave(status: int) -> None:
        assert status == interruption.STATUS
        raise EndedError

    monkeypatch.setattr(interruption, "end_process", leave)
    monkeypatch.setattr(watchdog, "is_interruptible", lambda: True)
    calls = SimpleNamespace(
        median_s=lambda: 0.1, began=lambda: time.monotonic() - began_s, processes=(0, 1),
        current=lambda: "line 5", recording=None,
    )  # fmt: skip
    process: Any = SimpleNamespace(_waits=lambda: calls, _end_reason=None, number=0, _leave=lambda _: None)
    end_interrupted = watchdog.Watchdog._end_interrupted
    if began_s < 30:
        end_interrupted(process, 30.0)
    else:
        with pytest.raises(EndedError):
            end_interrupted(process, 30.0)
