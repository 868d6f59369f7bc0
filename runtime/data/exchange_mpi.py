"""Carrying out a script over MPI: non-blocking messages in place, and waits that sleep.

All receives of a batch are posted at once; of what is ready to be sent a few messages to each host are under way, so
that a link works on few at a time. Between two looks the thread sleeps, longer the longer nothing has come: Open
MPI moves bytes only while it is called, but the kernel's buffers take what arrives meanwhile.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from commplan.lowering.mpi.untyped import MPI
from commplan.runtime.data.carrier import Bytes
from commplan.runtime.data.exchange import Message, Script, Window

WINDOW = 4  # messages to one host that are under way
_SHORTEST, _LONGEST = 100e-6, 4e-3  # seconds of a sleep
_SHARE = 8  # a sleep is as long as this share of the wait so far: what it adds is bounded by that
RESERVED = 8  # tags from 0 on that scripts do not use

_left_alone: list[Any] = []  # requests that could not be called back, with the memory that they may still touch


Awaited = Callable[[], list[int]]
Look = Callable[[float, Awaited], None]


class Patience:
    """Sleeps between looks. look: called after each with the seconds since something moved, and what tells the hosts
    that are waited for; what it raises ends the wait."""

    def __init__(self, look: Look, awaited: Awaited) -> None:
        self._look, self._awaited = look, awaited
        self._since = time.monotonic()

    def moved(self) -> None:
        self._since = time.monotonic()

    def wait(self) -> None:
        waited = time.monotonic() - self._since
        time.sleep(min(max(waited / _SHARE, _SHORTEST), _LONGEST))
        self._look(waited, self._awaited)


@dataclass
class Wire:
    """Messages between this host's speaker and those of others.

    comm: a communicator for this alone. ranks: of the speaker of each host, in it.
    """

    comm: Any
    ranks: dict[int, int]
    _sent: dict[int, int] = field(default_factory=dict[int, int])
    _received: dict[int, int] = field(default_factory=dict[int, int])
    _tags: int = 0

    def __post_init__(self) -> None:
        self._tags = int(self.comm.Get_attr(MPI.TAG_UB)) + 1 - RESERVED

    def run(self, script: Script, arrays: Sequence[Bytes], look: Look) -> None:
        """Carry out `script` on `arrays`, one-dimensional; returns when all is sent and all is there.

        look: see `Patience`. Raises what it raises, and `MPI.Exception` as MPI does; after either this wire cannot
        be used again.
        """
        run = _Run(self, script, arrays)
        try:
            patience = Patience(look, run.awaited)
            while run.left:
                if run.step():
                    patience.moved()
                elif run.left:
                    patience.wait()
        except BaseException:
            run.abandon()
            raise
        for counts, ours in ((script.sent, self._sent), (script.received, self._received)):
            for host, count in counts.items():
                ours[host] = (ours.get(host, 0) + count) % self._tags

    def post(self, message: Message, buffer: Bytes) -> Any:
        """The request of a message whose bytes lie in `buffer`."""
        counts = self._sent if message.outgoing else self._received
        tag = RESERVED + (counts.get(message.host, 0) + message.number) % self._tags
        # A synchronous send ends when its receiver has begun to take it: nothing of it is left in a queue here
        # that only later calls of MPI would empty.
        post = self.comm.Issend if message.outgoing else self.comm.Irecv
        return post([buffer, MPI.BYTE], self.ranks[message.host], tag)


class _Run:
    """One script under way."""

    def __init__(self, wire: Wire, script: Script, arrays: Sequence[Bytes]) -> None:
        self.left = len(script.messages)
        self._wire, self._messages, self._arrays = wire, script.messages, arrays
        self._buffers: dict[int, Bytes] = {}  # of messages whose bytes lie in several windows
        self._waits = [len(message.waits) for message in script.messages]
        self._next: list[list[int]] = [[] for _ in script.messages]
        self._ready: dict[int, deque[int]] = {}
        self._under_way: dict[int, int] = {}
        self._requests: list[Any] = []
        self._owners: list[int] = []
        for at, message in enumerate(script.messages):
            for before in message.waits:
                self._next[before].append(at)
            if not message.outgoing:
                self._keep(at)
            elif not message.waits:
                self._ready.setdefault(message.host, deque()).append(at)

    def step(self) -> bool:
        """Look once; whether anything happened."""
        issued = self._issue()
        if not self._requests:
            return issued
        done: list[int] | None = MPI.Request.Testsome(self._requests)
        if not done:
            return issued
        owners = sorted(self._owners[i] for i in done)
        kept = [i for i, request in enumerate(self._requests) if request != MPI.REQUEST_NULL]
        self._requests = [self._requests[i] for i in kept]
        self._owners = [self._owners[i] for i in kept]
        for owner in owners:
            self._finished(owner)
        self._issue()
        return True

    def awaited(self) -> list[int]:
        """The hosts of messages that are under way."""
        return sorted({self._messages[at].host for at in self._owners})

    def _issue(self) -> bool:
        issued = False
        for host, ready in self._ready.items():
            while ready and self._under_way.get(host, 0) < WINDOW:
                self._under_way[host] = self._under_way.get(host, 0) + 1
                self._keep(ready.popleft())
                issued = True
        return issued

    def _keep(self, at: int) -> None:
        message = self._messages[at]
        self._requests.append(self._wire.post(message, self._buffer(at)))
        self._owners.append(at)

    def _finished(self, at: int) -> None:
        message = self._messages[at]
        self.left -= 1
        if message.outgoing:
            self._under_way[message.host] -= 1
            self._buffers.pop(at, None)
            return
        if at in self._buffers:
            _spread(self._buffers.pop(at), message.windows, self._arrays)
        for after in self._next[at]:
            self._waits[after] -= 1
            if not self._waits[after]:
                # Those that come early in the script go first; it is sorted by rounds, and so nearly is this.
                self._ready.setdefault(self._messages[after].host, deque()).append(after)

    def _buffer(self, at: int) -> Bytes:
        """The memory of a message: in place where that is one window, else a copy."""
        message = self._messages[at]
        if len(message.windows) == 1:
            return _of(message.windows[0], self._arrays)
        if message.outgoing:
            made = np.concatenate([_of(window, self._arrays) for window in message.windows])
        else:
            made = np.empty(message.nbytes, np.uint8)
        self._buffers[at] = made
        return made

    def abandon(self) -> None:
        """End what is under way. What MPI cannot call back keeps its memory: bytes may still arrive in it."""
        for at, request in zip(self._owners, self._requests, strict=True):
            if request == MPI.REQUEST_NULL:
                continue
            if not self._messages[at].outgoing:
                try:
                    request.Cancel()
                    if request.Test():
                        continue
                except MPI.Exception:  # of a communicator that is no more
                    pass
            _left_alone.append((request, self._arrays, self._buffers.get(at)))
        self._requests, self._owners = [], []


def _of(window: Window, arrays: Sequence[Bytes]) -> Bytes:
    return arrays[window.array][window.low : window.high]


def _spread(buffer: Bytes, windows: Sequence[Window], arrays: Sequence[Bytes]) -> None:
    at = 0
    for window in windows:
        nbytes = window.high - window.low
        _of(window, arrays)[:] = buffer[at : at + nbytes]
        at += nbytes
