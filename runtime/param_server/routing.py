"""The routes of messages on one server: the content of each tag, and the tags of answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from commplan.ir import schedule as ir
from commplan.ir.types import DType
from commplan.lowering.jax.pytree import Structure, structure_by
from commplan.protocol.sites import Buffer, Chunk, Site, Sites
from commplan.runtime.param_server.update import AuxiliaryState, ChunkUpdate


@dataclass(frozen=True)
class Factor:
    """A factor of an elastic request: a literal of the plan, or a scalar that the worker sends.

    Attributes:
        value: The literal; not used if there is a tag.
        tag: The tag of the message with the factor, or None for a literal.
        dtype: The dtype of the factor in the message; not used for a literal.
    """

    value: float = 0.0
    tag: int | None = None
    dtype: DType = DType.F32


@dataclass
class SiteRoutes:
    """The messages of one site on one server.

    Attributes:
        site: The site.
        up: By tag, the buffer and the chunk of a received message.
        data: By unit, the tag of the message with the unit's term.
        scalars: The tags of the scalars of an exchange or an elastic request; empty for other requests.
        down: By unit, the buffer and the chunk of the answer; empty for a `get`.
        whole: All buffers and chunks of the answer to a `get`; empty for other requests.
        token: The tag of an answer without data; None if answers have data.
        last: The tags of the last message of a request. There are two if a request can be a token instead.
        update: The update function of an exchange; None for other requests.
        gradients: The dtypes of the gradients of an exchange, by part; empty for other requests.
        accumulate: The dtypes of the sums of these gradients, by part.
        eta: The factor `eta` of an elastic request; the default for other requests.
        rho: The factor `rho`, as `eta`.
    """

    site: Site
    up: dict[int, tuple[Buffer, Chunk]] = field(default_factory=dict[int, tuple[Buffer, Chunk]])
    data: dict[int, int] = field(default_factory=dict[int, int])
    scalars: tuple[int, ...] = ()
    down: dict[int, tuple[Buffer, Chunk]] = field(default_factory=dict[int, tuple[Buffer, Chunk]])
    whole: tuple[tuple[Buffer, Chunk], ...] = ()
    token: int | None = None
    last: frozenset[int] = frozenset()
    update: ChunkUpdate | None = None
    gradients: tuple[DType, ...] = ()
    accumulate: tuple[DType, ...] = ()
    eta: Factor = Factor()
    rho: Factor = Factor()


def site_routes(site: Site, server: int) -> SiteRoutes:
    """The messages of `site` to and from one of its servers, without an update function and factors.

    Args:
        site: The site.
        server: The index of the server among those of the site.
    """
    result = SiteRoutes(site)
    ends: list[int] = []
    for buffers in (site.up, site.token):
        tags = [(b, c) for b in buffers for c in b.chunks if c.server == server]
        result.up |= {chunk.tag: (buffer, chunk) for buffer, chunk in tags}
        ends += [chunk.tag for _, chunk in tags[-1:]]
    result.last = frozenset(ends)
    result.data = {chunk.unit: tag for tag, (buffer, chunk) in result.up.items() if buffer.content == "data"}
    if site.kind in ("exchange", "elastic"):
        result.scalars = tuple(tag for tag, (buffer, _) in result.up.items() if buffer.content == "scalar")
    down = [(b, c) for b in site.down for c in b.chunks if c.server == server]
    result.token = next((chunk.tag for buffer, chunk in down if buffer.content == "token"), None)
    if site.kind == "get":
        result.whole = tuple(down)
    else:
        result.down = {chunk.unit: (buffer, chunk) for buffer, chunk in down if buffer.content == "data"}
    return result


class RoutingTable:
    """The routes of all sites of a plan on one server.

    Args:
        schedule: The schedule.
        sites: The calls to servers in the schedule.
        server: The number of the server among all servers of the plan.
        functions: The functions by name.
        structures: Pytree structures by leaf paths.

    Attributes:
        entry: The inputs and states of the schedule, by name.
        sites: The routes of the sites that this server serves, by the number of the site.
        by_tag: The routes, by the tag of a received message.

    Raises:
        CommplanError: CP0970, CP0971 or CP0972 for an exchange; see `ChunkUpdate` and `AuxiliaryState`.
    """

    def __init__(
        self,
        schedule: ir.Schedule,
        sites: Sites,
        server: int,
        functions: Mapping[str, Callable[..., Any]],
        structures: Mapping[tuple[str, ...], Structure],
    ) -> None:
        self.schedule, self.functions, self.structures = schedule, functions, structures
        self.entry = {ref.rsplit(".", 1)[0]: value for ref, value in _entry(schedule).items()}
        self.sites: dict[int, SiteRoutes] = {}
        for site in sites.all:
            index = server - site.first
            if 0 <= index < site.servers:
                self.sites[site.number] = self._routes(site, index)
        self.by_tag = {tag: routes for routes in self.sites.values() for tag in routes.up}

    @property
    def leaves(self) -> dict[str, tuple[ir.Leaf, ...]]:
        """The leaves of each input and state, by name."""
        return {name: value.leaves for name, value in self.entry.items()}

    def _routes(self, site: Site, index: int) -> SiteRoutes:
        """The routes of `site` with its update function and factors; index: of this server in the site."""
        routes = site_routes(site, index)
        if site.kind == "elastic":
            routes.eta, routes.rho = self._factor(routes, site.eta), self._factor(routes, site.rho)
        if site.kind == "exchange":
            self._exchange(routes)
        return routes

    def _factor(self, routes: SiteRoutes, factor: float | str) -> Factor:
        """The route of a literal, or of the scalar value called `factor`."""
        if not isinstance(factor, str):
            return Factor(factor)
        for tag in routes.scalars:
            if routes.up[tag][0].value == factor:
                return Factor(tag=tag, dtype=routes.up[tag][0].dtype)
        return Factor()  # This server has no unit of a small state, and receives no request.

    def _exchange(self, routes: SiteRoutes) -> None:
        """Set the dtypes and the update function of an exchange."""
        site = routes.site
        phase = next(phase for phase in self.schedule.phases if phase.name == site.phase)
        values = _entry(self.schedule) | {value.id: value for value in phase.values}
        op = next(o for o in phase.ops if isinstance(o, ir.Exchange) and o.results[0] == site.result)

        # The leaves of a part have one dtype.
        gradient = values[op.gradient].leaves
        routes.gradients = tuple(gradient[part.leaves[0]].dtype for part in site.layout.parts)
        is_weighted = op.weight is not None
        hints = op.hints
        if site.mean:
            hints = hints.for_mean(routes.gradients, None, is_weighted=is_weighted)
        sums = [hints.accumulate or dtype for dtype in routes.gradients]
        if is_weighted:  # The product with a weight may exceed the range of 16 bits.
            sums = [DType.F32 if dtype.nbytes < DType.F32.nbytes else dtype for dtype in sums]
        wires = [self._wire(routes, number) for number in range(len(sums))]
        # Adding in a narrower dtype than that of the messages would lose precision.
        routes.accumulate = tuple(a if a.nbytes >= w.nbytes else w for a, w in zip(sums, wires, strict=True))
        routes.update = ChunkUpdate(
            site.fn, self.functions[site.fn], site.layout, routes.gradients, self._auxiliary(site), site.span,
            self.schedule.file,
        )  # fmt: skip

    def _wire(self, routes: SiteRoutes, part: int) -> DType:
        """The dtype of the terms of a part in messages."""
        return next(b.dtype for b in routes.site.up if b.content == "data" and b.part == part)

    def _auxiliary(self, site: Site) -> AuxiliaryState | None:
        """The second state of an exchange, such as momentum; None if it has only the weights."""
        if len(site.states) == 1:
            return None
        weights, auxiliary = (self.entry[name] for name in site.states)
        return AuxiliaryState(
            site.layouts[1], auxiliary.leaves, self._structure(auxiliary), self._structure(weights),
            site.span, self.schedule.file,
        )  # fmt: skip

    def _structure(self, value: ir.Value) -> Structure:
        return structure_by([leaf.path for leaf in value.leaves], self.structures)


def _entry(schedule: ir.Schedule) -> dict[str, ir.Value]:
    """The inputs and states of a schedule, by id."""
    return {value.id: value for value in schedule.entry}
