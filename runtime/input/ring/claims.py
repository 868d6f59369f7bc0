"""Claims of processes on parts of units, and the reasons why a unit is not made."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Claim(NamedTuple):
    """A part of a unit that this process makes."""

    unit: int
    part: int


class Blocker(NamedTuple):
    """The reason why a unit is not made yet.

    kind: a process holds the lock and does not run; a process makes a part of it; a cursor has not passed
    the unit in its slot; no process has begun it. pid: of that process, 0 for `none`. cursor: -1 for others.
    """

    kind: Literal["lock", "maker", "cursor", "none"]
    pid: int = 0
    cursor: int = -1
