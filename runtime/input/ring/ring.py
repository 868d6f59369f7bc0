"""Units of shared input: which process makes which part, which cursors they are kept for, and who died.

A unit is made in `parts`, each of which one process claims, fills in the unit's slot, and marks as done. A
unit is opened while its slot is free: every cursor has passed the unit that was there before. Bells wake the
producers of one process for each part that becomes free, and the cursors for each unit that is made.

In a feed any free process claims the next part, and processes come and go. In a group parts are dealt to the
processes in turn, so that each makes as many as the others, and places are never reused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from commplan.diagnostics import fail
from commplan.input.work_partition import dealt
from commplan.runtime.input import this_process
from commplan.runtime.input.ring.claims import Blocker, Claim
from commplan.runtime.input.ring.memory import SharedMemory
from commplan.runtime.input.ring.memory import ring as ring_bell
from commplan.runtime.input.ring.words import (
    ABSENT,
    CURSOR_PLACES,
    DIED,
    DONE,
    HOLDS,
    IDLE,
    LEAVES,
    LEFT,
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
from commplan.runtime.input.shm.futex import fence

# If more than this share of the time is waited, making waits. Threads that wait for each other count as well.
_WAITS = 0.33


class Ring:
    """One process's access to a ring. place: its own among the processes; -1 if it only looks at it."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory, self.place = memory, -1
        self.header, self.processes, self.cursors = memory.header, memory.processes, memory.cursors
        self.slots, self._is_group = memory.shape.slots, self.header.get("count") > 0
        self._is_carried, self._keeps_cursors = self.header.get("carried"), self.header.get("keeps")
        self.parts = memory.shape.parts - self._is_carried
        *self._slots, self._fresh = [record.words for record in memory.slots]
        self._process = this_process.pid
        self._part_words = range(PARTS, PARTS + self.parts)
        self._carry_word = PARTS + self.parts

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
                self.enter(place, self.header.get("joined") + 1)
                return
        fail("CP0928", f"{memory.title} has {len(self.processes)} processes already")

    def enter(self, place: int, order: int) -> None:
        """Become the process at `place`, of which this process holds the lock. order: among the makers."""
        places = self.header.get("process_places")
        self.header.set(joined=order, process_places=max(places, place + 1))
        record = self.processes[place]
        record.set(pid=this_process.pid, order=order, makes=1, idle=0, parts=0, records=0)
        record.set(state=LIVES)
        self.place = place
        self._call_all()

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
            self.processes[place].set(state=LEFT if self._is_group else ABSENT, idle=0)
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
        states = ((p, record.words[STATE]) for p, record in enumerate(self._present_processes()))
        return [place for place, state in states if state in (LIVES, LEAVES) and not self.memory.lives(place)]

    def _present_processes(self) -> list[Record]:
        return self.processes[: self.header.words[PROCESS_PLACES]]

    def _free(self, place: int) -> None:
        """Free what a process that has died held. The caller holds the lock."""
        for record in self.cursors:
            if record.words[OWNER] == place + 1 and not self._keeps_cursors:
                record.set(state=ABSENT, process=0)
        self._free_claims(place)
        for slot in self._slots:
            if slot[MADE] != slot[UNIT]:
                self._complete(slot)  # it may have died after the last part and before this
        self.processes[place].set(state=DIED if self._is_group else ABSENT, idle=0)

    def _free_claims(self, place: int) -> None:
        for slot in self._slots:
            for index in range(PARTS, PARTS + self.memory.shape.parts):
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
        places = (record.words for record in self._present_processes())
        living = [(not w[MAKES], w[ORDER], place) for place, w in enumerate(places) if w[STATE] == LIVES]
        return [place for _, _, place in sorted(living)[: self.header.get("makers")]]

    def threads(self) -> int:
        """How many threads of this process should make units; 0 if it is not eligible."""
        eligible = self.eligible()
        return -(-self.most_making() // len(eligible)) if self.place in eligible else 0

    def most_making(self) -> int:
        """Parts in the making at a time: one for each core, and more of them if making waits for a disk or a
        network."""
        cores, most = self.header.get("cores"), self.header.get("most")
        if most <= cores:
            return cores
        processes = self._present_processes()
        spent, waited = (sum(record.get(name) for record in processes) for name in ("spent_us", "waited_us"))
        if waited <= _WAITS * (spent + waited):
            return cores
        return min(most, -(-cores * (spent + waited) // max(spent, 1)))

    def measure(self, spent_us: int, waited_us: int, *, is_first: bool) -> None:
        """Add the times of making a part, in microseconds. is_first: forget those before."""
        record = self.processes[self.place]
        kept = (0, 0) if is_first else (record.get("spent_us"), record.get("waited_us"))
        record.set(spent_us=kept[0] + spent_us, waited_us=kept[1] + waited_us)

    def claim(self) -> Claim | None:
        """Claim the first part that is free for this process; None if there is none now."""
        with self.memory.locked():
            self.processes[self.place].words[MAKES] = 1
            least, makers = self.least(), self.eligible()
            if least is None or self.place not in makers:
                return None
            (making, free), most = self._parts_in(least), self.most_making()
            if making >= most:
                return None
            claim = self._own(free, makers)
            while claim is None and self._open(least, free):
                claim = self._own(free, makers)
            if claim is not None:
                self._slots[claim.unit % self.slots][PARTS + claim.part] = self.place + 1
                free.remove(claim)
                making += 1
            if making < most:
                self._call(least, free, makers)
            return claim

    def _own(self, free: Iterable[Claim], makers: list[int]) -> Claim | None:
        """The first of `free` that this process makes."""
        return next((claim for claim in free if self._maker_of(claim, makers) in (self.place, -1)), None)

    def _maker_of(self, claim: Claim, makers: list[int]) -> int:
        """The place of the process that a free part is dealt to; -1 if any process may make it."""
        if not self._is_group:
            return -1
        responsive = [place for place in makers if self.processes[place].words[MAKES]] or makers
        return dealt(claim.unit, claim.part, self.parts, responsive)

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
        if unit >= min(least + self.slots, armed):
            return None
        slot = self._slots[unit % self.slots]
        if any(0 < slot[index] < DONE for index in self._part_words):  # for cursors that have left
            return None
        # A host that another one leaves behind when it dies receives the unit before from here.
        carried = unit - self.slots + 1
        is_first = carried < self.header.get("start")
        if self._is_carried and not self._keeps_cursors and not is_first and not self.is_made(carried):
            return None
        return unit

    def _open(self, least: int, free: list[Claim]) -> bool:
        """Open the next unit, if there is room, and add its parts to `free`. Returns whether there was."""
        unit = self._openable(least)
        if unit is None:
            return False
        slot = self._slots[unit % self.slots]
        slot[MADE] = slot[SPOILED] = 0
        for index in range(PARTS, PARTS + self.memory.shape.parts):
            slot[index] = self._fresh[index]
        slot[UNIT] = unit + 1
        self.header.words[NEXT] = unit + 1
        free += [Claim(unit, part) for part, index in enumerate(self._part_words) if not slot[index]]
        if self._complete(slot):  # other hosts make all of it
            ring_bell(self.memory.bell("made"))
        return True

    def done(self, claim: Claim, records: int, *, spoiled: bool) -> None:
        """The part of `claim` is in its slot. spoiled: it failed, or some of its `records` were skipped."""
        slot, own = self._slots[claim.unit % self.slots], self.processes[self.place]
        with self.memory.locked():
            if slot[PARTS + claim.part] != self.place + 1:
                raise AssertionError(f"the claim of part {claim.part} of unit {claim.unit} was lost")
            own.set(parts=own.get("parts") + 1, records=own.get("records") + records)
            slot[SPOILED] |= int(spoiled)
            fence()
            slot[PARTS + claim.part] = DONE + self.place + 1
            is_whole = self._complete(slot)
        if is_whole:
            ring_bell(self.memory.bell("made"))

    def made_here(self, unit: int) -> list[int]:
        """The parts of `unit` that this process has made."""
        slot = self._slots[unit % self.slots]
        return [part for part, index in enumerate(self._part_words) if slot[index] == DONE + self.place + 1]

    def is_whole(self, unit: int) -> bool:
        """Whether all parts of `unit` that are made on this host are done."""
        slot = self._slots[unit % self.slots]
        return slot[UNIT] == unit + 1 and all(slot[index] >= DONE for index in self._part_words)

    def _complete(self, slot: Words) -> bool:
        """Mark a unit as made if all of its parts are done, unless it is still to be carried. Returns whether
        they are."""
        if any(slot[index] < DONE for index in self._part_words):
            return False
        fence()
        if not self._is_carried:
            slot[MADE] = slot[UNIT]
        return True

    def call_maker(self) -> None:
        """Wake the producers of one process that have a part to make, if there is one. Takes no lock."""
        least = self.least()
        if least is None:
            return
        making, free = self._parts_in(least)
        if making < self.most_making():
            self._call(least, free, self.eligible())

    def _call(self, least: int, free: Iterable[Claim], makers: list[int]) -> None:
        for place in self._callable(least, free, makers):
            own = self.processes[place].words
            if own[IDLE]:
                own[IDLE] = 0
                ring_bell(self.memory.work_bell(place))
                return

    def _callable(self, least: int, free: Iterable[Claim], makers: list[int]) -> Iterator[int]:
        """The places of processes that may claim one of `free`, or a part of a unit that can be opened."""
        unit = self._openable(least)
        following = range(0)
        if unit is not None:
            following = range(unit, min(least + self.slots, unit + self.most_making()))
        if self._is_group and makers:
            claims = [*free, *(Claim(unit, part) for unit in following for part in range(self.parts))]
            yield from dict.fromkeys(self._maker_of(claim, makers) for claim in claims)
        elif following or free:
            yield from makers

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

    # --- between hosts ---

    def deal_here(self, parts: Iterable[int], first: int) -> None:
        """From unit `first` on, which is not made yet, these parts are made on this host as well."""
        with self.memory.locked():
            fresh = [part for part in parts if self._fresh[PARTS + part]]
            for part in fresh:
                self._fresh[PARTS + part] = 0
            for slot in self._slots:
                for part in fresh if slot[UNIT] > first and slot[MADE] != slot[UNIT] else ():
                    slot[PARTS + part] = 0
        self._call_all()

    def begin_carry(self, unit: int) -> bool:
        """Become the process that moves `unit` between hosts; False if another process does."""
        with self.memory.locked():
            slot = self._slots[unit % self.slots]
            if slot[UNIT] != unit + 1 or slot[self._carry_word]:
                return False
            slot[self._carry_word] = self.place + 1
            return True

    def end_carry(self, unit: int) -> None:
        """`unit` is whole on this host."""
        slot = self._slots[unit % self.slots]
        with self.memory.locked():
            fence()
            slot[self._carry_word] = DONE + self.place + 1
            slot[MADE] = slot[UNIT]
        ring_bell(self.memory.bell("made"))
        self.call_maker()

    # --- cursors ---

    def present(self) -> list[Record]:
        """The cursors that processes have open, some of which may be dead."""
        places = self.cursors[: self.header.words[CURSOR_PLACES]]
        return [record for record in places if record.words[STATE]]

    def least(self) -> int | None:
        """The first unit that is kept for a cursor; None if none holds units."""
        held = (record.words for record in self.cursors[: self.header.words[CURSOR_PLACES]])
        return min([w[POSITION] for w in held if w[STATE] == HOLDS], default=None)

    def begin_at(self, unit: int) -> None:
        """`unit` may be the first one if none has been opened yet. The caller holds the lock."""
        if not any(slot[UNIT] for slot in self._slots):
            self.header.set(next=min(unit, self.header.get("next")))

    def is_kept(self, unit: int) -> bool:
        """Whether a cursor that holds `unit` from now on will find it. The caller holds the lock."""
        following = self.header.words[NEXT]
        kept = range(unit, following)
        return len(kept) <= self.slots and all(self._slots[u % self.slots][UNIT] == u + 1 for u in kept)

    def is_wanted(self, position: int) -> bool:
        """Whether a cursor waits for a unit whose slot is kept for a cursor at `position`."""
        return any(record.get("wanted") > position + self.slots for record in self.present())

    def is_made(self, unit: int) -> bool:
        return self._slots[unit % self.slots][MADE] == unit + 1

    def is_open(self, unit: int) -> bool:
        """Whether `unit` has a slot."""
        return self._slots[unit % self.slots][UNIT] == unit + 1

    def arm(self, cursor: int, upto: int) -> None:
        """Ask for all units before `upto`. A process that was passed over because it had not begun yet makes
        units again."""
        record = self.cursors[cursor]
        if record.get("armed") < upto:
            self.processes[self.place].set(makes=1)
            record.set(armed=upto)
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

    def awaited(self, unit: int) -> tuple[list[int], list[int]]:
        """The places of processes of a group that have to make a part of `unit`, and those of processes that
        have to take the unit in its slot before."""
        slot, makers = self._slots[unit % self.slots], self.eligible()
        if slot[UNIT] != unit + 1:
            held = (w.words for w in self.cursors if w.words[STATE] == HOLDS and w.words[OWNER])
            slow = [words[OWNER] - 1 for words in held if words[POSITION] <= unit - self.slots]
            undone = [] if slow else [Claim(unit, part) for part in range(self.parts)]
            return [self._maker_of(claim, makers) for claim in undone if makers], slow
        owners = [(Claim(unit, part), slot[index]) for part, index in enumerate(self._part_words)]
        waits = [(claim, owner) for claim, owner in owners if owner < DONE]
        return [owner - 1 if owner else self._maker_of(claim, makers) for claim, owner in waits], []

    def pid_of(self, cursor: int) -> int:
        """The PID of the process of a cursor; 0 if it has none."""
        owner = self.cursors[cursor].words[OWNER]
        return self.processes[owner - 1].get("pid") if owner else 0
