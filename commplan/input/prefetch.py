"""How many batches there are at once: those that are made ahead, and those that a process shows or is
shown."""

from __future__ import annotations

from collections.abc import Iterable

from commplan.ir.schedule import Map, Op, Read

PREFETCH = 2  # batches ahead where a plan does not say
MOST_THREADS = 8  # of one process, where a plan does not say: more than that is a choice that it states
KEEP = 2  # batches that a process may show without a copy: the caller's, and the one that it asks for
CARRIED = 1  # one more under way between hosts, where the caller's thread carries it


def prefetch(ops: Iterable[Op]) -> int:
    """Batches that are in the making or wait for the caller, at most: the largest `prefetch` of loads and
    maps."""
    depths = (op.hints.prefetch for op in ops if isinstance(op, Read | Map))
    return max((number for number in depths if number and number > 0), default=PREFETCH)


def device_prefetch(ops: Iterable[Op]) -> int:
    """Batches whose copies to the devices are made or on their way before the caller asks for them, beside
    the one that it has: the largest `device_prefetch` of loads; none where no load says."""
    return max((op.hints.device_prefetch or 0 for op in ops if isinstance(op, Read)), default=0)


def threads(ops: Iterable[Op], cores: int) -> int:
    """Threads of a process that reads and maps records: the most `cores` of loads and maps; where none says,
    as many as the `cores` that it may run on, up to `MOST_THREADS`."""
    counts = (op.hints.cores for op in ops if isinstance(op, Read | Map))
    return max((number for number in counts if number), default=min(cores, MOST_THREADS))


def slots(ahead: int, on_devices: int, *, by_caller: bool = False) -> int:
    """Slots of the memory that the processes of a host share. ahead: `prefetch`. on_devices:
    `device_prefetch`: devices that use the memory of the host show these. by_caller: collectives between
    hosts go out from the caller's thread."""
    return ahead + on_devices + KEEP + (CARRIED if by_caller else 0)
