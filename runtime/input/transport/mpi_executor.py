"""Carrying out a script over MPI: non-blocking messages in place, and waits that sleep.

To each host a bounded number of messages is under way, those that are needed first: enough for the link to
have work while this thread waits for a core, which decoding takes from it for whole time slices. More
receives than that are posted ahead. Between two looks the thread sleeps, longer the longer nothing has come:
Open MPI moves bytes only while it is called, but the kernel's buffers take what arrives meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
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
            run.issue()
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


class _Run:
    """One script under way."""

    def __init__(self, wire: Endpoint, script: TransferPlan, arrays: Sequence[Bytes]) -> None:
        self._wire, self._messages, self._arrays = wire, script.messages, arrays
        self._buffers: dict[int, Bytes] = {}  # of messages whose bytes lie in several windows
        self._receiving: dict[int, Any] = {}  # requests, by message
        self._sending: dict[int, Any] = {}
        # Of each host and direction the messages that have not ended, in the order in which they are needed.
        self._lanes: dict[tuple[int, bool], list[int]] = defaultdict(list)
        for at, message in enumerate(script.messages):
            self._lanes[message.host, message.outgoing].append(at)
        self.order = TopologicalSorter({at: m.waits for at, m in enumerate(script.messages)})
        self.order.prepare()
        self._ready = set(self.order.get_ready())

    def step(self) -> bool:
        """Look once; whether a message has ended."""
        done = self._done()
        for at in done:
            self._finished(at)
        if done:
            self.issue()
        return bool(done)

    def _done(self) -> list[int]:
        """The messages that have ended since the last look, in order. Sends to a host end in the order in
        which they were posted, or nearly: those behind one that has not ended are not asked."""
        done: list[int] = []
        if self._receiving:
            came: list[int] | None = MPI.Request.Testsome([*self._receiving.values()])
            owners = [*self._receiving]
            done = [owners[i] for i in came or ()]
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

    def issue(self) -> None:
        """Post what is ready of the messages that are needed first: the earliest of all is always among them,
        and its receiver, who posts more of them, waits for it."""
        for (_, outgoing), lane in self._lanes.items():
            under_way = self._sending if outgoing else self._receiving
            for at in lane[: SENDS if outgoing else RECEIVES]:
                if at in self._ready:
                    under_way[at] = self._wire.post(self._messages[at], self._buffer(at))
                    self._ready.remove(at)

    def _finished(self, at: int) -> None:
        message = self._messages[at]
        self._lanes[message.host, message.outgoing].remove(at)
        buffer = self._buffers.pop(at, None)
        if buffer is not None and not message.outgoing:
            _spread(buffer, message.windows, self._arrays)
        self.order.done(at)
        self._ready.update(self.order.get_ready())

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
