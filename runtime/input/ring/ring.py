"""Units of shared input: which process makes which part, which cursors they are kept for, and who died.

A unit is made in `parts`, each of which one process claims, fills in the unit's slot, and marks as done. A
unit is opened while its slot is free: every cursor has passed the unit that was there before. Bells wake the
producers of one process for each part that becomes free, and the cursors for each unit that is made.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from commplan.diagnostics import fail
from commplan.runtime.input import this_process
from commplan.runtime.input.ring.memory import SharedMemory
from commplan.runtime.input.ring.memory import ring as ring_bell
from commplan.runtime.input.ring.words import (
    ABSENT,
    CURSOR_PLACES,
    DONE,
    HOLDS,
    IDLE,
    LEAVES,
    LIVES,
    MADE,
    MAKES,
    NEXT,
    ORDER,
    OWNER,
    PARTS,
    POSITION,
    PROCESS_PLACES,
    SPOILED,
    STATE,
    UNIT,
    Record,
    Words,
)
from commplan.runtime.input.shm.shm_control import fence


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


class Ring:
    """One process's access to a ring. place: its own among the processes; -1 if it only looks at it."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory, self.place = memory, -1
        self.header, self.processes, self.cursors = memory.header, memory.processes, memory.cursors
        self.slots, self.parts = memory.shape.slots, memory.shape.parts
        self._slots = [record.words for record in memory.slots]
        self._process = this_process.pid
        self._part_words = range(PARTS, PARTS + self.parts)

    # --- processes ---

    def join(self) -> None:
        """Take a place among the processes. The caller holds the lock.

        Raises:
            CommplanError: CP0928 if no place is free.
        """
        memory = self.memory
        self.reap()
        for place, record in enumerate(self.processes):
            if record.words[STATE] == ABSENT and memory.lock_place(place):
                self._free(place)  # of a process that died while it joined here
                order, places = self.header.get("joined") + 1, self.header.get("process_places")
                self.header.set(joined=order, process_places=max(places, place + 1))
                record.set(pid=this_process.pid, order=order, makes=1, idle=0, parts=0, records=0)
                record.set(state=LIVES)
                self.place = place
                self._call_all()
                return
        fail("CP0928", f"{memory.title} has {len(self.processes)} processes already")

    def retire(self) -> None:
        """From now on this process makes no more units; its threads may still be busy with the last ones."""
        self.memory.is_stopped = True
        if self.place >= 0:
            self.processes[self.place].set(state=LEAVES, idle=0)
        self._call_all()

    def leave(self) -> None:
        """Free the place and the claims of this process and close the memory. No thread of it may write to a
        slot any more. Takes no lock: a stopped process may hold it."""
        self.memory.is_stopped = True
        place, self.place = self.place, -1
        if place >= 0:
            self._free_claims(place)
            self.processes[place].set(state=ABSENT, idle=0)
        self.memory.close()
        self._call_all()

    def reap(self) -> bool:
        """Free what processes that have died held. Returns whether there was one."""
        if not self._dead():
            return False
        with self.memory.locked():
            for place in self._dead():
                self._free(place)
        self._call_all()
        return True

    def _dead(self) -> list[int]:
        places = self.processes[: self.header.words[PROCESS_PLACES]]
        return [
            p for p, record in enumerate(places) if record.words[STATE] != ABSENT and not self.memory.lives(p)
        ]

    def _free(self, place: int) -> None:
        """Free what a process that has died held. The caller holds the lock."""
        for record in self.cursors:
            if record.words[OWNER] == place + 1:
                record.set(state=ABSENT, process=0)
        self._free_claims(place)
        for slot in self._slots:
            if slot[MADE] != slot[UNIT]:
                self._complete(slot)  # it may have died after the last part and before this
        self.processes[place].set(state=ABSENT, idle=0)

    def _free_claims(self, place: int) -> None:
        for slot in self._slots:
            for index in self._part_words:
                if slot[index] == place + 1:
                    slot[index] = 0

    def _call_all(self) -> None:
        ring_bell(self.memory.bell("made"))
        ring_bell(self.memory.bell("changed"))
        for place in range(self.header.words[PROCESS_PLACES]):
            ring_bell(self.memory.work_bell(place))

    # --- which process makes what ---

    def eligible(self) -> list[int]:
        """The places of the processes that may make units: the first `makers`, in the order in which they
        joined; processes that did not respond come last."""
        places = (record.words for record in self.processes[: self.header.words[PROCESS_PLACES]])
        living = [(not w[MAKES], w[ORDER], place) for place, w in enumerate(places) if w[STATE] == LIVES]
        return [place for _, _, place in sorted(living)[: self.header.get("makers")]]

    def threads(self) -> int:
        """How many threads of this process should make units; 0 if it is not eligible."""
        eligible = self.eligible()
        return -(-self.header.get("cores") // len(eligible)) if self.place in eligible else 0

    def claim(self) -> Claim | None:
        """Claim the first part that is free for this process; None if there is none now."""
        with self.memory.locked():
            self.processes[self.place].words[MAKES] = 1
            least = self.least()
            if least is None or self.place not in self.eligible():
                return None
            making, free = self._parts_in(least)
            if making >= self.header.get("cores"):
                return None
            if not free:
                free = self._open(least)
            if not free:
                return None
            claim = free[0]
            self._slots[claim.unit % self.slots][PARTS + claim.part] = self.place + 1
            has_more = len(free) > 1 or self._openable(least) is not None
            if making + 1 < self.header.get("cores") and has_more:
                self.call_maker()
            return claim

    def claim_or_idle(self) -> Claim | None:
        """`claim`, else mark this process as one that `call_maker` has to wake."""
        claim = self.claim()
        if claim is None:
            self.processes[self.place].words[IDLE] = 1
            fence()
            claim = self.claim()  # nothing announces what became free before the mark
        return claim

    def _parts_in(self, least: int) -> tuple[int, list[Claim]]:
        """How many parts are in the making, and which are free, of the opened units from `least` on."""
        following, making, free = self.header.words[NEXT], 0, list[Claim]()
        for unit in range(max(least, following - self.slots), following):
            slot = self._slots[unit % self.slots]
            if slot[UNIT] != unit + 1 or slot[MADE] == unit + 1:
                continue
            for part, index in enumerate(self._part_words):
                if not slot[index]:
                    free.append(Claim(unit, part))
                elif slot[index] < DONE:
                    making += 1
        return making, free

    def _openable(self, least: int) -> int | None:
        """The unit that may be opened next; None if no slot is free for it or no cursor has asked for its
        epoch."""
        unit = max(least, self.header.words[NEXT])
        armed = max((record.get("armed") for record in self.present()), default=0)
        if unit >= least + self.slots or unit >= armed * self.header.get("epoch"):
            return None
        slot = self._slots[unit % self.slots]
        if any(0 < slot[index] < DONE for index in self._part_words):  # for cursors that have left
            return None
        return unit

    def _open(self, least: int) -> list[Claim]:
        """Open the next unit, if there is room. Returns its parts."""
        unit = self._openable(least)
        if unit is None:
            return []
        slot = self._slots[unit % self.slots]
        slot[MADE] = slot[SPOILED] = 0
        for index in self._part_words:
            slot[index] = 0
        slot[UNIT] = unit + 1
        self.header.words[NEXT] = unit + 1
        return [Claim(unit, part) for part in range(self.parts)]

    def done(self, claim: Claim, records: int, *, spoiled: bool) -> None:
        """The part of `claim` is in its slot. spoiled: it failed, or some of its `records` were skipped."""
        slot, own = self._slots[claim.unit % self.slots], self.processes[self.place]
        with self.memory.locked():
            if slot[PARTS + claim.part] != self.place + 1:
                raise AssertionError(f"the claim of part {claim.part} of unit {claim.unit} was lost")
            own.set(parts=own.get("parts") + 1, records=own.get("records") + records)
            slot[SPOILED] |= int(spoiled)
            fence()
            slot[PARTS + claim.part] = DONE
            is_made = self._complete(slot)
        if is_made:
            ring_bell(self.memory.bell("made"))

    def _complete(self, slot: Words) -> bool:
        """Mark a unit as made if all of its parts are done."""
        if any(slot[index] != DONE for index in self._part_words):
            return False
        fence()
        slot[MADE] = slot[UNIT]
        return True

    def call_maker(self) -> None:
        """Wake the producers of one process that have nothing to do, if there is one. Takes no lock."""
        for place in self.eligible():
            own = self.processes[place].words
            if own[IDLE]:
                own[IDLE] = 0
                ring_bell(self.memory.work_bell(place))
                return

    def excuse(self, unit: int) -> bool:
        """Pass over processes that could make `unit` and did not respond. Returns whether there was one.

        One that has made or claimed nothing comes back with its next claim.
        """
        least = self.least()
        if least is None or self.is_made(unit):
            return False
        making, free = self._parts_in(least)
        if making or not (free or self._openable(least) is not None):
            return False
        silent = [place for place in self.eligible() if place != self.place]
        for place in silent:
            self.processes[place].words[MAKES] = 0
        if silent:
            self._call_all()
        return bool(silent)

    # --- cursors ---

    def present(self) -> list[Record]:
        """The cursors that processes have open, some of which may be dead."""
        places = self.cursors[: self.header.words[CURSOR_PLACES]]
        return [record for record in places if record.words[STATE]]

    def least(self) -> int | None:
        """The first unit that is kept for a cursor; None if none holds units."""
        held = (record.words for record in self.cursors[: self.header.words[CURSOR_PLACES]])
        return min([w[POSITION] for w in held if w[STATE] == HOLDS], default=None)

    def is_kept(self, unit: int) -> bool:
        """Whether a cursor that holds `unit` from now on will find it. The caller holds the lock."""
        following = self.header.words[NEXT]
        kept = range(unit, following)
        return len(kept) <= self.slots and all(self._slots[u % self.slots][UNIT] == u + 1 for u in kept)

    def is_made(self, unit: int) -> bool:
        return self._slots[unit % self.slots][MADE] == unit + 1

    def is_open(self, unit: int) -> bool:
        """Whether `unit` has a slot."""
        return self._slots[unit % self.slots][UNIT] == unit + 1

    def arm(self, cursor: int, epochs: int) -> None:
        """Ask for the units of all epochs before `epochs`."""
        record = self.cursors[cursor]
        if record.get("armed") < epochs:
            record.set(armed=epochs)
            fence()
            self.call_maker()

    def release(self, cursor: int, upto: int) -> None:
        """The cursor needs no unit before `upto` any more. Takes no lock: a collector may call it."""
        if this_process.pid != self._process:  # a forked process drops arrays that its parent still shows
            return
        own = self.cursors[cursor].words
        before = own[POSITION]
        fence()
        own[POSITION] = upto
        fence()  # of two cursors that release the least unit at once, one sees the other's position
        for record in self.cursors[: self.header.words[CURSOR_PLACES]]:
            other = record.words
            if other[POSITION] <= before and other[STATE] == HOLDS:
                return
        self.call_maker()

    # --- blame ---

    def maker(self, unit: int) -> int:
        """The PID of a living process that makes a part of `unit`; 0 if there is none."""
        slot = self._slots[unit % self.slots]
        for index in self._part_words if slot[UNIT] == unit + 1 else ():
            owner = slot[index]
            if 0 < owner < DONE and self.memory.lives(owner - 1):
                pid = self.processes[owner - 1].get("pid")
                fence()
                if slot[index] == owner:  # else another process may have taken that place meanwhile
                    return pid
        return 0

    def slowest(self, unit: int) -> int:
        """The cursor that keeps `unit` from its slot; -1 if there is none."""
        places = enumerate(self.cursors[: self.header.words[CURSOR_PLACES]])
        held = [(w.words[POSITION], cursor) for cursor, w in places if w.words[STATE] == HOLDS]
        position, cursor = min(held, default=(0, -1))
        return cursor if position <= unit - self.slots else -1

    def blocker(self, unit: int) -> Blocker:
        """The reason why `unit` is not made."""
        from commplan.recorder.processes import process_state  # noqa: PLC0415  loaded if a wait lasts

        holder = self.memory.lock_holder()
        if holder and process_state(holder) != "alive":
            return Blocker("lock", holder)
        if pid := self.maker(unit):
            return Blocker("maker", pid)
        cursor = self.slowest(unit)
        if cursor >= 0:
            return Blocker("cursor", self.pid_of(cursor), cursor)
        return Blocker("none")

    def pid_of(self, cursor: int) -> int:
        """The PID of the process of a cursor; 0 if it has none."""
        owner = self.cursors[cursor].words[OWNER]
        return self.processes[owner - 1].get("pid") if owner else 0
