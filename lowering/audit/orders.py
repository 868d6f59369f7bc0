"""Search for instruction orders with less exposed communication.

`commplan.lowering.audit.least_exposed` is a lower bound for all orders, while the orders found here are
feasible, so the minimum is between the two. Orders respect all data dependencies and use the durations and
levels of `estimate`. The search is list scheduling by critical path, with several weights of communication,
followed by random changes of priorities, of which those that do not increase the time are accepted. Memory is
not considered. Each loop body is ordered independently.
"""

from __future__ import annotations

import heapq
import random
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec.structs import replace

from commplan.lowering.audit.estimate import Machine, estimate, seconds_by_level, seconds_of, seconds_of_work
from commplan.lowering.audit.hlo import Computation, read_module
from commplan.lowering.audit.step import CompiledStep
from commplan.lowering.audit.walk import audit_text

WEIGHTS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)  # of a second of communication, relative to computation
_CONTROL = re.compile(r"control-predecessors=\{([^}]*)\}")


class InstructionOrder(NamedTuple):
    """An order of each computation with collectives, as positions of its instructions.

    `seconds` and `exposed` are the estimated times of the step.
    """

    places: Mapping[str, tuple[int, ...]]
    seconds: float
    exposed: float


def best_order(hlo_text: str, machine: Machine, tries: int, seed: int = 0) -> InstructionOrder:
    """Return the best order found, or the step's order if none is better.

    Args:
        hlo_text: the compiled step.
        machine: the rates.
        tries: number of changes of priorities for each computation.
        seed: seed of the random changes.
    """
    step, module = audit_text(hlo_text), read_module(hlo_text)
    original = estimate(step, machine)
    best = InstructionOrder({}, original.total, original.exposed)
    for name in dict.fromkeys(collective.computation for collective in reversed(step.collectives)):
        graph = InstructionGraph.from_computation(
            module.computations[name], reordered(step, best.places), machine
        )
        for places in graph.orders(tries, random.Random(seed)):
            guess = estimate(reordered(step, {**best.places, name: places}), machine)
            if guess.total < best.seconds:
                best = InstructionOrder({**best.places, name: places}, guess.total, guess.exposed)
    return best


def reordered(step: CompiledStep, orders: Mapping[str, Sequence[int]]) -> CompiledStep:
    """Apply orders, in the format of `InstructionOrder.places`, to `step`."""
    at = {name: {old: new for new, old in enumerate(places)} for name, places in orders.items()}

    def moved(place: int, computation: str) -> int:
        return at[computation][place] if computation in at else place

    return replace(
        step,
        products=tuple(replace(p, position=moved(p.position, p.computation)) for p in step.products),
        moves=tuple(replace(m, position=moved(m.position, m.computation)) for m in step.moves),
        loops=tuple(replace(x, position=moved(x.position, x.computation)) for x in step.loops),
        collectives=tuple(
            replace(c, start=moved(c.start, c.computation), done=moved(c.done, c.computation))
            for c in step.collectives
        ),
    )


class ScheduledTransfer(NamedTuple):
    """A collective: its levels, its seconds, and the positions of its start and done."""

    levels: tuple[str, ...]
    seconds: float
    start: int
    done: int


@dataclass
class InstructionGraph:
    """The instructions of a computation by position, with dependencies and seconds of computation."""

    needs: Sequence[tuple[int, ...]]
    computing: Mapping[int, float]
    transfers: Sequence[ScheduledTransfer]
    users: dict[int, list[int]] = field(default_factory=lambda: defaultdict[int, list[int]](list))

    def __post_init__(self) -> None:
        for place, needs in enumerate(self.needs):
            for need in needs:
                self.users[need].append(place)

    @classmethod
    def from_computation(
        cls, computation: Computation, step: CompiledStep, machine: Machine
    ) -> InstructionGraph:
        places = {instruction.name: i for i, instruction in enumerate(computation.instructions)}
        needs: list[tuple[int, ...]] = []
        for instruction in computation.instructions:
            control = re.findall(r"%([\w.\-$]+)", " ".join(_CONTROL.findall(instruction.attributes)))
            needs.append(
                tuple({places[name] for name in (*instruction.operands, *control) if name in places})
            )
        name = computation.name
        work = [event for event in (*step.products, *step.moves) if event.computation == name]
        computing = {event.position: seconds_of_work(event, machine) for event in work}
        for loop in step.loops:
            if loop.computation == name:
                body_step = replace(step, entry=loop.body)
                computing[loop.position] = (loop.trips or 1) * estimate(body_step, machine).total
        transfers = [
            ScheduledTransfer(tuple(seconds_by_level(c, machine)), seconds_of(c, machine), c.start, c.done)
            for c in step.collectives
            if c.computation == name
        ]
        return cls(needs, computing, transfers)

    def orders(self, tries: int, chance: random.Random) -> Iterator[tuple[int, ...]]:
        """The best order for each of `WEIGHTS`, then the best result of random changes."""
        best: list[tuple[float, list[float], tuple[int, ...]]] = []
        for weight in WEIGHTS:
            keys = self.priorities(weight)
            seconds, places = self.listed(keys)
            best.append((seconds, keys, places))
            yield places
        least, keys, places = min(best, key=lambda candidate: candidate[0])
        movable = [*self.computing, *(transfer.start for transfer in self.transfers)]
        spread = max(keys, default=0.0)
        for _ in range(tries):
            changed = list(keys)
            for place in chance.choices(movable, k=chance.choice((1, 1, 2, 4))):
                other = chance.choice(movable)
                changed[place] = keys[other] + spread * chance.uniform(-1e-3, 1e-3)
            seconds, order = self.listed(changed)
            if seconds <= least:
                if seconds < least:
                    places = order
                least, keys = seconds, changed
        yield places

    def priorities(self, weight: float) -> list[float]:
        """For each instruction, the seconds of the longest chain that starts with it."""
        took = {transfer.start: weight * transfer.seconds for transfer in self.transfers}
        keys = [0.0] * len(self.needs)
        for place in reversed(range(len(self.needs))):
            after = max((keys[user] for user in self.users[place]), default=0.0)
            keys[place] = after + self.computing.get(place, 0.0) + took.get(place, 0.0)
        return keys

    def listed(self, keys: Sequence[float]) -> tuple[float, tuple[int, ...]]:
        """Seconds and order of list scheduling with priorities `keys`.

        A collective starts when its levels are free; its done is issued when it has finished, or if no other
        instruction is ready.
        """
        player = _ListScheduler(self, keys)
        return player.run(), tuple(player.order)


class _ListScheduler:
    """Issues instructions when they are ready."""

    def __init__(self, graph: InstructionGraph, keys: Sequence[float]) -> None:
        self.graph, self.keys = graph, keys
        self.starts = {transfer.start: transfer for transfer in graph.transfers}
        self.dones = {t.done: t for t in graph.transfers if t.done != t.start}
        self.unresolved = [len(needs) for needs in graph.needs]
        self.order: list[int] = []
        self.now = 0.0
        self.free = defaultdict[str, float](float)
        self.ends: dict[int, float] = {}  # end time of the transfer with this done position
        self.ready: list[tuple[float, int]] = []  # ready computations
        self.waiting: list[tuple[float, int]] = []  # ready starts
        self.awaited: list[tuple[float, int]] = []  # dones of started transfers

    def run(self) -> float:
        for place in [place for place, count in enumerate(self.unresolved) if not count]:
            if self._is_free(place):
                self._issue(place)
        while self.ready or self.waiting or self.awaited:
            self._settle()
            if self.ready:
                _, place = heapq.heappop(self.ready)
                self.now += self.graph.computing[place]
                self._issue(place)
            elif self.awaited or self.waiting:
                self.now = max(self.now, min((*(end for end, _ in self.awaited), *self._free())))
        return max(self.now, *self.free.values(), 0.0)

    def _free(self) -> Iterator[float]:
        for _, place in self.waiting:
            yield max((self.free[level] for level in self.starts[place].levels), default=0.0)

    def _settle(self) -> None:
        """Start transfers whose levels are free and complete finished ones, until nothing changes."""
        again = True
        while again:
            again = False
            while self.awaited and self.awaited[0][0] <= self.now:
                self._issue(heapq.heappop(self.awaited)[1])
                again = True
            for item in sorted(self.waiting):
                transfer = self.starts[item[1]]
                if all(self.free[level] <= self.now for level in transfer.levels):
                    self.waiting.remove(item)
                    end = self.now + transfer.seconds
                    self.free.update(dict.fromkeys(transfer.levels, end))
                    self.ends[transfer.done] = end
                    if transfer.done == transfer.start:
                        self.now = end
                    self._issue(item[1])
                    again = True

    def _issue(self, place: int) -> None:
        """Issue `place`, followed by all instructions that become ready and need no time."""
        self.order.append(place)
        users = [iter(self.graph.users[place])]  # by depth: a chain may be longer than Python's stack
        while users:
            for user in users[-1]:
                self.unresolved[user] -= 1
                if not self.unresolved[user] and self._is_free(user):
                    self.order.append(user)
                    users.append(iter(self.graph.users[user]))
                    break
            else:
                users.pop()

    def _is_free(self, place: int) -> bool:
        """Whether a ready instruction needs no time; otherwise add it to the queue for its kind."""
        if place in self.starts:
            heapq.heappush(self.waiting, (-self.keys[place], place))
        elif place in self.dones:
            heapq.heappush(self.awaited, (self.ends[place], place))
        elif place in self.graph.computing:
            heapq.heappush(self.ready, (-self.keys[place], place))
        else:
            return True
        return False
