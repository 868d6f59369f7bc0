"""A source or a host function that does not return: the consumer of its batch raises, and can end."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import worker_plans as fns
from batch_feed import ours
from input_plans import FUNCTIONS, SIDE, ensemble, images

from commplan.diagnostics import CommplanError
from commplan.runtime.input import PhaseBatches
from commplan.runtime.input.stages import records, user_calls, worker_pool

BOUND_S = 1.0


@pytest.fixture(autouse=True)
def threads_end_when_their_calls_return(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(worker_pool, "_FATE_S", 1.5)
    yield
    end = time.monotonic() + 20
    while ours() and time.monotonic() < end:
        time.sleep(0.05)
    assert ours() == []


def feed(decode: Any, source: Any = None, **more: Any) -> PhaseBatches:
    program = ensemble("", 2, hints="{ cores = 2 }")
    functions = {**FUNCTIONS, "decode": decode}
    sources = {"images": images(40) if source is None else source}
    return PhaseBatches(program, "step", sources, functions, timeout=BOUND_S, **more)


def refused(batches: PhaseBatches) -> tuple[str, list[str]]:
    """The error, with its notes; the batches can be closed afterwards."""
    with batches, pytest.raises(CommplanError) as raised:
        for _ in batches:
            pass
    (diagnostic,) = raised.value.diagnostics
    assert diagnostic.code == "CP0926" and diagnostic.span is not None
    return diagnostic.message, [note.text for note in diagnostic.notes]


def test_frames_whose_locals_are_read_have_no_closure() -> None:
    codes = [code for code in user_calls._callers if code.co_filename == records.__file__]
    assert len(codes) == 2
    assert [code.co_freevars + code.co_cellvars for code in codes] == [(), ()]


def test_a_function_that_does_not_return_is_named_with_record_and_stack() -> None:
    gate = threading.Event()

    def decode(record: bytes) -> tuple[Any, int]:
        if record[0] == 9:
            gate.wait(60)
        return np.zeros((SIDE, SIDE), np.uint8), record[0]

    message, notes = refused(feed(decode))
    gate.set()
    assert message.startswith("host function `decode` has not returned for ") and message.endswith("record 9")
    assert "in decode" in notes[0] and notes[0].startswith("its Python: ")


def test_a_source_that_does_not_return_is_named() -> None:
    gate = threading.Event()

    class Hanging(list[bytes]):
        def __getitem__(self, index: Any) -> Any:
            if index == 5:
                gate.wait(60)
            return super().__getitem__(index)

    message, notes = refused(feed(FUNCTIONS["decode"], Hanging(images(40))))
    gate.set()
    assert message.startswith("source `images` has not returned") and message.endswith("on record 5")
    assert "in __getitem__" in notes[0]


def test_calls_that_return_may_take_longer_together() -> None:
    """A block of records takes longer than the bound, and none of its records does."""

    def decode(record: bytes) -> tuple[Any, int]:
        time.sleep(BOUND_S / 2)
        return np.zeros((SIDE, SIDE), np.uint8), record[0]

    with feed(decode, images(8)) as batches:
        assert len(list(batches)) == 1


@pytest.mark.parametrize("how", ["stop", "sleep"])
def test_a_worker_process_is_told_apart(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    decode = functools.partial(fns.holding, bad=9, how=how)
    message, notes = refused(feed(decode, workers="processes"))
    assert message.startswith("host function `decode` has not returned") and "on record 9" in message
    if how == "stop":
        assert message.endswith("is stopped") and ": worker process " in message
        return
    assert ", in worker process " in message and "its Python stack is printed above" in notes
    assert "in holding" in capfd.readouterr().err
