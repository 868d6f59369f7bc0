"""A file of shared memory with an owner's lock per process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import mmap
import os
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np

from commplan import io
from commplan.diagnostics import Span, fail
from commplan.runtime.input.observe import wait_log
from commplan.runtime.input.observe.wait_log import LOG, WaitReporter
from commplan.runtime.input.shm import futex
from commplan.runtime.input.shm.arena import allocate
from commplan.runtime.input.shm.locks import is_locked, lock_byte, lock_holder
from commplan.wait import Wait, until

_MAGIC = b"commplan"
_VERSION = 3
SEAL_AT = 64  # a word: 1 once all have joined and the name is gone
_REFUSED_AT = 68  # a word: the process that will not join, and the facts that it has otherwise, as bits
_FACTS_AT, _EACH_FACT = 512, 8  # bytes of a digest of each: a word
_REFUSED = ".refused"  # ends the name of an empty file, before an error number: the maker has no memory
_MAKER = 0  # the byte that the maker locks while the file has a name; every process locks another one
_POLL_S = 0.01  # seconds between looks for a file that another process will make


class Blame(NamedTuple):
    """Whom to name in errors. line: what the plan says there."""

    line: str
    span: Span
    file: str

    def fail(self, code: str, message: str, *notes: str) -> NoReturn:
        fail(code, message, f"the line: {self.line}", *notes, span=self.span, file=self.file)


# Names that this process has made or found, until they are removed: it must not take them for a dead maker's,
# for of its own locks the kernel says nothing, and closing any descriptor of a file lets go of them.
_MINE: set[Path] = set()
_REFUSALS: dict[Path, int] = {}  # marks of this process that there is no memory, with their descriptors


@dataclass
class Segment:
    """The file. data: its first bytes, mapped; what one waits for with `futex` lies there.

    Locks are fcntl's record locks, one byte each: the kernel lets go of them with the process, and they know
    nothing of process ids or containers. A process locks its own byte to be seen alive.
    """

    data: mmap.mmap
    path: Path
    descriptor: int
    _words: dict[int, ctypes.c_uint32] = field(default_factory=dict[int, ctypes.c_uint32])

    def word(self, offset: int) -> ctypes.c_uint32:
        if offset not in self._words:
            self._words[offset] = ctypes.c_uint32.from_buffer(self.data, offset)
        return self._words[offset]

    def owned(self, process: int) -> bool:
        """Whether the process that joined as `process` lives. Of one's own lock the kernel says nothing."""
        return self.locked(1 + process)

    def holder(self, process: int) -> int:
        """The number of the system's process that joined as `process`; 0 where the kernel does not say."""
        if self.descriptor < 0:
            return 0
        return lock_holder(self.descriptor, 1 + process)

    def maker_lives(self) -> bool:
        """Asked by the others."""
        return self.locked(_MAKER)

    def locked(self, byte: int) -> bool:
        """Whether another process holds the lock on `byte`."""
        return self.descriptor >= 0 and is_locked(self.descriptor, byte)

    def lock(self, byte: int) -> bool:
        """Lock `byte` until this process ends or closes the segment; False where another process has it."""
        return self.descriptor >= 0 and lock_byte(self.descriptor, byte)

    def sealed(self) -> bool:
        """Whether all have joined."""
        return bool(self.word(SEAL_AT).value)

    def seal(self) -> None:
        self.word(SEAL_AT).value = 1
        futex.wake(self.word(SEAL_AT))

    def unlink(self) -> None:
        """Remove the name, if it still is this file's."""
        with contextlib.suppress(OSError):
            if os.path.samestat(self.path.stat(), os.fstat(self.descriptor)):
                self.path.unlink()
        _MINE.discard(self.path)

    def close(self) -> None:
        """Let go of the locks. The memory goes with the last array that shows it."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
            _MINE.discard(self.path)


@dataclass(frozen=True)
class Wanted:
    """A segment that processes of one host meet at.

    prefix: of its name, that of one user and one plan. maker: the process that makes it. nbytes: of the file,
    of which the first `control` are mapped at once. facts: what all processes must agree on, by what to call
    it, 12 at most; the first is the plan, whose digest stands in the prefix.
    """

    folder: Path
    prefix: str
    name: str
    maker: int
    nbytes: int
    control: int
    facts: Mapping[str, object]
    timeout: float
    blame: Blame


def opened(wanted: Wanted, index: int) -> Segment:
    """Make (the maker) or find (the others) the segment, and lock the byte of process `index`.

    What dead makers left under the prefix is removed first. Errors: CP0921 the other process does not come,
    or the name is in use; CP0922 facts differ; CP0923 no memory.
    """
    path = wanted.folder / f"{wanted.prefix}{wanted.name}"
    if index == wanted.maker:
        _forget_refusals(path)
        clean(wanted.folder, wanted.prefix)
    new = path not in _MINE
    _MINE.add(path)
    try:
        return _made(wanted, path, index) if index == wanted.maker else _awaited(wanted, path, index)
    except BaseException:
        if new:
            _MINE.discard(path)
        raise


def clean(folder: Path, prefix: str) -> list[Path]:
    """Remove the segments under `prefix` whose maker is dead; returns their paths."""
    removed: list[Path] = []
    for path in sorted(set(folder.glob(f"{prefix}*")) - _MINE - _REFUSALS.keys()):
        try:
            descriptor = io.open_file(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            if os.fstat(descriptor).st_uid == os.getuid() and not is_locked(descriptor, _MAKER):
                path.unlink(missing_ok=True)
                removed.append(path)
        finally:
            os.close(descriptor)
    return removed


def _family(prefix: str) -> str:
    """What matches the names of one user's segments, whatever their plan is."""
    user, _, plan = prefix.rstrip("-").rpartition("-")
    return f"{user}-{'?' * len(plan)}-"


def _digests(facts: Mapping[str, object]) -> bytes:
    """One behind the other."""
    return b"".join(hashlib.sha256(repr(fact).encode()).digest()[:_EACH_FACT] for fact in facts.values())


def _unlike(head: bytes, facts: Mapping[str, object]) -> int:
    """Which of `facts` the maker of a segment has otherwise, a bit for each."""
    mine = np.frombuffer(_digests(facts), np.uint64)
    theirs = np.frombuffer(head, np.uint64, len(mine), _FACTS_AT)
    return sum(1 << place for place in np.flatnonzero(mine != theirs).tolist())


def _told_apart(wanted: Wanted, process: int, unlike: int) -> tuple[str, ...]:
    """Message and notes where `process` has other facts than the maker."""
    names = [name for place, name in enumerate(wanted.facts) if unlike >> place & 1]
    differ = names[:1] if unlike & 1 else names  # under another plan everything else may differ, too
    fix = (
        "all processes of a group run the same plan, phase, batch and place in the order, with the same "
        "sources, and hold the same indices of every axis that is not shared over"
    )
    message = f"process {process} is not doing the same as process {wanted.maker}"
    return message, f"what differs: {', '.join(differ)}", fix


def refused(memory: Segment, wanted: Wanted) -> None:
    """Raise CP0922 where a process found that it does not do the same as the maker, and will not come."""
    word = memory.word(_REFUSED_AT).value
    if word:
        wanted.blame.fail("CP0922", *_told_apart(wanted, (word & 0xFFFFF) - 1, word >> 20))


def _made(wanted: Wanted, path: Path, index: int) -> Segment:
    descriptor, blame = -1, wanted.blame
    try:
        descriptor = _nameless(path)
        allocate(descriptor, 0, wanted.nbytes)
        lock_byte(descriptor, _MAKER)
        lock_byte(descriptor, 1 + index)
        data = mmap.mmap(descriptor, wanted.control)
        header = _MAGIC + struct.pack("<II", _VERSION, 0)
        data[: len(header)] = header
        facts = _digests(wanted.facts)
        data[_FACTS_AT : _FACTS_AT + len(facts)] = facts
        _name(descriptor, path)
    except OSError as error:
        if descriptor >= 0:
            if os.fstat(descriptor).st_nlink:  # it was made with its name, and nobody must find it
                path.unlink(missing_ok=True)
            os.close(descriptor)
        if isinstance(error, FileExistsError):
            blame.fail(
                "CP0921",
                "another run with the same run id is going on",
                f"its memory: {path.name}",
                "give every run an id of its own",
            )
        _refuse_memory(wanted, path, error.errno or 0, tells=True)
    return Segment(data, path, descriptor)


def _refuse_memory(wanted: Wanted, path: Path, number: int, *, tells: bool = False) -> NoReturn:
    """Raise CP0923. number: of the operating system's error. tells: leave an empty file with that number in
    its name, for the processes that come later. It is valid while this process is alive (under MPI it
    waits for the others when it ends), and the next run of the plan removes it."""
    if tells:
        marker = path.with_name(f"{path.name}{_REFUSED}{number}")
        with contextlib.suppress(OSError):
            descriptor = io.open_file(marker, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW)
            lock_byte(descriptor, _MAKER)
            _REFUSALS[marker] = descriptor
    reason = "there is not enough of it" if number == errno.ENOSPC else os.strerror(number)
    wanted.blame.fail(
        "CP0923",
        f"{wanted.nbytes} bytes of shared memory cannot be had in {str(path.parent)!r}: {reason}",
        "make it larger, make the batch or `prefetch` smaller, or share `via duplicate`",
    )


def _forget_refusals(path: Path) -> None:
    """The maker of the segment at `path` tries again."""
    for marker in [marker for marker in _REFUSALS if marker.name.startswith(f"{path.name}{_REFUSED}")]:
        os.close(_REFUSALS.pop(marker))
        marker.unlink(missing_ok=True)


def _is_valid(marker: Path) -> bool:
    """Whether the process that left `marker` is alive."""
    if marker in _REFUSALS:
        return True
    try:
        descriptor = io.open_file(marker, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        return is_locked(descriptor, _MAKER)
    finally:
        os.close(descriptor)


def _nameless(path: Path) -> int:
    """A file that has no name yet, so that nobody finds it half made; a named one where that is not known."""
    flag = getattr(os, "O_TMPFILE", 0)
    if flag:
        with contextlib.suppress(OSError):
            return io.open_file(path.parent, flag | os.O_RDWR)
    return io.open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def _name(descriptor: int, path: Path) -> None:
    if os.fstat(descriptor).st_nlink == 0:
        # Python follows the link only where it is given a folder's descriptor, which the path needs not.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)


def _awaited(wanted: Wanted, path: Path, index: int) -> Segment:
    lasting = WaitReporter(wait_log.START_S)

    def attempt(seconds: float) -> Segment | None:
        segment = _try(wanted, path, index)
        if segment is None:
            for marker in filter(_is_valid, path.parent.glob(f"{path.name}{_REFUSED}*")):
                _refuse_memory(wanted, path, int(marker.name.rpartition(_REFUSED)[2]))
            for other in path.parent.glob(f"{_family(wanted.prefix)}{wanted.name}"):
                if other != path:
                    _try(wanted, other, index)
            time.sleep(min(seconds, _POLL_S))
        return segment

    def look(waited: float) -> None:
        if lasting.due(waited):
            LOG.warning("process %d has waited %.0f s for process %d to begin", index, waited, wanted.maker)

    def late(_: float) -> NoReturn:
        message = f"process {wanted.maker} did not make the shared memory within {wanted.timeout:g} s"
        wanted.blame.fail("CP0921", message)

    return until(attempt, Wait(wanted.timeout, late, look))


def _try(wanted: Wanted, path: Path, index: int) -> Segment | None:
    """The segment, or None where it is not there yet, or is an earlier one that is going away."""
    try:
        descriptor = io.open_file(path, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return None
    keep = False
    try:
        status = os.fstat(descriptor)
        if (
            status.st_uid != os.getuid()
            or status.st_size < max(mmap.PAGESIZE, wanted.control)
            or not is_locked(descriptor, _MAKER)
        ):
            return None
        head = os.pread(descriptor, mmap.PAGESIZE, 0)
        if head[:8] != _MAGIC or int.from_bytes(head[SEAL_AT : SEAL_AT + 4], "little"):
            return None
        unlike = _unlike(head, wanted.facts)
        if unlike:
            os.pwrite(descriptor, struct.pack("<I", unlike << 20 | index + 1), _REFUSED_AT)
            wanted.blame.fail("CP0922", *_told_apart(wanted, index, unlike))
        if not lock_byte(descriptor, 1 + index):
            wanted.blame.fail("CP0921", f"there is another process {index} in this run")
        data = mmap.mmap(descriptor, wanted.control)
        keep = True
        return Segment(data, path, descriptor)
    finally:
        if not keep:
            os.close(descriptor)
