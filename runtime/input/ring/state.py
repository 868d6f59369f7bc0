"""The words of a ring as its processes and observers read them, without taking its lock."""

from __future__ import annotations

from commplan.input.work_partition import dealt
from commplan.runtime.input.ring.claims import Blocker, Claim
from commplan.runtime.input.ring.memory import SharedMemory
from commplan.runtime.input.ring.words import (
    CURSOR_PLACES,
    DONE,
    HOLDS,
    JOINED,
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
)
from commplan.runtime.input.shm.futex import fence

# Making units counts as blocked by I/O if threads are blocked for a larger share of the time. Waits of
# threads for each other take less.
_MAX_BLOCKED_SHARE = 0.33


class RingState:
    """The state of a ring. Methods take no lock; a few require that the caller holds it.

    Args:
        memory: the memory of the ring.

    Attributes:
        memory: the memory of the ring.
        place: the place of this process; -1 for an observer.
        header: see `SharedMemory`.
        processes: see `SharedMemory`.
        cursors: see `SharedMemory`.
        slot_count: the number of slots.
        parts: the number of parts of a unit.
    """

    def __init__(self, memory: SharedMemory) -> None:
        self.memory, self.place = memory, -1
        self.header, self.processes, self.cursors = memory.header, memory.processes, memory.cursors
        self.slot_count, self._is_dealt = memory.shape.slots, self.header.get("count") > 1
        self.parts = memory.shape.parts - self.header.get("carried")
        *self._slots, self._fresh = [record.words for record in memory.slots]  # see `SharedMemory.slots`
        self._part_words = range(PARTS, PARTS + self.parts)

    # --- processes ---

    def _present_processes(self) -> list[Record]:
        """The places up to the last one that has been used."""
        return self.processes[: self.header.words[PROCESS_PLACES]]

    def eligible(self) -> list[int]:
        """The places of the processes that may make units.

        These are the first `makers` processes in the order of joining. Those without `makes` come last.
        """
        places = (record.words for record in self._present_processes())
        living = [
            (not words[MAKES], words[ORDER], place)
            for place, words in enumerate(places)
            if words[STATE] == LIVES
        ]
        return [place for _, _, place in sorted(living)[: self.header.get("makers")]]

    def threads(self) -> int:
        """The number of threads of this process that should make units; 0 if it is not eligible."""
        eligible = self.eligible()
        return -(-self.most_making() // len(eligible)) if self.place in eligible else 0

    def most_making(self) -> int:
        """The most parts in progress: one for each core, and more if making is blocked by I/O.

        In the second case there are as many as keep the cores busy, but at most the word `most`.
        """
        cores, most = self.header.get("cores"), self.header.get("most")
        if most <= cores:
            return cores
        processes = self._present_processes()
        spent, waited = (sum(record.get(name) for record in processes) for name in ("spent_us", "waited_us"))
        if waited <= _MAX_BLOCKED_SHARE * (spent + waited):
            return cores
        return min(most, -(-cores * (spent + waited) // max(spent, 1)))

    def _maker_of(self, claim: Claim, makers: list[int]) -> int:
        """The place of the process that a free part is dealt to; -1 if any process may make it, or none does.

        Args:
            claim: the part.
            makers: the result of `eligible`, empty while all processes leave.
        """
        if not self._is_dealt or not makers:
            return -1
        responsive = [place for place in makers if self.processes[place].words[MAKES]] or makers
        return dealt(claim.unit, claim.part, self.parts, responsive)

    # --- cursors and units ---

    def present(self) -> list[Record]:
        """The cursors in use, including those of dead processes."""
        places = self.cursors[: self.header.words[CURSOR_PLACES]]
        return [record for record in places if record.words[STATE]]

    def least(self) -> int | None:
        """The first unit that is kept for a cursor; None if no cursor holds units."""
        cursors = (record.words for record in self.cursors[: self.header.words[CURSOR_PLACES]])
        return min([words[POSITION] for words in cursors if words[STATE] == HOLDS], default=None)

    def is_kept(self, unit: int) -> bool:
        """Whether all opened units from `unit` on are still in their slots. The caller holds the lock."""
        units = range(unit, self.header.words[NEXT])
        return len(units) <= self.slot_count and all(map(self.is_open, units))

    def is_wanted(self, unit: int) -> bool:
        """Whether a cursor waits for `unit` or a later one."""
        return any(record.get("wanted") > unit for record in self.present())

    def is_made(self, unit: int) -> bool:
        """Whether `unit` is complete. The caller calls `fence` before it reads the slot."""
        return self._slots[unit % self.slot_count][MADE] == unit + 1

    def made_from(self, unit: int) -> int:
        """The number of consecutive units from `unit` on that are complete."""
        first = unit
        while unit - first < self.slot_count and self._slots[unit % self.slot_count][MADE] == unit + 1:
            unit += 1
        return unit - first

    def is_spoiled(self, unit: int) -> bool:
        """Whether making a part of `unit` failed or skipped records on this host."""
        return bool(self._slots[unit % self.slot_count][SPOILED])

    def is_open(self, unit: int) -> bool:
        """Whether `unit` has a slot."""
        return self._slots[unit % self.slot_count][UNIT] == unit + 1

    def pid_of(self, cursor: int) -> int:
        """The PID of the process of a cursor; 0 if the cursor has no process."""
        owner = self.cursors[cursor].words[OWNER]
        return self.processes[owner - 1].get("pid") if owner else 0

    # --- blame ---

    def maker(self, unit: int) -> int:
        """The PID of a living process that is making a part of `unit`; 0 if there is none."""
        slot = self._slots[unit % self.slot_count]
        for index in self._part_words if slot[UNIT] == unit + 1 else ():
            owner = slot[index]
            if 0 < owner < DONE and self.memory.lives(owner % JOINED - 1):
                pid = self.processes[owner % JOINED - 1].get("pid")
                fence()
                if slot[index] == owner:  # otherwise another process may have taken the place
                    return pid
        return 0

    def maker_of_part(self, unit: int, part: int) -> int:
        """The place of the process that claimed or made `part` of `unit`; -1 if another host makes it."""
        return self._slots[unit % self.slot_count][PARTS + part] % JOINED - 1

    def slowest(self, unit: int) -> int:
        """The cursor that still holds the slot of `unit`; -1 if there is none."""
        places = enumerate(self.cursors[: self.header.words[CURSOR_PLACES]])
        positions = [
            (record.words[POSITION], cursor) for cursor, record in places if record.words[STATE] == HOLDS
        ]
        position, cursor = min(positions, default=(0, -1))
        return cursor if position <= unit - self.slot_count else -1

    def blocker(self, unit: int) -> Blocker:
        """The reason why `unit` has not been made."""
        if holder := self._halted_holder():
            return Blocker("lock", holder)
        if pid := self.maker(unit):
            return Blocker("maker", pid)
        cursor = self.slowest(unit)
        if cursor >= 0:
            return Blocker("cursor", self.pid_of(cursor), cursor)
        return Blocker("none")

    def _halted_holder(self) -> int:
        """The PID of a process that holds the lock and does not run; 0 if there is none."""
        holder = self.memory.lock_holder()
        if not holder:
            return 0
        from commplan.recorder.processes import process_state  # noqa: PLC0415  the lock is free nearly always

        return holder if process_state(holder) != "alive" else 0

    def awaited(self, unit: int) -> tuple[list[int], list[int]]:
        """The places of the processes of a group that block `unit`.

        Returns:
            The places of processes that must make a part of `unit`, with -1 for a part that any process may
            make; and the places of those that must take the previous unit in its slot. If the holder of the
            lock does not run, the first list contains only its place, because no other process can claim a
            part.
        """
        if holder := self._halted_holder():
            places = (place for place, record in enumerate(self.processes) if record.get("pid") == holder)
            if (place := next(places, -1)) >= 0:
                return [place], []
        slot, makers = self._slots[unit % self.slot_count], self.eligible()
        if slot[UNIT] != unit + 1:  # the unit is not open
            cursors = (record.words for record in self.cursors)
            slow = [
                words[OWNER] - 1
                for words in cursors
                if words[STATE] == HOLDS and words[OWNER] and words[POSITION] <= unit - self.slot_count
            ]
            undone = [] if slow else [Claim(unit, part) for part in range(self.parts)]
            return [self._maker_of(claim, makers) for claim in undone if makers], slow
        fence()  # the parts must be read after the unit
        owners = [(Claim(unit, part), slot[index]) for part, index in enumerate(self._part_words)]
        waits = [(claim, owner) for claim, owner in owners if owner < DONE]
        return [owner % JOINED - 1 if owner else self._maker_of(claim, makers) for claim, owner in waits], []
