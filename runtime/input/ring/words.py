"""Layout of a ring's memory: words of 8 bytes, each written as a whole.

    header | processes | cursors | slots | facts (JSON) | compiled plan (JSON) | data of the slots

A process writes its own words and those of its cursors; `Ring.reap` clears them after its death. The words
of slots, and `next`, are written by the process that holds the ring's lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MAGIC = int.from_bytes(b"cmpring1", "little")
PAGE = 4096
RECORD_NBYTES = 128  # of a process or a cursor, and a divisor of that of a slot: whole cache lines
FACTS_NBYTES, PLAN_NBYTES = 1 << 14, 1 << 16
MOST_SLOTS, MOST_PARTS, MOST_PLACES = 4096, 4096, 4096
ABSENT = 0
LIVES, LEAVES = 1, 2  # of a process: it may make units; it only completes what its threads have begun
LEFT, DIED = 3, 4  # of a process of a group, whose place no other process takes
HOLDS, ALONE = 1, 2  # of a cursor: units are kept for it; it reads by itself
# Of a part: 0 if it is free, the place + 1 of the process that makes it, and DONE more once it is made.
DONE = 1 << 32
RING_LOCK, PROCESS_LOCK = 0, 1  # the bytes of the file that are locked


def _indices(*names: str) -> dict[str, int]:
    return {name: index for index, name in enumerate(names)}


HEADER = _indices(
    "magic", "slots", "slot_nbytes", "parts", "processes", "cursors", "facts", "plan", "cores", "makers",
    "epoch", "unit", "next", "joined", "process_places", "cursor_places",
    # of a group: its processes here; whether cursors of processes that are gone stay; whether the last part
    # is moved between hosts; whether all have joined; a process that does something else; the first one
    "count", "keeps", "carried", "sealed", "refused", "first",
    "start",  # the first unit
    "most",  # parts in the making at a time if making waits; 0 if it is measured by no process
)  # fmt: skip
PROCESS = _indices(
    "state", "pid", "order", "makes", "idle", "parts", "records", "culprit", "spent_us", "waited_us",
)  # fmt: skip
CURSOR = _indices(
    "state", "position", "armed", "process", "wanted", "waits_since", "waited_ns", "records", "since",
    "batch", "alone", "idle_since",
)  # fmt: skip
SLOT = _indices("unit", "made", "spoiled", "parts")
BELLS = {"made": 1024, "changed": 1088}  # in the header, in bytes
CORES_AT, CORES_NBYTES = 1152, 64  # in the header: a bit for each core that a process may run on
WORK_BELL = RECORD_NBYTES - 8  # in the record of a process, in bytes
# Words that are read for every batch, by index: `Record.get` costs more than the rest of that.
NEXT, PROCESS_PLACES, CURSOR_PLACES = HEADER["next"], HEADER["process_places"], HEADER["cursor_places"]
ORDER, MAKES, IDLE = PROCESS["order"], PROCESS["makes"], PROCESS["idle"]
STATE, POSITION, OWNER = CURSOR["state"], CURSOR["position"], CURSOR["process"]  # `state` of a process, too
UNIT, MADE, SPOILED, PARTS = SLOT["unit"], SLOT["made"], SLOT["spoiled"], SLOT["parts"]

Words = memoryview  # of 64-bit words


class Shape(NamedTuple):
    """The sizes that a ring is created with.

    slots, slot_nbytes: units that it keeps, and bytes of each, a multiple of the page. parts: of a unit.
    processes, cursors: places for them.
    """

    slots: int
    slot_nbytes: int
    parts: int
    processes: int
    cursors: int

    @property
    def is_valid(self) -> bool:
        """Whether a ring may have these sizes: they are read from files that may be damaged."""
        limits = zip(self, (MOST_SLOTS, 1 << 48, MOST_PARTS, MOST_PLACES, MOST_PLACES), strict=True)
        return all(1 <= size <= most for size, most in limits) and self.slot_nbytes % PAGE == 0

    @property
    def slot_record_nbytes(self) -> int:
        return -(-8 * (len(SLOT) + self.parts) // RECORD_NBYTES) * RECORD_NBYTES

    @property
    def facts_at(self) -> int:
        """The first byte after the tables; behind those of the slots is the record that each begins with."""
        each = self.slot_record_nbytes
        return PAGE + (self.processes + self.cursors) * RECORD_NBYTES + (self.slots + 1) * each

    @property
    def data_at(self) -> int:
        """The first byte of slot 0."""
        return -(-(self.facts_at + FACTS_NBYTES + PLAN_NBYTES) // PAGE) * PAGE

    @property
    def nbytes(self) -> int:
        return self.data_at + self.slots * self.slot_nbytes


class Record:
    """Words by name. indices: of each name."""

    __slots__ = ("_indices", "words")

    def __init__(self, words: Words, indices: Mapping[str, int]) -> None:
        self.words, self._indices = words, indices

    def get(self, name: str) -> int:
        return self.words[self._indices[name]]

    def set(self, **values: int) -> None:
        """Write words one after another, in the order of the arguments."""
        for name, value in values.items():
            self.words[self._indices[name]] = value
