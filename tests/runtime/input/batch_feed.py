"""Batches for the tests of the data runtime, and their checks."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest
from input_plans import FUNCTIONS

from commplan.diagnostics import CommplanError
from commplan.ir.schedule import Schedule
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.iterator import PhaseBatches

DATA4 = "axis data = 4"


def batches(program: Schedule, source: object, phase: str = "step", **more: Any) -> PhaseBatches:
    """Batches of `program` with the functions of `input_plans` and one source for all its loads."""
    functions = {**FUNCTIONS, **more.pop("functions", {})}
    names = {s.name for s in program.sources}
    return PhaseBatches(program, phase, dict.fromkeys(names, source), functions, **more)


def by_name(program: Schedule, batch: HostBatch, phase: str = "step") -> dict[str, np.ndarray[Any, Any]]:
    return {b.name: batch.values[b.value] for b in program.phase(phase).outputs if b.value in batch.values}


def epoch(program: Schedule, source: object, **more: Any) -> list[dict[str, np.ndarray[Any, Any]]]:
    with batches(program, source, **more) as feed:
        return [by_name(program, batch) for batch in feed]


def code(error: pytest.ExceptionInfo[CommplanError]) -> str:
    return error.value.diagnostics[0].code


def ours() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("commplan")]


@pytest.fixture
def no_thread_is_left_behind(small_heap: None):
    yield
    deadline = time.monotonic() + 10
    while gc.collect() >= 0 and ours() and time.monotonic() < deadline:
        time.sleep(0.01)  # a thread that has been stopped may still be on its way out
    assert ours() == []
