"""Sites: the ops of a schedule that communicate with servers, and the messages of each.

A *request* is one execution of a site by one worker: it sends its messages to the servers in the order of
their tags, then receives the answers. Each message of a site has a tag that no other message of the schedule
has, and that is the same for every worker and every step. So the schedule determines the messages on both
sides. Tags below `FIRST_TAG` are for control.
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

# The tag of a worker's last message to a server.
LEAVE = 1
# The tag of the last message of a server, which it sends when all workers have left.
LEFT = 5
# The first tag of the messages of sites.
FIRST_TAG = 16

# The op of a site; see `ir.ops`.
Kind = Literal["put", "get", "exchange", "elastic"]


class Chunk(msgspec.Struct, frozen=True):
    """One message: a run of elements of a buffer.

    Attributes:
        server: The server, counted from 0 among the servers of the site.
        start: The first element in the buffer.
        size: The number of elements.
        tag: The tag of the message.
        unit: The number of the state's unit that the elements belong to; -1 for scalars and tokens, which
            belong to the whole request.
    """

    server: int
    start: int
    size: int
    tag: int
    unit: int = -1


class Buffer(msgspec.Struct, frozen=True):
    """A flat buffer that a worker sends or receives.

    Attributes:
        content: The content of the buffer:

            - `data`: the leaves `leaves` of `value`, one after another.
            - `scalar`: leaf `leaves[0]` of `value`. A worker sends the same element to each server, and
              receives one element from each server.
            - `token`: elements whose values are unused.
        dtype: The dtype on the wire; i32 for tokens.
        size: The number of elements.
        chunks: The messages, in the order of their tags.
        value: The value that is sent, or that the answer becomes; empty for tokens.
        leaves: The indices of the leaves; empty for tokens.
        slot: For data, the index in `StateLayout.slots`.
        part: For data, the index of the part in the slot.
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
    """The bytes of all messages of `buffers`, or of those to or from `server` if it is not None."""
    return sum(
        chunk.size * buffer.dtype.nbytes
        for buffer in buffers
        for chunk in buffer.chunks
        if server in (None, chunk.server)
    )


class StateDistribution(msgspec.Struct, frozen=True):
    """The distribution of a state over its servers.

    Attributes:
        state: The name of the state.
        units: The number of units.
        nbytes: The bytes of each server, without scalars.
    """

    state: str
    units: int
    nbytes: tuple[int, ...]

    @property
    def balance(self) -> float:
        """The bytes of the server with the most, divided by the mean; 1 if there are no bytes."""
        total = sum(self.nbytes)
        return max(self.nbytes) * len(self.nbytes) / total if total else 1.0


class Site(msgspec.Struct, frozen=True):
    """One op of a phase that communicates with servers.

    Attributes:
        number: The index of the site in `Sites.all`.
        kind: The op.
        phase: The name of the phase.
        result: The first result of the op.
        span: The place of the op in the plan.
        server: The name of the server declaration.
        first: The number, among all servers of the plan, of the declaration's first server.
        servers: The number of servers of the declaration.
        per: The axes along which workers have separate states on the servers. Workers at the same place along
            these axes form a group.
        states: The names of the states. All are divided by the units of the first one.
        layouts: The layout of each state.
        up: The buffers of a worker's request.
        down: The buffers of the answer; empty for a put.
        token: For a put, the buffers that members of a group other than the first send; else empty.
        mode: The mode of an `elastic`; None for other kinds.
        staleness: For an exchange, the number of updates that may be missing in an answer. For an elastic,
            the number of requests that a worker may be ahead of the slowest of its group, or None for no
            limit. None for other kinds.
        fn: The update function of an exchange; else empty.
        mean: Whether an exchange averages gradients instead of adding them.
        weight: The weight of the mean of an exchange; None if there is none.
        eta: For an elastic, the first coefficient, a number or the scalar value that workers send.
        rho: For an elastic, the second coefficient, as `eta`.
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
        """The layout of the first state."""
        return self.layouts[0]

    @property
    def distributions(self) -> tuple[StateDistribution, ...]:
        """The distribution of each state."""
        named = zip(self.states, self.layouts, strict=True)
        return tuple(StateDistribution(name, len(layout.units), layout.stored) for name, layout in named)


class Sites(msgspec.Struct, frozen=True):
    """All sites of a schedule, the same on all ranks.

    Attributes:
        all: The sites, in the order of the schedule; empty if no state is on a server.
        axes: The names and sizes of the axes of the mesh, in the plan's order. A worker is a rank over these
            axes, the first one major.
        servers: The number of servers of all declarations.
    """

    all: tuple[Site, ...]
    axes: tuple[tuple[str, int], ...]
    servers: int

    @property
    def workers(self) -> int:
        """The number of workers."""
        return math.prod(size for _, size in self.axes)

    def at(self, phase: str, result: Ref) -> Site:
        """The site in `phase` of the op whose first result is `result`. Raises KeyError if there is none."""
        for site in self.all:
            if (site.phase, site.result) == (phase, result):
                return site
        raise KeyError(f"{phase}: {result}")

    def group(self, site: Site, worker: int) -> int:
        """The number of the group of `worker` at a site: its place along the axes `per`, row-major."""
        sizes = dict(self.axes)
        along = [name for name in sizes if name in site.per]
        return position(coordinates(worker, sizes, sizes), along, sizes)

    def members(self, site: Site) -> tuple[tuple[int, ...], ...]:
        """The workers of each group in rank order, indexed by the number of the group."""
        sizes = dict(self.axes)
        return tuple(groups([name for name in sizes if name not in site.per], sizes))


class SiteMessage(NamedTuple):
    """One message of a request or of its answer: a run of elements of a buffer.

    Attributes:
        server: The server, counted from 0 among the servers of the site.
        tag: The tag.
        buffer: The index of the buffer in `sent` for a request, or in `Site.down` for an answer.
        start: The first element in the buffer.
        size: The number of elements.
    """

    server: int
    tag: int
    buffer: int
    start: int
    size: int


def sent(site: Site, *, first: bool) -> tuple[Buffer, ...]:
    """The buffers that a worker sends for a request.

    Args:
        site: The site.
        first: Whether the worker is the first of its group, which alone sends the value of a put.
    """
    return site.up if first or site.kind != "put" else site.token


def sends(site: Site, *, first: bool) -> tuple[SiteMessage, ...]:
    """The messages of a request in the order of posting. Arguments are those of `sent`."""
    return tuple(_messages(sent(site, first=first)))


def receives(site: Site) -> tuple[SiteMessage, ...]:
    """The messages that answer a request. They may arrive in any order."""
    return tuple(_messages(site.down))


def _messages(buffers: tuple[Buffer, ...]) -> Iterator[SiteMessage]:
    for number, buffer in enumerate(buffers):
        for chunk in buffer.chunks:
            yield SiteMessage(chunk.server, chunk.tag, number, chunk.start, chunk.size)
