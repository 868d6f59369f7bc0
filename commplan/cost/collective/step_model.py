"""Simulates a program step by step on a network.

Slice j of a program runs round t at step t + j, and a rank issues its sends in the order of steps. In
dataflow forms a send waits only for its data and for earlier sends. A link serves requests in the order of
steps, and the transfers of one step share it evenly. In the form `rounds`, a rank continues when its own
sends and receives of the step are complete. Each step is then a separate operation, which copies its operand
out of the buffer and its result into it.

For a message of b bytes over links l that carry B_l bytes in the step, with alpha of the level, o and gamma:

    issue  = max(data, CPU of the sender) + o
    done_l = max(free_l, first issue on l) + B_l / bandwidth_l
    data   = max(max_l done_l, issue + b / min bandwidth) + alpha + o [+ gamma b]

Many slices reach a steady state: some are simulated twice, and the time of the others is extrapolated.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from commplan.cost.network.link_traffic import Pattern, RoundTraffic
from commplan.cost.network.network import Floats, Network

SIMULATED_SLICES = 48  # maximum number of simulated slices; others are extrapolated
COPIES = 2  # copies of each message in the form `rounds`: out of the buffer, and into it
WORK = 60_000  # maximum number of transfers, if ranks differ
SPARSE = 40  # reads, writes and uses of links per round; below, loops are faster than arrays


def seconds(pattern: Pattern, network: Network, chunk: float, slices: int, *, blocking: bool) -> float:
    """The time until the last rank is done, without the call that starts it.

    Args:
        pattern: The program on the network.
        network: The network.
        chunk: Bytes of one chunk, all slices together.
        slices: The number of slices.
        blocking: Whether the form is `rounds`.
    """
    if not pattern.steps:
        return 0.0
    piece = chunk / slices
    if blocking:
        return _blocking(pattern, network, piece, slices)
    simulated = SIMULATED_SLICES
    if not _is_even(pattern):
        simulated = min(simulated, max(4, WORK // sum(len(step.src) for step in pattern.steps)))
    if slices <= simulated:
        return _simulate(pattern, network, piece, slices)
    whole = _simulate(pattern, network, piece, simulated)
    half = _simulate(pattern, network, piece, simulated // 2)
    return whole + (slices - simulated) * (whole - half) / (simulated - simulated // 2)


def _is_even(pattern: Pattern) -> bool:
    """Whether one rank represents all."""
    return pattern.alike or (pattern.even and pattern.ranks * len(pattern.steps) > 1500)


@lru_cache(maxsize=1 << 14)
def _simulate(pattern: Pattern, network: Network, piece: float, slices: int) -> float:
    """The time of all slices, with `piece` bytes per chunk.

    Cached: buffers of different sizes are cut into the same pieces.
    """
    if _is_even(pattern):
        return _one_rank_time(pattern, network, piece, slices)
    uses = sum(len(step.takes) + len(step.gives) + 2 * step.lanes.link.size for step in pattern.steps)
    run = _sparse_time if uses < SPARSE * len(pattern.steps) else _all_ranks_time
    return run(pattern, network, piece, slices)


def _one_rank_time(pattern: Pattern, network: Network, piece: float, slices: int) -> float:
    """One rank represents all; the links of each level are aggregated."""
    rounds = _all_scalars(pattern, network, piece)
    last = len(rounds)
    free = [0.0] * len(network.latencies)
    ready = [0.0] * slices
    cpu = 0.0
    for step in range(last + slices - 1):
        for index in range(max(0, step - last + 1), min(step + 1, slices)):
            loads, own_seconds, after = rounds[step - index]
            cpu = max(ready[index], cpu) + network.overhead
            done = cpu + own_seconds
            for level, load in loads:
                free[level] = max(free[level], cpu) + load
                done = max(done, free[level])
            ready[index] = done + after
    return max(ready)


_Scalars = tuple[list[tuple[int, float]], float, float]


def _all_scalars(pattern: Pattern, network: Network, piece: float) -> list[_Scalars]:
    """`_scalars` of each round; many rounds differ only in their chunks."""
    by_key: dict[tuple[int, int], _Scalars] = {}
    scalars: list[_Scalars] = []
    for step in pattern.steps:
        key = (id(step.lanes), int(step.reduced[0]))
        if key not in by_key:
            by_key[key] = _scalars(step, network, piece)
        scalars.append(by_key[key])
    return scalars


def _scalars(step: RoundTraffic, network: Network, piece: float) -> _Scalars:
    """Seconds on the links of each level, seconds of a message alone, and seconds after its arrival."""
    lanes = step.lanes
    busy = lanes.per_level * piece / network.bandwidths
    loads = [(level, float(load)) for level, load in enumerate(busy) if load > 0]
    alone, after = _per_transfer(step, network, piece)
    return loads, float(alone.max()), float(after.mean())


def _per_transfer(step: RoundTraffic, network: Network, piece: float) -> tuple[Floats, Floats]:
    """For each transfer: its seconds without others, and the seconds from its last byte to usable data."""
    level = step.lanes.level
    slowest = np.minimum.accumulate(network.bandwidths)
    moved = step.size * piece
    alone = np.where(level >= 0, moved / slowest[level], moved * network.gamma)
    latency = np.where(level >= 0, network.latencies[level], 0.0)
    return alone, latency + network.overhead + step.reduced * piece * network.gamma


class _StepTimes:
    """Properties of a step that depend on sizes and network, but not on the slice."""

    def __init__(self, step: RoundTraffic, pattern: Pattern, network: Network, piece: float) -> None:
        lanes = step.lanes
        self.step, self.used = step, lanes.used
        self.columns, self.single, self.once = step.columns, step.is_single, step.gives_once
        self.turns = step.turn * network.overhead
        self.last = np.zeros(len(lanes.used) + 1)  # when each link is done; 0 for messages without a link
        self.busy = lanes.load * piece / network.bandwidths[pattern.level_of[lanes.used]]
        self.alone, self.after = _per_transfer(step, network, piece)
        self.users = step.users
        self.repeats = bool(step.turn.max() > 1)

    def data(self, ready: Floats) -> Floats:
        """When the data of each message is present at its sender."""
        available = ready.take(self.step.takes)
        return available if self.single else np.maximum.reduceat(available, self.step.begins)

    def arrive(self, ready: Floats, when: Floats) -> None:
        gives, arrived = self.step.gives, when if self.single else when.take(self.step.message)
        if self.once:
            ready[gives] = np.maximum(ready.take(gives), arrived)
        else:  # several messages reduce into one slot in a round
            np.maximum.at(ready, gives, arrived)

    def issue(self, data: Floats, cpu: Floats) -> Floats:
        """When each message is passed to the network; a rank passes one after another."""
        src = self.step.src
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
    """Every rank and link separately."""
    times = [_StepTimes(step, pattern, network, piece) for step in pattern.steps]
    last = len(times)
    ready = [np.zeros(pattern.ranks * pattern.chunks) for _ in range(slices)]
    free = np.zeros(len(pattern.level_of))
    cpu = np.zeros(pattern.ranks)
    for step in range(last + slices - 1):
        for index in range(max(0, step - last + 1), min(step + 1, slices)):
            step_times = times[step - index]
            issue = step_times.issue(step_times.data(ready[index]), cpu)
            step_times.arrive(ready[index], step_times.finish(issue, free) + step_times.after)
    return max(float(each.max()) for each in ready)


_Message = tuple[int, list[int], float, float, float, list[int], list[int]]
_Links = list[tuple[int, list[int], float]]


def _sparse_time(pattern: Pattern, network: Network, piece: float, slices: int) -> float:
    """`_all_ranks_time` for rounds with few messages."""
    rounds = [_messages_and_links(step, _StepTimes(step, pattern, network, piece)) for step in pattern.steps]
    last = len(rounds)
    ready = [[0.0] * (pattern.ranks * pattern.chunks) for _ in range(slices)]
    free, cpu = [0.0] * len(pattern.level_of), [0.0] * pattern.ranks
    for step in range(last + slices - 1):
        for index in range(max(0, step - last + 1), min(step + 1, slices)):
            messages, links = rounds[step - index]
            slots = ready[index]
            issue = [
                max(*[slots[slot] for slot in takes], cpu[src]) + turn for src, takes, turn, *_ in messages
            ]
            for link, users, busy in links:
                free[link] = max(free[link], min([issue[user] for user in users])) + busy
            for (src, _, _, own_seconds, after, gives, used), issued in zip(messages, issue, strict=True):
                cpu[src] = max(cpu[src], issued)
                when = max([issued + own_seconds, *[free[link] for link in used]]) + after
                for slot in gives:
                    slots[slot] = max(slots[slot], when)
    return max(max(slots) for slots in ready)


def _messages_and_links(step: RoundTraffic, times: _StepTimes) -> tuple[list[_Message], _Links]:
    """The messages of a round, and the links that they use, each with its messages."""
    lanes, bounds = step.lanes, [*step.begins.tolist(), len(step.takes)]
    used: list[int] = lanes.used.tolist()
    messages: list[_Message] = []
    for index, (src, turn, alone, after) in enumerate(
        zip(step.src.tolist(), times.turns.tolist(), times.alone.tolist(), times.after.tolist(), strict=True)
    ):
        part = slice(bounds[index], bounds[index + 1])
        links_of: list[int] = lanes.link[index].tolist()
        links_used = [used[link] for link in links_of if link < len(used)]
        messages.append(
            (src, step.takes[part].tolist(), turn, alone, after, step.gives[part].tolist(), links_used)
        )
    users, starts = step.users
    ends = [*starts.tolist(), len(users)]
    links = [
        (link, users[ends[i] : ends[i + 1]].tolist(), busy)
        for i, (link, busy) in enumerate(zip(used, times.busy.tolist(), strict=True))
    ]
    return messages, links


def _blocking(pattern: Pattern, network: Network, piece: float, slices: int) -> float:
    """One call for each step; several slices of a step are one message to each partner."""
    if pattern.alike or (pattern.even and pattern.ranks > 64):
        call_seconds = network.round + network.overhead
        rounds = _all_scalars(pattern, network, piece)
        per_round = (
            max([own_seconds, *(load for _, load in loads)]) + after for loads, own_seconds, after in rounds
        )
        copies = sum(float(step.size.max()) for step in pattern.steps) * COPIES * piece * network.gamma
        return slices * (len(rounds) * call_seconds + sum(per_round) + copies)
    times = [_StepTimes(step, pattern, network, piece) for step in pattern.steps]
    now = np.zeros(pattern.ranks)
    free = np.zeros(len(pattern.level_of))
    for step_times in times:
        step = step_times.step
        issue = step_times.issue(now[step.src] + network.round, now + network.round)
        copied = step.size * piece * network.gamma
        sent = step_times.finish(issue + copied, free)
        np.maximum.at(now, step.src, sent)
        np.maximum.at(now, step.dst, sent + step_times.after + copied)
    return float(now.max()) * slices
