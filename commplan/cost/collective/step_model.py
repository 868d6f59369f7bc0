"""Simulates a program step by step on a network.

Slice j of a program runs round t at step t + j, and a rank issues its sends in the order of steps. In
dataflow forms a send waits only for its data and for earlier sends. A link serves requests in the order of
steps, and the transfers of one step share it evenly.

In the form `rounds`, each round is a separate operation, which copies its operand out of the buffer and its
result into it. A rank continues when its own sends and receives of the round are complete.

In dataflow forms, a message of b bytes uses links l that carry B_l bytes in the step. With the latency alpha
of the outermost level that it crosses, and the overhead o and gamma of the network, its times in seconds are

    issue  = max(data, CPU of the sender) + o
    done_l = max(free_l, first issue on l) + B_l / bandwidth_l
    data'  = max(max_l done_l, issue + b / min bandwidth) + alpha + o [+ gamma b]

Here `data` is when the sender has the operand, and `data'` when the receiver has the result. The last term is
for messages that are reduced.

Many slices reach a steady state. Then only some of them are simulated, and the time of the others is
extrapolated from the difference between two simulations.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from commplan.cost.network.link_traffic import Pattern, RoundTraffic
from commplan.cost.network.network import Floats, Network

SIMULATED_SLICES = 48  # maximum number of simulated slices; others are extrapolated
COPIES = 2  # copies of each message in the form `rounds`: out of the buffer, and into it
WORK = 60_000  # maximum number of simulated messages, unless one rank represents all
SPARSE = 40  # reads, writes and uses of links per round; below, loops are faster than arrays
# If ranks are alike except for their levels, one represents all in larger programs. The limits are messages
# of all rounds in dataflow forms, and ranks in the form `rounds`.
_EVEN_MESSAGES = 1500
_EVEN_RANKS = 64


def seconds(pattern: Pattern, network: Network, chunk: float, slices: int, *, blocking: bool) -> float:
    """The time until the last rank is done, without `Network.call`; 0 for a program without rounds.

    Args:
        pattern: The program on the network.
        network: The network.
        chunk: Bytes of one chunk, all slices together.
        slices: The number of slices, at least 1.
        blocking: Whether the form is `rounds`.
    """
    if not pattern.rounds:
        return 0.0
    piece = chunk / slices
    if blocking:
        return _blocking(pattern, network, piece, slices)
    simulated = SIMULATED_SLICES
    if not _is_even(pattern):
        messages_per_slice = sum(len(traffic.src) for traffic in pattern.rounds)
        simulated = min(simulated, max(4, WORK // messages_per_slice))
    if slices <= simulated:
        return _simulate(pattern, network, piece, slices)
    whole = _simulate(pattern, network, piece, simulated)
    half = _simulate(pattern, network, piece, simulated // 2)
    return whole + (slices - simulated) * (whole - half) / (simulated - simulated // 2)


def _is_even(pattern: Pattern) -> bool:
    """Whether one rank represents all: exact if ranks are alike, and an approximation in large programs."""
    return pattern.alike or (pattern.even and pattern.ranks * len(pattern.rounds) > _EVEN_MESSAGES)


@lru_cache(maxsize=1 << 14)
def _simulate(pattern: Pattern, network: Network, piece: float, slices: int) -> float:
    """The time of all slices in dataflow forms, with `piece` bytes per chunk and slice.

    Cached, because buffers of different sizes are cut into pieces of the same size.
    """
    if _is_even(pattern):
        return _one_rank_time(pattern, network, piece, slices)
    uses = sum(
        len(traffic.takes) + len(traffic.gives) + 2 * traffic.lanes.link.size for traffic in pattern.rounds
    )
    run = _sparse_time if uses < SPARSE * len(pattern.rounds) else _all_ranks_time
    return run(pattern, network, piece, slices)


def _one_rank_time(pattern: Pattern, network: Network, piece: float, slices: int) -> float:
    """Simulate a single rank that represents all. The links of each level are aggregated into one."""
    rounds = _all_scalars(pattern, network, piece)
    round_count = len(rounds)
    free = [0.0] * len(network.latencies)  # when the link of each level is free
    ready = [0.0] * slices  # when the data of each slice is present
    cpu = 0.0
    for step in range(round_count + slices - 1):
        for index in range(max(0, step - round_count + 1), min(step + 1, slices)):
            loads, alone, after = rounds[step - index]
            cpu = max(ready[index], cpu) + network.overhead
            done = cpu + alone
            for level, load in loads:
                free[level] = max(free[level], cpu) + load
                done = max(done, free[level])
            ready[index] = done + after
    return max(ready)


# The seconds of a round if one rank represents all: pairs of a level and the time of its busiest link; the
# longest time of a message without others; the mean time from its last byte to usable data.
_Scalars = tuple[list[tuple[int, float]], float, float]


def _all_scalars(pattern: Pattern, network: Network, piece: float) -> list[_Scalars]:
    """`_scalars` of each round, computed once for rounds that differ only in their chunks."""
    by_key: dict[tuple[int, int], _Scalars] = {}
    scalars: list[_Scalars] = []
    for traffic in pattern.rounds:
        key = (id(traffic.lanes), int(traffic.reduced[0]))
        if key not in by_key:
            by_key[key] = _scalars(traffic, network, piece)
        scalars.append(by_key[key])
    return scalars


def _scalars(traffic: RoundTraffic, network: Network, piece: float) -> _Scalars:
    busy = traffic.lanes.per_level * piece / network.bandwidths
    loads = [(level, float(load)) for level, load in enumerate(busy) if load > 0]
    alone, after = _per_transfer(traffic, network, piece)
    return loads, float(alone.max()), float(after.mean())


def _per_transfer(traffic: RoundTraffic, network: Network, piece: float) -> tuple[Floats, Floats]:
    """For each message [t]: its seconds without others, and the seconds from its last byte to usable data."""
    level = traffic.lanes.level
    slowest = np.minimum.accumulate(network.bandwidths)
    moved = traffic.size * piece
    # A message within one place (level -1) is a copy, which takes gamma per byte.
    alone = np.where(level >= 0, moved / slowest[level], moved * network.gamma)
    latency = np.where(level >= 0, network.latencies[level], 0.0)
    return alone, latency + network.overhead + traffic.reduced * piece * network.gamma


class _RoundTimes:
    """The times of one round that depend on sizes and network, but not on the slice.

    In its methods, `free` [links] is when each link of the pattern is free, and `cpu` [ranks] when the
    processor of each rank is. `issue` and `finish` advance them.
    """

    def __init__(self, traffic: RoundTraffic, pattern: Pattern, network: Network, piece: float) -> None:
        lanes = traffic.lanes
        self.traffic, self.used = traffic, lanes.used
        self.columns, self.single, self.once = traffic.columns, traffic.is_single, traffic.gives_once
        self.turns = (
            traffic.turn * network.overhead
        )  # of the sender's processor, until each message is issued
        self.last = np.zeros(len(lanes.used) + 1)  # when each link is done; 0 for messages without a link
        self.busy = lanes.load * piece / network.bandwidths[pattern.level_of[lanes.used]]  # of each link
        self.alone, self.after = _per_transfer(traffic, network, piece)
        self.users = traffic.users
        self.repeats = bool(traffic.turn.max() > 1)  # whether some rank sends several messages

    def data(self, ready: Floats) -> Floats:
        """When the data of each message is present at its sender; `ready` is per rank and chunk."""
        available = ready.take(self.traffic.takes)
        return available if self.single else np.maximum.reduceat(available, self.traffic.begins)

    def arrive(self, ready: Floats, when: Floats) -> None:
        """Store in `ready` that each message arrives at its receiver at `when`."""
        gives, arrived = self.traffic.gives, when if self.single else when.take(self.traffic.message)
        if self.once:
            ready[gives] = np.maximum(ready.take(gives), arrived)
        else:  # several messages reduce into one slot in a round
            np.maximum.at(ready, gives, arrived)

    def issue(self, data: Floats, cpu: Floats) -> Floats:
        """When each message is passed to the network; a rank passes one after another."""
        src = self.traffic.src
        issue: Floats = np.maximum(data, cpu.take(src)) + self.turns
        if self.repeats:
            np.maximum.at(cpu, src, issue)
        else:
            cpu[src] = issue
        return issue

    def finish(self, issue: Floats, free: Floats) -> Floats:
        """When the last byte of each message is sent."""
        if not len(self.used):
            return issue + self.alone
        message, starts = self.users
        begin = np.maximum(free.take(self.used), np.minimum.reduceat(issue.take(message), starts))
        done = begin + self.busy
        free[self.used] = done
        self.last[:-1] = done
        sent: Floats = issue + self.alone
        for column in self.columns:
            np.maximum(sent, self.last.take(column), out=sent)
        return sent


def _all_ranks_time(pattern: Pattern, network: Network, piece: float, slices: int) -> float:
    """Simulate every rank and link, with arrays."""
    times = [_RoundTimes(traffic, pattern, network, piece) for traffic in pattern.rounds]
    round_count = len(times)
    ready = [np.zeros(pattern.ranks * pattern.chunks) for _ in range(slices)]
    free = np.zeros(len(pattern.level_of))
    cpu = np.zeros(pattern.ranks)
    for step in range(round_count + slices - 1):
        for index in range(max(0, step - round_count + 1), min(step + 1, slices)):
            round_times = times[step - index]
            issue = round_times.issue(round_times.data(ready[index]), cpu)
            round_times.arrive(ready[index], round_times.finish(issue, free) + round_times.after)
    return max(float(each.max()) for each in ready)


# A message: its sender, the slots that it reads, seconds of the sender's processor until it is issued,
# seconds without other messages, seconds from its last byte to usable data, the slots that it writes, and its
# links.
_Message = tuple[int, list[int], float, float, float, list[int], list[int]]
# The links of a round: the link, its messages, and the seconds that they occupy it.
_Links = list[tuple[int, list[int], float]]


def _sparse_time(pattern: Pattern, network: Network, piece: float, slices: int) -> float:
    """The result of `_all_ranks_time`, computed with lists, which are faster for rounds with few messages."""
    rounds = [
        _messages_and_links(traffic, _RoundTimes(traffic, pattern, network, piece))
        for traffic in pattern.rounds
    ]
    round_count = len(rounds)
    ready = [[0.0] * (pattern.ranks * pattern.chunks) for _ in range(slices)]
    free, cpu = [0.0] * len(pattern.level_of), [0.0] * pattern.ranks
    for step in range(round_count + slices - 1):
        for index in range(max(0, step - round_count + 1), min(step + 1, slices)):
            messages, links = rounds[step - index]
            slots = ready[index]
            issue = [
                max(*[slots[slot] for slot in takes], cpu[src]) + turn for src, takes, turn, *_ in messages
            ]
            for link, users, busy in links:
                free[link] = max(free[link], min([issue[user] for user in users])) + busy
            for (src, _, _, alone, after, gives, used), issued in zip(messages, issue, strict=True):
                cpu[src] = max(cpu[src], issued)
                when = max([issued + alone, *[free[link] for link in used]]) + after
                for slot in gives:
                    slots[slot] = max(slots[slot], when)
    return max(max(slots) for slots in ready)


def _messages_and_links(traffic: RoundTraffic, times: _RoundTimes) -> tuple[list[_Message], _Links]:
    """The messages of a round, and the links that they use."""
    lanes, bounds = traffic.lanes, [*traffic.begins.tolist(), len(traffic.takes)]
    used: list[int] = lanes.used.tolist()
    messages: list[_Message] = []
    turns, alone_seconds, after_seconds = times.turns.tolist(), times.alone.tolist(), times.after.tolist()
    for index, (src, turn, alone, after) in enumerate(
        zip(traffic.src.tolist(), turns, alone_seconds, after_seconds, strict=True)
    ):
        part = slice(bounds[index], bounds[index + 1])
        links_of: list[int] = lanes.link[index].tolist()
        links_used = [used[link] for link in links_of if link < len(used)]
        messages.append(
            (src, traffic.takes[part].tolist(), turn, alone, after, traffic.gives[part].tolist(), links_used)
        )
    users, starts = traffic.users
    ends = [*starts.tolist(), len(users)]
    links = [
        (link, users[ends[i] : ends[i + 1]].tolist(), busy)
        for i, (link, busy) in enumerate(zip(used, times.busy.tolist(), strict=True))
    ]
    return messages, links


def _blocking(pattern: Pattern, network: Network, piece: float, slices: int) -> float:
    """The time in the form `rounds`: one operation per round and slice, and slices one after the other.

    All chunks from one rank to another in a round are one message.
    """
    if pattern.alike or (pattern.even and pattern.ranks > _EVEN_RANKS):
        call_seconds = network.round + network.overhead
        rounds = _all_scalars(pattern, network, piece)
        per_round = (max([alone, *(load for _, load in loads)]) + after for loads, alone, after in rounds)
        copies = sum(float(traffic.size.max()) for traffic in pattern.rounds) * COPIES * piece * network.gamma
        return slices * (len(rounds) * call_seconds + sum(per_round) + copies)
    now = np.zeros(pattern.ranks)  # when each rank has completed the previous round
    free = np.zeros(len(pattern.level_of))  # when each link is free
    for traffic in pattern.rounds:
        round_times = _RoundTimes(traffic, pattern, network, piece)
        issue = round_times.issue(now[traffic.src] + network.round, now + network.round)
        copied = traffic.size * piece * network.gamma
        sent = round_times.finish(issue + copied, free)
        np.maximum.at(now, traffic.src, sent)
        np.maximum.at(now, traffic.dst, sent + round_times.after + copied)
    return float(now.max()) * slices
