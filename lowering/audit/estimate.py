"""A rough estimate of how long a compiled step takes on a machine that is not at hand.

One stream computes, in the order of the HLO schedule, and each level of the network carries one collective at
a time: collectives on different levels that the schedule lets fly together run at once. A product takes its
operations over the peak, or its bytes over the memory's bandwidth if that is more; anything else its bytes; a
collective what the best algorithm must move over the slowest level that it crosses (the convention of
nccl-tests), after a fixed start, or what `Machine.links` says. Asynchronous copies and slices count as if the
one stream made them where they start. It tells schedules of one step apart, no more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

import msgspec

from commplan.lowering.audit.step import CompiledCollective, CompiledStep, Loop, Move, Product

Level = str


class Links(Protocol):
    """What prices collectives by links that the machine does not have built in.

    levels: their names. source: where their rates come from, in words.
    """

    levels: tuple[Level, ...]
    source: str

    def seconds(self, collective: CompiledCollective) -> tuple[float, dict[Level, float]]:
        """Seconds of one collective alone, and for how much of that each level is busy."""
        ...


class Machine(msgspec.Struct, frozen=True):
    """Rates that are reached, not the vendor's peaks: operations and bytes per second, seconds.

    bus: of a rank within its host. network: of a rank's own link between hosts of `per_host` ranks each,
    counted in the mesh's row-major order; 0 where all ranks are on one bus. links: price collectives instead
    of `bus`, `network` and `start`, if given.
    """

    flops: float
    memory: float
    bus: float
    start: float = 20e-6
    network: float = 0
    per_host: int = 0
    links: Links | None = None

    def __str__(self) -> str:
        rates = f"{self.flops / 1e12:.0f} Tflop/s, {self.memory / 1e12:.2g} TB/s of memory"
        if self.links is not None:
            return f"{rates}, {self.links.source}"
        rates += f", {self.bus / 1e9:.0f} GB/s on the bus"
        rates += f", {self.network / 1e9:.0f} GB/s a rank between hosts" if self.network else ""
        return f"{rates}, built in: --topology has the links of a cluster"

    def data(self) -> dict[str, object]:
        """The rates for JSON; of `links` what they say of themselves."""
        plain: dict[str, object] = {name: getattr(self, name) for name in self.__struct_fields__}
        return plain | {"links": self.links.source if self.links is not None else None}

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels of the network."""
        return ("bus", "network") if self.links is None else self.links.levels


class Wait(msgspec.Struct, frozen=True):
    """Seconds of one collective, of all its trips where it is in a loop: alone, and those waited for it."""

    name: str
    seconds: float
    exposed: float


class Estimate(msgspec.Struct, frozen=True):
    """Seconds: of the step; of its computation and its communication alone; of waiting, in all, for the
    last collective that anything waits for, and for each of them; and how long each level is busy.
    after: of the computation behind the start of the last collective of a plan."""

    total: float
    computation: float
    communication: float
    exposed: float
    last: float
    waits: tuple[Wait, ...] = ()
    busy: Mapping[Level, float] = {}
    after: float = 0.0


def estimate(step: CompiledStep, machine: Machine) -> Estimate:
    """Play the schedule of `step` on `machine`. Loops whose trips are not known go round once."""
    clock = _Clock(step, machine)
    clock.run(step.entry)
    total = max(clock.now, *clock.free.values(), 0.0)
    waits = tuple(Wait(name, seconds, clock.waited[name]) for name, seconds in clock.took.items())
    exposed = total - clock.computing
    after = clock.computing - clock.planned if clock.planned else 0.0
    busy = dict(clock.busy)
    return Estimate(total, clock.computing, clock.communicating, exposed, clock.last, waits, busy, after)


def seconds_of(collective: CompiledCollective, machine: Machine) -> float:
    """Of one collective alone: a start, and what its slowest level takes."""
    if machine.links is not None:
        return machine.links.seconds(collective)[0]
    return machine.start + max(seconds_by_level(collective, machine).values(), default=0.0)


def seconds_by_level(collective: CompiledCollective, machine: Machine) -> dict[Level, float]:
    """What each level that `collective` crosses takes to move its bytes.

    Reductions, gathers and broadcasts go in rings: bytes that cross each rank's link, over the bus bandwidth;
    between hosts a ring for each rank of a host that takes part, each with its part of the bytes. All others
    send each rank's bytes straight to where they belong.
    """
    if machine.links is not None:
        return machine.links.seconds(collective)[1]
    if collective.kind == "permute":
        pairs = [(_host(a, machine), _host(b, machine)) for a, b in collective.groups if a != b]
        inside, across = any(a == b for a, b in pairs), any(a != b for a, b in pairs)
        shares = (float(inside), float(across))
    else:
        ranks = len(collective.groups[0])
        own = max(_in_one_host(group, machine) for group in collective.groups)
        if collective.kind == "all_to_all":
            shares = ((own - 1) / ranks, (ranks - own) / ranks)
        else:
            share = (ranks - 1) / ranks
            factor = {"all_reduce": 2 * share, "all_gather": ranks - 1.0, "broadcast": float(ranks > 1)}
            moved = factor.get(collective.kind, share)
            shares = (moved if own > 1 else 0.0, moved / own if own < ranks else 0.0)
    rates: dict[Level, float] = {"bus": machine.bus, "network": machine.network}
    return {
        level: collective.nbytes * share / rates[level]
        for level, share in zip(rates, shares, strict=True)
        if share
    }


def seconds_of_work(work: Product | Move, machine: Machine) -> float:
    """Of a product, or of anything else that computes, alone."""
    if isinstance(work, Move):
        return (work.reads + work.nbytes) / machine.memory
    moved = sum(tensor.nbytes for tensor in (*work.inputs, *work.outputs))
    return max(moved / machine.memory, work.flops / machine.flops)


def _host(rank: int, machine: Machine) -> int:
    return rank // machine.per_host if machine.network and machine.per_host else 0


def _in_one_host(group: tuple[int, ...], machine: Machine) -> int:
    """The most ranks of `group` that share a host."""
    hosts = [_host(rank, machine) for rank in group]
    return max(map(hosts.count, hosts), default=1)


class _Clock:
    """The time at which the computing stream is, and from which each level of the network is free."""

    def __init__(self, step: CompiledStep, machine: Machine) -> None:
        self.step, self.machine = step, machine
        self.now = self.computing = self.communicating = self.last = self.planned = 0.0
        self.free, self.busy = defaultdict[Level, float](float), defaultdict[Level, float](float)
        self.took, self.waited = defaultdict[str, float](float), defaultdict[str, float](float)

    def run(self, computation: str) -> None:
        step = self.step
        events: list[tuple[int, Product | Move | Loop | CompiledCollective | str]] = []
        events += [(p.position, p) for p in step.products if p.computation == computation]
        events += [(m.position, m) for m in step.moves if m.computation == computation]
        events += [(loop.position, loop) for loop in step.loops if loop.computation == computation]
        for collective in step.collectives:
            if collective.computation == computation:
                events += [(collective.start, collective), (collective.done, collective.name)]
        ends: dict[str, float] = {}
        for _, event in sorted(events, key=lambda item: item[0]):
            match event:
                case Product() | Move():
                    self._compute(event)
                case CompiledCollective():
                    ends[event.name] = self._move(event)
                case str():
                    self.last = max(0.0, ends[event] - self.now)
                    self.waited[event] += self.last
                    self.now = max(self.now, ends[event])
                case Loop():
                    for _ in range(event.trips or 1):
                        self.run(event.body)

    def _move(self, collective: CompiledCollective) -> float:
        """When `collective` ends: it begins when it is issued and all its levels are free."""
        levels, took = seconds_by_level(collective, self.machine), seconds_of(collective, self.machine)
        end = max(self.now, *(self.free[level] for level in levels), 0.0) + took
        for level, seconds in levels.items():
            self.free[level] = end
            self.busy[level] += seconds
        self.communicating += took
        self.planned = self.computing if collective.scopes else self.planned
        self.took[collective.name] += took
        return end

    def _compute(self, event: Product | Move) -> None:
        seconds = seconds_of_work(event, self.machine)
        self.now += seconds
        self.computing += seconds
