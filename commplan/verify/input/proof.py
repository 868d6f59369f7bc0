"""What of the input of a schedule is proved, and what it needs: see `commplan.verify.input.visitation`."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from commplan.input.prefetch import KEEP, device_prefetch, prefetch, slots
from commplan.input.rates import Rates, rates
from commplan.input.work_partition import Division, Turns, division
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.hints import Cache
from commplan.ir.plan import Ref, name_of
from commplan.ir.remark import Design
from commplan.ir.schedule import Map, Phase, Read, Schedule, Share, results
from commplan.ir.stages.rules import Violation, cached
from commplan.verify.input.visitation import (
    Broken,
    prove_division,
    prove_order,
    prove_parts,
    prove_rates,
    prove_turns,
    survivors,
)
from commplan.verify.scope import Scope

_GROUP = 16  # processes that a division is run for, at most: see `_share_wrong`


class Visited(NamedTuple):
    """A load whose visits are proved. shards: how many the batch is cut into. rates: of members by their own
    clocks."""

    phase: str
    op: Read
    shards: int
    rates: Rates | None


class Shared(NamedTuple):
    """A shared value whose division is proved. members: how many it is shared between."""

    phase: str
    op: Share
    members: int


class InputMemory(NamedTuple):
    """What the input of a phase holds at once, at most. batches: of each rank, those included that the caller
    holds. records: of one load. shared: bytes of the slots of a host, for the rows of one rank; own: bytes of
    a rank beside them. on_devices: bytes on a rank's device that batches take ahead of the step; devices that
    use the memory of the host show the others. Records of variable length, and what a function makes in
    between, are not counted. cached: bytes of records that a host keeps across epochs; in_files: those
    of them in files."""

    phase: str
    batches: int
    records: int
    shared: int
    own: int
    on_devices: int = 0
    cached: int = 0
    in_files: int = 0


def check_input(scope: Scope) -> None:
    """Report loads whose visit is not what they promise, shares that leave rows out, and caches of results
    that differ between epochs."""
    ahead = prefetch(scope.phase.ops)
    for op in scope.phase.ops:
        if isinstance(op, Map) and op.hints.cache is not None and not scope.has_seen_op(op):
            broken = _cache_wrong(scope, op, op.hints.cache)
            if broken is not None:
                scope.report.found.append(broken.diagnostic("CP0735", op.span, scope.schedule.file))
        if not isinstance(op, Read | Share) or scope.has_seen_op(op):
            continue
        name = f"`{name_of(op.result)}`"
        wrong = _load_wrong(op, ahead) if isinstance(op, Read) else _share_wrong(scope, op)
        if wrong is not None:
            scope.report.found.append(wrong.diagnostic(name, op.span, scope.schedule.file))


def _load_wrong(op: Read, ahead: int) -> Broken | None:
    orders = (prove_order(op.visit, op.tail, batch) for batch in dict.fromkeys(op.batch))
    wrong = next(filter(None, orders), None)
    if wrong is None and op.clock is not None:
        return prove_rates(rates(op.batch, ahead))
    return wrong


def _cache_wrong(scope: Scope, op: Map, cache: Cache) -> Violation | None:
    if op.lane != "host_compute":
        return Violation(f"`{op.fn}` runs on the device, and a cache keeps results of the host")
    before = DefUse(scope.phase.ops).ancestors(op.results)
    random = [each.fn for each in before if isinstance(each, Map) and each.random]
    sources = [each.source for each in before if isinstance(each, Read)]
    return cached(op.fn, random[::-1], sources, scope.schedule.fn(op.fn).results, cache)


def _share_wrong(scope: Scope, op: Share) -> Broken | None:
    value = scope.values[op.result]
    rows = value.leaves[0].shape[0] if value.leaves and value.leaves[0].shape else 1
    return prove_share(op.design, op.readers, scope.ranks(op.axes), rows)


@functools.lru_cache(maxsize=256)
def prove_share(design: Design, readers: int | None, members: int, rows: int) -> Broken | None:
    """That `members` processes which share a value as `design` says all get every row once, whoever is left.

    readers: as the plan says. rows: of a batch. On which hosts the processes lie is known when they run: here
    they are all on one host, each on its own, in two halves, and dealt out between two. Of large groups 16
    are looked at: what a process makes, and where it goes, depends on whether hosts are the same and on the
    order of processes alone. A group that runs has its own division proved when it meets (`prove_division`).
    """
    count = min(members, _GROUP)
    everyone = range(count)
    halves, dealt = (2 * process // count for process in everyone), (process % 2 for process in everyone)
    layouts = dict.fromkeys(map(tuple, ([0] * count, everyone, halves, dealt)))
    divisions = (division(design, hosts, readers) for hosts in layouts)
    proofs = (wrong for work in divisions for wrong in _proofs(work, rows))
    return prove_parts() or next(filter(None, proofs), None)


def _proofs(work: Division, rows: int) -> Iterator[Broken | None]:
    """Of all processes, of whoever is left, and of turns, which readers of one host may take, as many at a
    time as its cores ask for."""
    yield prove_division(work, rows)
    for alive in survivors(work):
        yield prove_division(work, rows, alive)
    if len(set(work.hosts)) == 1 and work.design != "duplicate":
        for width in range(1, work.parts + 1):
            yield prove_turns(Turns(work, width), rows)


# --- what is proved, for people ---


def visits(schedule: Schedule) -> tuple[Visited, ...]:
    """The loads of a schedule that was verified."""
    return tuple(
        Visited(phase.name, op, schedule.size(op.split), _rates(phase, op))
        for phase in schedule.phases
        for op in phase.ops
        if isinstance(op, Read)
    )


def _rates(phase: Phase, op: Read) -> Rates | None:
    return rates(op.batch, prefetch(phase.ops)) if op.clock is not None else None


def shares(schedule: Schedule) -> tuple[Shared, ...]:
    """The shared values of a schedule that was verified."""
    return tuple(
        Shared(phase.name, op, schedule.size(op.axes))
        for phase in schedule.phases
        for op in phase.ops
        if isinstance(op, Share)
    )


def input_memory(schedule: Schedule) -> tuple[InputMemory, ...]:
    """A bound for each phase that loads: no more batches are begun than it says, however slow the caller
    is."""
    return tuple(
        _memory(schedule, phase) for phase in schedule.phases if any(isinstance(op, Read) for op in phase.ops)
    )


def _memory(schedule: Schedule, phase: Phase) -> InputMemory:
    """Of members by their own clocks a batch is the largest here, and a host keeps `Rates.bound` records."""
    size = {value.id: value.nbytes for value in phase.values}
    moved = {op.result for op in phase.ops if isinstance(op, Share) and op.design != "duplicate"}
    own = [ref for ref in handed_over(schedule, phase) if ref not in moved]
    ahead, on_devices = prefetch(phase.ops), device_prefetch(phase.ops)
    loads = [op for op in phase.ops if isinstance(op, Read)]
    rows = max(max(op.batch) // schedule.size(op.split) for op in loads)
    batches = shown = ahead + on_devices + KEEP
    shared = slots(ahead, on_devices, by_caller=True) * sum(size[ref] for ref in moved)
    clocked = next((op for op in loads if op.clock is not None), None)
    if clocked is not None:
        kept = -(-rates(clocked.batch, ahead).bound // max(clocked.batch))
        batches, shown, shared = kept + KEEP, KEEP, kept * sum(size[ref] for ref in own)
    caches = [op.hints.cache for op in phase.ops if isinstance(op, Map) and op.hints.cache is not None]
    taken = {binding.value for binding in (*phase.outputs, *phase.takes) if binding.source_only}
    return InputMemory(
        phase.name, batches, batches * rows, shared, shown * sum(size[ref] for ref in own),
        on_devices * sum(size[ref] for ref in taken),
        sum(cache.nbytes for cache in caches), sum(cache.nbytes for cache in caches if cache.path),
    )  # fmt: skip


def handed_over(schedule: Schedule, phase: Phase) -> list[Ref]:
    """The values that the host makes and hands over: source-only outputs and arguments, or, where functions
    of the device make these record by record, what they are made from."""
    on_host: set[str] = set()
    for op in phase.ops:
        device = op.lane == "device"
        if op.runs_ahead(on_host) and not device:
            on_host.update(results(op))
    bound = (binding.value for binding in (*phase.outputs, *phase.takes) if binding.source_only)
    return DefUse(phase.ops).sources(bound, on_host)
