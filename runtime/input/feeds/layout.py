"""Where the words of a feed's memory lie.

    header | members | processes | slots' words | facts (JSON) | the compiled plan (JSON) | the slots

Words of 8 bytes, each written whole: a table of each kind, one after another.
"""

from __future__ import annotations

from collections.abc import Mapping

MEMBERS, PROCESSES, MOST_SLOTS, MOST_CORES = 64, 64, 64, 512
ABSENT, HOLDS, ALONE = 0, 1, 2  # of a member: units are kept for it; it reads for itself
MAGIC = int.from_bytes(b"cmpfeed4", "little")
EACH = 256  # bytes of a member's words
MEMBERS_AT, PROCESSES_AT = 4096, 4096 + MEMBERS * EACH
SLOTS_AT = PROCESSES_AT + PROCESSES * 64
FACTS_AT, FACTS_NBYTES = SLOTS_AT + MOST_SLOTS * 64, 1 << 14
COMPILED_AT, COMPILED_NBYTES = FACTS_AT + FACTS_NBYTES, 1 << 16
NBYTES = COMPILED_AT + COMPILED_NBYTES
BELLS = {"made": 1024, "taken": 1088, "seats": 1152}
# The bytes that are locked.
FEED, MEMBER_LOCK, PROCESS_LOCK, SEAT_LOCK = 0, 16, 16 + MEMBERS, 16 + MEMBERS + PROCESSES


def _places(*names: str) -> dict[str, int]:
    return {name: place for place, name in enumerate(names)}


HEADER = _places(
    "magic", "cores", "slots", "slot_nbytes", "next", "epoch", "unit", "readers", "facts", "compiled",
    "awaited", "places",
)  # fmt: skip
MEMBER = _places(
    "state", "position", "wanted", "records", "pid", "idle_since", "since", "waited_ns", "armed", "batch",
    "alone", "process", "waits_since",
)  # fmt: skip
PROCESS = _places("pid", "units", "records")
SLOT = _places("unit", "owner", "made", "spoiled")
# Where words lie that are read for every batch: `Record.get` would cost more than all else of that.
AWAITED, PLACES = HEADER["awaited"], HEADER["places"]
STATE, POSITION, MADE, SPOILED = MEMBER["state"], MEMBER["position"], SLOT["made"], SLOT["spoiled"]
WANTED, RECORDS, IDLE_SINCE, WAITED_NS, WAITS_SINCE, ARMED = (
    MEMBER[name] for name in ("wanted", "records", "idle_since", "waited_ns", "waits_since", "armed")
)

Words = memoryview  # of 64-bit words


class Record:
    """Some words by name. at: where each lies."""

    __slots__ = ("_at", "words")

    def __init__(self, words: Words, at: Mapping[str, int]) -> None:
        self.words, self._at = words, at

    def get(self, name: str) -> int:
        return self.words[self._at[name]]

    def set(self, name: str, value: int) -> None:
        self.words[self._at[name]] = value
