"""`{ device_prefetch = N }`: batches are on the devices before the step asks for them, and are the same."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from support.embedding import bind, code_of, mesh_of

import commplan
from commplan.diagnostics import CommplanError
from commplan.explain.report import explain_plan
from commplan.input.prefetch import KEEP
from commplan.runtime.machines.mesh_input import MeshInput
from commplan.verify.input_proof import input_memory
from commplan.wait import Wait, until

PLAN = """plan p
ensemble member = 2
axis data = 2
source images : u8[32]
fn noisy (u8[32]) -> u8[32] on host random
fn crop  (u8[32]) -> f32[32] on device random
each step {{
    raw, n = load images batch 8 split data visit exactly_once seed 3 {{ prefetch = {prefetch} {ahead} }}
    own    = map noisy(raw) per member
    y      = map crop(own)
    output raw, y, n
}}
"""
RECORDS = np.random.default_rng(0).integers(0, 256, (44, 32), np.uint8)  # six batches, the last one padded
Records = Callable[[int], Any]


pytestmark = pytest.mark.filterwarnings("ignore:warning.CP0949")  # repeats the same epoch on purpose


class Source:
    def __init__(self, get: Records) -> None:
        self.get = get

    def __len__(self) -> int:
        return len(RECORDS)

    def __getitem__(self, number: int) -> Any:
        return self.get(number)


@functools.cache
def fed(ahead: int, get: Records = RECORDS.__getitem__, prefetch: int = 2) -> Any:
    hint = f", device_prefetch = {ahead}" if ahead else ""
    return bind(
        PLAN.format(ahead=hint, prefetch=prefetch),
        mesh_of(member=2, data=2),
        sources={"images": Source(get)},
        functions={
            "noisy": lambda x, rng: x ^ np.uint8(rng.integers(256)),
            "crop": lambda key, x: x + jax.random.uniform(key, x.shape),
        },
    )


def same(first: dict[str, Any], second: dict[str, Any]) -> bool:
    return all(np.array_equal(first[name], second[name]) for name in first) and first.keys() == second.keys()


@pytest.mark.parametrize("ahead", [2, 9])
def test_batches_and_places_are_those_without_it(ahead: int):
    with fed(0).batches() as plain, fed(ahead).batches() as early:
        assert early.state() == plain.state()
        for _ in range(2):
            for first, second in zip(plain, early, strict=True):
                assert same(first, second)
                assert early.state() == plain.state()


def test_a_place_is_that_of_the_caller():
    """Batches that were taken ahead are made again after a restart from the state."""
    with fed(2).batches() as early:
        iter(early)
        first = [next(early) for _ in range(3)]
        state = early.state()
        for _ in early:  # to the end of the epoch, in the same order
            pass
    assert state["step"] == 3 and len(first) == 3
    with fed(9).batches(state=state) as again, fed(0).batches(state=state) as plain:
        for _ in range(2):  # the rest of the epoch, and the next one
            assert all(same(before, after) for before, after in zip(plain, again, strict=True))


def test_an_epoch_may_be_left_while_the_next_ones_batches_are_not_taken():
    with fed(9).batches() as early, fed(0).batches() as plain:
        iter(early), iter(plain)
        expected = [next(plain) for _ in range(4)]
        got = [next(early) for _ in range(2)]
        for item in early:  # continues from its position
            got.append(item)
        assert all(same(item, other) for item, other in zip(expected, got, strict=False)) and len(got) == 6
        assert early.state()["epoch"] == 1


def test_copies_are_made_before_they_are_asked_for(monkeypatch: pytest.MonkeyPatch):
    """Two batches ahead of the caller's are on the devices while the source blocks."""
    gate, reads = threading.Event(), list[int]()
    counting = threading.Lock()

    def get(number: int) -> Any:
        with counting:
            reads.append(number)
            late = len(reads) > 3 * 8
        if late:
            gate.wait(60)
        return RECORDS[number]

    arrays = list[Any]()
    array = MeshInput.array

    def watched(self: MeshInput, *args: Any) -> Any:
        arrays.append(args)
        return array(self, *args)

    monkeypatch.setattr(MeshInput, "array", watched)
    with fed(2, get, prefetch=3).batches() as early:
        iter(early)
        early._host._arm(0)

        def two_are_ready() -> bool:
            return early.summary().queue.ready >= 3

        until(lambda seconds: two_are_ready() or gate.wait(min(seconds, 0.01)), Wait(60.0, pytest.fail))
        next(early)
        each = len(arrays) // 3
        assert each >= 3 and len(arrays) == 3 * each
        next(early), next(early)
        assert len(arrays) == 3 * each
        gate.set()
        next(early)
        assert len(arrays) > 3 * each


def test_an_error_comes_with_its_own_batch():
    wrong = threading.Event()

    def get(number: int) -> Any:
        if number == bad:
            wrong.set()
            return b"no pixels"
        return RECORDS[number]

    with fed(0).batches() as plain:
        rows = [np.asarray(item["raw"]) for item in plain]
    bad = next(number for number, record in enumerate(RECORDS) if (record == rows[3][5]).all())
    with fed(9, get).batches() as early:
        iter(early)
        first = next(early)
        wrong.wait(60)
        got = [first, next(early), next(early)]
        assert all(np.array_equal(item["raw"], row) for item, row in zip(got, rows, strict=False))
        with pytest.raises(CommplanError) as error:
            next(early)
        assert code_of(error) == "CP0905" and early.state()["step"] == 3
        with pytest.raises(CommplanError) as error:
            next(early)
        assert code_of(error) == "CP0916"


def test_what_it_needs_is_told():
    schedules = [fed(ahead).program.schedule for ahead in (0, 2)]
    (plain,), (early,) = map(input_memory, schedules)
    # Each rank has 4 rows: raw u8[32], y f32[32], and a count.
    assert plain.on_devices == 0 and early.on_devices == 2 * (4 * 32 + 4 * 32 * 4 + 4)
    assert early.batches == plain.batches + 2 == 2 + KEEP + 2
    assert early.private // early.batches == plain.private // plain.batches


def test_the_plan_says_it():
    plan = commplan.loads(PLAN.format(ahead=", device_prefetch = 2", prefetch=2))
    text = str(explain_plan(plan.graph, fed(2).program.schedule))
    assert "{ prefetch = 2, device_prefetch = 2 }" in text and "tail pad, 2 ahead on the devices" in text
