"""Costs of sharing designs: CPU per record and member, time per step, bytes between hosts, memory.

The model: N members receive the same batch of B records in each step. P is the CPU time per record before the
cut, C the CPU time that each member spends after it, and s the bytes of a record at the cut. Without sharing,
every member spends P + C. With sharing, one reader makes the record. If the members run on H hosts, its bytes
are sent and received H - 1 times, at w seconds of CPU per byte at each end. The cost per record and member is
then P/N + T + C, with T = 2 w s (H - 1)/N. Inside a host there are no copies. The ratio of the costs is the
bound of "Exploring Flexible Communications for Streamlining DNN Ensemble Training Pipelines" (SC 2018), (P +
C)/(P/N + T + C). The minimum of these sums over all cuts, and of P + C, is the physical limit: no design is
cheaper, since each reads and decodes every record at least once. Designs have two further costs that are not
in the limit: the pipeline's own time per record and batch, and slower preprocessing if more processes of a
host make records than it has cores. In that case each process has its own decoder memory, which is no longer
in the caches when the process runs again.

The time of a step is the maximum of: the CPU work of a host divided by its cores; one process, with its
threads sped up by Amdahl's law (1967) and the work under the interpreter's lock as the serial part; the
links; the consumer. It is the maximum instead of the sum because prefetching overlaps with the consumer.
Collectives that run in the consumer's thread (JAX) are added to the consumer's time.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal

from commplan.input.work_partition import Division, HostTransfer, division
from commplan.ir.remark import DESIGNS, Design

TIME_TOLERANCE = 0.02  # as a fraction of the step time: smaller differences are ties
COST_TOLERANCE = 0.01  # as a fraction of CPU time or bytes: smaller differences are ties
MAX_EXHAUSTIVE_MEMBERS = 32  # up to this number of members, every number of readers is tried

Prefer = Literal["time", "cpu"]  # what decides among the shortest steps; see `best`
Links = Callable[[tuple[int, ...], HostTransfer, float], float]
"""Returns the seconds of a transfer.

The arguments are the members that lead the hosts of the transfer (in the order of its hosts), the transfer,
and the bytes of the whole buffer.
"""


@dataclass(frozen=True)
class RecordWork:
    """The work for one record.

    Attributes:
        cpu: CPU seconds.
        serial: The part of `cpu` under the interpreter's lock.
        wait: Seconds without CPU use, such as reads from disk.
        steps: The number of pipeline stages.
    """

    cpu: float = 0.0
    serial: float = 0.0
    wait: float = 0.0
    steps: int = 0

    def __add__(self, other: RecordWork) -> RecordWork:
        cpu, serial = self.cpu + other.cpu, self.serial + other.serial
        return RecordWork(cpu, serial, self.wait + other.wait, self.steps + other.steps)


@dataclass(frozen=True)
class SharingCut:
    """A point in the pipeline at which members could share records.

    Attributes:
        name: A description, such as "after `decode`".
        shared: The work for one record before the cut, done once for all members.
        per_member: The work for one record after the cut, done by every member.
        nbytes: The bytes of one record at the cut.
    """

    name: str
    shared: RecordWork
    per_member: RecordWork
    nbytes: int


@dataclass(frozen=True)
class Setting:
    """The machine and the load.

    Attributes:
        rows: Records per batch of one member.
        groups: [groups][members], the host of each member, for each group of processes that share records.
            There are several groups if a batch is split between ranks. All have the same number of members.
        cores: Cores per host.
        threads: Threads per process.
        record: CPU seconds of the pipeline itself per record and stage.
        batch: CPU seconds of the pipeline itself per batch and member.
        crossing: CPU seconds per byte at each end of a link.
        step: Seconds of a member's step; 0 if not measured.
        step_cpu: CPU seconds of a member's step; 0 if not measured.
        by_caller: Whether transfers run in the consumer's thread.
        slots: The number of batches in memory: those that a process may have ahead, and the one in use.
        processes: Whether functions run in worker processes, each with its own interpreter lock.
        oversubscription: The fraction by which preprocessing slows down if more processes of a host make
            records than it has cores.
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
    oversubscription: float = 0.0

    @property
    def members(self) -> int:
        """The number of members in each group."""
        return len(self.groups[0])

    @functools.cached_property
    def patterns(self) -> dict[tuple[int, ...], list[tuple[int, ...]]]:
        """Groups with equal host assignments, keyed by hosts numbered in order of appearance."""
        patterns: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for group in self.groups:
            order = {host: index for index, host in enumerate(dict.fromkeys(group))}
            patterns.setdefault(tuple(order[host] for host in group), []).append(group)
        return patterns


@dataclass(frozen=True)
class Predicted:
    """The predicted costs of a design with its readers, at one cut.

    Attributes:
        design: The design.
        readers: The number of readers; None for `duplicate` and `all_shared`, whose members all read.
        cut: The cut.
        cpu: CPU seconds per record and member.
        wall: Seconds per step.
        waits_for: The resource that determines `wall`: "the consumer", "the CPUs of a host", "one process" or
            "the links".
        nbytes: Bytes received from other hosts per step, over all hosts.
        memory: Bytes of slots on the host with the most.
        limit: The physical limit of `cpu`.
    """

    design: Design
    readers: int | None
    cut: SharingCut
    cpu: float
    wall: float
    waits_for: str
    nbytes: float
    memory: float
    limit: float

    @property
    def distance(self) -> float:
        """CPU time divided by the limit; 1 is optimal."""
        return self.cpu / self.limit if self.limit > 0 else 1.0


def limit(setting: Setting, cuts: Iterable[SharingCut]) -> float:
    """The physical limit in CPU seconds per record and member (see the module); 0 without cuts."""
    members = setting.members
    # The mean number of hosts, over groups, that receive a record from another host.
    crossings = sum(len(set(group)) - 1 for group in setting.groups) / len(setting.groups)
    bounds: list[float] = []
    for cut in cuts:
        moved = 2 * setting.crossing * cut.nbytes * crossings
        bounds.append((cut.shared.cpu + moved) / members + cut.per_member.cpu)
        bounds.append(cut.shared.cpu + cut.per_member.cpu)
    return min(bounds, default=0.0)


def predict(
    setting: Setting, cut: SharingCut, design: Design, readers: int | None, links: Links | None, bound: float
) -> Predicted:
    """The costs of one design at one cut.

    Args:
        setting: The machine and the load.
        cut: The cut.
        design: The design.
        readers: The number of readers; None for all members.
        links: The seconds of a transfer between hosts; None if transfers take no time.
        bound: The physical limit (see `limit`).
    """
    cpu_of_host: defaultdict[int, float] = defaultdict(float)  # CPU seconds of the input per step
    slowest = 0.0  # seconds per step of the slowest process
    received_nbytes = 0.0  # per step, over all hosts
    moving = 0.0  # seconds of transfers per step
    divisions = {pattern: division(design, pattern, readers) for pattern in setting.patterns}
    oversubscribed = _oversubscribed_hosts(setting, divisions)

    # Groups with the same pattern of hosts have the same costs, except on oversubscribed hosts.
    for pattern, groups in setting.patterns.items():
        work = divisions[pattern]
        rows = [_rows(work, member, setting.rows) for member in range(setting.members)]
        sent, received = _link_bytes(work, setting.rows, cut.nbytes)
        for member, host in enumerate(pattern):
            making = _seconds(cut.shared, setting) * rows[member]
            cpu = making + _seconds(cut.per_member, setting) * setting.rows + setting.batch
            if work.leader(host) == member:
                cpu += setting.crossing * (sent[host] + received[host])
            slowed = cpu + setting.oversubscription * making
            for group in groups:
                cpu_of_host[group[member]] += slowed if group[member] in oversubscribed else cpu
            most = slowed if any(group[member] in oversubscribed for group in groups) else cpu
            slowest = max(slowest, _process(setting, cut, rows[member], most))
        received_nbytes += sum(received.values()) * len(groups)
        if links is not None:
            leaders = {host: work.leader(host) for host in set(pattern)}
            moving = max(moving, _moving(work, setting.rows, cut.nbytes, leaders, links))

    # The slowest resource determines the time of a step: prefetching overlaps all of them.
    members_of_host = Counter(host for group in setting.groups for host in group)
    working = (
        max(cpu_of_host[host] + number * setting.step_cpu for host, number in members_of_host.items())
        / setting.cores
    )
    consumer = setting.step + (moving if setting.by_caller else 0.0)
    times = {
        "the consumer": consumer,
        "the CPUs of a host": working,
        "one process": slowest,
        "the links": moving,
    }
    waits_for = max(times, key=lambda name: times[name])
    ranks = setting.members * len(setting.groups)
    cpu = sum(cpu_of_host.values()) / (ranks * setting.rows)
    memory = _memory(setting, cut, design)
    return Predicted(design, readers, cut, cpu, times[waits_for], waits_for, received_nbytes, memory, bound)


def _oversubscribed_hosts(setting: Setting, divisions: Mapping[tuple[int, ...], Division]) -> set[int]:
    """The hosts with more processes that make records than cores. `divisions` has one for each pattern."""
    makers: Counter[int] = Counter()  # the number of processes of each host that make records
    for pattern, groups in setting.patterns.items():
        work = divisions[pattern]
        making = range(setting.members) if work.design == "duplicate" else set(work.readers)
        for group in groups:
            makers.update(group[member] for member in making)
    return {host for host, count in makers.items() if count > setting.cores}


def _rows(work: Division, member: int, rows: int) -> int:
    """The number of records that `member` makes, in a batch of `rows`."""
    return sum(high - low for low, high in (work.part(rows, number) for number in work.parts_of(member)))


def _seconds(work: RecordWork, setting: Setting) -> float:
    """CPU seconds for one record, including the pipeline's own."""
    return work.cpu + work.steps * setting.record


def _process(setting: Setting, cut: SharingCut, records: int, cpu: float) -> float:
    """Seconds of one process per step.

    The work under the interpreter's lock is serial. The rest is divided among threads, which wait for the
    disk in parallel.

    Args:
        setting: The machine and the load.
        cut: The cut.
        records: The number of records per step that the process makes up to the cut.
        cpu: CPU seconds of the process per step.
    """
    rows = setting.rows
    threads = max(1, min(setting.threads, setting.cores))
    serial = 0.0 if setting.processes else cut.shared.serial * records + cut.per_member.serial * rows
    steps = cut.shared.steps * records + cut.per_member.steps * rows
    serial += steps * setting.record + setting.batch  # the pipeline itself is Python code
    waiting = cut.shared.wait * records + cut.per_member.wait * rows
    return min(serial, cpu) + max(0.0, cpu - serial) / threads + waiting / max(1, setting.threads)


def _sizes(work: Division, move: HostTransfer, rows: int, nbytes: int) -> list[int]:
    """The bytes that each contributor to a transfer sends, in a batch of `rows` records of `nbytes` each."""
    ends = [(work.part(rows, low)[0], work.part(rows, high - 1)[1]) for low, high in move.runs]
    return [(end - begin) * nbytes for begin, end in ends]


def _link_bytes(work: Division, rows: int, nbytes: int) -> tuple[Counter[int], Counter[int]]:
    """The bytes that each host sends and receives per batch, if each byte goes to every host once."""
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for move in work.moves():
        sizes = _sizes(work, move, rows, nbytes)
        if move.kind == "broadcast":  # along a chain
            for host in move.hosts[:-1]:
                sent[host] += sizes[0]
            for host in move.hosts[1:]:
                received[host] += sizes[0]
            continue
        following = [*sizes[1:], sizes[0]]  # in a ring, a host never receives the part of the next host
        for host, size, next_size in zip(move.hosts, sizes, following, strict=True):
            sent[host] += sum(sizes) - next_size
            received[host] += sum(sizes) - size
    return sent, received


def _moving(work: Division, rows: int, nbytes: int, leaders: dict[int, int], links: Links) -> float:
    """Seconds of the transfers of a batch, one after another. `leaders` has a member for each host."""
    total = 0.0
    for move in work.moves():
        sizes = _sizes(work, move, rows, nbytes)
        whole = float(sum(sizes))
        # Uneven parts cost as much as equal ones with the same bytes on the busiest link.
        if move.kind == "all_gather":
            whole = (whole - min(sizes)) * len(sizes) / (len(sizes) - 1)
        if whole > 0:
            total += links(tuple(leaders[host] for host in move.hosts), move, whole)
    return total


def _memory(setting: Setting, cut: SharingCut, design: Design) -> float:
    """Bytes of slots on the host with the most.

    A host has one set of slots per group if members share, else one per member.
    """
    sets: Counter[int] = Counter()
    for group in setting.groups:
        sets.update(group if design == "duplicate" else set(group))
    return max(sets.values()) * setting.slots * setting.rows * cut.nbytes


def candidates(setting: Setting, cuts: Sequence[SharingCut], links: Links | None = None) -> list[Predicted]:
    """The predicted costs of all designs, numbers of readers and cuts, simplest design first.

    Args:
        setting: The machine and the load.
        cuts: At least one, sorted by the length of the shared prefix, longest first.
        links: The seconds of a transfer between hosts; None if transfers take no time.

    Returns:
        First the costs of `duplicate` (members do not share), predicted once, at the first cut. Then those of
        the other designs at every cut; none if there is a single member.
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
    """The numbers of readers to try.

    These are all numbers up to `MAX_EXHAUSTIVE_MEMBERS` members. For more, they are the powers of two, the
    number of hosts of the first group, and the number of members.
    """
    members = setting.members
    if members <= MAX_EXHAUSTIVE_MEMBERS:
        return list(range(1, members + 1))
    powers = {2**power for power in range(members.bit_length()) if 2**power <= members}
    return sorted(powers | {len(set(setting.groups[0])), members})


def best(costs: Sequence[Predicted], prefer: Prefer = "time") -> Predicted:
    """The costs of the design to use, of one or more `costs` in the order of `candidates`.

    1. Only steps within `TIME_TOLERANCE` of the shortest remain, whatever `prefer` is.
    2. If not sharing remains, preprocessing is not the bottleneck. With `prefer="time"` members then do not
       share: sharing would make them wait for one another without saving time.
    3. The least CPU time wins, then within `COST_TOLERANCE` of it the fewest bytes between hosts, then the
       shortest step, then the simplest design, in the order of `costs`.

    Args:
        costs: The predicted costs.
        prefer: With "cpu", rule 2 does not apply: sharing that saves CPU time without a longer step is used.
    """
    shortest = min(cost.wall for cost in costs)
    remaining = [cost for cost in costs if cost.wall <= shortest * (1 + TIME_TOLERANCE)]
    unshared = next((cost for cost in remaining if cost.design == "duplicate"), None)
    if unshared is not None and prefer == "time":
        return unshared
    for quantity in map(attrgetter, ("cpu", "nbytes", "wall")):
        least = min(map(quantity, remaining))
        remaining = [cost for cost in remaining if quantity(cost) <= least * (1 + COST_TOLERANCE)]
    return remaining[0]


def costs_per_design(
    costs: Sequence[Predicted], selected: Predicted, prefer: Prefer = "time"
) -> list[Predicted]:
    """The costs that `explain` shows: the best ones of each design, in the order of `DESIGNS`.

    The selected design has `selected` instead, followed by its costs at other cuts with as many readers.

    Args:
        costs: The result of `candidates`.
        selected: The element of `costs` that the plan uses.
        prefer: As for `best`.
    """
    shown: list[Predicted] = []
    for design in DESIGNS:
        same_design = [cost for cost in costs if cost.design == design]
        if not same_design:
            continue
        chosen = (
            selected
            if selected.design == design
            else best(same_design, prefer if design != "duplicate" else "cpu")
        )
        shown.append(chosen)
        if selected.design == design:
            shown += [
                cost
                for cost in same_design
                if cost.readers == selected.readers and cost.cut is not selected.cut
            ]
    return shown
