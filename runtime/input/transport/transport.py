"""Between hosts: what moves the rows that one host made to the others.

A carrier is asked for one batch after another, in order, by the process that leads its host, once every part
of that host is filled. It moves rows in place, in the memory of the slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from commplan.input.work_partition import Division

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class RowSlices:
    """One array of a slot. cells: u8 [copies, rows, bytes of a row], C-contiguous in the slot; part p of the
    division lies in rows bounds[p] to bounds[p + 1] of every copy."""

    cells: Bytes
    bounds: tuple[int, ...]


class RegroupedError(Exception):
    """Processes of other hosts died, and the plan goes on without them.

    number: the first batch that no host has whole. division: who makes which part of it and of all later ones
    (one process may make several); parts and their bounds stay. Once the parts that are new on this host are
    filled, batch `number` is carried again.
    """

    def __init__(self, number: int, division: Division) -> None:
        super().__init__(number, division)
        self.number, self.division = number, division


class Carrier(Protocol):
    """division: whose parts go where; the same in all processes."""

    @property
    def division(self) -> Division: ...

    @property
    def by_caller(self) -> bool:
        """Whether `carry` must be called from the thread that calls `next()`, one batch a step."""
        ...

    def carry(
        self, number: int, parcels: Sequence[RowSlices], before: Sequence[RowSlices] = (), count: int = 1
    ) -> None:
        """Carry out `division.moves()` on the parcels of batch `number`. Returns when this host has all parts
        and the memory may be read. Waiting costs no CPU. before: the parcels of batch `number` - 1, which
        this host has whole, for hosts that were left behind when one died; none for the first. count: what
        errors call the batch: see `EpochCursor.count`. Raises RegroupedError where parts change hands, and
        what went wrong otherwise, as a CommplanError."""
        ...

    def stop(self) -> None:
        """Make a `carry` under way raise `ring.ClosedError` soon. From any thread."""
        ...

    def close(self) -> None: ...
