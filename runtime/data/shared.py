"""Batches between the processes of one host: each makes its part, all read the whole.

A group of processes maps one file of memory (`/dev/shm`), which holds a few slots. Process i fills its
part of batch q in slot q modulo the number of slots, once everyone has let go of batch q - slots, and
reads the slot once everyone has filled it. Two counters per process carry all of that: `filled` (batches
0..filled-1 are filled) and `taken`. Each is written by one process and waited for with a futex.

As soon as all have joined, the file's name is removed: whatever dies later, nothing stays behind. A
process that dies is noticed by its lock on one byte of the file (fcntl record locks: the kernel lets go of
them with the process, and they know nothing of process ids or containers).
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from commplan.diagnostics import CommplanError, Diagnostic, Note, Span, fail
from commplan.ir.plan import Ref
from commplan.ir.schedule import Share
from commplan.ir.types import ArrayType
from commplan.runtime.data import futex, segment
from commplan.runtime.data.group import Group as Group
from commplan.runtime.data.group import group as group
from commplan.runtime.data.layout import Array, rounded
from commplan.runtime.data.making import validity
from commplan.runtime.data.program import HostProgram
from commplan.runtime.data.records import numpy_dtype
from commplan.runtime.data.usage import Meter

LOOK_S = 0.25  # how often a waiting process looks whether its peers live
_PAGE = 4096
_CONTROL = 256  # bytes per process: filled, taken, presence, on cache lines of their own
_NOTE = 4096  # bytes per process and slot: what it says about its part
_ABSENT, _JOINED, _LEFT = 0, 1, 2


@dataclass(frozen=True)
class _Room:
    """Where one array lies in a slot."""

    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def _rooms(program: HostProgram, count: int) -> tuple[dict[Ref, _Room], int]:
    """The arrays of a slot, each aligned to 64 bytes, and the slot's size in bytes."""
    rooms: dict[Ref, _Room] = {}
    offset = count * _NOTE
    for flow in program.flows:
        if not flow.moved:
            continue
        rows = len(program.rows(flow, flow.batch))
        wanted: list[tuple[Ref, tuple[int, ...], np.dtype[Any]]] = [
            (validity(flow), (len(program.variants(flow.per)), rows), np.dtype(np.uint8))
        ]
        for ref in flow.moved:
            element = program.elements[ref]
            if isinstance(element, ArrayType):
                shape = (len(program.variants(program.copies[ref])), rows, *element.shape)
                wanted.append((ref, shape, numpy_dtype(element.dtype)))
        for ref, shape, dtype in wanted:
            rooms[ref] = _Room(offset, shape, dtype)
            offset += rounded(int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
    return rooms, rounded(offset, _PAGE)


class _Note(msgspec.Struct, frozen=True):
    """What a process says about its part of a batch."""

    epoch: int
    step: int
    errors: tuple[Diagnostic, ...] = ()
    other: str = ""


@dataclass
class SharedRing:
    """This process's side of the slots. Errors: CP0920 a peer died or left, CP0921 a peer is missing or
    silent, CP0922 the peers are not doing the same; and a peer's own error, as it was."""

    group: Group
    memory: segment.Segment
    rooms: Mapping[Ref, _Room]
    slot_nbytes: int
    slots: int
    blame: tuple[str, Span, str]  # what the plan says there, its place, and the file
    key: str
    meter: Meter
    _stopped: bool = False
    _left: bool = False
    _filled: set[int] = field(default_factory=set[int])
    _taken: set[int] = field(default_factory=set[int])
    _places: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def index(self) -> int:
        return self.group.index

    @property
    def count(self) -> int:
        return self.group.count

    def _word(self, process: int, name: str) -> ctypes.c_uint32:
        at = _PAGE + process * _CONTROL + {"filled": 0, "taken": 64, "presence": 128}[name]
        return self.memory.word(at)

    def _slot(self, number: int) -> int:
        return _slots_at(self.count) + number % self.slots * self.slot_nbytes

    def in_use(self) -> tuple[int, int]:
        """The slots, and how many of them hold a batch that somebody fills, has filled or still reads."""
        with self._lock:
            if self._left:
                return self.slots, 0
            filled = [self._word(process, "filled").value for process in range(self.count)]
            taken = [self._word(process, "taken").value for process in range(self.count)]
        return self.slots, min(max(filled) - min(taken), self.slots)

    # --- coming ---

    def meet(self) -> None:
        """Wait until all have joined; then the name of the file goes."""
        with self.meter.waiting(self.key):
            self._word(self.index, "presence").value = _JOINED
            futex.wake(self._word(self.index, "presence"))
            for process in range(self.count):
                self._await(process, "presence", lambda seen: seen != _ABSENT, joining=True)
            if self.index == 0:
                self.memory.unlink()
                self.memory.seal()
            else:
                self._await_seal()

    def _await_seal(self) -> None:
        word = self.memory.word(segment.SEAL_AT)
        until = time.monotonic() + self.group.timeout
        while not (seen := word.value):
            futex.wait(word, seen, LOOK_S)
            if not self.memory.owned(0) or time.monotonic() > until:
                self._lost(0, "died or gave up while the group was forming")

    # --- waiting, see `ring.Peers` ---

    def writable(self, number: int) -> bool:
        with self.meter.waiting(self.key, idle=True):
            return all(
                self._await(process, "taken", lambda seen: seen > number - self.slots)
                for process in range(self.count)
            )

    def readable(self, number: int) -> bool:
        with self.meter.waiting(self.key):
            if not all(
                self._await(process, "filled", lambda seen: seen > number) for process in range(self.count)
            ):
                return False
        with self._lock:
            mine = self._places.pop(number)
        for process in range(self.count):
            self._hear(number, process, mine)
        return True

    def _await(
        self, process: int, name: str, enough: Callable[[int], bool], *, joining: bool = False
    ) -> bool:
        """Wait for a peer's counter; False once stopped."""
        word = self._word(process, name)
        until = time.monotonic() + self.group.timeout
        while not self._stopped:
            seen = word.value
            if enough(seen):
                with self._lock:  # a fence: what the peer wrote before its counter is read after it
                    return True
            if process != self.index:
                self._look_after(process, word, enough, joining=joining, late=time.monotonic() > until)
            futex.wait(word, seen, LOOK_S)
        return False

    def _look_after(
        self, process: int, word: ctypes.c_uint32, enough: Callable[[int], bool], *, joining: bool, late: bool
    ) -> None:
        """Raise where waiting for `process` is in vain. Its counter is read again after its presence: a peer
        that finished its part and then left has done its duty."""
        presence = self._word(process, "presence").value
        if presence == _LEFT and not enough(word.value):
            self._lost(process, "left: its batches were closed before the epoch's end")
        if presence == _JOINED and not self.memory.owned(process) and not enough(word.value):
            self._lost(process, "died")
        if late and joining:
            self._fail(
                "CP0921", f"process {process} of {self.count} did not come within {self.group.timeout:g} s"
            )
        if late:
            self._fail(
                "CP0921",
                f"process {process} of {self.count} lives, but was silent for {self.group.timeout:g} s",
            )

    def _lost(self, process: int, how: str) -> None:
        self._fail("CP0920", f"process {process} of {self.count} {how}")

    def _fail(self, code: str, message: str) -> None:
        what, span, file = self.blame
        fail(
            code,
            f"{message}; line {span.line} waits for its part of each batch",
            f"the line: {what}",
            f"this is process {self.index} of run {self.group.run_id!r}",
            span=span,
            file=file,
        )

    def _hear(self, number: int, process: int, mine: tuple[int, int]) -> None:
        """Read a peer's note on its part of batch `number`."""
        at = self._slot(number) + process * _NOTE
        length = int.from_bytes(self.memory.data[at : at + 4], "little")
        note = msgspec.json.decode(self.memory.data[at + 4 : at + 4 + length], type=_Note)
        if note.errors:
            remark = Note(f"raised in process {process} of {self.count}")
            raise CommplanError(*(msgspec.structs.replace(d, notes=(*d.notes, remark)) for d in note.errors))
        if note.other:
            self._lost(process, f"stopped: {note.other}")
        if (note.epoch, note.step) != mine:
            self._fail(
                "CP0922",
                f"process {process} of {self.count} stands at epoch {note.epoch}, step {note.step}, "
                f"this one at epoch {mine[0]}, step {mine[1]}",
            )

    # --- doing, see `making.Exchange` ---

    def arrays(self, number: int) -> dict[Ref, Array]:
        base = self._slot(number)
        return {
            ref: np.ndarray(room.shape, room.dtype, self.memory.data, base + room.offset)
            for ref, room in self.rooms.items()
        }

    def publish(self, number: int, epoch: int, step: int, error: BaseException | None) -> None:
        """Say that this process's part of batch `number` is there, or what went wrong with it."""
        at = self._slot(number) + self.index * _NOTE
        data = _encoded(epoch, step, error)
        self.memory.data[at + 4 : at + 4 + len(data)] = data
        self.memory.data[at : at + 4] = len(data).to_bytes(4, "little")
        with self._lock:
            self._places[number] = (epoch, step)
            self._filled.add(number)
            self._advance("filled", self._filled)

    def taken(self, number: int) -> None:
        with self._lock:
            self._taken.add(number)
            self._advance("taken", self._taken)

    def _advance(self, name: str, finished: set[int]) -> None:
        """Move a counter over all that is finished without a gap (the lock is held: a fence, too)."""
        word = self._word(self.index, name)
        at = start = word.value
        while at in finished:
            finished.remove(at)
            at += 1
        if at > start:
            word.value = at
            futex.wake(word)

    # --- going ---

    def stop(self) -> None:
        """Make the waits of this process return."""
        self._stopped = True
        for process in range(self.count):
            for name in ("filled", "taken", "presence"):
                futex.wake(self._word(process, name))

    def leave(self) -> None:
        """Tell the peers, and let go of the memory."""
        with self._lock:
            self._left = True
        self._word(self.index, "presence").value = _LEFT
        for name in ("presence", "filled", "taken"):
            futex.wake(self._word(self.index, name))
        if self.index == 0:
            self.memory.unlink()
        self.memory.close()


def _slots_at(count: int) -> int:
    return rounded(_PAGE + count * _CONTROL, _PAGE)


def _encoded(epoch: int, step: int, error: BaseException | None) -> bytes:
    """A note, cut down until it fits."""
    room = _NOTE - 4
    if error is None:
        return msgspec.json.encode(_Note(epoch, step))
    if isinstance(error, CommplanError):
        data = msgspec.json.encode(_Note(epoch, step, error.diagnostics))
        if len(data) <= room:
            return data
        first = error.diagnostics[0]
        short = Diagnostic(first.code, first.message[:500], first.span)
        return msgspec.json.encode(_Note(epoch, step, (short,)))
    return msgspec.json.encode(_Note(epoch, step, other=f"{type(error).__name__}: {error}"[:500]))


def join(
    group: Group, program: HostProgram, at: tuple[int, int, int], *, slots: int, meter: Meter
) -> SharedRing:
    """Meet the other processes of `group` and map the slots for what travels in `program`.

    at: epoch, step and order that the first batch stands at, the same in all. Errors: CP0920 to CP0923.
    """
    schedule, phase = program.schedule, program.phase
    share = next(
        op
        for flow in program.flows
        if flow.moved
        for op in flow.before
        if isinstance(op, Share) and op.design == "all_shared"
    )
    rooms, slot_nbytes = _rooms(program, group.count)
    over = {axis for f in program.flows for op in f.before if isinstance(op, Share) for axis in op.over}
    alike = {axis: indices for axis, indices in program.local.items() if axis not in over}
    facts = (schedule.plan_digest, phase.name, at, slots, slot_nbytes, group.count, sorted(alike.items()))
    digest = schedule.plan_digest[:12] or hashlib.sha256(schedule.plan.encode()).hexdigest()[:12]
    blame = (f"share {share.result.rpartition('.')[0]} via all_shared", share.span, schedule.file)
    memory = segment.opened(
        group.folder,
        f"commplan-{os.getuid()}-{digest}-",
        f"{group.run_id}-{phase.name}",
        group.index,
        _slots_at(group.count) + slots * slot_nbytes,
        hashlib.sha256(repr(facts).encode()).digest(),
        group.timeout,
        blame,
    )
    ring = SharedRing(group, memory, rooms, slot_nbytes, slots, blame, share.result, meter)
    try:
        ring.meet()
    except BaseException:
        ring.leave()
        raise
    return ring
