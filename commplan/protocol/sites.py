"""Sites: the ops of a schedule that communicate with servers, and the messages of each.

A *request* is one worker at one site: it sends its messages to the servers in the order of their tags, then
receives the answers. Each message has a unique tag, the same for every worker and every step, so the schedule
determines the messages on both sides. Tags below `FIRST_TAG` are for control.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import msgspec

from commplan.diagnostics import Span
from commplan.ir.axes import coordinates, groups, position
from commplan.ir.plan import Ref
from commplan.ir.types import DType, ServedMode
from commplan.protocol.units import StateLayout

LEAVE = 1  # a worker sends no further messages
LEFT = 5  # a server that all workers have left sends no further messages
FIRST_TAG = 16

Kind = Literal["put", "get", "exchange", "elastic"]


class Chunk(msgspec.Struct, frozen=True):
    """One message: elements `start` to `start + size` - 1 of a buffer, to or from `server`.

    Attributes:
        unit: the unit of the state that the elements belong to; -1 if they belong to the whole request.
    """

    server: int
    start: int
    size: int
    tag: int
    unit: int = -1


class Buffer(msgspec.Struct, frozen=True):
    """A flat buffer that a worker sends or gets, and its chunks in the order of their tags.

    Attributes:
        content: `data`, the leaves `leaves` of `value` one after another, which are part `part` of slot
            `slot` of its state; `scalar`, `value` or leaf `leaves[0]` of it, in one message for each server
            (one element going up; the same element from each server coming down); `token`, i32 whose values
            are unused.
    """

    content: Literal["data", "scalar", "token"]
    dtype: DType
    size: int
    chunks: tuple[Chunk, ...]
    value: Ref = ""
    leaves: tuple[int, ...] = ()
    slot: int = 0
    part: int = 0


def nbytes_of(buffers: Iterable[Buffer], server: int | None = None) -> int:
    """Bytes of all messages of `buffers`, or of those to or from one server."""
    return sum(
        chunk.size * buffer.dtype.nbytes
        for buffer in buffers
        for chunk in buffer.chunks
        if server in (None, chunk.server)
    )


class StateDistribution(msgspec.Struct, frozen=True):
    """The distribution of a state over its servers: bytes of each server, and the largest over the mean."""

    state: str
    units: int
    nbytes: tuple[int, ...]

    @property
    def balance(self) -> float:
        total = sum(self.nbytes)
        return max(self.nbytes) * len(self.nbytes) / total if total else 1.0


class Site(msgspec.Struct, frozen=True):
    """One op of a phase that communicates with servers.

    Attributes:
        result: the first result of the op.
        server: the name of the server declaration.
        servers: the number of its servers.
        first: the number of its first server in the plan.
        per: the axes along which workers have separate states on the server (their group).
        states: the names of the states; the units of the first one are distributed.
        layouts: the layout of each state.
        up, down: the buffers of a worker's request and of the answer.
        token: the buffers that members other than the first send for a `put`.
    """

    number: int
    kind: Kind
    phase: str
    result: Ref
    span: Span
    server: str
    first: int
    servers: int
    per: tuple[str, ...]
    states: tuple[str, ...]
    layouts: tuple[StateLayout, ...]
    up: tuple[Buffer, ...]
    down: tuple[Buffer, ...]
    token: tuple[Buffer, ...] = ()
    mode: ServedMode | None = None
    staleness: int | None = None
    fn: str = ""
    mean: bool = False
    weight: Ref | None = None
    eta: float | Ref = 0.0
    rho: float | Ref = 0.0

    @property
    def layout(self) -> StateLayout:
        """The layout of its first state."""
        return self.layouts[0]

    @property
    def distributions(self) -> tuple[StateDistribution, ...]:
        """The distribution of each of its states."""
        named = zip(self.states, self.layouts, strict=True)
        return tuple(StateDistribution(name, len(layout.units), layout.stored) for name, layout in named)


class Sites(msgspec.Struct, frozen=True):
    """All sites of a schedule, in its order, the same on all ranks.

    Attributes:
        axes: the axes of the mesh, in the plan's order.
    """

    all: tuple[Site, ...]
    axes: tuple[tuple[str, int], ...]
    servers: int

    @property
    def workers(self) -> int:
        return math.prod(size for _, size in self.axes)

    def at(self, phase: str, result: Ref) -> Site:
        """The site of the op that makes `result` first. Raises KeyError."""
        for site in self.all:
            if (site.phase, site.result) == (phase, result):
                return site
        raise KeyError(f"{phase}: {result}")

    def group(self, site: Site, worker: int) -> int:
        """The group of a worker at a site: its place along `per`, row-major."""
        sizes = dict(self.axes)
        along = [name for name in sizes if name in site.per]
        return position(coordinates(worker, sizes, sizes), along, sizes)

    def members(self, site: Site) -> tuple[tuple[int, ...], ...]:
        """The workers of each group, in rank order."""
        sizes = dict(self.axes)
        return tuple(groups([name for name in sizes if name not in site.per], sizes))


class SiteMessage(NamedTuple):
    """One message: `size` elements from `start` of buffer number `buffer` of `sent`, or of `Site.down`."""

    server: int
    tag: int
    buffer: int
    start: int
    size: int


def sent(site: Site, *, first: bool) -> tuple[Buffer, ...]:
    """The buffers that a worker sends.

    Args:
        first: whether it is the first of its group, which alone sends a put.
    """
    return site.up if first or site.kind != "put" else site.token


def sends(site: Site, *, first: bool) -> tuple[SiteMessage, ...]:
    """The messages of a request in the order in which they are posted. The site's first server is 0."""
    return tuple(_moves(sent(site, first=first)))


def receives(site: Site) -> tuple[SiteMessage, ...]:
    """The messages that answer a request, in any order."""
    return tuple(_moves(site.down))


def _moves(buffers: tuple[Buffer, ...]) -> Iterator[SiteMessage]:
    for number, buffer in enumerate(buffers):
        for chunk in buffer.chunks:
            yield SiteMessage(chunk.server, chunk.tag, number, chunk.start, chunk.size)
