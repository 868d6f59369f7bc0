"""Layout of a ring's memory: words of 8 bytes, each written as a whole.

    header | processes | cursors | slots | facts (JSON) | compiled plan (JSON) | data of the slots

A process writes its own words and those of its cursors; `Ring.reap` clears them after its death. Others only
clear `makes` (`Ring.excuse`) and `idle` (when they wake one of its threads); the process sets both again. The
process that holds the ring's lock writes the words of slots and `next`. A process that leaves frees its own
claims without the lock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

MAGIC = int.from_bytes(b"cmpring1", "little")
PAGE = 4096
RECORD_NBYTES = 128  # size of the record of a process or cursor: whole cache lines; divides that of a slot
FACTS_NBYTES, PLAN_NBYTES = 1 << 14, 1 << 16
MOST_SLOTS, MOST_PARTS, MOST_PLACES = 4096, 4096, 4096
ABSENT = 0
LIVES, LEAVES = 1, 2  # states of a process: may make units; ends its threads and makes no more units
LEFT, DIED = 3, 4  # states of a process of a group; its place is not reused
HOLDS, PRIVATE = 1, 2  # states of a cursor: units are kept for it; its member makes its units itself
# The word of a part: 0 if it is free; place + 1 of its maker, plus JOINED if it was claimed together with the
# part before it; DONE + place + 1 when the part is made.
JOINED, DONE = 1 << 31, 1 << 32
RING_LOCK, PROCESS_LOCK = 0, 1  # the locked bytes of the file


def _indices(*names: str) -> dict[str, int]:
    return {name: index for index, name in enumerate(names)}


HEADER = _indices(
    "magic", "slots", "slot_nbytes", "parts", "processes", "cursors", "facts", "plan", "cores", "makers",
    "epoch", "unit", "next", "joined", "process_places", "cursor_places",
    # Words of a group, in order: the number of its processes on this host; whether it ends if a process dies
    # or leaves early, so that cursors of dead processes stay; whether units are moved between hosts; whether
    # all processes have joined; the facts that differ and the process that was refused; the first process.
    "count", "ends_with_one", "carried", "sealed", "refused", "first",
    "start",  # the first unit
    "most",  # most parts in progress if making is blocked by I/O; 0 if this is not measured
)  # fmt: skip
PROCESS = _indices(
    "state", "pid", "order", "makes", "idle", "parts", "records", "culprit", "spent_us", "waited_us",
)  # fmt: skip
CURSOR = _indices(
    "state", "position", "armed", "process", "wanted", "waits_since", "waited_ns", "records", "since",
    "batch", "private", "idle_since",
)  # fmt: skip
SLOT = _indices("unit", "made", "spoiled", "parts")
BELLS = {"made": 1024, "changed": 1088}  # byte offsets in the header
CORES_AT, CORES_NBYTES = 1152, 64  # a bit set in the header: the cores that processes may run on
WORK_BELL = RECORD_NBYTES - 8  # byte offset in the record of a process
# Indices of the words that are read for every batch, because `Record.get` is too slow for them.
NEXT, PROCESS_PLACES, CURSOR_PLACES = HEADER["next"], HEADER["process_places"], HEADER["cursor_places"]
ORDER, MAKES, IDLE = PROCESS["order"], PROCESS["makes"], PROCESS["idle"]
PARTS_MADE, RECORDS_MADE = PROCESS["parts"], PROCESS["records"]
# The record of a process also starts with `state`.
STATE, POSITION, OWNER = CURSOR["state"], CURSOR["position"], CURSOR["process"]
UNIT, MADE, SPOILED, PARTS = SLOT["unit"], SLOT["made"], SLOT["spoiled"], SLOT["parts"]

Words = memoryview  # of 64-bit unsigned integers


class Shape(NamedTuple):
    """The sizes of a ring, fixed when it is created.

    Attributes:
        slots: the number of units that the ring keeps.
        slot_nbytes: the size of a slot, a multiple of the page size.
        parts: the number of parts of a unit.
        processes: the number of places for processes.
        cursors: the number of places for cursors.
    """

    slots: int
    slot_nbytes: int
    parts: int
    processes: int
    cursors: int

    @property
    def is_valid(self) -> bool:
        """Whether these sizes are allowed. They may come from a damaged file."""
        limits = zip(self, (MOST_SLOTS, 1 << 48, MOST_PARTS, MOST_PLACES, MOST_PLACES), strict=True)
        return all(1 <= size <= most for size, most in limits) and self.slot_nbytes % PAGE == 0

    @property
    def slot_record_nbytes(self) -> int:
        return -(-8 * (len(SLOT) + self.parts) // RECORD_NBYTES) * RECORD_NBYTES

    @property
    def facts_at(self) -> int:
        """The first byte after the tables. The extra slot record is the initial state of all slots."""
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
    """Access to words by name.

    Args:
        words: the words.
        indices: the index of each name.
    """

    __slots__ = ("_indices", "words")

    def __init__(self, words: Words, indices: Mapping[str, int]) -> None:
        self.words, self._indices = words, indices

    def get(self, name: str) -> int:
        return self.words[self._indices[name]]

    def set(self, **values: int) -> None:
        """Write words one by one, in the order of the arguments."""
        for name, value in values.items():
            self.words[self._indices[name]] = value
