"""What each design of sharing costs: CPU per record and member, time of a step, bytes between hosts, memory.

The model. N members get the same batch of B records each step. P is the CPU time of what is done before the
cut for one record, C that of what each member does for itself behind it, s the bytes of the record at the
cut. Without sharing every member spends P + C. With it the record is made once, by one of the readers, and
where the members run on H hosts its bytes are sent and received H - 1 times, w seconds of CPU a byte at each
end: per record and member P/N + T + C, with T = 2 w s (H - 1)/N. Inside a host nothing is copied. The ratio
is the bound of "Exploring Flexible Communications for Streamlining DNN Ensemble Training Pipelines" (SC
2018), (P + C)/(P/N + T + C). The least of these sums over all cuts, and P + C, is the physical limit: no
design is below it, since none reads or decodes a record less than once. What the pipeline itself takes for
each record and batch is charged to the designs and not to the limit, and so is what making takes more where
more processes of a host make records than it has cores: each keeps a decoder's memory of its own, which has
left the caches when its turn comes again.

A step takes as long as the slowest of: the CPU work of a host over its cores; one process, its threads sped
up by Amdahl's law (1967) with what holds the interpreter's lock as the serial part; the links; the consumer.
Work ahead runs beside the consumer, so the largest counts and not the sum; collectives that go out from the
consumer's own thread (JAX) are added to it.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from commplan.input.work_partition import Division, Move, division
from commplan.ir.remark import Design

TIE = 0.02  # of the time of a step: differences below it decide nothing
CLOSE = 0.01  # of CPU time and bytes, alike
DESIGNS: tuple[Design, ...] = ("duplicate", "all_shared", "single_broadcast", "multi_broadcast")
MANY = 32  # members: with more, not every number of readers is tried

Prefer = Literal["time", "cpu"]
Links = Callable[[tuple[int, ...], Move, float], float]
"""Seconds of a move: the members that lead its hosts, the move, bytes of the whole buffer."""


@dataclass(frozen=True)
class Work:
    """Work on one record. cpu: seconds, `serial` of them under the interpreter's lock; wait: seconds that
    pass without CPU, at the disk. steps: stages of the pipeline."""

    cpu: float = 0.0
    serial: float = 0.0
    wait: float = 0.0
    steps: int = 0

    def __add__(self, other: Work) -> Work:
        cpu, serial = self.cpu + other.cpu, self.serial + other.serial
        return Work(cpu, serial, self.wait + other.wait, self.steps + other.steps)


@dataclass(frozen=True)
class Cut:
    """Where sharing could happen. shared: what is done once for each record, before the cut. own: what every
    member does behind it. nbytes: of one record at the cut. name: for people, such as "after `decode`"."""

    name: str
    shared: Work
    own: Work
    nbytes: int


@dataclass(frozen=True)
class Setting:
    """The machine, and what runs on it.

    rows: records of a batch, of one member. groups: the host of each member, for each group of processes that
    share with one another (several where a batch is split between ranks). cores: of a host. threads: of one
    process. record, batch: CPU seconds of the pipeline itself for each record and stage, and for each batch
    and member. crossing: CPU seconds a byte at each end of a link. step, step_cpu: seconds and CPU seconds of
    a member's step; 0 where nothing was measured. by_caller: whether moves run in the consumer's thread.
    slots: batches that a process of a host may be ahead, and the one in use. processes: whether functions run
    in worker processes, each with a lock of its own. cold: the share by which making takes more where more
    processes of a host make records than it has cores.
    """

    rows: int
    groups: tuple[tuple[int, ...], ...]
    cores: int
    threads: int = 1
    record: float = 0.0
    batch: float = 0.0
    crossing: float = 0.0
    step: float = 0.0
    step_cpu: float = 0.0
    by_caller: bool = False
    slots: int = 3
    processes: bool = False
    cold: float = 0.0

    @property
    def members(self) -> int:
        return len(self.groups[0])

    @functools.cached_property
    def patterns(self) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
        """Groups whose members lie alike on hosts, under the numbers of hosts in order of appearance."""
        patterns: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for group in self.groups:
            order = {host: place for place, host in enumerate(dict.fromkeys(group))}
            patterns.setdefault(tuple(order[host] for host in group), []).append(group)
        return patterns


@dataclass(frozen=True)
class Predicted:
    """One design with its readers, at one cut.

    cpu: CPU seconds per record and member. wall: seconds of a step. waits_for: what that time is spent on.
    nbytes: bytes that arrive from other hosts in a step, all hosts together. memory: bytes of the slots on
    the fullest host. limit: CPU seconds per record and member below which no design gets.
    """

    design: Design
    readers: int | None
    cut: Cut
    cpu: float
    wall: float
    waits_for: str
    nbytes: float
    memory: float
    limit: float

    @property
    def distance(self) -> float:
        """CPU time over the limit: 1 is the best there can be."""
        return self.cpu / self.limit if self.limit > 0 else 1.0


def limit(setting: Setting, cuts: Iterable[Cut]) -> float:
    """The physical limit in CPU seconds per record and member; see the head of this module."""
    members = setting.members
    crossings = sum(len(set(group)) - 1 for group in setting.groups) / len(setting.groups)
    bounds: list[float] = []
    for cut in cuts:
        moved = 2 * setting.crossing * cut.nbytes * crossings
        bounds.append((cut.shared.cpu + moved) / members + cut.own.cpu)
        bounds.append(cut.shared.cpu + cut.own.cpu)
    return min(bounds, default=0.0)


def predict(
    setting: Setting, cut: Cut, design: Design, readers: int | None, links: Links | None, bound: float
) -> Predicted:
    """What `design` would cost at `cut`. bound: the physical limit. links: None inside one host."""
    load: defaultdict[int, float] = defaultdict(float)
    slowest = arrived = moving = 0.0
    divided = {pattern: division(design, pattern, readers) for pattern in setting.patterns}
    crowded = _crowded(setting, divided)
    for pattern, groups in setting.patterns.items():
        share = divided[pattern]
        rows = [_rows(share, member, setting.rows) for member in range(setting.members)]
        sent, got = _crossed(share, setting.rows, cut.nbytes)
        for member, host in enumerate(pattern):
            making = _seconds(cut.shared, setting) * rows[member]
            cpu = making + _seconds(cut.own, setting) * setting.rows + setting.batch
            if share.leader(host) == member:
                cpu += setting.crossing * (sent[host] + got[host])
            colder = cpu + setting.cold * making
            for group in groups:
                load[group[member]] += colder if group[member] in crowded else cpu
            most = colder if any(group[member] in crowded for group in groups) else cpu
            slowest = max(slowest, _process(setting, cut, rows[member], most))
        arrived += sum(got.values()) * len(groups)
        if links is not None:
            leaders = {host: share.leader(host) for host in set(pattern)}
            moving = max(moving, _moving(share, setting.rows, cut.nbytes, leaders, links))
    busy = Counter(host for group in setting.groups for host in group)
    working = max(load[host] + busy[host] * setting.step_cpu for host in busy) / setting.cores
    consumer = setting.step + (moving if setting.by_caller else 0.0)
    times = {
        "the consumer": consumer,
        "the CPUs of a host": working,
        "one process": slowest,
        "the links": moving,
    }
    waits_for = max(times, key=lambda name: times[name])
    ranks = setting.members * len(setting.groups)
    cpu = sum(load.values()) / (ranks * setting.rows)
    memory = _memory(setting, cut, design)
    return Predicted(design, readers, cut, cpu, times[waits_for], waits_for, arrived, memory, bound)


def _crowded(setting: Setting, divided: Mapping[tuple[int, ...], Division]) -> set[int]:
    """The hosts on which more processes make records than there are cores."""
    makers: Counter[int] = Counter()
    for pattern, groups in setting.patterns.items():
        share = divided[pattern]
        making = range(setting.members) if share.design == "duplicate" else set(share.readers)
        for group in groups:
            makers.update(group[place] for place in making)
    return {host for host, count in makers.items() if count > setting.cores}


def _rows(share: Division, member: int, rows: int) -> int:
    """Records of a batch that `member` makes."""
    return sum(high - low for low, high in (share.part(rows, number) for number in share.of(member)))


def _seconds(work: Work, setting: Setting) -> float:
    return work.cpu + work.steps * setting.record


def _process(setting: Setting, cut: Cut, records: int, cpu: float) -> float:
    """Seconds of one process a step: what holds the lock is serial, the rest is spread over its threads,
    which wait for the disk side by side."""
    rows = setting.rows
    threads = max(1, min(setting.threads, setting.cores))
    serial = 0.0 if setting.processes else cut.shared.serial * records + cut.own.serial * rows
    steps = cut.shared.steps * records + cut.own.steps * rows
    serial += steps * setting.record + setting.batch  # the pipeline itself is Python
    waiting = cut.shared.wait * records + cut.own.wait * rows
    return min(serial, cpu) + max(0.0, cpu - serial) / threads + waiting / max(1, setting.threads)


def _sizes(share: Division, move: Move, rows: int, nbytes: int) -> list[int]:
    """Bytes of each run of `move`."""
    ends = [(share.part(rows, low)[0], share.part(rows, high - 1)[1]) for low, high in move.runs]
    return [(end - begin) * nbytes for begin, end in ends]


def _crossed(share: Division, rows: int, nbytes: int) -> tuple[Counter[int], Counter[int]]:
    """Bytes that each host sends and gets in a batch, in moves that carry every byte once to every host."""
    sent: Counter[int] = Counter()
    got: Counter[int] = Counter()
    for move in share.moves():
        sizes = _sizes(share, move, rows, nbytes)
        if move.kind == "broadcast":  # along a chain
            for host in move.hosts[:-1]:
                sent[host] += sizes[0]
            for host in move.hosts[1:]:
                got[host] += sizes[0]
            continue
        following = [*sizes[1:], sizes[0]]  # round a ring: what the next one has made comes to it in no round
        for host, own, other in zip(move.hosts, sizes, following, strict=True):
            sent[host] += sum(sizes) - other
            got[host] += sum(sizes) - own
    return sent, got


def _moving(share: Division, rows: int, nbytes: int, leaders: dict[int, int], links: Links) -> float:
    """Seconds of the moves of a batch, one after another."""
    total = 0.0
    for move in share.moves():
        sizes = _sizes(share, move, rows, nbytes)
        whole = float(sum(sizes))
        # Uneven parts: as if all were such that the busiest link carries as much.
        if move.kind == "all_gather":
            whole = (whole - min(sizes)) * len(sizes) / (len(sizes) - 1)
        if whole > 0:
            total += links(tuple(leaders[host] for host in move.hosts), move, whole)
    return total


def _memory(setting: Setting, cut: Cut, design: Design) -> float:
    """Bytes of the slots on the fullest host: one set for all that share there, else one for each member."""
    sets: Counter[int] = Counter()
    for group in setting.groups:
        sets.update(group if design == "duplicate" else set(group))
    return max(sets.values()) * setting.slots * setting.rows * cut.nbytes


def candidates(setting: Setting, cuts: Sequence[Cut], links: Links | None = None) -> list[Predicted]:
    """Every design with every number of readers at every cut, the simplest first.

    cuts: the one after the longest prefix first. Not sharing is `duplicate`, which knows no cut.
    """
    bound = limit(setting, cuts)
    costs = [predict(setting, cuts[0], "duplicate", None, links, bound)]
    if setting.members == 1:
        return costs
    for cut in cuts:
        costs.append(predict(setting, cut, "all_shared", None, links, bound))
    for design in ("single_broadcast", "multi_broadcast"):
        for readers in reader_counts(setting):
            costs += [predict(setting, cut, design, readers, links, bound) for cut in cuts]
    return costs


def reader_counts(setting: Setting) -> list[int]:
    """The numbers of readers that are tried: all of them for few members, else powers of two, the number of
    hosts, and all members."""
    members = setting.members
    if members <= MANY:
        return list(range(1, members + 1))
    powers = {2**power for power in range(members.bit_length()) if 2**power <= members}
    return sorted(powers | {len(set(setting.groups[0])), members})


def best(costs: Sequence[Predicted], prefer: Prefer = "time") -> Predicted:
    """The one to take.

    1. Steps within `TIE` of the shortest are alike. Where not sharing is among them, preprocessing is not
       the bottleneck, and members are left to themselves: sharing would make them wait for one another and
       gain no time. With `prefer="cpu"` this rule is left out.
    2. Of those the least CPU time; within `CLOSE` of it the fewest bytes between hosts; then the shortest
       step, and the simplest, as `costs` stand.
    """
    shortest = min(cost.wall for cost in costs)
    left = [cost for cost in costs if cost.wall <= shortest * (1 + TIE)]
    alone = next((cost for cost in left if cost.design == "duplicate"), None)
    if alone is not None and prefer == "time":
        return alone
    for quantity in map(attrgetter, ("cpu", "nbytes", "wall")):
        least = min(map(quantity, left))
        left = [cost for cost in left if quantity(cost) <= least * (1 + CLOSE)]
    return left[0]


def of_each_design(costs: Sequence[Predicted], taken: Predicted, prefer: Prefer = "time") -> list[Predicted]:
    """The best of each design, and `taken`'s design at its other cuts: the table that `explain` shows."""
    shown: list[Predicted] = []
    for design in DESIGNS:
        of_it = [cost for cost in costs if cost.design == design]
        if not of_it:
            continue
        chosen = taken if taken.design == design else best(of_it, prefer if design != "duplicate" else "cpu")
        shown.append(chosen)
        if taken.design == design:
            shown += [cost for cost in of_it if cost.readers == taken.readers and cost.cut is not taken.cut]
    return shown
