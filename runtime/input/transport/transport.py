"""The interface of carriers, which move rows between hosts.

The process that leads its host calls the carrier for one batch after another, in order, once every part of
that host is filled. The carrier moves rows in place, in the memory of the slot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from commplan.input.work_partition import Division

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RowSlices:
    """One array of a slot.

    Attributes:
        cells: u8 [copies, rows, bytes of a row], C-contiguous in the slot.
        bounds: part p of the division has rows bounds[p] to bounds[p + 1] - 1 of every copy.
    """

    cells: Bytes
    bounds: tuple[int, ...]


class RegroupedError(Exception):
    """Processes of other hosts died, and the plan continues without them.

    Once the parts that are new on this host are filled, `carry` must be called again for batch `number`.

    Attributes:
        number: the first batch that no host has completely.
        division: the makers of its parts and those of all later batches (one process may make several parts);
            parts and their bounds do not change.
    """

    def __init__(self, number: int, division: Division) -> None:
        super().__init__(number, division)
        self.number, self.division = number, division


class Carrier(Protocol):
    """Moves rows between hosts. division: the makers of parts, equal in all processes."""

    @property
    def division(self) -> Division: ...

    @property
    def by_caller(self) -> bool:
        """Whether `carry` must be called from the thread that calls `next()`, for one batch per step."""
        ...

    def carry(
        self, number: int, parcels: Sequence[RowSlices], before: Sequence[RowSlices] = (), count: int = 1,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """Carry out `division.moves()` on the parcels of batch `number`. Waiting uses no CPU.

        Returns when this host has all parts and the memory may be read.

        Args:
            number: the batch.
            parcels: the arrays of its slot.
            before: the parcels of batch `number` - 1, which this host has completely, for hosts that lack it
                after a death; empty for the first batch.
            count: the number of the batch in errors (see `EpochCursor.count`).
            is_wanted: returns whether a process of this host waits for the batch. Only this time counts for
                the timeout: another host may be behind while no process waits for it.

        Raises:
            RegroupedError: if parts move to another host.
            CommplanError: for any other failure.
        """
        ...

    def stop(self) -> None:
        """Make a `carry` in progress raise `ring.ClosedError` soon. May be called from any thread."""
        ...

    def close(self) -> None: ...
