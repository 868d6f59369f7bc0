"""Record the requests of a server, and the workers that answers wait for, in its flight record."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from commplan.protocol.sites import Buffer
from commplan.recorder.lane import Lane
from commplan.runtime.param_server.routing import SiteRoutes

_RECORD_AFTER_S = 1.0  # Seconds from the begin of a request until the worker that it waits for is recorded.


class RequestMessage(NamedTuple):
    """The request that a message belongs to.

    Attributes:
        site: The number of the site.
        name: The index of the request's line in the record.
        messages: The number of messages of one request to and from this server. For the tag of an answer it
            is not used.
    """

    site: int
    name: int
    messages: int


@dataclass
class OpenRequest:
    """A request that is not completely answered.

    Attributes:
        operation: The number of the request in the record.
        name: As in `RequestMessage`.
        pending: The number of messages that have not been received or sent yet.
        since: The time of its first message, in seconds on `time.monotonic`.
    """

    operation: int
    name: int
    pending: int
    since: float


class ServeRecord:
    """The flight record of one server.

    Each message of a request has a separate tag. The number of a request is therefore the number of messages
    with this tag from, or to, the worker.

    Args:
        lane: The part of the record that it writes to.
        routes: The sites of the server.
        file: The plan's file, or "".

    Attributes:
        lane: The part of the record that it writes to.
    """

    def __init__(self, lane: Lane, routes: Iterable[SiteRoutes], file: str) -> None:
        self.lane = lane
        self._by_tag: dict[int, RequestMessage] = {}
        for site_routes in routes:
            name = lane.name(
                f"line {site_routes.site.span.line} of {file or 'the plan'}", "serve", site_routes.site.kind
            )
            down = [chunk.tag for _, chunk in (*site_routes.whole, *site_routes.down.values())]
            down += [site_routes.token] if site_routes.token is not None else []
            # A worker sends one of these.
            alternatives = [
                _tags(site_routes, site_routes.site.up),
                _tags(site_routes, site_routes.site.token),
            ]
            # Only the first message of a request, which comes from a worker, sets its number of messages.
            for tags in (*alternatives, down):
                messages = len(tags if tags is not down else alternatives[0]) + len(down)
                self._by_tag |= dict.fromkeys(tags, RequestMessage(site_routes.site.number, name, messages))
        self._count: Counter[tuple[int, int]] = Counter()  # Messages, by worker and tag.
        # By site, worker and number of the request; the oldest first.
        self._open: dict[tuple[int, int, int], OpenRequest] = {}
        self._awaited: tuple[int, int] = (0, -1)  # The operation and the rank that were recorded last.

    def message(self, worker: int, tag: int) -> None:
        """Count a message that was received from, or sent to, a worker. Other tags are ignored.

        The first message of a request begins an operation of the record, and the last one ends it.
        """
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
        request.pending -= 1
        if not request.pending:
            self.lane.end(message.name, request.operation, number)
            del self._open[key]

    def lost(self, worker: int) -> None:
        """End the requests of a worker that has left or died."""
        for key in [key for key in self._open if key[1] == worker]:
            request = self._open.pop(key)
            self.lane.end(request.name, request.operation, key[2])

    def waits(self, workers: Sequence[int]) -> None:
        """Record that the oldest open request waits for `workers[0]`.

        Nothing is recorded before the request is `_RECORD_AFTER_S` old, or if this was recorded last.

        Args:
            workers: Living workers that do not wait; one of them blocks the others. May be empty.
        """
        if not self._open or not workers:
            return
        request = next(iter(self._open.values()))
        awaited = request.operation, workers[0]
        if time.monotonic() - request.since >= _RECORD_AFTER_S and self._awaited != awaited:
            self._awaited = awaited
            self.lane.awaits(request.name, *self._awaited)


def _tags(routes: SiteRoutes, buffers: Iterable[Buffer]) -> list[int]:
    """The tags of `buffers` that this server receives."""
    return [chunk.tag for buffer in buffers for chunk in buffer.chunks if chunk.tag in routes.up]
