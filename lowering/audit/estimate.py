"""A rough estimate of how long a compiled step takes on a machine that is not at hand.

One stream computes and one communicates, in the order of the HLO schedule. A product takes its
operations over the peak, or its bytes over the memory's bandwidth if that is more; anything else its
bytes; a collective moves what the best algorithm must over its `bus` bandwidth (the convention of
nccl-tests) after a fixed start. It tells schedules of one step apart, no more.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec

from commplan.lowering.audit.step import CompiledCollective, CompiledStep, Loop, Move, Product


class Machine(msgspec.Struct, frozen=True):
    """Rates that are reached, not the vendor's peaks: operations and bytes per second, seconds."""

    flops: float
    memory: float
    bus: float
    start: float = 20e-6


class Wait(msgspec.Struct, frozen=True):
    """Seconds of one collective, of all its trips where it is in a loop: alone, and those waited for it."""

    name: str
    seconds: float
    exposed: float


class Estimate(msgspec.Struct, frozen=True):
    """Seconds: of the step; of its computation and its communication alone; of waiting, in all, for the
    last collective that anything waits for, and for each of them."""

    total: float
    computation: float
    communication: float
    exposed: float
    last: float
    waits: tuple[Wait, ...] = ()


def estimate(step: CompiledStep, machine: Machine) -> Estimate:
    """Play the schedule of `step` on `machine`. Loops whose trips are not known go round once."""
    clock = _Clock(step, machine)
    clock.run(step.entry)
    total = max(clock.now, clock.free)
    waits = tuple(Wait(name, seconds, clock.waited[name]) for name, seconds in clock.took.items())
    return Estimate(total, clock.computing, clock.communicating, total - clock.computing, clock.last, waits)


def seconds_of(collective: CompiledCollective, machine: Machine) -> float:
    """Of one collective alone: start + bytes that cross each rank's link, over the bus bandwidth."""
    ranks = max(len(collective.groups[0]), 1)
    share = (ranks - 1) / ranks
    factor = {"all_reduce": 2 * share, "all_gather": ranks - 1.0, "broadcast": 1.0, "permute": 1.0}
    return machine.start + collective.nbytes * factor.get(collective.kind, share) / machine.bus


class _Clock:
    """The time at which the computing stream is, and from which the communicating one is free."""

    def __init__(self, step: CompiledStep, machine: Machine) -> None:
        self.step, self.machine = step, machine
        self.now = self.free = self.computing = self.communicating = self.last = 0.0
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
                    took = seconds_of(event, self.machine)
                    self.communicating += took
                    self.took[event.name] += took
                    self.free = max(self.free, self.now) + took
                    ends[event.name] = self.free
                case str():
                    self.last = max(0.0, ends[event] - self.now)
                    self.waited[event] += self.last
                    self.now = max(self.now, ends[event])
                case Loop():
                    for _ in range(event.trips or 1):
                        self.run(event.body)

    def _compute(self, event: Product | Move) -> None:
        if isinstance(event, Move):
            seconds = (event.reads + event.nbytes) / self.machine.memory
        else:
            moved = sum(tensor.nbytes for tensor in (*event.inputs, *event.outputs))
            seconds = max(moved / self.machine.memory, event.flops / self.machine.flops)
        self.now += seconds
        self.computing += seconds
