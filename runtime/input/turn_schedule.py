"""Who makes which batch, among the processes of one host.

At first every reader makes a part of each batch. Where there are more readers than cores, and the making
takes CPU and not time in which it waits for something, they take turns from some batch on: few make a batch,
and only as many batches are made at a time as keep the cores busy. Then a process goes to work once for many
rows, and a core changes rarely from one process to another. Where making waits, for a disk or a network, it
stays with all of them at once.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from commplan.input.work_partition import Division, Turns, width
from commplan.runtime.input.shm.shm_control import Control, fence

_EVERY, _LOOKED_AT = 64, range(1, 4)  # of so many batches, those of which it is measured what they wait for
# More than this share of the time: all make each batch, whose waits then overlap. Threads of one process that
# wait for each other count as well.
_WAITS = 0.33
_HARDLY = 0.05  # less than this: a core needs no second batch to go on with
_SCHEDSTAT = Path("/proc/thread-self/schedstat")


@dataclass
class TurnSchedule:
    """local: the processes of this host. makers: those that make parts, by the place of their note in a slot.
    ahead: batches that are in the making at a time, at most; None: all readers make each. slots: of the
    memory that is shared.
    """

    control: Control
    divisions: Mapping[int, Division]
    local: Sequence[int]
    makers: Sequence[int]
    slots: int
    ahead: int | None
    _since: int = 0  # the first batch that is made in turns; 0: none so far
    _turns: dict[int, Turns] = field(default_factory=dict[int, Turns])
    _coming: dict[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]])
    _heard: list[tuple[tuple[int, int], ...]] = field(default_factory=list[tuple[tuple[int, int], ...]])
    _at_once: int = 0
    _watch: threading.local = field(default_factory=threading.local)

    def __post_init__(self) -> None:
        self._all = tuple(enumerate(self.makers))

    def at(self, flow: int, number: int) -> Division:
        """The work of a flow in batch `number`."""
        if not self._in_turns(number):
            return self.divisions[flow]
        return self._turns[flow].at(number - self._since)

    def turn(self, process: int, number: int) -> int:
        """The first batch from `number` on of which `process` makes a part."""
        if not self._in_turns(number):
            return number
        coming = self._coming[process]
        return number + coming[(number - self._since) % len(coming)]

    def heard(self, number: int) -> tuple[tuple[int, int], ...]:
        """The makers of batch `number`, each behind the place of its note."""
        if not self._in_turns(number):
            return self._all
        return self._heard[(number - self._since) % len(self._heard)]

    def follows(self, number: int) -> int:
        """The batch that is to be whole before `number` is begun; less than 0 where none is."""
        return number - self._at_once if self._in_turns(number) else -1

    def _in_turns(self, number: int) -> bool:
        if self.ahead is None:
            return False
        if not self._since:
            since = self.control.turns.value
            if not since:
                return False
            fence()
            self._begin(since)
        return number >= self._since

    def _begin(self, since: int) -> None:
        """Everybody comes to the same, from the cores that all said before they joined."""
        cores = self.control.cores(self.local)
        for flow, partition in self.divisions.items():
            self._turns[flow] = Turns(partition, width(partition.parts, cores, self.ahead or 1))
        widest = max(turns.width for turns in self._turns.values())
        self._at_once = -(-cores // widest) + self.control.spare.value
        period = math.lcm(*(turns.period for turns in self._turns.values()))
        for process in self.makers:
            coming = [
                min(n for turns in self._turns.values() if (n := turns.next(process, turn)) is not None)
                for turn in range(period)
            ]
            self._coming[process] = tuple(n - turn for turn, n in enumerate(coming))
        for turn in range(period):
            readers = {reader for turns in self._turns.values() for reader in turns.at(turn).readers}
            self._heard.append(tuple(maker for maker in self._all if maker[1] in readers))
        self._since = since

    # --- whether making waits ---

    def begun(self, number: int) -> None:
        """The calling thread begins a part of batch `number`."""
        looks = self.ahead is not None and not self._since and number % _EVERY in _LOOKED_AT
        self._watch.begun = _times() if looks else None

    def done(self, number: int) -> None:
        """The part that the calling thread began is done, or some of it."""
        before = getattr(self._watch, "begun", None)
        after = _times() if before is not None else None
        self._watch.begun = None
        if before is None or after is None:
            return
        spent, waited = after[0] - before[0], max(0, after[1] - before[1])
        index, first = self.control.index, number % _EVERY == _LOOKED_AT.start
        words = self.control.word(index, "spent"), self.control.word(index, "waited")
        for word, clock in zip(words, (spent, waited), strict=True):
            kept = 0 if first else word.value
            word.value = min(kept + clock, 0xFFFFFFFF)

    def look(self, number: int) -> None:
        """The first process of the host decides, once all have made batch `number`, from when on they take
        turns: nobody has come so far by then, for its own slots must be let go before that."""
        if self.ahead is None or self._since or self.control.index != self.local[0]:
            return
        if number % _EVERY != _LOOKED_AT[-1] or self.control.turns.value:
            return
        fence()
        spent = sum(self.control.word(process, "spent").value for process in self.makers)
        waited = sum(self.control.word(process, "waited").value for process in self.makers)
        cores = self.control.cores(self.local)
        fewer = any(width(d.parts, cores, self.ahead) < d.parts for d in self.divisions.values())
        if spent and fewer and waited <= _WAITS * (spent + waited):
            self.control.spare.value = waited > _HARDLY * (spent + waited)
            fence()
            self.control.turns.value = number + self.slots + self.ahead + 2
            fence()


def _times() -> tuple[int, int] | None:
    """Microseconds for which the calling thread ran so far, and the clock less those for which it ran or
    waited for a core; None where the kernel does not say."""
    with contextlib.suppress(OSError, ValueError):
        ran, queued = map(int, _SCHEDSTAT.read_text().split()[:2])
        return ran // 1000, (time.perf_counter_ns() - ran - queued) // 1000
    return None
