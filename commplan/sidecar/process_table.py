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
    """The records of a job's processes on this host. A process has a record for each group of processes.

    Attributes:
        who: The noun for a rank in messages: `process` if whole steps are recorded.
        reading_s: The duration of the last reading of all records.
    """

    def __init__(self, who: str) -> None:
        super().__init__()
        self.who, self.reading_s = who, 0.0
        self._recent_at, self._recent = -1.0, dict[int, RankState]()

    @property
    def ranks(self) -> set[int]:
        """All ranks of the job."""
        return {rank for each in self for rank in each.group}

    @property
    def lowest(self) -> int:
        return min(each.rank for each in self)

    def track(
        self, path: Path, process: AttendedProcess, members: tuple[int, ...] = (), descriptor: int = -1
    ) -> None:
        """Add a record. Those that cannot be read are skipped."""
        with contextlib.suppress(CommplanError, OSError, struct.error):
            self.append(OpenRecord(path, process, members, descriptor))

    def close(self, path: Path | None = None) -> None:
        """Remove the record at `path`, or all."""
        for each in [each for each in self if path in (None, each.path)]:
            self.remove(each)
            os.close(each.descriptor)

    def refresh(self) -> None:
        """Read the live blocks, except those of records that a user has damaged."""
        for each in self:
            with contextlib.suppress(OSError, struct.error):
                each.live = live.read_live(each.descriptor)

    def read(self, now: float) -> tuple[dict[OpenRecord, Record], dict[int, RankState]]:
        """The records and the states of the ranks on this host."""
        began, records = time.monotonic(), dict[OpenRecord, Record]()
        for each in self:
            with contextlib.suppress(CommplanError, OSError):
                records[each] = each.record()
        states = states_here(records, self.who, now)
        self.reading_s = time.monotonic() - began
        return records, states

    def recent_states(self, now: float) -> tuple[RankState, ...]:
        """The states of the ranks on this host, at most `_RECENT_S` old: all hosts query them at once."""
        if now > self._recent_at + _RECENT_S:
            self.refresh()
            _, self._recent = self.read(now)
            self._recent_at = time.monotonic()
        return tuple(self._recent.values())
