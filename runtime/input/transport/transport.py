"""The interface of carriers, which move rows between hosts: `JaxCarrier` and `MpiCarrier` implement it.

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

Bytes = npt.NDArray[np.uint8]  # of any shape


@dataclass(frozen=True)
class RowSlices:
    """The bytes of one array of a slot, and their division into parts.

    Attributes:
        cells: u8 [copies, rows, bytes of a row], C-contiguous in the slot.
        bounds: [parts + 1] row numbers. Part p has the rows bounds[p] to bounds[p + 1] - 1 of every copy.
    """

    cells: Bytes
    bounds: tuple[int, ...]


class RegroupedError(Exception):
    """Processes of other hosts died, and the plan continues without them.

    The caller fills the parts that are new on this host, and calls `carry` again for batch `number`.

    Attributes:
        number: the first batch that no host has completely.
        division: the makers of the parts of this batch and all later ones. A process may make several parts.
            The parts and their bounds have not changed.
    """

    def __init__(self, number: int, division: Division) -> None:
        super().__init__(number, division)
        self.number, self.division = number, division


class Carrier(Protocol):
    """Moves rows between hosts."""

    @property
    def division(self) -> Division:
        """The makers of parts, equal in all processes. May change in `carry` if processes have died."""
        ...

    @property
    def by_caller(self) -> bool:
        """Whether `carry` must be called from the thread that calls `next()`, for one batch per step."""
        ...

    def carry(
        self, number: int, row_slices: Sequence[RowSlices], before: Sequence[RowSlices] = (), count: int = 1,
        is_wanted: Callable[[], bool] = lambda: True,
    ) -> None:  # fmt: skip
        """Carry out `division.moves()` on the arrays of batch `number`. Waiting uses no CPU.

        Returns when this host has all parts and the memory may be read.

        Args:
            number: the number of the batch.
            row_slices: the arrays of its slot.
            before: the arrays of batch `number` - 1, which this host has completely, for hosts that lack it
                after a death; empty for the first batch.
            count: the number of the batch in errors (see `EpochCursor.count`).
            is_wanted: returns whether a process of this host waits for the batch. Only this time counts for
                the timeout: another host may be behind while no process waits for it.

        Raises:
            RegroupedError: if parts move to another host.
            CommplanError: for any other failure.
            ClosedError: after `stop` (`observe.wait_log`).
        """
        ...

    def stop(self) -> None:
        """Make a `carry` in progress, and later ones, raise ClosedError soon. Any thread may call this."""
        ...

    def close(self) -> None:
        """Stop, and free the resources. May be called twice."""
        ...
