"""Carrying out a script over MPI: non-blocking messages in place, and waits that sleep.

Of what is ready to be sent a bounded number of messages to each host is under way: enough for the link to
have work while this thread waits for a core, which decoding takes from it for whole time slices. More
receives than that are posted ahead. Between two looks the thread sleeps, longer the longer nothing has come:
Open MPI moves bytes only while it is called, but the kernel's buffers take what arrives meanwhile.
"""

from __future__ import annotations

import contextlib
import heapq
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any

import numpy as np

from commplan.lowering.mpi.typing_shim import MPI
from commplan.runtime.input.transport.transfer_plan import Message, TransferPlan, Window
from commplan.runtime.input.transport.transport import Bytes
from commplan.wait import Wait, until

SENDS, RECEIVES = 64, 128  # messages from, and to, one host that are under way
_SHORTEST, _LONGEST = 1e-3, 4e-3  # seconds of a sleep; what comes in the first waits in buffers
_LIVELY = 20e-3  # seconds without news after which sleeps grow
_SHARE = 8  # a sleep is as long as this share of the wait so far: what it adds is bounded by that
RESERVED = 8  # tags from 0 on that scripts do not use

_left_alone: list[tuple[Any, Any]] = []  # requests that nobody waits for, and memory that they may touch
Awaited = Callable[[], list[int]]
Waiting = Callable[[Awaited], Wait]  # how long, and what to look after meanwhile


def until_moved(step: Callable[[], object], wait: Wait) -> None:
    """Call `step` until it says that something has moved, and sleep in between."""
    begun = time.monotonic()

    def attempt(_: float) -> bool:
        if step():
            return True
        waited = time.monotonic() - begun
        time.sleep(_SHORTEST if waited < _LIVELY else min(waited / _SHARE, _LONGEST))
        return False

    until(attempt, wait)


@dataclass
class Endpoint:
    """Messages between this host's speaker and those of others.

    comm: a communicator for this alone. ranks: of the speaker of each host, in it.
    """

    comm: Any
    ranks: dict[int, int]
    _counts: Counter[tuple[bool, int]] = field(default_factory=Counter[tuple[bool, int]])
    _tags: int = 0

    def __post_init__(self) -> None:
        self._tags = int(self.comm.Get_attr(MPI.TAG_UB)) + 1 - RESERVED

    def run(self, script: TransferPlan, arrays: Sequence[Bytes], waiting: Waiting) -> None:
        """Carry out `script` on `arrays`, one-dimensional; returns when all is sent and all is there.

        waiting: for the next message. Raises what the wait raises, and `MPI.Exception` as MPI does; after
        either this wire cannot be used again.
        """
        run = _Run(self, script, arrays)
        wait = waiting(run.awaited)
        try:
            while run.order.is_active():
                until_moved(run.step, wait)
        except MPI.Exception:
            run.abandon(failed=True)
            raise
        except BaseException:
            run.abandon(failed=False)
            raise
        self._counts.update((message.outgoing, message.host) for message in script.messages)

    def post(self, message: Message, buffer: Bytes) -> Any:
        """The request of a message whose bytes lie in `buffer`."""
        tag = RESERVED + (self._counts[message.outgoing, message.host] + message.number) % self._tags
        # A synchronous send ends when its receiver has begun to take it: nothing of it is left in a queue
        # here that only later calls of MPI would empty.
        post = self.comm.Issend if message.outgoing else self.comm.Irecv
        return post([buffer, MPI.BYTE], self.ranks[message.host], tag)


class _Lane:
    """Messages one way between this host and another.

    waiting: of sends those that are ready, of receives all, earliest first. order: all of them, in order.
    """

    def __init__(self) -> None:
        self.waiting: list[int] = []
        self.order: deque[int] = deque()
        self.under_way = 0

    def next(self, most: int) -> int | None:
        """The next to post. The earliest of all may always go: its receiver waits for it, and perhaps not
        yet for those that were ready before."""
        if not self.waiting or (self.under_way >= most and self.waiting[0] != self.order[0]):
            return None
        at = heapq.heappop(self.waiting)
        self.order.remove(at)
        self.under_way += 1
        return at


class _Run:
    """One script under way."""

    def __init__(self, wire: Endpoint, script: TransferPlan, arrays: Sequence[Bytes]) -> None:
        self._wire, self._messages, self._arrays = wire, script.messages, arrays
        self._buffers: dict[int, Bytes] = {}  # of messages whose bytes lie in several windows
        self._lanes: dict[tuple[int, bool], _Lane] = defaultdict(_Lane)
        self._receiving: dict[int, Any] = {}  # requests, by message
        self._sending: dict[int, Any] = {}
        for at in range(len(script.messages)):
            self._lane(at).order.append(at)
        self.order = TopologicalSorter({at: m.waits for at, m in enumerate(script.messages)})
        self.order.prepare()
        self._make_ready()

    def step(self) -> bool:
        """Look once; whether anything happened."""
        issued = self._issue()
        done = self._done()
        if not done:
            return issued
        for at in done:
            self._finished(at)
        self._issue()
        return True

    def _done(self) -> list[int]:
        """The messages that have ended since the last look, in order. Sends to a host end in the order in
        which they were posted, or nearly: those behind one that has not ended are not asked."""
        done: list[int] = []
        if self._receiving:
            came: list[int] | None = MPI.Request.Testsome([*self._receiving.values()])
            if came:
                owners = [*self._receiving]
                done = [owners[i] for i in came]
        busy: set[int] = set()
        for at, request in self._sending.items():
            host = self._messages[at].host
            if host in busy:
                continue
            if ended(request):
                done.append(at)
            else:
                busy.add(host)
        for at in done:
            self._receiving.pop(at, None)
            self._sending.pop(at, None)
        return sorted(done)

    def awaited(self) -> list[int]:
        """The hosts of messages that are under way."""
        return sorted({self._messages[at].host for at in (*self._receiving, *self._sending)})

    def _issue(self) -> bool:
        issued = False
        for (_, outgoing), lane in self._lanes.items():
            most = SENDS if outgoing else RECEIVES
            while (at := lane.next(most)) is not None:
                under_way = self._sending if outgoing else self._receiving
                under_way[at] = self._wire.post(self._messages[at], self._buffer(at))
                issued = True
        return issued

    def _finished(self, at: int) -> None:
        message = self._messages[at]
        self._lane(at).under_way -= 1
        buffer = self._buffers.pop(at, None)
        if buffer is not None and not message.outgoing:
            _spread(buffer, message.windows, self._arrays)
        self.order.done(at)
        self._make_ready()

    def _make_ready(self) -> None:
        """Let those go that wait for nothing any more."""
        for at in self.order.get_ready():
            heapq.heappush(self._lane(at).waiting, at)

    def _lane(self, at: int) -> _Lane:
        message = self._messages[at]
        return self._lanes[message.host, message.outgoing]

    def _buffer(self, at: int) -> Bytes:
        """The memory of a message: in place where that is one window, else a copy."""
        message = self._messages[at]
        if len(message.windows) == 1:
            return _of(message.windows[0], self._arrays)
        if message.outgoing:
            packed = np.concatenate([_of(window, self._arrays) for window in message.windows])
        else:
            packed = np.empty(message.nbytes, np.uint8)
        self._buffers[at] = packed
        return packed

    def abandon(self, *, failed: bool) -> None:
        """End what is under way. What cannot be called back keeps its memory: bytes may still arrive in it.
        After a failure of MPI that is everything."""
        for at, request in (*self._receiving.items(), *self._sending.items()):
            if not failed and at in self._receiving:
                request.Cancel()
                if request.Test():
                    continue
            orphan(request, self._arrays, self._buffers.get(at))
        self._receiving.clear()
        self._sending.clear()


def ended(request: Any) -> bool:
    """Whether a send is over; raises `MPI.Exception` where it failed. Such a request must not be freed, as
    every other call that tests it does: Open MPI ends the job when it hears of the failure once more."""
    status = MPI.Status()
    if not request.Get_status(status):
        return False
    if status.Get_error() != MPI.SUCCESS:
        raise MPI.Exception(status.Get_error())
    request.Test()
    return True


def orphan(request: Any, *memory: Any) -> None:
    """Keep a request that nobody waits for any more, and its memory."""
    _left_alone.append((request, memory))


def forget() -> None:
    """Let go of requests that were left alone and have ended since."""
    for entry in list(_left_alone):
        with contextlib.suppress(MPI.Exception):
            if ended(entry[0]):
                _left_alone.remove(entry)


def _of(window: Window, arrays: Sequence[Bytes]) -> Bytes:
    return arrays[window.array][window.low : window.high]


def _spread(buffer: Bytes, windows: Sequence[Window], arrays: Sequence[Bytes]) -> None:
    at = 0
    for window in windows:
        nbytes = window.high - window.low
        _of(window, arrays)[:] = buffer[at : at + nbytes]
        at += nbytes
