"""Claims of processes on parts of units, and the reasons why a unit is blocked."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Claim(NamedTuple):
    """Consecutive parts of a unit, claimed by this process.

    Attributes:
        unit: the unit.
        part: the first part.
        part_count: the number of parts.
    """

    unit: int
    part: int
    part_count: int = 1

    @property
    def parts(self) -> range:
        return range(self.part, self.part + self.part_count)


class Blocker(NamedTuple):
    """The reason why a unit is not made yet.

    Attributes:
        kind: "lock": a process that does not run holds the lock; "maker": a process is making a part;
            "cursor": a cursor has not passed the previous unit in the slot; "none": no process has begun.
        pid: the PID of that process; 0 for "none" and for a cursor without a process.
        cursor: the number of the cursor; -1 for other kinds.
    """

    kind: Literal["lock", "maker", "cursor", "none"]
    pid: int = 0
    cursor: int = -1
