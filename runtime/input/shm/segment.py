"""The shared memory of a group, and a lock for each of its processes."""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import os
import struct
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, NoReturn

import numpy as np

from commplan import io
from commplan.diagnostics import Span, fail
from commplan.runtime.input.ring import meeting
from commplan.runtime.input.shm import futex
from commplan.runtime.input.shm.locks import is_locked, lock_byte, lock_holder
from commplan.runtime.input.shm.slots import Root, mapped, owner_of

_MAGIC = b"commplan"
_VERSION = 4
KIND = "group"  # in the name of its memory
SEAL_AT = 64  # a word: 1 once all processes have joined
_REFUSED_AT = 68  # a word: a process that differs from the first one, and in which facts, as bits
_FIRST_AT = 72  # a word: the process that created it
_FACTS_AT, _EACH_FACT = 512, 8  # bytes of a digest of each: a word


class Blame(NamedTuple):
    """The subject of errors. line: the statement of the plan."""

    line: str
    span: Span
    file: str

    def fail(self, code: str, message: str, *notes: str) -> NoReturn:
        fail(code, message, f"the line: {self.line}", *notes, span=self.span, file=self.file)


@dataclass(eq=False)
class Segment:
    """The memory, open in this process. data: its first bytes, mapped; the words that processes wait for.

    Locks are fcntl's record locks, one byte each: the kernel releases them with the process, whatever its
    container. A process locks its own byte to be seen alive.
    """

    opened: ClassVar[weakref.WeakSet[Segment]] = weakref.WeakSet()  # in this process
    data: Root
    descriptor: int
    key: tuple[int, int]
    _words: dict[int, ctypes.c_uint32] = field(default_factory=dict[int, ctypes.c_uint32])

    def __post_init__(self) -> None:
        Segment.opened.add(self)

    def word(self, offset: int) -> ctypes.c_uint32:
        if offset not in self._words:
            self._words[offset] = ctypes.c_uint32.from_buffer(self.data, offset)
        return self._words[offset]

    def owned(self, process: int) -> bool:
        """Whether the process that joined as `process` lives. The kernel does not report one's own lock."""
        return self.descriptor >= 0 and is_locked(self.descriptor, 1 + process)

    def holder(self, process: int) -> int:
        """The PID of the process that joined as `process`; 0 if the kernel does not say."""
        if self.descriptor < 0:
            return 0
        return lock_holder(self.descriptor, 1 + process)

    def lock(self, byte: int) -> bool:
        """Lock `byte` until this process ends or closes the segment; False if another process has it."""
        return self.descriptor >= 0 and lock_byte(self.descriptor, byte)

    def sealed(self) -> bool:
        """Whether all processes have joined."""
        return bool(self.word(SEAL_AT).value)

    def seal(self) -> None:
        self.word(SEAL_AT).value = 1
        futex.wake(self.word(SEAL_AT))

    def close(self) -> None:
        """Release the locks. The memory lives as long as an array shows it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


@dataclass(frozen=True)
class Wanted:
    """The segment at which `count` processes of one host meet.

    nbytes: of the memory, of which the first `control` are mapped at once. facts: all processes must agree on
    them, 12 at most, the plan first; by their names in messages.
    """

    name: str
    count: int
    nbytes: int
    control: int
    facts: Mapping[str, object]
    blame: Blame


def opened(wanted: Wanted, index: int) -> Segment:
    """Join the segment as process `index`, or create it if no other process has.

    Raises:
        CommplanError: CP0921 if there is another process `index`; CP0922 if facts differ; CP0923 if there is
            not enough memory; CP0928 if another process is stopped while it joins.
    """
    with meeting.meeting():
        for candidate in meeting.found(wanted.name, KIND):
            own = next((s for s in Segment.opened if s.key == candidate.key and s.descriptor >= 0), None)
            if own is not None and not own.sealed():  # to open and close it again would release its locks
                _refuse_second(wanted, index)
            segment = _joined(wanted, candidate, index) if own is None else None
            if segment is not None:
                return segment
        return _created(wanted, index)


def _created(wanted: Wanted, index: int) -> Segment:
    try:
        descriptor = meeting.fresh(wanted.name, wanted.nbytes, KIND)
    except OSError as error:
        wanted.blame.fail(
            "CP0923",
            f"{wanted.nbytes} bytes of shared memory cannot be had: {error.strerror}",
            "make the batch or `prefetch` smaller, or share `via duplicate`",
        )
    status = os.fstat(descriptor)
    data = _mapped(descriptor, wanted.control)
    header = _MAGIC + struct.pack("<II", _VERSION, 0)
    data[: len(header)] = header
    facts = _digests(wanted.facts)
    data[_FACTS_AT : _FACTS_AT + len(facts)] = facts
    segment = Segment(data, descriptor, (status.st_dev, status.st_ino))
    segment.word(_FIRST_AT).value = index
    segment.lock(1 + index)
    return segment


def _mapped(descriptor: int, nbytes: int) -> Root:
    """The first bytes of a segment. Python's `mmap` would keep a second descriptor open."""
    return owner_of(mapped(nbytes, mmap.MAP_SHARED, descriptor, 0), nbytes)


def _joined(wanted: Wanted, candidate: meeting.Found, index: int) -> Segment | None:
    """The segment in the file of `candidate`; None if its processes have met already, or all have died."""
    try:
        descriptor = io.open_file(candidate.path, os.O_RDWR)
    except OSError:
        return None
    keep = False
    try:
        status = os.fstat(descriptor)
        head = os.pread(descriptor, mmap.PAGESIZE, 0)
        if (status.st_dev, status.st_ino) != candidate.key or len(head) < mmap.PAGESIZE:
            return None
        if head[:8] != _MAGIC or int.from_bytes(head[SEAL_AT : SEAL_AT + 4], "little"):
            return None
        if not any(is_locked(descriptor, 1 + process) for process in range(wanted.count)):
            return None
        unlike = _unlike(head, wanted.facts)
        if unlike:
            os.pwrite(descriptor, struct.pack("<I", unlike << 20 | index + 1), _REFUSED_AT)
            first = int.from_bytes(head[_FIRST_AT : _FIRST_AT + 4], "little")
            wanted.blame.fail("CP0922", *_differences(wanted, index, first, unlike))
        if not lock_byte(descriptor, 1 + index):
            _refuse_second(wanted, index)
        keep = True
        return Segment(_mapped(descriptor, wanted.control), descriptor, candidate.key)
    finally:
        if not keep:
            os.close(descriptor)


def _refuse_second(wanted: Wanted, index: int) -> NoReturn:
    wanted.blame.fail(
        "CP0921", f"another process {index} of this run is there", "give every run an id of its own"
    )


def _digests(facts: Mapping[str, object]) -> bytes:
    """One behind the other."""
    return b"".join(hashlib.sha256(repr(fact).encode()).digest()[:_EACH_FACT] for fact in facts.values())


def _unlike(head: bytes, facts: Mapping[str, object]) -> int:
    """The `facts` that differ from those in the header of a segment, a bit for each."""
    mine = np.frombuffer(_digests(facts), np.uint64)
    theirs = np.frombuffer(head, np.uint64, len(mine), _FACTS_AT)
    return sum(1 << place for place in np.flatnonzero(mine != theirs).tolist())


def _differences(wanted: Wanted, process: int, first: int, unlike: int) -> tuple[str, ...]:
    """Message and notes if `process` has other facts than `first`."""
    names = [name for place, name in enumerate(wanted.facts) if unlike >> place & 1]
    differ = names[:1] if unlike & 1 else names  # under another plan everything else may differ, too
    fix = (
        "all processes of a group run the same plan, phase, batch and place in the order, with the same "
        "sources, and hold the same indices of every axis that is not shared over"
    )
    message = f"process {process} is not doing the same as process {first}"
    return message, f"what differs: {', '.join(differ)}", fix


def refused(memory: Segment, wanted: Wanted) -> None:
    """Raise CP0922 if a process has found that it differs from the first one, and does not join."""
    word = memory.word(_REFUSED_AT).value
    if word:
        first = memory.word(_FIRST_AT).value
        wanted.blame.fail("CP0922", *_differences(wanted, (word & 0xFFFFF) - 1, first, word >> 20))


os.register_at_fork(after_in_child=Segment.opened.clear)
