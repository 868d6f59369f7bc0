"""What a worker does at a site: which messages it sends, and which it then waits for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from commplan.protocol.sites import Buffer, Site


class Move(NamedTuple):
    """One message: `size` elements from `start` of buffer number `buffer` of `sent`, or of `Site.down`."""

    server: int
    tag: int
    buffer: int
    start: int
    size: int


def sent(site: Site, *, first: bool) -> tuple[Buffer, ...]:
    """What a worker sends. first: whether it is the first of its group, which alone sends what is put."""
    return site.up if first or site.kind != "put" else site.token


def sends(site: Site, *, first: bool) -> tuple[Move, ...]:
    """The messages of a request in the order in which they are posted. The site's first server is 0."""
    return tuple(_moves(sent(site, first=first)))


def receives(site: Site) -> tuple[Move, ...]:
    """The messages that answer a request, in any order."""
    return tuple(_moves(site.down))


def _moves(buffers: tuple[Buffer, ...]) -> Iterator[Move]:
    for number, buffer in enumerate(buffers):
        for chunk in buffer.chunks:
            yield Move(chunk.server, chunk.tag, number, chunk.start, chunk.size)
