"""The words of a segment that say how far everyone is, and who is alive.

Each process has its own words, and alone writes them, but for the counter of a dead maker, which its heir
writes. Bells are words whose change means: look again. Whoever completes something for everybody rings; a
value never comes twice, so that a wait which began before sees it. Without that many would wake many for each
part.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.shm import futex
from commplan.runtime.input.shm.slot_layout import PAGE
from commplan.wait import Wait, attended, until

if TYPE_CHECKING:
    from commplan.runtime.input.shm.segment import Segment

LOOK_S = 0.25  # how often a waiting process looks whether its peers live
ABSENT, JOINED, LEFT = 0, 1, 2
_EACH = 256  # bytes per process, what is written by different processes on cache lines of their own
_NAMES = {"filled": 0, "taken": 64, "presence": 128, "culprit": 132, "wanted": 192, "charge": 196,
          "spent": 200, "waited": 204}  # fmt: skip
_CORES_AT, _CORES_NBYTES = 208, 48  # which cores a process may run on, a bit for each; the rest of its room
_TURNS_AT, _SPARE_AT = 320, 324
_BELLS = {"filled": 128, "taken": 192, "carried": 256}

Name = Literal["filled", "taken", "presence", "culprit", "wanted", "charge", "spent", "waited"]
Bell = Literal["filled", "taken", "carried"]


def nbytes(count: int) -> int:
    """Bytes before the slots."""
    return -(-(PAGE + count * _EACH) // PAGE) * PAGE


def cores_of() -> set[int]:
    """The numbers of the cores that this process may run on: all, where the system cannot tell."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def fence() -> None:
    """What was read and written so far is read and written before what follows, as other processes see it.

    Taking a lock keeps what follows behind it, giving it back keeps what was before it ahead, and processors
    that order memory loosely keep no more than that: the second taking holds back reads that follow a write.
    """
    once = threading.Lock()
    once.acquire(blocking=False)
    once.release()
    once.acquire(blocking=False)


@dataclass
class Control:
    """filled: a maker has done its parts of batches 0..filled-1; taken: let go. presence: see above. culprit:
    the process + 1 that this one gave up on (0: none). wanted: epochs that were asked for. charge: of a maker
    on another host, the process + 1 of this host that makes its part. spent, waited: see `turn_schedule`. For
    all: `carried`, batches 0..carried-1 are here whole; turns, the first batch that is made in turns (0:
    none); spare, how many more than the cores ask for are then in the making at a time."""

    memory: Segment
    count: int
    index: int
    stopped: bool = False
    _chimes: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self._words = {
            name: [self.memory.word(PAGE + process * _EACH + at) for process in range(self.count)]
            for name, at in _NAMES.items()
        }
        self._bells = {name: self.memory.word(at) for name, at in _BELLS.items()}
        self.turns, self.spare = self.memory.word(_TURNS_AT), self.memory.word(_SPARE_AT)

    def say_cores(self, cores: Iterable[int]) -> None:
        """Which cores this process may run on."""
        bits = sum(1 << core for core in {core % (8 * _CORES_NBYTES) for core in cores})
        self.memory.data[self._cores_of(self.index)] = bits.to_bytes(_CORES_NBYTES, "little")

    def cores(self, processes: Iterable[int]) -> int:
        """How many cores `processes` may run on, all together."""
        bits = 0
        for process in processes:
            bits |= int.from_bytes(self.memory.data[self._cores_of(process)], "little")
        return bits.bit_count()

    def _cores_of(self, process: int) -> slice:
        at = PAGE + process * _EACH + _CORES_AT
        return slice(at, at + _CORES_NBYTES)

    def word(self, process: int, name: Name) -> ctypes.c_uint32:
        return self._words[name][process]

    def bell(self, name: Bell) -> ctypes.c_uint32:
        return self._bells[name]

    def least(self, name: Name, processes: Iterable[int]) -> int:
        """The smallest of their words; a large number where there are none."""
        words = self._words[name]
        return min([words[process].value for process in processes], default=1 << 32)

    def beyond(self, name: Name, processes: Iterable[int], number: int) -> bool:
        """Whether all their words are larger than `number`: asked often, and mostly answered by the first."""
        words = self._words[name]
        for process in processes:  # noqa: SIM110  an expression costs a frame
            if words[process].value <= number:
                return False
        return True

    def advance(self, process: int, name: Literal["filled", "taken"], to: int, all_: Iterable[int]) -> None:
        """Move a counter, and ring where that brings the least of `all_` on."""
        word = self.word(process, name)
        before = word.value
        fence()  # the part is in its slot, or read, before the counter says so
        word.value = to
        fence()  # of two who move the least on at once, one at least sees the other's counter
        if self.beyond(name, all_, before):
            self.ring(name)

    def ring(self, name: Bell) -> None:
        """Wake all who wait for `name`."""
        self._chimes += 1
        bell = self.bell(name)
        bell.value = (self._chimes * self.count + self.index + 1) & 0xFFFFFFFF
        futex.wake(bell)

    def carry_to(self, number: int) -> None:
        """Batches before `number` are here whole."""
        fence()
        self.bell("carried").value = number
        futex.wake(self.bell("carried"))

    def wait(self, bell: Bell, enough: Callable[[], bool], wait: Wait | None = None) -> None:
        """Sleep until `enough`; raises ClosedError once stopped. wait: None for what this process waits for
        as long as it lives."""
        word = self.bell(bell)

        def attempt(seconds: float) -> bool:
            if self.stopped:
                raise ClosedError
            seen = word.value
            fence()
            if not enough():
                if seconds:
                    futex.wait(word, seen, seconds)
                return False
            fence()
            return True

        if not attempt(0.0):  # mostly it is there already
            _ = until(attempt, wait) if wait is not None else attended(attempt)

    def alive(self, process: int) -> bool:
        """Whether `process`, of this host, has come, has not left and lives."""
        if process == self.index:
            return not self.stopped
        return self.word(process, "presence").value == JOINED and self.memory.owned(process)

    def give_up(self, process: int) -> int:
        """The process because of which `process` is waited for in vain: itself, or the one that it gave up
        on, or that one in turn. From now on the others learn that this process gives up on it."""
        for _ in range(self.count):
            culprit = self.word(process, "culprit").value
            if self.alive(process) or not culprit:
                break
            process = culprit - 1
        self.word(self.index, "culprit").value = process + 1
        fence()  # before this process leaves
        return process

    def take_duty(self, process: int) -> bool:
        """Become the one heir of a dead process; False where another one is. The kernel hands the duty on
        when its holder dies."""
        return self.memory.lock(1 + self.count + process)

    def lead(self) -> bool:
        """Become the one that speaks for this host after its leader."""
        return self.memory.lock(1 + 2 * self.count)

    def stop(self) -> None:
        """Make the waits of this process return."""
        self.stopped = True
        self.wake()

    def wake(self) -> None:
        """Let all who wait look again."""
        for name in ("filled", "taken", "carried"):
            futex.wake(self.bell(name))

    def leave(self) -> None:
        self.word(self.index, "presence").value = LEFT
        futex.wake(self.word(self.index, "presence"))
        self.wake()
