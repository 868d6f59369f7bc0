"""Simulates a program message by message, with max-min fair rates on every link.

This is the exact version of `step_model`, with the same rules for when a message is issued. Messages from one
rank to another are sequential. All others in flight share their links max-min fairly, until one ends. A
simulation of some dozens of messages takes a millisecond, and its time grows faster than their number.
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
    """A message from rank `src` to rank `dst` of the first group."""

    src: int
    dst: int
    nbytes: float
    links: tuple[int, ...]  # indices into `Pattern.level_of`; empty within one place
    after: float  # seconds from its last byte to usable data
    waits: int = 0  # number of messages that must arrive before it is issued
    frees: list[int] = field(default_factory=list[int])  # the messages that wait for its arrival


def seconds(pattern: Pattern, network: Network, chunk: float, slices: int) -> float:
    """The time until the last rank is done, without `Network.call`; 0 for a program without messages.

    Only the first group is simulated, so the layout should have one group.

    Args:
        pattern: The program on the network.
        network: The network.
        chunk: Bytes of one chunk, all slices together.
        slices: The number of slices, at least 1.
    """
    messages = _messages(pattern, network, chunk / slices, slices)
    return _Flight(messages, pattern, network).run() if messages else 0.0


def _messages(pattern: Pattern, network: Network, piece: float, slices: int) -> list[_Message]:
    """All messages in the order of issue, with their dependencies.

    Slice j of the program issues round t at step t + j. A message waits for all earlier messages of its slice
    that write a slot that it reads.
    """
    messages: list[_Message] = []
    # By slice and slot: the messages that write it.
    writers: list[dict[int, list[int]]] = [{} for _ in range(slices)]
    round_count = len(pattern.rounds)
    for step in range(round_count + slices - 1):
        for index in range(max(0, step - round_count + 1), min(step + 1, slices)):
            traffic = pattern.rounds[step - index]
            slots, begin = writers[index], len(messages)
            for t in range(len(traffic.src)):
                level, used = int(traffic.lanes.level[t]), traffic.lanes.used
                links = tuple(int(used[x]) for x in traffic.lanes.link[t] if x < len(used))
                latency = network.levels[level].latency if level >= 0 else 0.0
                after = latency + network.overhead + float(traffic.reduced[t]) * piece * network.gamma
                message = _Message(
                    int(traffic.src[t]), int(traffic.dst[t]), float(traffic.size[t]) * piece, links, after
                )
                reads = _slots(traffic.takes, traffic, t)
                needs = {before for slot in reads for before in slots.get(slot, ())}
                message.waits = len(needs)
                messages.append(message)
                for before in needs:
                    messages[before].frees.append(len(messages) - 1)
            # After the loop above: messages of one round do not wait for each other.
            for t in range(len(traffic.src)):
                for slot in _slots(traffic.gives, traffic, t):
                    slots.setdefault(slot, []).append(begin + t)
    return messages


@lru_cache(maxsize=1 << 12)
def _fair_rates(
    links: tuple[tuple[int, ...], ...], capacity: tuple[float, ...], gamma: float
) -> tuple[float, ...]:
    """Bytes per second of concurrent messages; cached, because the same combinations recur.

    Args:
        links: The links of each message, as indices into `capacity`.
        capacity: Bytes per second of each link.
        gamma: Seconds per byte of a message without links.
    """
    use = np.zeros((len(links), len(capacity)))
    maximum = np.full(len(links), np.inf)
    for row, used in enumerate(links):
        use[row, list(used)] = 1.0
        if not used:  # a copy within one place
            maximum[row] = 1 / gamma
    rates: list[float] = max_min(use, np.array(capacity), maximum).tolist()
    return tuple(rates)


def _slots(indices: Ints, traffic: RoundTraffic, message: int) -> list[int]:
    """The part of `indices`, which are `takes` or `gives` of `traffic`, that belongs to one message."""
    return [int(slot) for slot in indices[traffic.message == message]]


class _Flight:
    """A simulation of messages: those in flight, those not yet issued, and the next events."""

    def __init__(self, messages: list[_Message], pattern: Pattern, network: Network) -> None:
        self.messages, self.network = messages, network
        self.capacity = tuple(network.bandwidths[pattern.level_of].tolist())
        # By rank: its messages that are not yet issued, the next one last.
        self.turn: list[list[int]] = [[] for _ in range(pattern.ranks)]
        for index in reversed(range(len(messages))):
            self.turn[messages[index].src].append(index)
        # By sender and receiver: the issued messages; the first one is in flight.
        self.queue: dict[tuple[int, int], list[int]] = {}
        self.remaining = [message.nbytes for message in messages]  # bytes of each message not yet sent
        self.events: list[tuple[float, int, int]] = []  # a heap: time, kind (0 issued, 1 arrived), message
        self.cpu = [0.0] * pattern.ranks  # when the processor of each rank is free
        self.now = 0.0
        self.end = 0.0  # the last arrival so far

    def run(self) -> float:
        """Simulate all messages, and return the time of the last arrival."""
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
        """Advance to the next event: a message is issued, has been sent, or arrives."""
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
        """Bytes per second of each message of `active`."""
        links = tuple(self.messages[i].links for i in active)
        return _fair_rates(links, self.capacity, self.network.gamma) if active else ()

    def _finish_send(self, i: int) -> None:
        """Remove message `i` from its queue. The next one for the same receiver is then in flight."""
        message = self.messages[i]
        pair = (message.src, message.dst)
        self.queue[pair].pop(0)
        if not self.queue[pair]:
            del self.queue[pair]
        heapq.heappush(self.events, (self.now + message.after, 1, i))

    def _arrive(self, i: int) -> None:
        self.end = max(self.end, self.now)
        for waiting in self.messages[i].frees:
            self.messages[waiting].waits -= 1
            self._issue(self.messages[waiting].src)


def max_min(use: Floats, capacity: Floats, maximum: Floats) -> Floats:
    """The max-min fair rate of each flow [f] on shared links.

    All rates grow together until a link is full or a flow reaches its maximum. These flows keep their rate,
    and the others grow further (progressive filling, Bertsekas and Gallager, "Data Networks", section 6.5.2).

    Args:
        use: The load of each flow on each link at rate 1; 0 if it does not use the link; [f, l].
        capacity: The capacity of each link, positive; [l].
        maximum: The maximum rate of each flow; may be infinite for flows that use a link; [f].

    Returns:
        The rate of each flow [f], in the unit of `capacity`.
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
