"""A file of shared memory with an owner's lock per process."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import struct
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from commplan.diagnostics import Span, fail
from commplan.runtime.data import futex

_MAGIC = b"commplan"
_VERSION = 1
_DIGEST_AT = 16  # 32 bytes
SEAL_AT = 64  # a word: 1 once all have joined and the name is gone
_POLL_FIRST, _POLL_MOST = 0.001, 0.05  # seconds between looks for a file that another process will make

# struct flock of fcntl(2): type, whence, start, length, process
_LINUX = sys.platform.startswith("linux")
_FLOCK = "hhqqi" if _LINUX else "qqihh"

Blame = tuple[str, Span, str]

# Names that this process has made and not yet removed: it must not take them for a dead owner's, for of
# its own locks the kernel says nothing, and closing any descriptor of a file lets go of them.
_MINE: set[Path] = set()


def default_folder() -> Path:
    """Memory where there is a file system of it."""
    memory = Path("/dev/shm")
    return memory if memory.is_dir() and os.access(memory, os.W_OK) else Path(tempfile.gettempdir())


@dataclass
class Segment:
    """The mapped file. data: all of it. One word of it may be waited for with `futex`."""

    data: mmap.mmap
    path: Path
    _descriptor: int
    _words: dict[int, ctypes.c_uint32] = field(default_factory=dict[int, ctypes.c_uint32])

    def word(self, offset: int) -> ctypes.c_uint32:
        if offset not in self._words:
            self._words[offset] = ctypes.c_uint32.from_buffer(self.data, offset)
        return self._words[offset]

    def owned(self, process: int) -> bool:
        """Whether the process that joined as `process` lives. Of one's own lock the kernel says nothing."""
        return _is_locked(self._descriptor, process)

    def seal(self) -> None:
        self.word(SEAL_AT).value = 1
        futex.wake(self.word(SEAL_AT))

    def unlink(self) -> None:
        """Remove the name, if it still is this file's."""
        with contextlib.suppress(OSError):
            if os.path.samestat(self.path.stat(), os.fstat(self._descriptor)):
                self.path.unlink()
        _MINE.discard(self.path)

    def close(self) -> None:
        """Let go of the lock. The memory goes with the last array that shows it."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _flock(kind: int, byte: int) -> bytes:
    if _LINUX:
        return struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0)
    return struct.pack(_FLOCK, byte, 1, 0, kind, os.SEEK_SET)


def _is_locked(descriptor: int, byte: int) -> bool:
    """Whether another process holds the lock on `byte`."""
    answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, _flock(fcntl.F_WRLCK, byte))
    return struct.unpack(_FLOCK, answer)[0 if _LINUX else 3] != fcntl.F_UNLCK


def _lock(descriptor: int, byte: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, byte)
    except OSError:
        return False
    return True


def opened(
    folder: Path,
    prefix: str,
    name: str,
    index: int,
    nbytes: int,
    digest: bytes,
    timeout: float,
    blame: Blame,
) -> Segment:
    """Make (process 0) or find (the others) the segment `prefix` + `name`, and lock byte `index` of it.

    What dead owners left under `prefix` (one user and one plan) is removed first. digest: 32 bytes that
    all processes must agree on. Errors: CP0921 the other process does not come, or the name is in use;
    CP0922 digests differ; CP0923 no memory.
    """
    path = folder / f"{prefix}{name}"
    if index == 0:
        clean(folder, prefix)
        return _made(path, nbytes, digest, blame)
    return _found(path, index, digest, timeout, blame)


def clean(folder: Path, prefix: str) -> list[Path]:
    """Remove the segments under `prefix` whose maker is dead; returns their paths."""
    removed: list[Path] = []
    for path in sorted(set(folder.glob(f"{prefix}*")) - _MINE):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if os.fstat(descriptor).st_uid == os.getuid() and not _is_locked(descriptor, 0):
                path.unlink(missing_ok=True)
                removed.append(path)
        finally:
            os.close(descriptor)
    return removed


def _made(path: Path, nbytes: int, digest: bytes, blame: Blame) -> Segment:
    descriptor = -1
    try:
        descriptor = _nameless(path)
        _allocate(descriptor, nbytes)
        _lock(descriptor, 0)
        data = mmap.mmap(descriptor, nbytes)
        header = _MAGIC + struct.pack("<II", _VERSION, 0) + digest
        data[: len(header)] = header
        _name(descriptor, path)
        _MINE.add(path)
    except OSError as error:
        if descriptor >= 0:
            if os.fstat(descriptor).st_nlink:  # it was made with its name, and nobody must find it
                path.unlink(missing_ok=True)
            os.close(descriptor)
        if isinstance(error, FileExistsError):
            _fail(
                blame,
                "CP0921",
                "another run with the same run id is going on",
                f"its memory: {path.name}",
                "give every run an id of its own",
            )
        reason = "there is not enough of it" if error.errno == errno.ENOSPC else str(error.strerror)
        _fail(
            blame,
            "CP0923",
            f"{nbytes} bytes of shared memory cannot be had in {str(path.parent)!r}: {reason}",
            "make it larger, make the batch or `prefetch` smaller, or share `via duplicate`",
        )
    return Segment(data, path, descriptor)


def _allocate(descriptor: int, nbytes: int) -> None:
    """Memory that is missing is an error here, not a SIGBUS later, where the system can say so."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, nbytes)
    else:
        os.ftruncate(descriptor, nbytes)


def _nameless(path: Path) -> int:
    """A file that has no name yet, so that nobody finds it half made; a named one where that is not known."""
    flag = getattr(os, "O_TMPFILE", 0)
    if flag:
        with contextlib.suppress(OSError):
            return os.open(path.parent, flag | os.O_RDWR | os.O_CLOEXEC, 0o600)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _name(descriptor: int, path: Path) -> None:
    if os.fstat(descriptor).st_nlink == 0:
        # Python follows the link only where it is given a folder's descriptor, which the path needs not.
        os.link(f"/proc/self/fd/{descriptor}", path, src_dir_fd=descriptor, follow_symlinks=True)


def _found(path: Path, index: int, digest: bytes, timeout: float, blame: Blame) -> Segment:
    until, sleep = time.monotonic() + timeout, _POLL_FIRST
    while True:
        segment = _try(path, index, digest, blame)
        if segment is not None:
            return segment
        if time.monotonic() > until:
            _fail(blame, "CP0921", f"process 0 did not make the shared memory within {timeout:g} s")
        time.sleep(sleep)
        sleep = min(2 * sleep, _POLL_MOST)


def _try(path: Path, index: int, digest: bytes, blame: Blame) -> Segment | None:
    """The segment, or None where it is not there yet, or is an earlier one that is going away."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    keep = False
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or status.st_size < mmap.PAGESIZE or not _is_locked(descriptor, 0):
            return None
        data = mmap.mmap(descriptor, status.st_size)
        if data[:8] != _MAGIC or int.from_bytes(data[SEAL_AT : SEAL_AT + 4], "little"):
            return None
        if data[_DIGEST_AT : _DIGEST_AT + 32] != digest:
            _fail(
                blame,
                "CP0922",
                f"process {index} is not doing the same as process 0",
                "all processes of a group run the same plan, phase, batch and place in the order, with the "
                "same sources, and hold the same indices of every axis that is not shared over",
            )
        if not _lock(descriptor, index):
            _fail(blame, "CP0921", f"there is another process {index} in this run")
        keep = True
        return Segment(data, path, descriptor)
    finally:
        if not keep:
            os.close(descriptor)


def _fail(blame: Blame, code: str, message: str, *notes: str) -> NoReturn:
    what, span, file = blame
    fail(code, message, f"the line: {what}", *notes, span=span, file=file)
