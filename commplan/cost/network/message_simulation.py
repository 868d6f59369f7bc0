"""Simulates a program message by message, with max-min fair rates on every link.

The exact version of `step_model`: the rules of issue are the same, but links are not simplified. Messages
between two ranks are sequential. All others in flight share their links max-min fairly, until one ends. Some
dozens of messages take a millisecond; the time grows faster than their number.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from commplan.collectives.program import Ints
from commplan.cost.network.link_traffic import Pattern, RoundTraffic
from commplan.cost.network.network import Floats, Network

FULL = 1e-9  # a link is full if less than this fraction of its capacity is left
REMAINDER = 1e-6  # bytes; a message with less than this left is complete


@dataclass
class _Message:
    src: int
    dst: int
    nbytes: float
    links: tuple[int, ...]
    after: float  # seconds from its last byte to usable data
    waits: int = 0  # number of messages that must arrive before
    frees: list[int] = field(default_factory=list[int])


def seconds(pattern: Pattern, network: Network, chunk: float, slices: int) -> float:
    """The time until the last rank is done.

    Other groups than the first are ignored, so the layout should have one group.

    Args:
        pattern: The program on the network.
        network: The network.
        chunk: Bytes of one chunk, all slices together.
        slices: The number of slices.
    """
    messages = _messages(pattern, network, chunk / slices, slices)
    return _Flight(messages, pattern, network).run() if messages else 0.0


def _messages(pattern: Pattern, network: Network, piece: float, slices: int) -> list[_Message]:
    """All messages in the order in which they are issued, with their dependencies."""
    messages: list[_Message] = []
    writers: list[dict[int, list[int]]] = [{} for _ in range(slices)]
    last = len(pattern.steps)
    for step in range(last + slices - 1):
        for index in range(max(0, step - last + 1), min(step + 1, slices)):
            batch = pattern.steps[step - index]
            slots, begin = writers[index], len(messages)
            for t in range(len(batch.src)):
                level, used = int(batch.lanes.level[t]), batch.lanes.used
                links = tuple(int(used[x]) for x in batch.lanes.link[t] if x < len(used))
                latency = network.levels[level].latency if level >= 0 else 0.0
                after = latency + network.overhead + float(batch.reduced[t]) * piece * network.gamma
                message = _Message(
                    int(batch.src[t]), int(batch.dst[t]), float(batch.size[t]) * piece, links, after
                )
                needs = {before for slot in _slots(batch.takes, batch, t) for before in slots.get(slot, ())}
                message.waits = len(needs)
                messages.append(message)
                for before in needs:
                    messages[before].frees.append(len(messages) - 1)
            for t in range(len(batch.src)):
                for slot in _slots(batch.gives, batch, t):
                    slots.setdefault(slot, []).append(begin + t)
    return messages


@lru_cache(maxsize=1 << 12)
def _fair_rates(
    links: tuple[tuple[int, ...], ...], capacity: tuple[float, ...], gamma: float
) -> tuple[float, ...]:
    """Bytes per second of messages on these links. Cached, since the same combinations recur."""
    use = np.zeros((len(links), len(capacity)))
    maximum = np.full(len(links), np.inf)
    for row, used in enumerate(links):
        use[row, list(used)] = 1.0
        if not used:  # a copy within one place
            maximum[row] = 1 / gamma
    rates: list[float] = max_min(use, np.array(capacity), maximum).tolist()
    return tuple(rates)


def _slots(indices: Ints, step: RoundTraffic, message: int) -> list[int]:
    return [int(slot) for slot in indices[step.message == message]]


class _Flight:
    """The messages in flight."""

    def __init__(self, messages: list[_Message], pattern: Pattern, network: Network) -> None:
        self.messages, self.network = messages, network
        self.capacity = tuple(network.bandwidths[pattern.level_of].tolist())
        self.turn: list[list[int]] = [[] for _ in range(pattern.ranks)]  # not yet issued, the next one last
        for index in reversed(range(len(messages))):
            self.turn[messages[index].src].append(index)
        self.queue: dict[tuple[int, int], list[int]] = {}  # issued, the first one is in flight
        self.remaining = [message.nbytes for message in messages]
        self.events: list[tuple[float, int, int]] = []  # time, kind (0: issued, 1: arrived), message
        self.cpu = [0.0] * pattern.ranks
        self.now = self.end = 0.0

    def run(self) -> float:
        for rank in range(len(self.turn)):
            self._issue(rank)
        while self.events or self.queue:
            self._advance()
        return self.end

    def _issue(self, rank: int) -> None:
        """Pass the rank's next messages to the network, one after another, while their data is present."""
        while self.turn[rank] and self.messages[self.turn[rank][-1]].waits == 0:
            index = self.turn[rank].pop()
            self.cpu[rank] = max(self.cpu[rank], self.now) + self.network.overhead
            heapq.heappush(self.events, (self.cpu[rank], 0, index))

    def _advance(self) -> None:
        """Advance to the next event: the end of a transfer, or an arrival."""
        active = [queue[0] for queue in self.queue.values()]
        rates = self._rates(active)
        ends = [self.now + self.remaining[i] / rate for i, rate in zip(active, rates, strict=True)]
        when = min([*ends, self.events[0][0]] if self.events else ends)
        for i, rate in zip(active, rates, strict=True):
            self.remaining[i] -= (when - self.now) * rate
        self.now = when
        # Few bytes on a fast link may take less time than the resolution of the clock.
        for i, end in zip(active, ends, strict=True):
            if end <= when or self.remaining[i] <= REMAINDER:
                self._finish_send(i)
        while self.events and self.events[0][0] <= when:
            _, is_arrival, i = heapq.heappop(self.events)
            if is_arrival:
                self._arrive(i)
            else:
                message = self.messages[i]
                self.queue.setdefault((message.src, message.dst), []).append(i)

    def _rates(self, active: list[int]) -> tuple[float, ...]:
        links = tuple(self.messages[i].links for i in active)
        return _fair_rates(links, self.capacity, self.network.gamma) if active else ()

    def _finish_send(self, i: int) -> None:
        message = self.messages[i]
        pair = (message.src, message.dst)
        self.queue[pair].pop(0)
        if not self.queue[pair]:
            del self.queue[pair]
        heapq.heappush(self.events, (self.now + message.after, 1, i))

    def _arrive(self, i: int) -> None:
        self.end = max(self.end, self.now)
        for other in self.messages[i].frees:
            self.messages[other].waits -= 1
            self._issue(self.messages[other].src)


def max_min(use: Floats, capacity: Floats, maximum: Floats) -> Floats:
    """The max-min fair rate of each flow [f] on shared links.

    All rates grow together until a link is full or a flow reaches its maximum. These flows keep their rate,
    and the others grow further (progressive filling, Bertsekas and Gallager, "Data Networks", section 6.5.2).

    Args:
        use: The load of each flow on each link at rate 1; 0 if it does not use the link; [f, l].
        capacity: The capacity of each link, positive; [l].
        maximum: The maximum rate of each flow; may be infinite for flows that use a link; [f].
    """
    flows = len(maximum)
    rate = np.zeros(flows)
    growing = np.ones(flows, np.bool_)
    free = capacity.astype(np.float64)
    while growing.any():
        demand = use[growing].sum(axis=0)
        with np.errstate(divide="ignore", invalid="ignore"):
            until_full = np.where(demand > 0, free / demand, np.inf)
        step = min(float(until_full.min(initial=np.inf)), float((maximum - rate)[growing].min()))
        rate[growing] += step
        free = np.maximum(free - step * demand, 0.0)
        stuck = (use[:, free <= FULL * capacity] > 0).any(axis=1) | (rate >= maximum * (1 - FULL))
        growing &= ~stuck
    return rate
