"""The number of batches in memory: prefetched batches, and batches that processes use without a copy."""

from __future__ import annotations

from collections.abc import Iterable

from commplan.ir.schedule import Map, Op, Read

PREFETCH = 2  # the default number of prefetched batches
MOST_THREADS = 8  # the maximum number of threads per process, unless the plan sets `cores`
KEEP = 2  # batches that a process may use without a copy: the caller's current and next one
CARRIED = 1  # batches in transfer between hosts, if transfers run in the caller's thread


def prefetch(ops: Iterable[Op]) -> int:
    """The maximum number of batches that are being made or wait for the caller.

    This is the largest `prefetch` hint of the loads and maps among `ops`, or `PREFETCH` without a positive
    one.
    """
    depths = (op.hints.prefetch for op in ops if isinstance(op, Read | Map))
    return max((number for number in depths if number and number > 0), default=PREFETCH)


def device_prefetch(ops: Iterable[Op]) -> int:
    """The maximum number of batches that are copied to devices before the caller requests them.

    This is the largest `device_prefetch` hint of the loads among `ops`, or 0 without one.
    """
    return max((op.hints.device_prefetch or 0 for op in ops if isinstance(op, Read)), default=0)


def threads(ops: Iterable[Op], cores: int) -> int:
    """The number of threads of a process that reads and maps records.

    Args:
        ops: The ops. The largest `cores` hint of the loads and maps among them is the result.
        cores: The number of CPUs of the process. Without a hint, the result is this number, but at most
            `MOST_THREADS`.
    """
    counts = (op.hints.cores for op in ops if isinstance(op, Read | Map))
    return max((number for number in counts if number), default=min(cores, MOST_THREADS))


def slots(ahead: int, on_devices: int, *, by_caller: bool = False) -> int:
    """The number of slots in the memory that processes of a host share.

    Args:
        ahead: The number of prefetched batches (see `prefetch`).
        on_devices: The number of batches on devices that use the memory of the host (see `device_prefetch`).
        by_caller: Whether collectives between hosts run in the caller's thread.
    """
    return ahead + on_devices + KEEP + (CARRIED if by_caller else 0)
