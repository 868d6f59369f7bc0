"""Lent slots: they return when no array refers to them, and referenced ones keep their content."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commplan.diagnostics import CommplanError
from commplan.runtime.input.shm import slots as _slots
from commplan.runtime.input.shm.slots import CompletionCounter, Slots, privatize_pages

NBYTES, START, COUNT = 8 * 4096, 4096, 3


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[Slots]:
    descriptor = os.open(tmp_path / "memory", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, START + COUNT * NBYTES)
    result = Slots(descriptor, START, NBYTES, COUNT)
    result.returned = back.append
    back.clear()
    yield result
    result.close()
    os.close(descriptor)


back: list[int] = []


def fill(slots: Slots, number: int, value: int) -> None:
    ctypes.memset(ctypes.addressof(slots.memory(number)), value, NBYTES)


def view(root: Any, offset: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    array: np.ndarray[Any, np.dtype[np.uint8]] = np.ndarray((NBYTES - offset,), np.uint8, root, offset)
    array.flags.writeable = False
    return array


def test_a_slot_comes_back_with_its_last_view(slots: Slots) -> None:
    fill(slots, 0, 7)
    array = view(slots.lend(0, {}))
    part = array[100:200].reshape(10, 10)
    assert slots.lent() == [0] and back == []
    del array
    assert back == [] and (part == 7).all()
    del part
    assert back == [0] and slots.lent() == []


def test_what_is_recalled_keeps_its_content_and_its_address(slots: Slots) -> None:
    fill(slots, 0, 7)
    array = view(slots.lend(0, {}))
    address = array.ctypes.data
    slots.recall(0)
    assert back == [0] and slots.lent() == []
    fill(slots, COUNT, 9)  # the same slot, for a later batch
    assert (array == 7).all() and array.ctypes.data == address
    later = view(slots.lend(COUNT, {}))
    assert (later == 9).all() and later.ctypes.data != address
    assert slots.offset(later.ctypes.data) == START and slots.offset(address) is None
    del array
    assert back == [0], "it came back once"
    slots.recall(0)
    assert back == [0]
    del later
    assert back == [0, COUNT]


def test_readers_see_the_same_bytes_while_pages_are_exchanged(slots: Slots) -> None:
    """A thread hashes the array all the time; the slot is filled anew at the first moment the rules allow."""
    digests: set[str] = set()
    for number in range(40):
        fill(slots, number, number)
        array = view(slots.lend(number, {}))
        expected = hashlib.sha256(array.tobytes()).hexdigest()
        stop = threading.Event()

        def read(array: Any = array, stop: threading.Event = stop, expected: str = expected) -> None:
            while not stop.is_set():
                digest = hashlib.sha256(array.tobytes()).hexdigest()
                if digest != expected:
                    digests.add(digest)

        reader = threading.Thread(target=read)
        reader.start()
        slots.recall(number)
        fill(slots, number + COUNT, 255)
        fill(slots, number + COUNT, 254)
        stop.set()
        reader.join()
    assert digests == set()


def test_a_computation_of_jax_that_is_still_to_run_keeps_its_input(slots: Slots) -> None:
    """Arrays that JAX took without a copy: dropped at once, while a computation on them still runs."""

    @jax.jit
    def many(x: Any) -> Any:
        slow = jnp.sin(x.astype(jnp.float32)[:, None] * jnp.ones(600)).sum()
        return slow, x.min(), x.max()

    jax.block_until_ready(many(jnp.zeros(NBYTES, jnp.uint8)))
    results: list[Any] = []
    shown = 0
    for number in range(30):
        value = number % 200 + 1
        if number - COUNT >= 0 and number - COUNT in slots.lent():
            slots.recall(number - COUNT)
        assert number < COUNT or number - COUNT in back, "written over as soon as it may be, and no sooner"
        fill(slots, number, value)
        array = view(slots.lend(number, {}))
        on_device = jax.device_put(array)
        shown += on_device.unsafe_buffer_pointer() == array.ctypes.data
        results.append((value, many(on_device)))
        del on_device, array
    assert shown == 30, "JAX showed the slot itself"
    for value, (_, low, high) in results:
        assert (int(low), int(high)) == (value, value)


def test_a_closed_ring_leaves_what_is_still_shown(slots: Slots) -> None:
    fill(slots, 1, 5)
    array = view(slots.lend(1, {}), 64)
    maps = Path("/proc/self/maps").read_text().count("/memory")
    slots.close()
    assert (array == 5).all() and array.ctypes.data % 64 == 0
    gc.collect()
    assert maps == COUNT and Path("/proc/self/maps").read_text().count("/memory") == 0
    owner = weakref.ref(array.base)
    del array
    assert owner() is None


def test_pages_that_cannot_be_exchanged_are_an_error(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(slots, 0, 3)
    array = view(slots.lend(0, {}))
    monkeypatch.setattr(_slots, "_MOVE_TO", 1 << 30)  # flags that mremap(2) does not know
    with pytest.raises(CommplanError, match="exchanged"):
        slots.recall(0)
    assert (array == 3).all()


@pytest.mark.parametrize("is_private", [False, True])
def test_an_interrupted_recall_is_repeated(slots: Slots, is_private: bool) -> None:
    """Ctrl-C once at every line of it."""
    slots.is_private = is_private
    fill(slots, 0, 7)
    array = view(slots.lend(0, {}))

    def recall() -> None:
        try:
            slots.recall(0)
        except KeyboardInterrupt:
            assert slots.lent() == [0] or 0 in back
            raise

    assert interruptions(recall, Slots.recall, Slots._exchange, Slots._fresh, privatize_pages) > 10
    assert back == [0] and slots.lent() == []
    fill(slots, COUNT, 9)
    assert (array == 7).all()
    assert (view(slots.lend(COUNT, {})) == 9).all()


def interruptions(call: Callable[[], None], *functions: Callable[..., Any]) -> int:
    """Repeat `call` until it returns, with Ctrl-C once at every line of `functions`; the number of lines."""
    places = {function.__code__: set[int]() for function in functions}

    def interrupting(frame: FrameType, event: str, arg: Any) -> Any:
        lines = places.get(frame.f_code)
        if lines is None or isinstance(sys.exc_info()[1], KeyboardInterrupt):
            return None
        if event == "line" and frame.f_lineno not in lines:
            lines.add(frame.f_lineno)
            raise KeyboardInterrupt
        return interrupting

    for _ in range(100):
        sys.settrace(interrupting)
        try:
            call()
            break
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
    return sum(map(len, places.values()))


def test_a_number_whose_count_is_interrupted_is_counted_again() -> None:
    returned: list[int] = []
    returns = CompletionCounter(returned.append)
    returns.add(1)
    assert interruptions(lambda: returns.add(0), CompletionCounter._deliver) > 5
    assert returned[-1] == returns.upto == 2


def test_numbers_come_back_without_a_gap_and_from_anywhere() -> None:
    returned: list[int] = []
    returns = CompletionCounter(returned.append)
    for number in (2, 1, 0, 4, 3):
        returns.add(number)
    assert returned == [3, 5] and returns.upto == 5


def test_a_number_that_comes_back_while_one_is_counted_is_counted_too() -> None:
    """As a finaliser does that runs inside of the counting thread."""
    returned: list[int] = []

    def advance(upto: int) -> None:
        returned.append(upto)
        if upto == 1:
            returns.add(1)

    returns = CompletionCounter(advance)
    returns.add(0)
    assert returned == [1, 2]


def test_many_threads_give_back() -> None:
    returned: list[int] = []
    returns = CompletionCounter(returned.append)

    def give_back(first: int) -> None:
        for number in range(first, 4000, 8):
            returns.add(number)

    threads = [threading.Thread(target=give_back, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert returned == sorted(set(returned)) and returned[-1] == returns.upto == 4000
