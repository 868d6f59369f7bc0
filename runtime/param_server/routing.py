"""A site as one server sees it: what each tag carries, and under which tags it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from commplan.ir import schedule as ir
from commplan.ir.types import DType
from commplan.lowering.jax.pytree import Structure, structure_by
from commplan.protocol.sites import Buffer, Chunk, Site, Sites
from commplan.runtime.param_server.update import Beside, ChunkUpdate


@dataclass(frozen=True)
class Scalars:
    """A factor of an elastic request: a number of the plan, or the tag of the message that brings it."""

    value: float = 0.0
    tag: int | None = None
    dtype: DType = DType.F32


@dataclass
class Desk:
    """One site on one server.

    up: by tag, what comes. data: by unit, the tag of its terms. scalars: the tags of a request's scalars.
    down: by unit, buffer and chunk of its answer. whole: of a `get`, everything that is answered. token: the
    tag of an answer without data. last: the tags that end a request.
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
    eta: Scalars = Scalars()
    rho: Scalars = Scalars()


def desk(site: Site, own: int) -> Desk:
    """The messages of `site` to and from its server `own`."""
    result = Desk(site)
    ends: list[int] = []
    for buffers in (site.up, site.token):
        tags = [(b, c) for b in buffers for c in b.chunks if c.server == own]
        result.up |= {chunk.tag: (buffer, chunk) for buffer, chunk in tags}
        ends += [chunk.tag for _, chunk in tags[-1:]]
    result.last = frozenset(ends)
    result.data = {chunk.unit: tag for tag, (buffer, chunk) in result.up.items() if buffer.what == "data"}
    if site.kind in ("exchange", "elastic"):
        result.scalars = tuple(tag for tag, (buffer, _) in result.up.items() if buffer.what == "scalar")
    down = [(b, c) for b in site.down for c in b.chunks if c.server == own]
    result.token = next((chunk.tag for buffer, chunk in down if buffer.what == "token"), None)
    if site.kind == "get":
        result.whole = tuple(down)
    else:
        result.down = {chunk.unit: (buffer, chunk) for buffer, chunk in down if buffer.what == "data"}
    return result


class Desks:
    """All sites of a plan as server `server` sees them. Raises CP0970, CP0971, CP0972 (see `ChunkUpdate`)."""

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
        self.all: dict[int, Desk] = {}
        for site in sites.all:
            own = server - site.first
            if 0 <= own < site.servers:
                self.all[site.number] = self._desk(site, own)
        self.of_tag = {tag: entry for entry in self.all.values() for tag in entry.up}

    @property
    def leaves(self) -> dict[str, tuple[ir.Leaf, ...]]:
        """The leaves of each state."""
        return {name: value.leaves for name, value in self.entry.items()}

    def _desk(self, site: Site, own: int) -> Desk:
        entry = desk(site, own)
        if site.kind == "elastic":
            entry.eta, entry.rho = self._factor(entry, site.eta), self._factor(entry, site.rho)
        if site.kind == "exchange":
            self._exchange(entry)
        return entry

    def _factor(self, entry: Desk, given: float | str) -> Scalars:
        if not isinstance(given, str):
            return Scalars(given)
        for tag in entry.scalars:
            if entry.up[tag][0].value == given:
                return Scalars(tag=tag, dtype=entry.up[tag][0].dtype)
        return Scalars()  # a server that owns nothing of a small state is not asked

    def _exchange(self, entry: Desk) -> None:
        site = entry.site
        phase = next(phase for phase in self.schedule.phases if phase.name == site.phase)
        values = _entry(self.schedule) | {value.id: value for value in phase.values}
        op = next(o for o in phase.ops if isinstance(o, ir.Exchange) and o.results[0] == site.result)
        gradient = values[op.gradient].leaves
        entry.gradients = tuple(gradient[part.leaves[0]].dtype for part in site.layout.parts)
        is_weighted = op.weight is not None
        hints = op.hints
        if site.mean:
            hints = hints.for_mean(entry.gradients, None, is_weighted=is_weighted)
        sums = [hints.accumulate or dtype for dtype in entry.gradients]
        if is_weighted:  # a value times its weight, which 16 bits may not hold
            sums = [DType.F32 if dtype.nbytes < DType.F32.nbytes else dtype for dtype in sums]
        wires = [self._wire(entry, number) for number in range(len(sums))]
        # Adding in less than what travels would lose what was paid for.
        entry.accumulate = tuple(a if a.nbytes >= w.nbytes else w for a, w in zip(sums, wires, strict=True))
        entry.update = ChunkUpdate(
            site.fn, self.functions[site.fn], site.layout, entry.gradients, self._beside(site), site.span,
            self.schedule.file,
        )  # fmt: skip

    def _wire(self, entry: Desk, part: int) -> DType:
        return next(b.dtype for b in entry.site.up if b.what == "data" and b.part == part)

    def _beside(self, site: Site) -> Beside | None:
        if len(site.states) == 1:
            return None
        weights, kept = (self.entry[name] for name in site.states)
        return Beside(
            site.layouts[1], kept.leaves, self._structure(kept), self._structure(weights), site.span,
            self.schedule.file,
        )  # fmt: skip

    def _structure(self, value: ir.Value) -> Structure:
        return structure_by([leaf.path for leaf in value.leaves], self.structures)


def _entry(schedule: ir.Schedule) -> dict[str, ir.Value]:
    return {value.id: value for value in schedule.entry}
