"""The processes of a job on this host, and their records."""

from __future__ import annotations

import contextlib
import os
import struct
import time
from pathlib import Path

from commplan.diagnostics import CommplanError
from commplan.recorder import live
from commplan.recorder.file import Record
from commplan.recorder.rank_state import RankState
from commplan.sidecar.process import AttendedProcess
from commplan.sidecar.states import OpenRecord, states_here

_RECENT_S = 0.25  # maximum age of states for other hosts; shorter than the time between two evaluations


class ProcessTable(list[OpenRecord]):
    """The records of a job's processes on this host.

    A process has a record for each lane, and for each group of processes with which it runs whole steps.

    Attributes:
        noun: The noun for a rank in messages: `process` if whole steps are recorded, else `rank`.
        reading_s: The duration of the last `read` in seconds; 0 before.
    """

    def __init__(self, noun: str) -> None:
        super().__init__()
        self.noun, self.reading_s = noun, 0.0
        # The result of `recent_states`, and when it was read.
        self._recent, self._recent_at = dict[int, RankState](), -1.0

    @property
    def ranks(self) -> set[int]:
        """All ranks of the job, on any host, as far as the records show them."""
        return {rank for each in self for rank in each.group}

    @property
    def lowest(self) -> int:
        """The lowest rank on this host. The table must not be empty."""
        return min(each.rank for each in self)

    def track(
        self, path: Path, process: AttendedProcess, members: tuple[int, ...] = (), descriptor: int = -1
    ) -> None:
        """Add a record, unless it cannot be read. For the arguments, see `OpenRecord`."""
        with contextlib.suppress(CommplanError, OSError, struct.error):
            self.append(OpenRecord(path, process, members, descriptor))

    def close(self, path: Path | None = None) -> None:
        """Close and remove the record at `path`; all records if it is None."""
        for each in [each for each in self if path in (None, each.path)]:
            self.remove(each)
            os.close(each.descriptor)

    def refresh(self) -> None:
        """Read the live block of each record. A damaged one keeps its last block."""
        for each in self:
            with contextlib.suppress(OSError, struct.error):
                each.live = live.read_live(each.descriptor)

    def read(self, now: float) -> tuple[dict[OpenRecord, Record], dict[int, RankState]]:
        """Read the records.

        Args:
            now: The `time.monotonic` at which the ages of operations are taken.

        Returns:
            The records without damaged ones, and by rank the states of the ranks on this host.
        """
        began, records = time.monotonic(), dict[OpenRecord, Record]()
        for each in self:
            with contextlib.suppress(CommplanError, OSError):
                records[each] = each.record()
        states = states_here(records, self.noun, now)
        self.reading_s = time.monotonic() - began
        return records, states

    def recent_states(self, now: float) -> tuple[RankState, ...]:
        """The states of the ranks on this host, at most `_RECENT_S` old, for queries of other hosts.

        All hosts may query them at once. `now` is on `time.monotonic`.
        """
        if now > self._recent_at + _RECENT_S:
            self.refresh()
            _, self._recent = self.read(now)
            self._recent_at = time.monotonic()
        return tuple(self._recent.values())
