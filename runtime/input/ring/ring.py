"""Changes of a ring: claims of processes on parts, positions of cursors, and dead processes.

A unit consists of `parts`. One process claims a part, fills it in the unit's slot, and marks it as done. A
unit is opened when its slot is free: every cursor has passed the previous unit in the slot. Bells wake the
producers of one process for each part that becomes free, and the cursors for each unit that is made.

The word `count` of the header is the number of processes of a group on this host. It selects between:

| ring | `count` | a free part may be claimed by | the place of a process that left |
|---|---|---|---|
| a feed, or members with separate clocks in one process | 0 | any process | is reused |
| a single process, or the only one of its group on this host | 1 | any process | is not reused |
| a group of processes on this host | more | the process that it is dealt to, in turn | is not reused |
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Iterable, Iterator

from commplan.diagnostics import fail
from commplan.runtime.input.ring.claims import Claim
from commplan.runtime.input.ring.memory import SharedMemory, ring_bell
from commplan.runtime.input.ring.state import RingState
from commplan.runtime.input.ring.words import (
    ABSENT,
    CURSOR_PLACES,
    DIED,
    DONE,
    HOLDS,
    IDLE,
    JOINED,
    LEAVES,
    LEFT,
    LIVES,
    MADE,
    MAKES,
    NEXT,
    OWNER,
    PARTS,
    PARTS_MADE,
    POSITION,
    PROCESS_PLACES,
    RECORDS_MADE,
    SPOILED,
    STATE,
    UNIT,
    Words,
)
from commplan.runtime.input.shm.futex import fence


class Ring(RingState):
    """One process's access to a ring. See `RingState` for the other attributes.

    Args:
        memory: the memory of the ring.

    Attributes:
        claims_units: whether a claim takes consecutive parts of a unit, which saves time if they are cheap.
        ends_with_one: whether the group ends if a process dies or leaves early. Then its cursor stays.
    """

    def __init__(self, memory: SharedMemory) -> None:
        super().__init__(memory)
        self.claims_units, self._process = False, os.getpid()
        self._reuses_places, self._is_carried = self.header.get("count") == 0, self.header.get("carried")
        self.ends_with_one = bool(self.header.get("ends_with_one"))
        self._carry_word = PARTS + self.parts  # the word of the transfer, as of a part, if units are moved

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
        record.set(pid=os.getpid(), order=order, makes=1, idle=0, parts=0, records=0)
        record.set(state=LIVES)
        self.place = place
        self._call_all()

    def retire(self) -> None:
        """Stop making units in this process.

        Its threads end at their next record, without completing parts in progress. Other processes make these
        parts after `leave`.
        """
        self.memory.is_stopped = True
        if self.place >= 0:
            self.processes[self.place].set(state=LEAVES, idle=0)
        self._call_all()

    def leave(self) -> None:
        """Free the place and the claims of this process and close the memory.

        Threads of this process must not write to slots afterwards. This takes no lock, because a stopped
        process may hold it.
        """
        self.memory.is_stopped = True
        place, self.place = self.place, -1
        if place >= 0:
            self._free_claims(place)
            self.processes[place].set(state=ABSENT if self._reuses_places else LEFT, idle=0)
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
        """The places of processes that have died and have not been reaped."""
        states = ((p, record.words[STATE]) for p, record in enumerate(self._present_processes()))
        return [place for place, state in states if state in (LIVES, LEAVES) and not self.memory.lives(place)]

    def _free(self, place: int) -> None:
        """Free the cursors, claims and place of a dead process. The caller holds the lock."""
        for record in self.cursors:
            if record.words[OWNER] == place + 1 and not self.ends_with_one:
                record.set(state=ABSENT, process=0)
        self._free_claims(place)
        for slot in self._slots:
            if slot[MADE] != slot[UNIT]:
                self._complete(slot)  # the process may have died between its last part and this call
        self.processes[place].set(state=ABSENT if self._reuses_places else DIED, idle=0)

    def _free_claims(self, place: int) -> None:
        """Free the parts and transfers in progress of the process at `place`."""
        for slot in self._slots:
            for index in range(PARTS, PARTS + self.memory.shape.parts):
                if slot[index] in (place + 1, JOINED + place + 1):
                    slot[index] = 0

    def _call_all(self) -> None:
        """Wake all threads that wait for this ring."""
        ring_bell(self.memory.bell("made"))
        ring_bell(self.memory.bell("changed"))
        for place in range(self.header.words[PROCESS_PLACES]):
            ring_bell(self.memory.work_bell(place))

    # --- making units ---

    def measure(self, spent_us: int, waited_us: int, *, is_first: bool) -> None:
        """Add the times of making the parts of a claim.

        Args:
            spent_us: the time on a core, in microseconds.
            waited_us: the blocked time, in microseconds.
            is_first: whether this claim begins a new measurement; earlier times are discarded.
        """
        record = self.processes[self.place]
        earlier = (0, 0) if is_first else (record.get("spent_us"), record.get("waited_us"))
        record.set(spent_us=earlier[0] + spent_us, waited_us=earlier[1] + waited_us)

    def claim(self) -> Claim | None:
        """Claim the first part that is due for this process, and open its unit if necessary.

        If `claims_units` is set, the claim includes the free parts directly after it.

        Returns:
            The claim; None if no part is due.
        """
        with self.memory.locked():
            self.processes[self.place].words[MAKES] = 1
            least, makers = self.least(), self.eligible()
            if least is None or self.place not in makers:
                return None
            due = self._due(least, makers)
            claim = next((claim for claim, maker in due if maker in (self.place, -1)), None)
            # Units are opened in order, so earlier ones may have to be opened first.
            while claim is not None and not self.is_open(claim.unit):
                if not self._open(least):
                    claim = None
            if claim is not None:
                slot = self._slots[claim.unit % self.slot_count]
                if slot[PARTS + claim.part]:
                    claim = None  # other hosts make all parts; the unit is open now
                else:
                    slot[PARTS + claim.part] = self.place + 1
            if claim is not None and self.claims_units:
                claim = self._extended(claim, makers)
            self._call(least, makers)
            return claim

    def _due(self, least: int, makers: list[int]) -> Iterator[tuple[Claim, int]]:
        """The parts that may be claimed now, in order, of open units and those that can be opened.

        There are as many as may be in progress in addition to the present ones (`most_making`). The parts of
        makers that have their share in progress are omitted: other makers do not wait for them.

        Args:
            least: the result of `RingState.least`.
            makers: the result of `RingState.eligible`.

        Yields:
            A part, and the place of the process that makes it; -1 if any process may.
        """
        making, free = self._parts_in(least)
        most, busy = self.most_making(), Counter(making)
        unit = self._openable(least)
        end = min(least + self.slot_count, (unit or 0) + most)
        # If other hosts make all parts, the process that would make part 0 opens the units.
        parts = [part for part in range(self.parts) if not self._fresh[PARTS + part]] or [0]
        following = (
            Claim(unit, part) for unit in range(end if unit is None else unit, end) for part in parts
        )
        remaining = most - len(making)
        most_of_maker = -(-most // max(len(makers), 1))
        for claim in itertools.chain(free, following):
            if remaining <= 0:
                return
            maker = self._maker_of(claim, makers)
            if maker >= 0 and busy[maker] >= most_of_maker:
                continue
            busy[maker] += 1
            remaining -= 1
            yield claim, maker

    def _extended(self, claim: Claim, makers: list[int]) -> Claim:
        """Extend `claim` by the parts directly after it, up to one that is not free for this process."""
        slot = self._slots[claim.unit % self.slot_count]
        while (part := claim.parts.stop) < self.parts and not slot[PARTS + part]:
            if self._maker_of(Claim(claim.unit, part), makers) not in (self.place, -1):
                break
            slot[PARTS + part] = JOINED + self.place + 1
            claim = claim._replace(part_count=claim.part_count + 1)
        return claim

    def mark_idle(self, is_idle: bool) -> None:
        """Record whether threads of this process wait for `call_maker`."""
        self.processes[self.place].words[IDLE] = int(is_idle)

    def _parts_in(self, least: int) -> tuple[list[int], list[Claim]]:
        """The places of the makers of each claim, and the free parts, in the open units from `least` on."""
        following, making, free = self.header.words[NEXT], list[int](), list[Claim]()
        for unit in range(max(least, following - self.slot_count), following):
            slot = self._slots[unit % self.slot_count]
            if slot[UNIT] != unit + 1 or slot[MADE] == unit + 1:
                continue
            for part, index in enumerate(self._part_words):
                if not slot[index]:
                    free.append(Claim(unit, part))
                elif slot[index] < JOINED:
                    making.append(slot[index] - 1)
        return making, free

    def _openable(self, least: int) -> int | None:
        """The unit that may be opened next.

        The result is None if no cursor has requested it, or if its slot is in use: by a cursor, by a maker,
        or for hosts that may still need the previous unit.
        """
        unit = max(least, self.header.words[NEXT])
        armed = max((record.get("armed") for record in self.present()), default=0)
        if unit >= min(least + self.slot_count, armed):
            return None
        slot = self._slots[unit % self.slot_count]
        if any(0 < slot[index] < DONE for index in self._part_words):  # for cursors that have left the ring
            return None
        # If a host dies during a transfer, other hosts receive the previous unit from this one.
        carried = unit - self.slot_count + 1
        is_first = carried < self.header.get("start")
        if self._is_carried and not self.ends_with_one and not is_first and not self.is_made(carried):
            return None
        return unit

    def _open(self, least: int) -> bool:
        """Open the next unit, if possible. Returns whether a unit was opened."""
        unit = self._openable(least)
        if unit is None:
            return False
        slot = self._slots[unit % self.slot_count]
        slot[MADE] = slot[SPOILED] = 0
        for index in range(PARTS, PARTS + self.memory.shape.parts):
            slot[index] = self._fresh[index]
        fence()  # a process that reads the unit must not read parts of the previous unit
        slot[UNIT] = unit + 1
        self.header.words[NEXT] = unit + 1
        if self._complete(slot):  # other hosts make all of its parts
            ring_bell(self.memory.bell("made"))
        return True

    def done(self, claim: Claim, records: int, *, spoiled: bool) -> None:
        """Mark the parts of `claim` as done.

        Args:
            claim: the claim, which this process holds.
            records: the number of records in the parts, for the counters of this process.
            spoiled: whether making a part failed or skipped records.
        """
        with self.memory.locked():
            self._mark_done(claim, records, spoiled)

    def next_claim(self, claim: Claim, records: int, *, spoiled: bool) -> Claim | None:
        """Mark the parts of `claim` as done, as `done`, and claim the next ones, as `claim`."""
        with self.memory.locked():
            self._mark_done(claim, records, spoiled)
            return self.claim()

    def _mark_done(self, claim: Claim, records: int, spoiled: bool) -> None:
        """As `done`. The caller holds the lock."""
        slot, process = self._slots[claim.unit % self.slot_count], self.processes[self.place].words
        for part in claim.parts:
            if slot[PARTS + part] not in (self.place + 1, JOINED + self.place + 1):
                raise AssertionError(f"the claim of part {part} of unit {claim.unit} was lost")
        process[PARTS_MADE] += claim.part_count
        process[RECORDS_MADE] += records
        slot[SPOILED] |= int(spoiled)
        fence()
        for part in claim.parts:
            slot[PARTS + part] = DONE + self.place + 1
        if self._complete(slot):
            ring_bell(self.memory.bell("made"))

    def made_here(self, unit: int) -> list[int]:
        """The parts of `unit` that this process has made."""
        slot = self._slots[unit % self.slot_count]
        return [part for part, index in enumerate(self._part_words) if slot[index] == DONE + self.place + 1]

    def is_whole(self, unit: int) -> bool:
        """Whether all parts of `unit` that this host makes are done."""
        slot = self._slots[unit % self.slot_count]
        if slot[UNIT] != unit + 1:
            return False
        fence()  # the parts must be read after the unit
        return all(slot[index] >= DONE for index in self._part_words)

    def _complete(self, slot: Words) -> bool:
        """Mark the unit in `slot` as made if all parts are done and it is not moved between hosts.

        Returns:
            Whether all parts are done.
        """
        if any(slot[index] < DONE for index in self._part_words):
            return False
        fence()
        if not self._is_carried:
            slot[MADE] = slot[UNIT]
        return True

    def call_maker(self) -> None:
        """Wake a thread of one process that can claim a part, if any. Takes no lock.

        The caller calls `fence` after the change that lets a process claim a part.
        """
        if not any(record.words[IDLE] for record in self._present_processes()):
            return
        least = self.least()
        if least is not None:
            self._call(least, self.eligible())

    def _call(self, least: int, makers: list[int]) -> None:
        """Wake a thread of the first process that is idle and may claim a part that is due."""
        for _, maker in self._due(least, makers):
            for place in makers if maker < 0 else (maker,):
                process = self.processes[place].words
                if process[IDLE]:
                    process[IDLE] = 0
                    ring_bell(self.memory.work_bell(place), 1)
                    return

    def excuse(self, unit: int) -> bool:
        """Deal no parts to other makers for now, if parts are free and all claims are done.

        Does nothing if `unit` is made.

        This clears `makes` of all other eligible processes, whether or not they run. A process that runs sets
        its word again with its next claim.

        Returns:
            Whether a word was cleared.
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
        """Make `parts` on this host, too, because the hosts that made them have died.

        Args:
            parts: the parts.
            first: the first unit with these parts. It has not been made yet.
        """
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
            slot = self._slots[unit % self.slot_count]
            if slot[UNIT] != unit + 1 or slot[self._carry_word]:
                return False
            slot[self._carry_word] = self.place + 1
            return True

    def is_carried_or_free(self, unit: int) -> bool:
        """Whether no process has the transfer of `unit` in progress.

        `reap` frees the transfer of a dead process.
        """
        slot = self._slots[unit % self.slot_count]
        return not 0 < slot[self._carry_word] < DONE or slot[UNIT] != unit + 1

    def end_carry(self, unit: int) -> None:
        """Mark `unit`, whose transfer this process has reserved, as complete on this host."""
        slot = self._slots[unit % self.slot_count]
        with self.memory.locked():
            fence()
            slot[self._carry_word] = DONE + self.place + 1
            slot[MADE] = slot[UNIT]
        ring_bell(self.memory.bell("made"))
        self.call_maker()

    # --- cursors ---

    def begin_at(self, unit: int) -> None:
        """Allow `unit` as the first unit if no unit has been opened. The caller holds the lock."""
        if not any(slot[UNIT] for slot in self._slots):
            self.header.set(next=min(unit, self.header.get("next")))

    def arm(self, cursor: int, upto: int) -> None:
        """Request all units before `upto` for a cursor of this process.

        This sets `makes` again if `excuse` has cleared it.
        """
        record = self.cursors[cursor]
        if record.get("armed") < upto:
            self.processes[self.place].set(makes=1)
            record.set(armed=upto)
            fence()
            self.call_maker()

    def release(self, cursor: int, upto: int) -> None:
        """Release all units before `upto` for a cursor of this process.

        This takes no lock, because the garbage collector may call it.
        """
        if os.getpid() != self._process:  # a forked process drops arrays that its parent still uses
            return
        words = self.cursors[cursor].words
        before = words[POSITION]
        fence()
        words[POSITION] = upto
        fence()  # if two cursors release the least unit concurrently, one of them reads the other's position
        if self.header.words[NEXT] < before + self.slot_count:
            return  # producers did not need the slots
        for record in self.cursors[: self.header.words[CURSOR_PLACES]]:
            other = record.words
            if other[POSITION] <= before and other[STATE] == HOLDS:
                return
        self.call_maker()
