"""Proofs and memory bounds for the input of a schedule.

`verify.structural` calls `check_input` for each phase; `commplan verify` prints `visits`, `shares` and
`input_memory`. The proofs themselves are in `commplan.verify.input.visitation`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from commplan.input.prefetch import KEEP, device_prefetch, prefetch, slots
from commplan.input.rates import Rates, rates
from commplan.input.work_partition import MOST_PARTS, Division, division
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.analysis.input_slice import cache_violation
from commplan.ir.plan import Ref, name_of
from commplan.ir.remark import Design
from commplan.ir.schedule import Map, Phase, Read, Schedule, Share, results
from commplan.verify.input.visitation import (
    BrokenPromise,
    prove_deal,
    prove_division,
    prove_order,
    prove_parts,
    prove_rates,
    survivors,
)
from commplan.verify.scope import OpScope

_GROUP = 16  # most processes that are simulated; see `prove_share`


class ProvedLoad(NamedTuple):
    """A load whose visitation contract is proved.

    Attributes:
        phase: name of the phase.
        op: the load.
        shards: number of shards of a batch; 1 if it is not split.
        rates: rates of the members, if they advance independently; else None.
    """

    phase: str
    op: Read
    shards: int
    rates: Rates | None


class ProvedShare(NamedTuple):
    """A shared value whose work partition is proved.

    Attributes:
        phase: name of the phase.
        op: the sharing op.
        members: number of members that share the value.
    """

    phase: str
    op: Share
    members: int


class InputMemory(NamedTuple):
    """An upper bound for the input of a phase in flight.

    Records of variable length and temporaries of user functions are not included.

    Attributes:
        phase: name of the phase.
        batches: number of batches of each rank, including those that the caller holds.
        records: number of records of one load in these batches.
        shared: bytes of a host's slots for the rows of one rank.
        private: bytes private to a rank.
        on_devices: device bytes of a rank for batches transferred before their step. Devices that use host
            memory reference the other batches.
        cached: bytes of records that a host caches across epochs.
        in_files: the part of `cached` that is in files.
    """

    phase: str
    batches: int
    records: int
    shared: int
    private: int
    on_devices: int = 0
    cached: int = 0
    in_files: int = 0


def check_input(scope: OpScope) -> None:
    """Report loads that violate their contract, shares that omit rows, and caches of changing results."""
    ahead = prefetch(scope.phase.ops)
    for op in scope.phase.ops:
        if isinstance(op, Map) and op.hints.cache is not None and not scope.has_seen_op(op):
            broken = cache_violation(scope.schedule, DefUse(scope.phase.ops), op, op.hints.cache)
            if broken is not None:
                scope.report.diagnostics.append(broken.diagnostic("CP0735", op.span, scope.schedule.file))
        if not isinstance(op, Read | Share) or scope.has_seen_op(op):
            continue
        name = f"`{name_of(op.result)}`"
        wrong = _load_violation(op, ahead) if isinstance(op, Read) else _share_violation(scope, op)
        if wrong is not None:
            scope.report.diagnostics.append(wrong.diagnostic(name, op.span, scope.schedule.file))


def _load_violation(op: Read, ahead: int) -> BrokenPromise | None:
    """A violation of a load's contract, or None. `ahead`: batches that are prefetched."""
    orders = (prove_order(op.visit, op.tail, batch) for batch in dict.fromkeys(op.batch))
    wrong = next(filter(None, orders), None)
    if wrong is None and op.clock is not None:
        return prove_rates(rates(op.batch, ahead))
    return wrong


def _share_violation(scope: OpScope, op: Share) -> BrokenPromise | None:
    """A violation of the partition of a shared value, or None. A value without rows is checked as one row."""
    value = scope.values[op.result]
    rows = value.leaves[0].shape[0] if value.leaves and value.leaves[0].shape else 1
    return prove_share(op.design, op.readers, scope.ranks(op.axes), rows)


@functools.lru_cache(maxsize=256)
def prove_share(design: Design, readers: int | None, members: int, rows: int) -> BrokenPromise | None:
    """Prove that every process of a sharing group receives every row once, also after failures.

    The hosts of the processes are unknown at compile time, so four layouts are checked: one host, one host
    each, two halves, and alternating between two hosts. At most 16 processes are simulated: the work of a
    process depends only on which hosts are equal and on the order of processes. At run time each group proves
    its actual partition (`prove_division`).

    Args:
        design: the sharing design.
        readers: number of readers requested by the plan, or None.
        members: number of processes.
        rows: rows of a batch.

    Returns:
        None if proved, otherwise a counterexample.
    """
    count = min(members, _GROUP)
    everyone = range(count)
    halves = (2 * process // count for process in everyone)
    alternating = (process % 2 for process in everyone)
    layouts = dict.fromkeys(map(tuple, ([0] * count, everyone, halves, alternating)))
    divisions = (division(design, hosts, readers) for hosts in layouts)
    proofs = (wrong for work in divisions for wrong in _proofs(work, rows))
    return prove_parts() or next(filter(None, proofs), None)


def _proofs(work: Division, rows: int) -> Iterator[BrokenPromise | None]:
    """Prove a partition for all processes and for survivors, and on one host for each number of makers."""
    yield prove_division(work, rows)
    for alive in survivors(work):
        yield prove_division(work, rows, alive)
    if len(set(work.hosts)) == 1 and work.design != "duplicate":
        for makers in range(1, work.parts + 1):
            yield from (prove_deal(parts, makers) for parts in range(1, MOST_PARTS + 1))


# --- proved properties, for reports ---


def visits(schedule: Schedule) -> tuple[ProvedLoad, ...]:
    """Return the loads of a verified schedule, whose contracts are therefore proved."""
    return tuple(
        ProvedLoad(phase.name, op, schedule.size(op.split), _rates(phase, op))
        for phase in schedule.phases
        for op in phase.ops
        if isinstance(op, Read)
    )


def _rates(phase: Phase, op: Read) -> Rates | None:
    return rates(op.batch, prefetch(phase.ops)) if op.clock is not None else None


def shares(schedule: Schedule) -> tuple[ProvedShare, ...]:
    """Return the shared values of a verified schedule, whose partitions are therefore proved."""
    return tuple(
        ProvedShare(phase.name, op, schedule.size(op.axes))
        for phase in schedule.phases
        for op in phase.ops
        if isinstance(op, Share)
    )


def input_memory(schedule: Schedule) -> tuple[InputMemory, ...]:
    """Bound the input memory of each phase that loads records, however slow the caller is."""
    return tuple(
        _memory(schedule, phase) for phase in schedule.phases if any(isinstance(op, Read) for op in phase.ops)
    )


def _memory(schedule: Schedule, phase: Phase) -> InputMemory:
    """Bound the input memory of a phase.

    If members advance independently, a batch is the largest of theirs, and a host stores `Rates.bound`
    records.
    """
    size = {value.id: value.nbytes for value in phase.values}
    # Values that a host shares are in its slots; the others are private to a rank.
    moved = {op.result for op in phase.ops if isinstance(op, Share) and op.design != "duplicate"}
    private = [ref for ref in handed_over(schedule, phase) if ref not in moved]
    ahead, on_devices = prefetch(phase.ops), device_prefetch(phase.ops)
    loads = [op for op in phase.ops if isinstance(op, Read)]
    rows = max(max(op.batch) // schedule.size(op.split) for op in loads)
    batches = private_batches = ahead + on_devices + KEEP
    shared = slots(ahead, on_devices, by_caller=True) * sum(size[ref] for ref in moved)
    clocked = next((op for op in loads if op.clock is not None), None)
    if clocked is not None:
        # The host buffers records for all members; only the batches that a caller holds are private.
        buffered = -(-rates(clocked.batch, ahead).bound // max(clocked.batch))
        batches, private_batches = buffered + KEEP, KEEP
        shared = buffered * sum(size[ref] for ref in private)
    caches = [op.hints.cache for op in phase.ops if isinstance(op, Map) and op.hints.cache is not None]
    outputs_and_takes = {binding.value for binding in (*phase.outputs, *phase.takes) if binding.source_only}
    return InputMemory(
        phase.name, batches, batches * rows, shared, private_batches * sum(size[ref] for ref in private),
        on_devices * sum(size[ref] for ref in outputs_and_takes),
        sum(cache.nbytes for cache in caches), sum(cache.nbytes for cache in caches if cache.path),
    )  # fmt: skip


def handed_over(schedule: Schedule, phase: Phase) -> list[Ref]:
    """The values that the host produces for the device.

    These are outputs and arguments that depend on sources alone. If a device function computes one of them
    record by record, its inputs take the place of the result.
    """
    on_host: set[str] = set()
    for op in phase.ops:
        device = op.lane == "device"
        if op.runs_ahead(on_host) and not device:
            on_host.update(results(op))
    bound = (binding.value for binding in (*phase.outputs, *phase.takes) if binding.source_only)
    return DefUse(phase.ops).sources(bound, on_host)
