"""How fast a stream of batches may run where something else than its caller decides it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Pace:
    """The pace of batches that several consumers take apart, each at its own rate.

    epoch, step: the first batch. steps: batches of an epoch, whatever the loads would make of it: positions
    past the end of a source wrap. slots: batches that may be there at a time, made or in the making. room:
    how many batches, counted from the first one made, may have been begun by now.

    Such batches are not put together around records that were skipped: every row stays in its place, and
    `HostBatch.values` tells for each flow, under `making.validity`, which rows hold a record.
    """

    epoch: int
    step: int
    steps: int
    slots: int
    room: Callable[[], int]
