"""What of a step's communication no order of its instructions could hide.

Computation can run while a collective is under way only where neither waits for the other: it makes nothing
of what the collective takes, and reads nothing of what it gives. A level of the network carries one
collective at a time, so that seconds of computation hide as many of its communication at most, each once.
The most that can be hidden is then the most that flows from computations to the collectives that they are
independent of, and a step waits for the rest at least. Loops stay as they are: what is in a body is hidden
by that body alone.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from commplan.lowering.audit.estimate import Level, Machine, seconds_by_level, seconds_of, seconds_of_work
from commplan.lowering.audit.hlo import Computation, Module, read_module
from commplan.lowering.audit.step import CompiledCollective, CompiledStep
from commplan.lowering.audit.walk import audit_text

_NONE = 1e-12  # seconds: less is rounding


def least_exposed(hlo_text: str, machine: Machine) -> float:
    """Seconds of the compiled step `hlo_text` that are spent waiting in any order of its instructions.

    Of the levels of the network the one for which most is left counts. Raises `HloError` as `audit_text`.
    """
    graph = _Graph(read_module(hlo_text), audit_text(hlo_text), machine)
    return max(graph.exposed(graph.step.entry, level) for level in machine.levels)


@dataclass
class _Graph:
    """The computations that run, each with what depends on what."""

    module: Module
    step: CompiledStep
    machine: Machine
    computing: dict[str, float] = field(default_factory=dict[str, float])

    def exposed(self, computation: str, level: Level) -> float:
        """Seconds of one run of `computation` that wait for collectives on `level`."""
        own = [c for c in self.step.collectives if c.computation == computation and self._crosses(c, level)]
        needs = [seconds_of(collective, self.machine) for collective in own]
        own_wait = sum(needs) - hidden(needs, self._offers(self.module.computations[computation], own))
        return own_wait + sum(
            times * self.exposed(body, level) for _, body, times in self._loops(computation)
        )

    def _crosses(self, collective: CompiledCollective, level: Level) -> bool:
        return level in seconds_by_level(collective, self.machine)

    def _offers(self, computation: Computation, own: Sequence[CompiledCollective]) -> dict[int, float]:
        """Seconds of computation by the collectives that they could run under, as bits of their numbers."""
        places = [collective.start for collective in own]
        before = _ancestors(computation)
        offers: dict[int, float] = defaultdict(float)
        for place, seconds in self._computations(computation.name):
            bits = (
                1 << number
                for number, start in enumerate(places)
                if not (before[start] >> place | before[place] >> start) & 1
            )
            offers[sum(bits)] += seconds
        return offers

    def _computations(self, computation: str) -> Iterator[tuple[int, float]]:
        """The places of what computes in `computation`, loops included, with its seconds."""
        for event in (*self.step.products, *self.step.moves):
            if event.computation == computation:
                yield event.position, seconds_of_work(event, self.machine)
        for place, body, times in self._loops(computation):
            if body not in self.computing:
                self.computing[body] = sum(seconds for _, seconds in self._computations(body))
            yield place, times * self.computing[body]

    def _loops(self, computation: str) -> Iterator[tuple[int, str, int]]:
        for loop in self.step.loops:
            if loop.computation == computation:
                yield loop.position, loop.body, loop.trips or 1


def _ancestors(computation: Computation) -> list[int]:
    """Of each instruction those that it waits for, as bits of their places."""
    places = {instruction.name: place for place, instruction in enumerate(computation.instructions)}
    result: list[int] = []
    for instruction in computation.instructions:
        bits = 0
        for name in instruction.operands:
            place = places.get(name)
            if place is not None and place < len(result):
                bits |= result[place] | 1 << place
        result.append(bits)
    return result


def hidden(needs: Sequence[float], offers: Mapping[int, float]) -> float:
    """The most of `needs` that `offers` cover.

    The key of an offer has the bits of the needs that it can be for. A maximum flow, along shortest
    augmenting paths (Edmonds and Karp 1972).
    """
    free = dict(offers)
    given: dict[int, dict[int, float]] = {offer: {} for offer in offers}
    covered = 0.0
    for number, need in enumerate(needs):
        left = need
        while left > _NONE:
            path = _path(number, free, given)
            if path is None:
                break
            steps = list(itertools.pairwise(path))
            moved = min(left, free[path[-1][1]], *(given[offer][other] for (_, offer), (other, _) in steps))
            for (taker, offer), (other, _) in steps:
                given[offer][taker] = given[offer].get(taker, 0.0) + moved
                given[offer][other] -= moved
            taker, offer = path[-1]
            given[offer][taker] = given[offer].get(taker, 0.0) + moved
            free[offer] -= moved
            left -= moved
        covered += need - left
    return covered


def _path(
    start: int, free: Mapping[int, float], given: Mapping[int, Mapping[int, float]]
) -> list[tuple[int, int]] | None:
    """How a need can take of an offer, as pairs of both; None where it cannot.

    Every need but the last takes of an offer that the next need has, which takes another instead. The last
    offer has something free.
    """
    before: dict[int, tuple[int, int]] = {}  # of a need: who takes its offer, and which
    queue, known, offers = deque([start]), {start}, set(free)
    while queue:
        need = queue.popleft()
        for offer in [offer for offer in offers if offer >> need & 1]:
            offers.discard(offer)
            if free[offer] > _NONE:
                path = [(need, offer)]
                while need != start:
                    need, taken = before[need]
                    path.append((need, taken))
                return path[::-1]
            for other, seconds in given[offer].items():
                if seconds > _NONE and other not in known:
                    known.add(other)
                    before[other] = (need, offer)
                    queue.append(other)
    return None
