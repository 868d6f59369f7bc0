"""A lower bound on exposed communication over all orders of a step's instructions.

Computation can overlap a collective only if neither depends on the other. A level of the network carries one
collective at a time, so a second of computation hides at most one second of its communication. The most that
can be hidden is therefore the maximum flow from computations to the collectives independent of them, and the
step waits for the rest. Loops are not restructured: communication in a loop body is hidden within the body.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from commplan.lowering.gpu.estimate import Level, Machine, seconds_by_level, seconds_of, seconds_of_work
from commplan.lowering.hlo.reader import Computation, Module, read_module
from commplan.lowering.hlo.step import CompiledCollective, CompiledStep
from commplan.lowering.hlo.walk import audit_text

_NONE = 1e-12  # seconds; smaller amounts are rounding errors


def least_exposed(hlo_text: str, machine: Machine) -> float:
    """Return a lower bound, in seconds, on the waiting time of a step for any order of its instructions.

    Args:
        hlo_text: The compiled step.
        machine: The rates to estimate with.

    Returns:
        The largest of the bounds of each network level.

    Raises:
        HloError: See `audit_text`.
    """
    graph = _DependencyGraph(read_module(hlo_text), audit_text(hlo_text), machine)
    return max(graph.exposed(graph.step.entry, level) for level in machine.levels)


@dataclass
class _DependencyGraph:
    """The computations of a step, with the dependencies of their instructions.

    Attributes:
        module: The step's HLO, which has the dependencies.
        step: The collectives and other work of the same HLO.
        machine: The rates to estimate with.
        computing: Seconds of computation of one run of each loop body; filled on demand.
    """

    module: Module
    step: CompiledStep
    machine: Machine
    computing: dict[str, float] = field(default_factory=dict[str, float])

    def exposed(self, computation: str, level: Level) -> float:
        """The least seconds for which one run of `computation` waits for collectives that cross `level`."""
        collectives = [
            c for c in self.step.collectives if c.computation == computation and self._crosses(c, level)
        ]
        needs = [seconds_of(collective, self.machine) for collective in collectives]
        wait = sum(needs) - hidden(needs, self._offers(self.module.computations[computation], collectives))
        return wait + sum(times * self.exposed(body, level) for _, body, times in self._loops(computation))

    def _crosses(self, collective: CompiledCollective, level: Level) -> bool:
        return level in seconds_by_level(collective, self.machine)

    def _offers(
        self, computation: Computation, collectives: Sequence[CompiledCollective]
    ) -> dict[int, float]:
        """Seconds of computation, by the bit set of collectives (indices) that it could overlap.

        It could overlap those that neither depend on it nor are needed by it.
        """
        positions = [collective.start for collective in collectives]
        before = _ancestors(computation)  # by position, the bit set of earlier positions that it needs
        offers: dict[int, float] = defaultdict(float)
        for position, seconds in self._computations(computation.name):
            bits = (
                1 << number
                for number, start in enumerate(positions)
                if not (before[start] >> position | before[position] >> start) & 1
            )
            offers[sum(bits)] += seconds
        return offers

    def _computations(self, computation: str) -> Iterator[tuple[int, float]]:
        """The positions of the instructions and loops of `computation` that compute, with their seconds."""
        for event in (*self.step.products, *self.step.moves):
            if event.computation == computation:
                yield event.position, seconds_of_work(event, self.machine)
        for position, body, times in self._loops(computation):
            if body not in self.computing:
                self.computing[body] = sum(seconds for _, seconds in self._computations(body))
            yield position, times * self.computing[body]

    def _loops(self, computation: str) -> Iterator[tuple[int, str, int]]:
        """The position, the body and the iterations of each loop of `computation`; 1 if unknown."""
        for loop in self.step.loops:
            if loop.computation == computation:
                yield loop.position, loop.body, loop.trips or 1


def _ancestors(computation: Computation) -> list[int]:
    """For each instruction, the bit set of positions that it depends on."""
    positions = {instruction.name: position for position, instruction in enumerate(computation.instructions)}
    result: list[int] = []
    for instruction in computation.instructions:
        bits = 0
        for name in instruction.operands:
            position = positions.get(name)
            if position is not None and position < len(result):
                bits |= result[position] | 1 << position
        result.append(bits)
    return result


def hidden(needs: Sequence[float], offers: Mapping[int, float]) -> float:
    """The maximum total of `needs` that `offers` can cover.

    Maximum flow with shortest augmenting paths (Edmonds and Karp 1972).

    Args:
        needs: Amounts needed, in seconds.
        offers: Amounts offered, in seconds, by the bit set of needs (indices) that each can cover.
    """
    free = dict(offers)
    allocated: dict[int, dict[int, float]] = {offer: {} for offer in offers}
    covered = 0.0
    for number, need in enumerate(needs):
        unserved = need
        while unserved > _NONE:
            path = _path(number, free, allocated)
            if path is None:
                break
            steps = list(itertools.pairwise(path))
            moved = min(
                unserved, free[path[-1][1]], *(allocated[offer][other] for (_, offer), (other, _) in steps)
            )
            for (taker, offer), (other, _) in steps:
                allocated[offer][taker] = allocated[offer].get(taker, 0.0) + moved
                allocated[offer][other] -= moved
            taker, offer = path[-1]
            allocated[offer][taker] = allocated[offer].get(taker, 0.0) + moved
            free[offer] -= moved
            unserved -= moved
        covered += need - unserved
    return covered


def _path(
    start: int, free: Mapping[int, float], allocated: Mapping[int, Mapping[int, float]]
) -> list[tuple[int, int]] | None:
    """Find an augmenting path from need `start`, as pairs (need, offer); None if there is none.

    Each need except the last takes from an offer that the next need uses. The last offer has a free amount.

    Args:
        start: The need that is not covered yet.
        free: The amount of each offer that no need uses.
        allocated: The amount of each offer that each need uses.
    """
    before: dict[int, tuple[int, int]] = {}  # for each need, the preceding need and the offer it takes
    queue = deque([start])
    visited = {start}
    offers = set(free)
    while queue:
        need = queue.popleft()
        for offer in [offer for offer in offers if offer >> need & 1]:
            offers.discard(offer)
            if free[offer] > _NONE:
                path = [(need, offer)]
                while need != start:
                    need, previous_offer = before[need]
                    path.append((need, previous_offer))
                return path[::-1]
            for other, seconds in allocated[offer].items():
                if seconds > _NONE and other not in visited:
                    visited.add(other)
                    before[other] = (need, offer)
                    queue.append(other)
    return None
