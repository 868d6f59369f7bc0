"""The memory of a feed: who is there, how far each has come, and which unit lies in which slot.

What lies where is said in `layout`. A member's words are written by its process alone, but for `state`, which
whoever finds it dead clears; those of slots by who holds the feed's lock, `made` by who made the unit. Who
is alive is told by the kernel's record locks, a byte each. What is done under the feed's lock leaves the
words fit for use at every point of it, since its holder may die there.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import msgspec

from commplan import io
from commplan.diagnostics import fail
from commplan.runtime.input import this_process
from commplan.runtime.input.feeds import layout
from commplan.runtime.input.feeds.layout import AWAITED, HOLDS, MADE, PLACES, POSITION, STATE, Record
from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.shm import futex
from commplan.runtime.input.shm.locks import is_locked, lock_byte, lock_holder, unlock_byte
from commplan.runtime.input.shm.shm_control import LOOK_S, fence
from commplan.runtime.input.shm.slots import mapped, owner_of
from commplan.wait import Wait, until

IDLE_S = 60.0  # how long a member that has ended an epoch is waited for to begin the next
_LOCK_S = 30.0


class Facts(msgspec.Struct, frozen=True):
    """What all members must have alike. sources: length and key; functions: a digest of their source."""

    name: str
    plan: str
    digest: str
    phase: str
    unit: int
    sources: dict[str, tuple[int, str]]
    functions: dict[str, str]


@dataclass(eq=False)
class FeedMemory:
    """This process's side of the memory. key: of the file. own: the members of this process, with locks of
    theirs, about which the kernel would say nothing here."""

    descriptor: int
    key: tuple[int, int]
    facts: Facts
    own: set[int] = field(default_factory=set[int])
    process: int = -1
    stopped: bool = False

    def __post_init__(self) -> None:
        # Not by Python's `mmap`, which opens the file once more: closing that lets go of all locks.
        self._root = owner_of(mapped(layout.NBYTES, mmap.MAP_SHARED, self.descriptor, 0), layout.NBYTES)
        self._table = memoryview(self._root).cast("B").cast("Q")  # as quick to read as a list
        (self.header,) = self._records(0, 0, 1, layout.HEADER)
        self.members = self._records(layout.MEMBERS_AT, layout.EACH, layout.MEMBERS, layout.MEMBER)
        self.processes = self._records(layout.PROCESSES_AT, 64, layout.PROCESSES, layout.PROCESS)
        self.slot_words = self._records(layout.SLOTS_AT, 64, layout.MOST_SLOTS, layout.SLOT)
        self._bells = {name: ctypes.c_uint32.from_buffer(self._root, at) for name, at in layout.BELLS.items()}
        self._forked_from = this_process.pid
        self._lock, self._inside, self._closing = threading.RLock(), False, threading.Lock()
        self._seats: set[int] = set()

    def _records(self, offset: int, each: int, count: int, names: Mapping[str, int]) -> list[Record]:
        """offset, each: of the first one, and of each, in bytes."""
        starts = ((offset + number * each) // 8 for number in range(count))
        return [Record(self._table[start : start + len(names)], names) for start in starts]

    # --- making and finding ---

    def lay_out(
        self, *, cores: int, slots: int, slot_nbytes: int, epoch: int, readers: int, first: int
    ) -> None:
        """Of a new feed, whose first unit is number `first`."""
        data = msgspec.json.encode(self.facts)
        if len(data) > layout.FACTS_NBYTES:
            fail(
                "CP0928",
                f"the names and digests of the feed take {len(data)} bytes, {layout.FACTS_NBYTES} at most",
            )
        ctypes.memmove(ctypes.addressof(self._root) + layout.FACTS_AT, data, len(data))
        values = {
            "cores": min(cores, layout.MOST_CORES), "slots": slots, "slot_nbytes": slot_nbytes, "next": first,
            "epoch": epoch, "unit": self.facts.unit, "readers": readers, "facts": len(data),
            "magic": layout.MAGIC,
        }  # fmt: skip
        for name, value in values.items():
            self.header.set(name, value)

    def compiled(self) -> bytes | None:
        """What `keep_compiled` left there."""
        nbytes = min(self.header.get("compiled"), layout.COMPILED_NBYTES)
        return ctypes.string_at(ctypes.addressof(self._root) + layout.COMPILED_AT, nbytes) if nbytes else None

    def keep_compiled(self, data: bytes) -> None:
        """Leave the compiled plan for others (under the feed's lock); what is too long is left out."""
        if len(data) <= layout.COMPILED_NBYTES:
            ctypes.memmove(ctypes.addressof(self._root) + layout.COMPILED_AT, data, len(data))
            fence()
            self.header.set("compiled", len(data))

    @classmethod
    def opened(cls, path: str, key: tuple[int, int]) -> FeedMemory | None:
        """The feed in the file at `path`; None where it is none, or nobody is left in it."""
        try:
            descriptor = io.open_file(path, os.O_RDWR)
        except OSError:
            return None
        try:
            status = os.fstat(descriptor)
            words: dict[str, int] = {}
            if status.st_size >= layout.NBYTES:  # what lies behind a file's end cannot be touched
                head = os.pread(descriptor, 8 * len(layout.HEADER), 0)
                words = dict(zip(layout.HEADER, memoryview(head).cast("Q"), strict=True))
            alive = any(
                is_locked(descriptor, layout.MEMBER_LOCK + member) for member in range(layout.MEMBERS)
            )
            if (status.st_dev, status.st_ino) == key and words.get("magic") == layout.MAGIC and alive:
                facts = os.pread(descriptor, min(words["facts"], layout.FACTS_NBYTES), layout.FACTS_AT)
                with contextlib.suppress(ValueError):  # another version's
                    memory = cls(descriptor, key, io.decode_json(facts, Facts))
                    descriptor = -1
                    return memory
        finally:
            if descriptor >= 0:
                os.close(descriptor)
        return None

    def close(self) -> None:
        """Let go of all locks. The memory goes with the last array that shows it."""
        with self._closing:
            descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    # --- locks ---

    @contextlib.contextmanager
    def locked(self) -> Generator[None]:
        """Nobody else claims a unit, comes or goes while this runs. Errors: CP0921 where a process holds
        the lock for too long: it is stopped."""

        def late(waited: float) -> NoReturn:
            fail(
                "CP0921",
                f"process {self.lock_holder()} holds feed {self.facts.name!r} for {waited:.0f} s",
                "is it stopped?",
            )

        def attempt(seconds: float) -> bool:
            if self.descriptor < 0 or self.stopped:  # who leaves waits for no stopped process
                raise ClosedError
            return lock_byte(self.descriptor, layout.FEED) or bool(time.sleep(min(seconds, 0.0005)))

        with self._lock:
            if self._inside:  # the kernel counts nothing: the first one to let go lets go for all
                yield
                return
            _ = until(attempt, Wait(_LOCK_S, late))
            self._inside = True
            try:
                yield
            finally:
                self._inside = False
                if self.descriptor >= 0:
                    unlock_byte(self.descriptor, layout.FEED)

    def lock_holder(self) -> int:
        """The other process that holds the feed's lock now; 0 where none does."""
        return lock_holder(self.descriptor, layout.FEED) if self.descriptor >= 0 else 0

    def lock_process(self) -> None:
        """Take a place among the processes (under the feed's lock). Raises CP0928 where there is none
        left."""
        for place in range(layout.PROCESSES):
            if lock_byte(self.descriptor, layout.PROCESS_LOCK + place):
                self.process = place
                for words in self.slot_words:  # what one that died in this place began is to be made anew
                    if words.get("owner") == place + 1:
                        words.set("owner", 0)
                self.processes[place].set("units", 0)
                self.processes[place].set("records", 0)
                self.processes[place].set("pid", os.getpid())
                return
        fail("CP0928", f"feed {self.facts.name!r} has {layout.PROCESSES} processes already")

    def lock_member(self, member: int) -> bool:
        """Become `member`; False where that is there already."""
        if member in self.own or not lock_byte(self.descriptor, layout.MEMBER_LOCK + member):
            return False
        if member >= self.header.words[PLACES]:
            self.header.words[PLACES] = member + 1
        self.own.add(member)
        return True

    def unlock_member(self, member: int) -> None:
        if member in self.own and self.descriptor >= 0:
            unlock_byte(self.descriptor, layout.MEMBER_LOCK + member)
        self.own.discard(member)

    def lives(self, member: int) -> bool:
        return member in self.own or (
            self.descriptor >= 0 and is_locked(self.descriptor, layout.MEMBER_LOCK + member)
        )

    def process_lives(self, place: int) -> bool:
        return place == self.process or (
            self.descriptor >= 0 and is_locked(self.descriptor, layout.PROCESS_LOCK + place)
        )

    # --- seats: as many as cores, held by threads that make units ---

    def take_seat(self) -> int | None:
        """Become one of those that make units; None where that is for others."""
        with self._lock:
            if self.descriptor < 0 or self.stopped or len(self._seats) >= self._fair():
                return None
            if not self._seats and self._readers() >= self.header.get("readers"):
                return None
            for seat in range(self.header.get("cores")):
                if seat not in self._seats and lock_byte(self.descriptor, layout.SEAT_LOCK + seat):
                    self._seats.add(seat)
                    return seat
        return None

    def _readers(self) -> int:
        """Other processes that make units."""
        cores = range(self.header.get("cores"))
        return len(
            {
                lock_holder(self.descriptor, layout.SEAT_LOCK + seat)
                for seat in cores
                if seat not in self._seats
            }
            - {0}
        )

    def is_seat_fair(self) -> bool:
        """Whether this process has no more seats than others could have."""
        return len(self._seats) <= self._fair()

    def _fair(self) -> int:
        processes = len({self.members[m].get("process") for m in self.present()})
        return -(-self.header.get("cores") // max(1, min(processes, self.header.get("readers"))))

    def leave_seat(self, seat: int) -> None:
        with self._lock:
            if seat not in self._seats:
                return
            self._seats.discard(seat)
            if self.descriptor >= 0:
                unlock_byte(self.descriptor, layout.SEAT_LOCK + seat)
        self.ring("seats")

    def leave_seats(self) -> None:
        """Others make units, while a thread of this process may still be in its last one."""
        for seat in list(self._seats):
            self.leave_seat(seat)

    # --- who is there ---

    def present(self) -> list[int]:
        """Members that have not left; some may be dead."""
        return [member for member, words in enumerate(self.places()) if words.get("state")]

    def holding(self) -> list[int]:
        """Members that units are kept for."""
        return [member for member, words in enumerate(self.places()) if words.words[STATE] == HOLDS]

    def places(self) -> list[Record]:
        """Of members, up to the last one that anybody has had."""
        return self.members[: self.header.words[PLACES]]

    def reap(self) -> bool:
        """Clear the words of members that are dead; whether there were any."""
        dead = [member for member in self.present() if not self.lives(member)]
        if not dead:
            return False
        with self.locked():
            for member in dead:
                if not self.lives(member):
                    self.members[member].set("state", layout.ABSENT)
        self.ring("taken", "made", "seats")
        return True

    # --- units ---

    @functools.cached_property
    def slots(self) -> int:
        return self.header.get("slots")

    def least(self) -> int | None:
        """The first unit that is kept for a member; None where there is no member that holds any."""
        held = (words.words for words in self.places())
        return min([words[POSITION] for words in held if words[STATE] == HOLDS], default=None)

    def maker_of(self, unit: int) -> int | None:
        """The pid of the process that makes `unit`; None where nobody does, or who did has died."""
        words = self.slot_words[unit % self.slots]
        while True:
            owner = words.get("owner") - 1
            if owner < 0 or words.get("unit") != unit + 1 or not self.process_lives(owner):
                return None
            pid = self.processes[owner].get("pid")
            fence()
            if words.get("owner") == owner + 1:  # else its place was taken by another meanwhile
                return pid

    def claim(self) -> int | None:
        """The next unit to make, which is now this process's; None where there is none, for now."""
        with self.locked():
            least = self.least()
            if least is None:
                return None
            slots, first = self.slots, self.header.get("next")
            for unit in range(max(least, first - slots), first):
                words = self.slot_words[unit % slots]
                lacks = words.get("unit") == unit + 1 and words.get("made") != unit + 1
                if lacks and not self._is_being_made(words):
                    words.set("owner", self.process + 1)
                    return unit
            unit = max(first, least)
            armed = max((words.get("armed") for words in self.places() if words.get("state")), default=0)
            if unit >= least + slots or unit >= armed * self.header.get("epoch"):
                return None
            words = self.slot_words[unit % slots]
            if self._is_being_made(words):  # for members that have left: that thread still writes there
                return None
            words.set("made", 0)
            words.set("owner", self.process + 1)
            words.set("unit", unit + 1)
            self.header.set("next", unit + 1)
            return unit

    def _is_being_made(self, words: Record) -> bool:
        owner = words.get("owner") - 1
        return words.get("made") != words.get("unit") and owner >= 0 and self.process_lives(owner)

    def made(self, unit: int, records: int, *, spoiled: bool) -> None:
        """Unit `unit` lies in its slot. spoiled: its making failed, or records in it were skipped."""
        own, slot = self.processes[self.process], self.slot_words[unit % self.slots]
        slot.set("spoiled", int(spoiled))
        own = self.processes[self.process]
        own.set("units", own.get("units") + 1)
        own.set("records", own.get("records") + records)
        fence()
        slot.set("made", unit + 1)
        self.ring("made")

    def is_made(self, unit: int) -> bool:
        return self.slot_words[unit % self.slots].words[MADE] == unit + 1

    def is_kept(self, unit: int) -> bool:
        """Whether a member that begins to hold `unit` now will find it (under the feed's lock)."""
        first = self.header.get("next")
        if unit >= first:
            return True
        kept = range(unit, first)
        return len(kept) <= self.slots and all(
            self.slot_words[u % self.slots].get("unit") == u + 1 for u in kept
        )

    def pass_on(self, member: int, upto: int) -> None:
        """`member` has let go of units before `upto`."""
        if this_process.pid != self._forked_from:  # what a forked one drops is still shown there
            return
        words = self.members[member].words
        before = words[POSITION]
        fence()
        words[POSITION] = upto
        fence()  # of it and who says that room is awaited, one at least sees the other
        if not self.header.words[AWAITED]:
            return
        for other in self.places():
            words = other.words
            if words[POSITION] <= before and words[STATE] == HOLDS:
                return
        self.header.words[AWAITED] = 0
        self.ring("taken")

    # --- waiting ---

    def claim_or_wait(self) -> int | None:
        """The next unit to make, else None, after a while in which there was none."""
        seen = self.seen("taken")
        unit = self.claim()
        if unit is not None:
            return unit
        self.header.set("awaited", 1)
        fence()
        unit = self.claim()  # what was let go of before, nobody will tell
        if unit is None:
            self.sleep("taken", seen)
        return unit

    def await_made(self, unit: int, seconds: float) -> bool:
        """Whether `unit` is made, after one sleep of so many seconds at most where it is not yet."""
        bell, words = self._bells["made"], self.slot_words[unit % self.slots].words
        seen = bell.value
        fence()
        if words[MADE] != unit + 1:
            futex.wait(bell, seen, seconds)
        is_made = words[MADE] == unit + 1
        fence()  # what lies in the slot is read behind this
        return is_made

    def ring(self, *names: str) -> None:
        """Wake all who wait for one of `names`."""
        for name in names:
            bell = self._bells[name]
            bell.value = (bell.value + 1) & 0xFFFFFFFF
            futex.wake(bell)

    def seen(self, name: str) -> int:
        return self._bells[name].value

    def sleep(self, name: str, seen: int, seconds: float = LOOK_S) -> None:
        """Until `name` has been rung since `seen`, or for so long."""
        futex.wait(self._bells[name], seen, seconds)

    def wait(self, name: str, enough: Callable[[], bool], wait: Wait) -> None:
        """Until `enough`. Raises ClosedError once stopped."""

        def attempt(seconds: float) -> bool:
            if self.stopped:
                raise ClosedError
            seen = self.seen(name)
            fence()
            if enough():
                fence()
                return True
            if seconds:
                self.sleep(name, seen, seconds)
            return False

        if not attempt(0.0):
            _ = until(attempt, wait)
