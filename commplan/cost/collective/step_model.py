"""How long a program takes, step by step: the model that prices plans.

Slice j of a program does round t at step t + j, and a rank issues its sends in the order of steps. In the
dataflow forms a send waits for its data and for the sends before it, nothing else; a link serves what is
asked of it in order of steps, and the transfers of one step share it evenly. With `rounds`, a rank goes on
when its own sends and receives of the step are over, and each step is an operation of its own, which copies
what it sends out of the buffer and what it receives into it.

For a message of b bytes over links l that carry B_l bytes of the step, alpha of the level, o and gamma:

    issue  = max(data, CPU of the sender) + o
    done_l = max(free_l, first issue on l) + B_l / bandwidth_l
    data   = max(max_l done_l, issue + b / min bandwidth) + alpha + o [+ gamma b]

Many slices settle into a rhythm: a few are followed, the others come at the same distance (seen in two runs).
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from commplan.cost.network.link_traffic import Pattern, TrafficStep
from commplan.cost.network.network import Floats, Network

FOLLOWED = 48  # slices at most; the rest is extrapolated
COPIES = 2  # of each message in the form `rounds`: out of the buffer, and into it
WORK = 60_000  # transfers at most, where ranks differ
SPARSE = 40  # reads, writes and uses of links of a round: with fewer, plain loops are faster than arrays


def seconds(pattern: Pattern, network: Network, chunk: float, slices: int, *, blocking: bool) -> float:
    """The time until the last rank is done, without the call that starts it.

    chunk: bytes of one chunk, all slices together. blocking: as the form `rounds` does it.
    """
    if not pattern.steps:
        return 0.0
    piece = chunk / slices
    if blocking:
        return _blocking(pattern, network, piece, slices)
    most = FOLLOWED
    if not _is_even(pattern):
        most = min(most, max(4, WORK // sum(len(step.src) for step in pattern.steps)))
    if slices <= most:
        return _followed(pattern, network, piece, slices)
    whole, half = _followed(pattern, network, piece, most), _followed(pattern, network, piece, most // 2)
    return whole + (slices - most) * (whole - half) / (most - most // 2)


def _is_even(pattern: Pattern) -> bool:
    """Whether one rank may stand for all."""
    return pattern.alike or (pattern.even and pattern.ranks * len(pattern.steps) > 1500)


@lru_cache(maxsize=1 << 14)
def _followed(pattern: Pattern, network: Network, piece: float, slices: int) -> float:
    """The time of slices of `piece` bytes a chunk, all followed. Sizes of buffers share the pieces of a
    message, so the same are priced again and again."""
    if _is_even(pattern):
        return _alike(pattern, network, piece, slices)
    uses = sum(len(step.takes) + len(step.gives) + 2 * step.lanes.link.size for step in pattern.steps)
    run = _sparse if uses < SPARSE * len(pattern.steps) else _unlike
    return run(pattern, network, piece, slices)


def _alike(pattern: Pattern, network: Network, piece: float, slices: int) -> float:
    """One rank stands for all; its links of each level are the machine's."""
    rounds = _all_scalars(pattern, network, piece)
    last = len(rounds)
    free = [0.0] * len(network.latencies)
    ready = [0.0] * slices
    cpu = 0.0
    for step in range(last + slices - 1):
        for index in range(max(0, step - last + 1), min(step + 1, slices)):
            loads, alone, after = rounds[step - index]
            cpu = max(ready[index], cpu) + network.overhead
            done = cpu + alone
            for level, load in loads:
                free[level] = max(free[level], cpu) + load
                done = max(done, free[level])
            ready[index] = done + after
    return max(ready)


_Scalars = tuple[list[tuple[int, float]], float, float]


def _all_scalars(pattern: Pattern, network: Network, piece: float) -> list[_Scalars]:
    """Of each round; many rounds are the same but for the chunks."""
    seen: dict[tuple[int, int], _Scalars] = {}
    scalars: list[_Scalars] = []
    for step in pattern.steps:
        key = (id(step.lanes), int(step.reduced[0]))
        if key not in seen:
            seen[key] = _scalars(step, network, piece)
        scalars.append(seen[key])
    return scalars


def _scalars(step: TrafficStep, network: Network, piece: float) -> _Scalars:
    """Seconds on the links of each level, seconds of a message alone, and what follows its arrival."""
    lanes = step.lanes
    busy = lanes.per_level * piece / network.bandwidths
    loads = [(level, float(load)) for level, load in enumerate(busy) if load > 0]
    alone, after = _each(step, network, piece)
    return loads, float(alone.max()), float(after.mean())


def _each(step: TrafficStep, network: Network, piece: float) -> tuple[Floats, Floats]:
    """For each transfer: seconds if it were alone, and from its last byte sent to its data usable."""
    level = step.lanes.level
    slowest = np.minimum.accumulate(network.bandwidths)
    moved = step.size * piece
    alone = np.where(level >= 0, moved / slowest[level], moved * network.gamma)
    latency = np.where(level >= 0, network.latencies[level], 0.0)
    return alone, latency + network.overhead + step.reduced * piece * network.gamma


class _Follow:
    """What of a step depends on sizes and network, but not on the slice."""

    def __init__(self, step: TrafficStep, pattern: Pattern, network: Network, piece: float) -> None:
        lanes = step.lanes
        self.step, self.used = step, lanes.used
        self.columns, self.single, self.once = step.columns, step.is_single, step.gives_once
        self.turns = step.turn * network.overhead
        self.last = np.zeros(len(lanes.used) + 1)  # when each link is done; 0 for messages without one
        self.busy = lanes.load * piece / network.bandwidths[pattern.level_of[lanes.used]]
        self.alone, self.after = _each(step, network, piece)
        self.users = step.users
        self.repeats = bool(step.turn.max() > 1)

    def data(self, ready: Floats) -> Floats:
        """When what each message holds is at its sender."""
        held = ready.take(self.step.takes)
        return held if self.single else np.maximum.reduceat(held, self.step.begins)

    def arrive(self, ready: Floats, when: Floats) -> None:
        gives, arrived = self.step.gives, when if self.single else when.take(self.step.message)
        if self.once:
            ready[gives] = np.maximum(ready.take(gives), arrived)
        else:  # several reduce into one slot in one round
            np.maximum.at(ready, gives, arrived)

    def issue(self, data: Floats, cpu: Floats) -> Floats:
        """When each message is handed to the network; a rank hands over one after another."""
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


def _unlike(pattern: Pattern, network: Network, piece: float, slices: int) -> float:
    """Every rank and link for itself."""
    follow = [_Follow(step, pattern, network, piece) for step in pattern.steps]
    last = len(follow)
    ready = [np.zeros(pattern.ranks * pattern.chunks) for _ in range(slices)]
    free, cpu = np.zeros(len(pattern.level_of)), np.zeros(pattern.ranks)
    for step in range(last + slices - 1):
        for index in range(max(0, step - last + 1), min(step + 1, slices)):
            follower = follow[step - index]
            issue = follower.issue(follower.data(ready[index]), cpu)
            follower.arrive(ready[index], follower.finish(issue, free) + follower.after)
    return max(float(each.max()) for each in ready)


_Message = tuple[int, list[int], float, float, float, list[int], list[int]]
_Links = list[tuple[int, list[int], float]]


def _sparse(pattern: Pattern, network: Network, piece: float, slices: int) -> float:
    """As `_unlike`, of rounds with few messages."""
    rounds = [_listed(step, _Follow(step, pattern, network, piece)) for step in pattern.steps]
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
            for (src, _, _, alone, after, gives, used), begun in zip(messages, issue, strict=True):
                cpu[src] = max(cpu[src], begun)
                when = max([begun + alone, *[free[link] for link in used]]) + after
                for slot in gives:
                    slots[slot] = max(slots[slot], when)
    return max(max(slots) for slots in ready)


def _listed(step: TrafficStep, follow: _Follow) -> tuple[list[_Message], _Links]:
    """The messages of a round, and the links that they use, each with its messages."""
    lanes, bounds = step.lanes, [*step.begins.tolist(), len(step.takes)]
    used: list[int] = lanes.used.tolist()
    messages: list[_Message] = []
    for index, (src, turn, alone, after) in enumerate(
        zip(
            step.src.tolist(),
            follow.turns.tolist(),
            follow.alone.tolist(),
            follow.after.tolist(),
            strict=True,
        )
    ):
        part = slice(bounds[index], bounds[index + 1])
        links_of: list[int] = lanes.link[index].tolist()
        own = [used[link] for link in links_of if link < len(used)]
        messages.append((src, step.takes[part].tolist(), turn, alone, after, step.gives[part].tolist(), own))
    users, starts = step.users
    ends = [*starts.tolist(), len(users)]
    links = [
        (link, users[ends[i] : ends[i + 1]].tolist(), busy)
        for i, (link, busy) in enumerate(zip(used, follow.busy.tolist(), strict=True))
    ]
    return messages, links


def _blocking(pattern: Pattern, network: Network, piece: float, slices: int) -> float:
    """One call for each step; a step of several slices sends them as one message to each partner."""
    if pattern.alike or (pattern.even and pattern.ranks > 64):
        each = network.round + network.overhead
        rounds = _all_scalars(pattern, network, piece)
        once = (max([alone, *(load for _, load in loads)]) + after for loads, alone, after in rounds)
        copies = sum(float(step.size.max()) for step in pattern.steps) * COPIES * piece * network.gamma
        return slices * (len(rounds) * each + sum(once) + copies)
    follow = [_Follow(step, pattern, network, piece) for step in pattern.steps]
    now, free = np.zeros(pattern.ranks), np.zeros(len(pattern.level_of))
    for follower in follow:
        step = follower.step
        issue = follower.issue(now[step.src] + network.round, now + network.round)
        copied = step.size * piece * network.gamma
        sent = follower.finish(issue + copied, free)
        np.maximum.at(now, step.src, sent)
        np.maximum.at(now, step.dst, sent + follower.after + copied)
    return float(now.max()) * slices
