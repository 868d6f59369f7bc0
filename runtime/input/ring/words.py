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

MAGIC = int.from_bytes(b"cmpring1", "little")  # the first word of a ring that is laid out
PAGE = 4096  # bytes
RECORD_NBYTES = 128  # size of the record of a process or cursor: whole cache lines; divides that of a slot
FACTS_NBYTES = 1 << 14  # space for the facts
PLAN_NBYTES = 1 << 16  # space for the compiled plan

# The largest sizes of a valid `Shape`.
MOST_SLOTS = 4096
MOST_PARTS = 4096
MOST_PLACES = 4096
_MOST_SLOT_NBYTES = 1 << 48

# States of a process or a cursor. 0 is a place that is free or not used yet.
ABSENT = 0
LIVES = 1  # a process: may make units
LEAVES = 2  # a process: ends its threads and makes no more units
LEFT = 3  # a process of a group that has left; its place is not reused
DIED = 4  # a process of a group that has died; its place is not reused
HOLDS = 1  # a cursor: units are kept for it
PRIVATE = 2  # a cursor: no units are kept for it; its member makes its units itself

# The word of a part: 0 if it is free; place + 1 of its maker, plus JOINED if it was claimed together with the
# part before it; DONE + place + 1 when the part is made.
JOINED = 1 << 31
DONE = 1 << 32

# The locked bytes of the file.
RING_LOCK = 0
PROCESS_LOCK = 1  # of place 0; the bytes of other places follow


def _indices(*names: str) -> dict[str, int]:
    return {name: index for index, name in enumerate(names)}


HEADER = _indices(
    "magic",
    "slots", "slot_nbytes", "parts", "processes", "cursors",  # see `Shape`
    "facts",  # bytes of the facts
    "plan",  # bytes of the compiled plan; 0 without one
    "cores",  # the most parts in progress if making is not blocked by I/O
    "makers",  # the most processes that make units at a time
    "epoch",  # units of an epoch
    "unit",  # records of a unit in its first load
    "next",  # the next unit to be opened
    "joined",  # the `order` of the process that joined last
    "process_places", "cursor_places",  # places after the last one that has been used
    # Words of a group.
    "count",  # its processes on this host; see `Ring`
    "ends_with_one",  # 1 if it ends when a process dies or leaves early; then cursors of dead processes stay
    "carried",  # 1 if units are moved between hosts
    "sealed",  # 1 if all processes have joined
    "refused",  # a process that was refused, plus 1; in the upper 32 bits, a bit for each fact that differs
    "first",  # the index in the group of the process that created the ring
    "start",  # the first unit
    "most",  # most parts in progress if making is blocked by I/O; 0 if this is not measured
)  # fmt: skip
PROCESS = _indices(
    "state",  # ABSENT, LIVES, LEAVES, LEFT or DIED
    "pid",
    "order",  # its rank among the makers
    "makes",  # 0 if no parts are dealt to it; see `Ring.excuse`
    "idle",  # 1 if one of its threads waits for `Ring.call_maker`
    "parts", "records",  # the parts and records that it has made
    "culprit",  # place + 1 of the process that made it give up; 0 if there is none; see `GroupExchange`
    "spent_us", "waited_us",  # microseconds that making parts ran and was blocked
)  # fmt: skip
CURSOR = _indices(
    "state",  # ABSENT, HOLDS or PRIVATE
    "position",  # the first unit that it has not released
    "armed",  # it has requested all units before this one
    "process",  # place + 1 of its process; 0 without a process
    "wanted",  # the unit that it waits for, plus 1; 0 if it does not wait
    "waits_since",  # the start of its latest wait in nanoseconds, as `time.monotonic_ns`
    "waited_ns",  # the duration of all earlier waits in nanoseconds
    "records",  # the records that its member has received
    "since",  # the time of its joining, as `time.monotonic_ns`
    "batch",  # records of a batch of its member
    "private",  # units that its member has made itself
    "idle_since",  # the end of its latest epoch, as `time.monotonic_ns`; 0 during an epoch
)  # fmt: skip
SLOT = _indices(
    "unit",  # the opened unit, plus 1; 0 if there is none
    "made",  # equal to `unit` if the unit is complete, else 0
    "spoiled",  # 1 if making a part failed or skipped records
    "parts",  # the first of the words of parts
)  # fmt: skip
BELLS = {"made": 1024, "changed": 1088}  # byte offsets in the header
CORES_AT = 1152  # byte offset in the header of a bit set: the cores that processes may run on
CORES_NBYTES = 64  # size of the bit set
WORK_BELL = RECORD_NBYTES - 8  # byte offset in the record of a process

# Indices of the words that are read for every batch, because `Record.get` is too slow for them.
NEXT = HEADER["next"]
PROCESS_PLACES = HEADER["process_places"]
CURSOR_PLACES = HEADER["cursor_places"]
ORDER = PROCESS["order"]
MAKES = PROCESS["makes"]
IDLE = PROCESS["idle"]
PARTS_MADE = PROCESS["parts"]
RECORDS_MADE = PROCESS["records"]
STATE = CURSOR["state"]  # also the index in `PROCESS`
POSITION = CURSOR["position"]
OWNER = CURSOR["process"]
UNIT = SLOT["unit"]
MADE = SLOT["made"]
SPOILED = SLOT["spoiled"]
PARTS = SLOT["parts"]

Words = memoryview  # of 64-bit unsigned integers


class Shape(NamedTuple):
    """The sizes of a ring, fixed when it is created.

    Attributes:
        slots: the number of units that the ring keeps.
        slot_nbytes: the size of a slot in bytes, a multiple of `PAGE`.
        parts: the number of words for the parts of a unit: one per part, and one for the transfer of the unit
            if units are moved between hosts.
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
        limits = zip(self, (MOST_SLOTS, _MOST_SLOT_NBYTES, MOST_PARTS, MOST_PLACES, MOST_PLACES), strict=True)
        return all(1 <= size <= most for size, most in limits) and self.slot_nbytes % PAGE == 0

    @property
    def slot_record_nbytes(self) -> int:
        """The size of the record of a slot in bytes, a multiple of `RECORD_NBYTES`."""
        return -(-8 * (len(SLOT) + self.parts) // RECORD_NBYTES) * RECORD_NBYTES

    @property
    def facts_at(self) -> int:
        """The offset of the facts, which follow the records of slots.

        There is one more of these records than slots: the last one is the initial state of a slot.
        """
        slots_nbytes = (self.slots + 1) * self.slot_record_nbytes
        return PAGE + (self.processes + self.cursors) * RECORD_NBYTES + slots_nbytes

    @property
    def data_at(self) -> int:
        """The offset of the data of slot 0, a multiple of `PAGE`."""
        return -(-(self.facts_at + FACTS_NBYTES + PLAN_NBYTES) // PAGE) * PAGE

    @property
    def nbytes(self) -> int:
        """The size of the memory, including the data of the slots."""
        return self.data_at + self.slots * self.slot_nbytes


class Record:
    """The words of the header, a process, a cursor or a slot, by name.

    Args:
        words: the words.
        indices: the index of each name, such as `CURSOR`.
    """

    __slots__ = ("_indices", "words")

    def __init__(self, words: Words, indices: Mapping[str, int]) -> None:
        self.words, self._indices = words, indices

    def get(self, name: str) -> int:
        """The word `name`."""
        return self.words[self._indices[name]]

    def set(self, **values: int) -> None:
        """Write words one by one, in the order of the arguments."""
        for name, value in values.items():
            self.words[self._indices[name]] = value
