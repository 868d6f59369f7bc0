"""Steps are counted and recorded as they are called, and their results are not kept for long."""

from __future__ import annotations

import weakref
from collections.abc import Generator
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from commplan.recorder.file import BEGIN, CAPACITY, END, start_recording
from commplan.recorder.reading import read_records
from commplan.runtime.observe.calls import Calls


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Calls]:
    monkeypatch.setenv("COMMPLAN_RECORDS", str(tmp_path))
    recording = start_recording("job", "plan", 0, 2)
    assert recording is not None
    yield Calls((0, 1), recording)
    recording.remove()  # or records of other tests would go into it


def test_calls_are_recorded_with_their_lines_and_ends(calls: Calls, tmp_path: Path):
    train, index = calls.counted(jax.jit(lambda x: x + 1), "train")
    look, _ = calls.counted(jax.jit(lambda x: x * 2), "look")
    calls.locate(index, (9, 7, 9), "x.plan")
    x = train(look(train(jnp.ones(3))))
    jax.block_until_ready(x)
    assert x[0] == 5 and calls.number == 3
    (record,) = read_records([str(tmp_path)])
    began = [(event.name, event.operation, event.runs) for event in record.events if event.kind == BEGIN]
    step = "one of lines 7, 9 of x.plan, in `train`"
    assert began == [(step, 1, 1), ("`look`", 2, 1), (step, 3, 2)]
    assert [event.operation for event in record.events if event.kind == END] == [1, 2]
    calls.observe()
    (record,) = read_records([str(tmp_path)])
    assert [event.operation for event in record.events if event.kind == END] == [1, 2, 3]
    assert calls.waits == 0 and calls.current() == step


def test_a_call_that_is_under_way_waits(calls: Calls):
    states: list[int] = []

    def step(x: int) -> int:
        calls.observe()
        states.append(calls.waits)
        return x

    for attribute in ("lower", "trace", "eval_shape", "clear_cache"):
        setattr(step, attribute, None)
    counted, _ = calls.counted(step, "train")
    assert [counted(1), counted(2)] == [1, 2]
    assert states == [1, 2]
    calls.observe()
    assert calls.waits == 0


def test_a_call_that_raises_has_ended(calls: Calls):
    def broken(x: jax.Array) -> jax.Array:
        raise ArithmeticError("broken")

    counted, _ = calls.counted(jax.jit(broken), "train")
    with pytest.raises(ArithmeticError):
        counted(jnp.ones(3))
    calls.observe()
    assert calls.waits == 0 and calls.number == 1


def test_a_call_within_a_trace_is_part_of_that(calls: Calls):
    counted, _ = calls.counted(jax.jit(lambda x: x + 1), "train")
    assert jax.jit(lambda x: counted(x) * 2)(jnp.ones(3))[0] == 4
    assert calls.number == 0
    assert counted.lower(jnp.ones(3)).compile()(jnp.ones(3))[0] == 2


def test_large_results_are_not_kept(calls: Calls):
    counted, _ = calls.counted(jax.jit(lambda x: (x + 1, *(x[:1] for _ in range(4)))), "train")
    large = weakref.ref(jax.block_until_ready(counted(jnp.ones(1000)))[0])
    assert large() is not None
    calls.observe()
    assert large() is None


def test_results_that_are_donated_are_not_asked(calls: Calls):
    counted, _ = calls.counted(jax.jit(lambda x: (x + 1, x.sum())), "train")
    grown, total = counted(jnp.ones(8))
    jax.block_until_ready(jax.jit(lambda x: x + 1, donate_argnums=0)(total))
    assert total.is_deleted() and not grown.is_deleted()
    jax.block_until_ready(grown)
    calls.observe()
    assert calls.waits == 0


def test_the_ring_goes_on_over_its_end(calls: Calls, tmp_path: Path):
    counted, _ = calls.counted(jax.jit(lambda x: x + 1), "train")
    x = jnp.ones(())
    for _ in range(CAPACITY // 2 + 10):
        x = counted(x)
    (record,) = read_records([str(tmp_path)])
    assert record.lost > 0 and max(event.operation for event in record.events) == calls.number
