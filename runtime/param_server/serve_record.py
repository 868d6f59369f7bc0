"""What a server does, in the record of its run: requests heard and answered, and who is waited for."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from commplan.protocol.sites import Buffer
from commplan.recorder.lane import Lane
from commplan.runtime.param_server.routing import Desk

_LASTS_S = 1.0  # without an answer, before it is recorded who is waited for


class RequestMessage(NamedTuple):
    """One message of a request. name: of the request's line, in the record. messages: of one request, to this
    server and from it."""

    site: int
    name: int
    messages: int


@dataclass
class OpenRequest:
    """A request that is not answered whole. name: as of `RequestMessage`. left: messages not come, or not
    sent. since: on `time.monotonic`."""

    operation: int
    name: int
    left: int
    since: float


class ServeRecord:
    """Of one server. desks: its sites. file: of the plan.

    Each message of a request has a tag of its own: how often a worker's message with a tag has come, or gone
    to it, is the number of the request.
    """

    def __init__(self, lane: Lane, desks: Iterable[Desk], file: str) -> None:
        self.lane = lane
        self._by_tag: dict[int, RequestMessage] = {}
        for desk in desks:
            name = lane.name(f"line {desk.site.span.line} of {file or 'the plan'}", "serve", desk.site.kind)
            down = [chunk.tag for _, chunk in (*desk.whole, *desk.down.values())]
            down += [desk.token] if desk.token is not None else []
            sets = [_tags(desk, desk.site.up), _tags(desk, desk.site.token)]  # a worker sends one of them
            for tags in (*sets, down):
                messages = len(tags if tags is not down else sets[0]) + len(down)
                self._by_tag |= dict.fromkeys(tags, RequestMessage(desk.site.number, name, messages))
        self._count: Counter[tuple[int, int]] = Counter()  # by worker and tag
        self._open: dict[tuple[int, int, int], OpenRequest] = {}  # by site, worker and number
        self._awaited: tuple[int, int] = (0, -1)  # the operation and the rank that were recorded last

    def message(self, worker: int, tag: int) -> None:
        """A message of a worker's request has come, or its answer has gone."""
        message = self._by_tag.get(tag)
        if message is None:
            return
        self._count[worker, tag] = number = self._count[worker, tag] + 1
        key = message.site, worker, number
        request = self._open.get(key)
        if request is None:
            operation = self.lane.begin(message.name, number, worker)
            request = self._open[key] = OpenRequest(
                operation, message.name, message.messages, time.monotonic()
            )
        request.left -= 1
        if not request.left:
            self.lane.end(message.name, request.operation, number)
            del self._open[key]

    def lost(self, worker: int) -> None:
        """A worker has left or died: it is answered nothing more."""
        for key in [key for key in self._open if key[1] == worker]:
            request = self._open.pop(key)
            self.lane.end(request.name, request.operation, key[2])

    def waits(self, workers: Sequence[int]) -> None:
        """Answers wait for these workers."""
        if not self._open or not workers:
            return
        request = next(iter(self._open.values()))
        if time.monotonic() - request.since >= _LASTS_S and self._awaited != (request.operation, workers[0]):
            self._awaited = request.operation, workers[0]
            self.lane.awaits(request.name, *self._awaited)


def _tags(desk: Desk, buffers: Iterable[Buffer]) -> list[int]:
    return [chunk.tag for buffer in buffers for chunk in buffer.chunks if chunk.tag in desk.up]
