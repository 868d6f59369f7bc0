"""The state of shared units: claims of processes on parts, positions of cursors, and dead processes.

A unit consists of `parts`. One process claims a part, fills it in the unit's slot, and marks it as done. A
unit is opened when its slot is free: every cursor has passed the previous unit in the slot. Bells wake the
producers of one process for each part that becomes free, and the cursors for each unit that is made.

In a feed any idle process claims the next part, and processes join and leave at any time. In a group parts
are dealt to the processes in turn, so that each makes an equal number, and places are not reused.
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

# Making units counts as blocked above this fraction of blocked time, which includes waits between threads.
_WAITS = 0.33


class Ring:
    """One process's access to a ring. `place` is the place of the process; -1 for an observer."""

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
        """Take a free place for this process. The caller holds the lock.

        Raises:
            CommplanError: CP0928 if no place is free.
        """
        memory = self.memory
        self.reap()
        for place, record in enumerate(self.processes):
            if record.words[STATE] == ABSENT and memory.lock_place(place):
                self._free(place)  # may contain words of a process that died while it joined
                self.enter(place, self.header.get("joined") + 1)
                return
        fail("CP0928", f"{memory.title} has {len(self.processes)} processes already")

    def enter(self, place: int, order: int) -> None:
        """Initialize `place`, whose lock this process holds. `order` is its rank among the makers."""
        places = self.header.get("process_places")
        self.header.set(joined=order, process_places=max(places, place + 1))
        record = self.processes[place]
        record.set(pid=this_process.pid, order=order, makes=1, idle=0, parts=0, records=0)
        record.set(state=LIVES)
        self.place = place
        self._call_all()

    def retire(self) -> None:
        """Stop making units in this process. Its threads may still complete parts in progress."""
        self.memory.is_stopped = True
        if self.place >= 0:
            self.processes[self.place].set(state=LEAVES, idle=0)
        self._call_all()

    def leave(self) -> None:
        """Free the place and the claims of this process and close the memory. Its threads may not write to
        slots afterwards. This takes no lock, because a stopped process may hold it."""
        self.memory.is_stopped = True
        place, self.place = self.place, -1
        if place >= 0:
            self._free_claims(place)
            self.processes[place].set(state=LEFT if self._is_group else ABSENT, idle=0)
        self.memory.close()
        self._call_all()

    def reap(self) -> bool:
        """Free the places and claims of dead processes. Returns whether there were any."""
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
        """Free the cursors, claims and place of a dead process. The caller holds the lock."""
        for record in self.cursors:
            if record.words[OWNER] == place + 1 and not self._keeps_cursors:
                record.set(state=ABSENT, process=0)
        self._free_claims(place)
        for slot in self._slots:
            if slot[MADE] != slot[UNIT]:
                self._complete(slot)  # the process may have died between its last part and this call
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

    # --- making units ---

    def eligible(self) -> list[int]:
        """The places of the first `makers` processes in the order of joining, unresponsive ones last."""
        places = (record.words for record in self._present_processes())
        living = [(not w[MAKES], w[ORDER], place) for place, w in enumerate(places) if w[STATE] == LIVES]
        return [place for _, _, place in sorted(living)[: self.header.get("makers")]]

    def threads(self) -> int:
        """The number of threads of this process that should make units; 0 if it is not eligible."""
        eligible = self.eligible()
        return -(-self.most_making() // len(eligible)) if self.place in eligible else 0

    def most_making(self) -> int:
        """The most parts in progress: one for each core, and more if making is blocked by I/O."""
        cores, most = self.header.get("cores"), self.header.get("most")
        if most <= cores:
            return cores
        processes = self._present_processes()
        spent, waited = (sum(record.get(name) for record in processes) for name in ("spent_us", "waited_us"))
        if waited <= _WAITS * (spent + waited):
            return cores
        return min(most, -(-cores * (spent + waited) // max(spent, 1)))

    def measure(self, spent_us: int, waited_us: int, *, is_first: bool) -> None:
        """Add the times of making a part, in microseconds; `is_first` discards earlier times."""
        record = self.processes[self.place]
        kept = (0, 0) if is_first else (record.get("spent_us"), record.get("waited_us"))
        record.set(spent_us=kept[0] + spent_us, waited_us=kept[1] + waited_us)

    def claim(self) -> Claim | None:
        """Claim the first part that is free for this process, if any."""
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
        """The first of `free` that this process may make."""
        return next((claim for claim in free if self._maker_of(claim, makers) in (self.place, -1)), None)

    def _maker_of(self, claim: Claim, makers: list[int]) -> int:
        """The place of the process that a free part is dealt to; -1 if any process may make it."""
        if not self._is_group:
            return -1
        responsive = [place for place in makers if self.processes[place].words[MAKES]] or makers
        return dealt(claim.unit, claim.part, self.parts, responsive)

    def claim_or_idle(self) -> Claim | None:
        """Claim a part. If there is no free part, mark this process as idle for `call_maker`."""
        claim = self.claim()
        if claim is None:
            self.processes[self.place].words[IDLE] = 1
            fence()
            claim = self.claim()  # a part may have become free before the mark
        return claim

    def _parts_in(self, least: int) -> tuple[int, list[Claim]]:
        """The number of parts in progress and the free parts, in the open units from `least` on."""
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
        """The unit that may be opened next; None if its slot is in use or no cursor has requested it."""
        unit = max(least, self.header.words[NEXT])
        armed = max((record.get("armed") for record in self.present()), default=0)
        if unit >= min(least + self.slots, armed):
            return None
        slot = self._slots[unit % self.slots]
        if any(0 < slot[index] < DONE for index in self._part_words):  # for cursors that have left the ring
            return None
        # If a host dies during a transfer, other hosts receive the previous unit from this one.
        carried = unit - self.slots + 1
        is_first = carried < self.header.get("start")
        if self._is_carried and not self._keeps_cursors and not is_first and not self.is_made(carried):
            return None
        return unit

    def _open(self, least: int, free: list[Claim]) -> bool:
        """Open the next unit, if possible, and add its parts to `free`. Returns whether it was opened."""
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
        if self._complete(slot):  # other hosts make all of its parts
            ring_bell(self.memory.bell("made"))
        return True

    def done(self, claim: Claim, records: int, *, spoiled: bool) -> None:
        """Mark the part of `claim` as done; `spoiled` if it failed or some of its `records` were skipped."""
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
        """Whether all parts of `unit` that this host makes are done."""
        slot = self._slots[unit % self.slots]
        return slot[UNIT] == unit + 1 and all(slot[index] >= DONE for index in self._part_words)

    def _complete(self, slot: Words) -> bool:
        """Mark a unit as made if all parts are done and it is not moved between hosts. Returns whether all
        parts are done."""
        if any(slot[index] < DONE for index in self._part_words):
            return False
        fence()
        if not self._is_carried:
            slot[MADE] = slot[UNIT]
        return True

    def call_maker(self) -> None:
        """Wake the producers of one process that can claim a part, if any. Takes no lock."""
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
        """The places of processes that may claim one of `free` or a part of a unit that can be opened."""
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
        """Mark the other makers as unresponsive if parts are free, but no part is in progress.

        The next claim of a process clears its mark.

        Returns:
            Whether a process was marked.
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
        """Make `parts` on this host, too, from unit `first` on, which has not been made yet."""
        with self.memory.locked():
            fresh = [part for part in parts if self._fresh[PARTS + part]]
            for part in fresh:
                self._fresh[PARTS + part] = 0
            for slot in self._slots:
                for part in fresh if slot[UNIT] > first and slot[MADE] != slot[UNIT] else ():
                    slot[PARTS + part] = 0
        self._call_all()

    def begin_carry(self, unit: int) -> bool:
        """Reserve the transfer of `unit` for this process; False if another process has done so."""
        with self.memory.locked():
            slot = self._slots[unit % self.slots]
            if slot[UNIT] != unit + 1 or slot[self._carry_word]:
                return False
            slot[self._carry_word] = self.place + 1
            return True

    def end_carry(self, unit: int) -> None:
        """Mark `unit` as complete on this host."""
        slot = self._slots[unit % self.slots]
        with self.memory.locked():
            fence()
            slot[self._carry_word] = DONE + self.place + 1
            slot[MADE] = slot[UNIT]
        ring_bell(self.memory.bell("made"))
        self.call_maker()

    # --- cursors ---

    def present(self) -> list[Record]:
        """The open cursors, including those of dead processes."""
        places = self.cursors[: self.header.words[CURSOR_PLACES]]
        return [record for record in places if record.words[STATE]]

    def least(self) -> int | None:
        """The first unit that is kept for a cursor; None if no cursor holds units."""
        held = (record.words for record in self.cursors[: self.header.words[CURSOR_PLACES]])
        return min([w[POSITION] for w in held if w[STATE] == HOLDS], default=None)

    def begin_at(self, unit: int) -> None:
        """Allow `unit` as the first unit if no unit has been opened. The caller holds the lock."""
        if not any(slot[UNIT] for slot in self._slots):
            self.header.set(next=min(unit, self.header.get("next")))

    def is_kept(self, unit: int) -> bool:
        """Whether all opened units from `unit` on are still in their slots. The caller holds the lock."""
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
        """Request all units before `upto`. If `excuse` has marked this process, the mark is cleared."""
        record = self.cursors[cursor]
        if record.get("armed") < upto:
            self.processes[self.place].set(makes=1)
            record.set(armed=upto)
            fence()
            self.call_maker()

    def release(self, cursor: int, upto: int) -> None:
        """Release all units before `upto`. Takes no lock, because the garbage collector may call this."""
        if this_process.pid != self._process:  # a forked process drops arrays that its parent still uses
            return
        own = self.cursors[cursor].words
        before = own[POSITION]
        fence()
        own[POSITION] = upto
        fence()  # if two cursors release the least unit concurrently, one of them reads the other's position
        for record in self.cursors[: self.header.words[CURSOR_PLACES]]:
            other = record.words
            if other[POSITION] <= before and other[STATE] == HOLDS:
                return
        self.call_maker()

    # --- blame ---

    def maker(self, unit: int) -> int:
        """The PID of a living process that is making a part of `unit`; 0 if there is none."""
        slot = self._slots[unit % self.slots]
        for index in self._part_words if slot[UNIT] == unit + 1 else ():
            owner = slot[index]
            if 0 < owner < DONE and self.memory.lives(owner - 1):
                pid = self.processes[owner - 1].get("pid")
                fence()
                if slot[index] == owner:  # otherwise another process may have taken the place
                    return pid
        return 0

    def slowest(self, unit: int) -> int:
        """The cursor that still holds the slot of `unit`; -1 if there is none."""
        places = enumerate(self.cursors[: self.header.words[CURSOR_PLACES]])
        held = [(w.words[POSITION], cursor) for cursor, w in places if w.words[STATE] == HOLDS]
        position, cursor = min(held, default=(0, -1))
        return cursor if position <= unit - self.slots else -1

    def blocker(self, unit: int) -> Blocker:
        """The reason why `unit` has not been made."""
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
        """The places of the processes of a group that block `unit`.

        Returns:
            The places of processes that must make a part of `unit`, and of those that must take the previous
            unit in its slot.
        """
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
        """The PID of the process of a cursor; 0 if the cursor has no process."""
        owner = self.cursors[cursor].words[OWNER]
        return self.processes[owner - 1].get("pid") if owner else 0
