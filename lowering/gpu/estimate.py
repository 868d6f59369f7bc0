"""A rough estimate of the time of a compiled step on a machine that need not be available.

One stream computes in the order of the HLO schedule, and each level of the network carries one collective at
a time; asynchronous collectives on different levels run concurrently. Costs:

- a product: its operations at peak rate, or its bytes at memory bandwidth if that takes longer;
- other computation: its bytes at memory bandwidth;
- a collective: a fixed start, and the bytes that the best algorithm moves over the slowest level that it
  crosses (the convention of nccl-tests), or the result of `Machine.links`.

Asynchronous copies and slices count as if the stream executed them when they start. The estimate is meant to
compare schedules of one step, not to predict absolute times.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Protocol

import msgspec

from commplan.lowering.hlo.step import CompiledCollective, CompiledStep, Loop, MemoryMove, Product

Level = str  # the name of a level of the network


class Links(Protocol):
    """A cost model of collectives, for `Machine.links`.

    Attributes:
        levels: Names of the network levels.
        source: Description of its data, for the text of a `Machine`.
    """

    levels: tuple[Level, ...]
    source: str

    def seconds(self, collective: CompiledCollective) -> tuple[float, dict[Level, float]]:
        """Return the seconds of one collective alone, and the seconds for which it occupies each level.

        Levels that it does not cross are absent.
        """
        ...


class Machine(msgspec.Struct, frozen=True):
    """Achievable rates, rather than the vendor's peaks.

    Attributes:
        flops: Floating-point operations per second.
        memory: Bytes per second of memory.
        bus: Bytes per second of a rank within its host.
        start: Seconds to start a collective.
        network: Bytes per second of a rank's link between hosts; 0 if all ranks are on one host.
        per_host: Ranks per host, counted row-major over the mesh; 0 if all ranks are on one host.
        links: The cost model of collectives, which replaces `bus`, `network`, `start` and `per_host`; None to
            use those.
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
        """The rates as JSON data; `links` is replaced by its description, or None."""
        plain: dict[str, object] = {name: getattr(self, name) for name in self.__struct_fields__}
        return plain | {"links": self.links.source if self.links is not None else None}

    @property
    def levels(self) -> tuple[Level, ...]:
        """The levels of the network."""
        return ("bus", "network") if self.links is None else self.links.levels


class CollectiveWait(msgspec.Struct, frozen=True):
    """The time of a collective, summed over all iterations of its loops.

    Attributes:
        name: Name of the collective's instruction.
        seconds: Seconds that it takes.
        exposed: Seconds for which the step waits at its done.
    """

    name: str
    seconds: float
    exposed: float


class Estimate(msgspec.Struct, frozen=True):
    """The estimated times of a step, in seconds.

    Attributes:
        total: The step, until its computation and all its collectives are done.
        computation: Computation alone.
        communication: The collectives one by one.
        exposed: Waiting for collectives: `total` without `computation`.
        last: Waiting at the last done of a collective; 0 if there are no collectives.
        waits: Each collective, in order of first issue.
        busy: Time for which collectives occupy each level; levels that are not used are absent.
        after: Computation after the start of the last collective that a plan requested; 0 if there is none.
    """

    total: float
    computation: float
    communication: float
    exposed: float
    last: float
    waits: tuple[CollectiveWait, ...] = ()
    busy: Mapping[Level, float] = {}
    after: float = 0.0


def estimate(step: CompiledStep, machine: Machine) -> Estimate:
    """Simulate `step` on `machine`. A loop whose trip count is unknown runs once."""
    clock = _Clock(step, machine)
    clock.run(step.entry)
    total = max(clock.now, *clock.free.values(), 0.0)
    waits = tuple(CollectiveWait(name, seconds, clock.waited[name]) for name, seconds in clock.took.items())
    exposed = total - clock.computing
    after = clock.computing - clock.planned if clock.planned else 0.0
    busy = dict(clock.busy)
    return Estimate(total, clock.computing, clock.communicating, exposed, clock.last, waits, busy, after)


def seconds_of(collective: CompiledCollective, machine: Machine) -> float:
    """The seconds of a collective alone: its start, and the transfer on its slowest level."""
    if machine.links is not None:
        return machine.links.seconds(collective)[0]
    return machine.start + max(seconds_by_level(collective, machine).values(), default=0.0)


def seconds_by_level(collective: CompiledCollective, machine: Machine) -> dict[Level, float]:
    """The seconds of transfer on each level that `collective` crosses.

    Reductions, gathers and broadcasts use rings, with one ring between hosts for each participating rank of a
    host. Other collectives send each rank's bytes directly to their destination.
    """
    if machine.links is not None:
        return machine.links.seconds(collective)[1]
    # `shares`: bytes that a rank sends on the bus and on the network, as multiples of the bytes that it
    # contributes. Of the groups, the one with the most ranks in a host counts.
    if collective.kind == "permute":
        pairs = [(_host(a, machine), _host(b, machine)) for a, b in collective.groups if a != b]
        inside = any(a == b for a, b in pairs)
        across = any(a != b for a, b in pairs)
        shares = (float(inside), float(across))
    else:
        ranks = len(collective.groups[0])
        ranks_in_host = max(_in_one_host(group, machine) for group in collective.groups)
        if collective.kind == "all_to_all":
            shares = ((ranks_in_host - 1) / ranks, (ranks - ranks_in_host) / ranks)
        else:
            share = (ranks - 1) / ranks
            factor = {"all_reduce": 2 * share, "all_gather": ranks - 1.0, "broadcast": float(ranks > 1)}
            moved = factor.get(collective.kind, share)
            shares = (
                moved if ranks_in_host > 1 else 0.0,
                moved / ranks_in_host if ranks_in_host < ranks else 0.0,
            )
    rates: dict[Level, float] = {"bus": machine.bus, "network": machine.network}
    return {
        level: collective.nbytes * multiple / rates[level]
        for level, multiple in zip(rates, shares, strict=True)
        if multiple
    }


def seconds_of_work(work: Product | MemoryMove, machine: Machine) -> float:
    """The seconds of a product or of another computation alone."""
    if isinstance(work, MemoryMove):
        return (work.reads + work.nbytes) / machine.memory
    moved = sum(tensor.nbytes for tensor in (*work.inputs, *work.outputs))
    return max(moved / machine.memory, work.flops / machine.flops)


def _host(rank: int, machine: Machine) -> int:
    """The index of the host of a rank; 0 for all ranks if the machine has one host."""
    return rank // machine.per_host if machine.network and machine.per_host else 0


def _in_one_host(group: tuple[int, ...], machine: Machine) -> int:
    """The largest number of ranks of `group` on one host; 1 for an empty group."""
    hosts = [_host(rank, machine) for rank in group]
    return max(map(hosts.count, hosts), default=1)


class _Clock:
    """A simulation of a step. All times are in seconds from the start of the step.

    Attributes:
        now: The current time of the computing stream.
        computing: Computation so far.
        communicating: Duration of all collectives so far.
        last: Waiting at the last done of a collective.
        planned: `computing` when the last collective of a plan was issued.
        free: The time at which each level becomes free.
        busy: Time for which each level was occupied.
        took, waited: The duration of each collective, and the waiting for it, by name.
    """

    def __init__(self, step: CompiledStep, machine: Machine) -> None:
        self.step, self.machine = step, machine
        self.now = self.computing = self.communicating = self.last = self.planned = 0.0
        self.free, self.busy = defaultdict[Level, float](float), defaultdict[Level, float](float)
        self.took, self.waited = defaultdict[str, float](float), defaultdict[str, float](float)

    def run(self, computation: str) -> None:
        """Execute a computation once. Its events are instructions; a name is the done of a collective."""
        step = self.step
        events: list[tuple[int, Product | MemoryMove | Loop | CompiledCollective | str]] = []
        events += [(p.position, p) for p in step.products if p.computation == computation]
        events += [(m.position, m) for m in step.moves if m.computation == computation]
        events += [(loop.position, loop) for loop in step.loops if loop.computation == computation]
        for collective in step.collectives:
            if collective.computation == computation:
                events += [(collective.start, collective), (collective.done, collective.name)]
        ends: dict[str, float] = {}
        for _, event in sorted(events, key=lambda item: item[0]):
            match event:
                case Product() | MemoryMove():
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
        """Issue a collective, which starts when all its levels are free. Returns the time of its end."""
        levels, took = seconds_by_level(collective, self.machine), seconds_of(collective, self.machine)
        end = max(self.now, *(self.free[level] for level in levels), 0.0) + took
        for level, seconds in levels.items():
            self.free[level] = end
            self.busy[level] += seconds
        self.communicating += took
        self.planned = self.computing if collective.scopes else self.planned
        self.took[collective.name] += took
        return end

    def _compute(self, event: Product | MemoryMove) -> None:
        seconds = seconds_of_work(event, self.machine)
        self.now += seconds
        self.computing += seconds
