"""A program message by message: every rank, every message, max-min fair rates on every link at every moment.

The exact form of `steps`: the same rules of issue, but nothing about links is simplified. Messages between
two ranks follow each other; all others that are under way share their links max-min fairly, until one ends.
It takes a millisecond for some dozens of messages, and more than in proportion for more.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from commplan.collectives.program import Ints
from commplan.cost.network.link_traffic import Pattern, TrafficStep
from commplan.cost.network.max_min import max_min
from commplan.cost.network.network import Network

LEFT = 1e-6  # bytes: a message with less than this left is through


@dataclass
class _Message:
    src: int
    dst: int
    nbytes: float
    links: tuple[int, ...]
    after: float  # seconds from its last byte sent to its data usable
    waits: int = 0  # messages that must have arrived before
    frees: list[int] = field(default_factory=list[int])


def seconds(pattern: Pattern, network: Network, chunk: float, slices: int) -> float:
    """The time until the last rank is done. chunk: bytes of one chunk, all slices together.

    Groups but the first are left out, so the layout should have one.
    """
    messages = _messages(pattern, network, chunk / slices, slices)
    return _Flight(messages, pattern, network).run() if messages else 0.0


def _messages(pattern: Pattern, network: Network, piece: float, slices: int) -> list[_Message]:
    """All messages in the order in which they are issued, with what each waits for."""
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
def _shared(
    links: tuple[tuple[int, ...], ...], capacity: tuple[float, ...], gamma: float
) -> tuple[float, ...]:
    """Bytes a second of messages that use these links: the same meet again and again."""
    use = np.zeros((len(links), len(capacity)))
    most = np.full(len(links), np.inf)
    for row, used in enumerate(links):
        use[row, list(used)] = 1.0
        if not used:  # within one place: memory is copied
            most[row] = 1 / gamma
    rates: list[float] = max_min(use, np.array(capacity), most).tolist()
    return tuple(rates)


def _slots(of: Ints, step: TrafficStep, message: int) -> list[int]:
    return [int(slot) for slot in of[step.message == message]]


class _Flight:
    """The messages under way."""

    def __init__(self, messages: list[_Message], pattern: Pattern, network: Network) -> None:
        self.messages, self.network = messages, network
        self.capacity = tuple(network.bandwidths[pattern.level_of].tolist())
        self.turn: list[list[int]] = [[] for _ in range(pattern.ranks)]  # not yet issued, the next one last
        for index in reversed(range(len(messages))):
            self.turn[messages[index].src].append(index)
        self.queue: dict[tuple[int, int], list[int]] = {}  # issued, the first one is under way
        self.left = [message.nbytes for message in messages]
        self.events: list[tuple[float, int, int]] = []  # time, issued (0) or arrived (1), message
        self.cpu = [0.0] * pattern.ranks
        self.now = self.end = 0.0

    def run(self) -> float:
        for rank in range(len(self.turn)):
            self._issue(rank)
        while self.events or self.queue:
            self._advance()
        return self.end

    def _issue(self, rank: int) -> None:
        """Hand over the rank's next message as soon as its data is there; one after another."""
        while self.turn[rank] and self.messages[self.turn[rank][-1]].waits == 0:
            index = self.turn[rank].pop()
            self.cpu[rank] = max(self.cpu[rank], self.now) + self.network.overhead
            heapq.heappush(self.events, (self.cpu[rank], 0, index))

    def _advance(self) -> None:
        active = [queue[0] for queue in self.queue.values()]
        rates = self._rates(active)
        ends = [self.now + self.left[i] / rate for i, rate in zip(active, rates, strict=True)]
        when = min([*ends, self.events[0][0]] if self.events else ends)
        for i, rate in zip(active, rates, strict=True):
            self.left[i] -= (when - self.now) * rate
        self.now = when
        # Few bytes on a fast link may take less time than the clock can tell: what was to end now has ended.
        for i, end in zip(active, ends, strict=True):
            if end <= when or self.left[i] <= LEFT:
                self._sent(i)
        while self.events and self.events[0][0] <= when:
            _, arrived, i = heapq.heappop(self.events)
            if arrived:
                self._arrived(i)
            else:
                message = self.messages[i]
                self.queue.setdefault((message.src, message.dst), []).append(i)

    def _rates(self, active: list[int]) -> tuple[float, ...]:
        links = tuple(self.messages[i].links for i in active)
        return _shared(links, self.capacity, self.network.gamma) if active else ()

    def _sent(self, i: int) -> None:
        message = self.messages[i]
        pair = (message.src, message.dst)
        self.queue[pair].pop(0)
        if not self.queue[pair]:
            del self.queue[pair]
        heapq.heappush(self.events, (self.now + message.after, 1, i))

    def _arrived(self, i: int) -> None:
        self.end = max(self.end, self.now)
        for other in self.messages[i].frees:
            self.messages[other].waits -= 1
            self._issue(self.messages[other].src)
