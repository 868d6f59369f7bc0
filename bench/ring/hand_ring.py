"""A typical hand-written ring in shared memory for one job: fixed slots, one producer, sequence numbers.

    words: made, armed, a bell for the maker | taken, one for each member | slots

`made` counts batches, and members sleep on it (futex); `taken[m]` counts those that member m has released,
and the last member to release one wakes the producer. Members map the slots as NumPy arrays, without a copy.
There is no failure detection: a dead process blocks the others for ever.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.input.records import SHAPE

ROWS, SLOTS, _HEAD, _EACH = 32, 4, 256, 64
_FUTEX, _WAIT, _WAKE = 202, 0, 1  # of x86-64
_LIBC = ctypes.CDLL(None)
Batch = Mapping[str, npt.NDArray[Any]]


def nbytes(members: int) -> int:
    return _slots_at(members) + SLOTS * _slot_nbytes()


def _slots_at(members: int) -> int:
    return -(-(_HEAD + members * _EACH) // mmap.PAGESIZE) * mmap.PAGESIZE


def _slot_nbytes() -> int:
    return -(-(ROWS * (int(np.prod(SHAPE)) + 4)) // mmap.PAGESIZE) * mmap.PAGESIZE


class Ring:
    """One process's side. path: a file of `nbytes(members)` zeros."""

    def __init__(self, path: Path, members: int) -> None:
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), nbytes(members))
        word = ctypes.c_uint32.from_buffer
        self._made, self._armed, self._bell = (word(self._memory, at) for at in (0, 64, 128))
        self._taken = [word(self._memory, _HEAD + member * _EACH) for member in range(members)]
        self._parent = os.getppid()
        self._slots = [self._slot(_slots_at(members) + slot * _slot_nbytes()) for slot in range(SLOTS)]

    def _slot(self, at: int) -> Batch:
        pixels = np.ndarray((ROWS, *SHAPE), np.uint8, self._memory, at)
        return {"pixels": pixels, "ids": np.ndarray(ROWS, np.int32, self._memory, at + pixels.nbytes)}

    def make(self, steps: int, fill: Callable[[int, int, Batch], None]) -> None:
        """Make batches for ever, of epochs that a member has begun."""
        number = 0
        while True:
            seen = self._bell.value
            free = min(word.value for word in self._taken) + SLOTS > number
            if not free or number >= self._armed.value * steps:
                _wait(self._bell, seen)
                continue
            fill(*divmod(number, steps), self._slots[number % SLOTS])
            number += 1
            self._made.value = number
            _wake(self._made)

    def epochs(self, member: int, steps: int) -> Callable[[], Iterator[Batch]]:
        own = self._taken[member]

        def epoch() -> Iterator[Batch]:
            first = own.value
            if self._armed.value < first // steps + 1:
                self._armed.value = first // steps + 1
                self._ring()
            for number in range(first, first + steps):
                while (count := self._made.value) <= number:
                    _wait(self._made, count)
                    if os.getppid() != self._parent:  # the bench was killed
                        raise SystemExit(1)
                yield self._slots[number % SLOTS]
                own.value = number + 1
                if all(word.value > number for word in self._taken):
                    self._ring()

        return epoch

    def _ring(self) -> None:
        self._bell.value = (self._bell.value + 1) & 0xFFFFFFFF
        _wake(self._bell)


def _wait(word: ctypes.c_uint32, seen: int) -> None:
    seconds = (ctypes.c_long * 2)(1, 0)  # the caller looks again
    _LIBC.syscall(_FUTEX, ctypes.byref(word), _WAIT, ctypes.c_uint32(seen), seconds, None, 0)


def _wake(word: ctypes.c_uint32) -> None:
    _LIBC.syscall(_FUTEX, ctypes.byref(word), _WAKE, ctypes.c_uint32(0x7FFFFFFF), None, None, 0)
