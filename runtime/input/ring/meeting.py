"""Finding rings by name: their memory is an open file of one of this user's processes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

from commplan import io
from commplan.diagnostics import fail
from commplan.runtime.input.ring.memory import SharedMemory, close_file
from commplan.runtime.input.ring.words import HEADER, MAGIC, PROCESS_LOCK, Shape
from commplan.runtime.input.shm.locks import default_folder, is_locked
from commplan.wait import Wait, until

# The target of a descriptor's link in /proc: the kind and the name of the memory (see `fresh`).
_LINK = re.compile(r"/memfd:commplan-([a-z]+)-([A-Za-z0-9_.-]+)(?: \(deleted\))?")
_MEMORY = Path("/proc/meminfo")  # the kernel's figures of free memory
BEGIN_S = 20.0  # seconds to wait for another process that compiles its plan
MEET_S = 60.0  # seconds to wait for another process that joins or leaves, which takes milliseconds

OPENING = threading.RLock()  # held by the thread of this process that opens or closes rings


class MemoryFile(NamedTuple):
    """An open memory file of a process.

    Attributes:
        name: the name of the feed, group or cache.
        key: the device and inode of the file.
        path: a path that opens the file, in /proc.
    """

    name: str
    key: tuple[int, int]
    path: str


def check_name(name: object) -> str:
    """Return `name` if it is a valid name of a feed.

    Raises:
        CommplanError: CP0928 if the name is invalid.
    """
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name):
        fail("CP0928", f"a feed is named with letters, digits and `-_.`, up to 100 of them, not {name!r}")
    return name


def fresh(name: str, nbytes: int, kind: str = "feed") -> int:
    """Allocate memory for a ring.

    Args:
        name: the name of the feed or group.
        nbytes: the size of the memory.
        kind: the kind of memory, a part of its name: "feed", "group", or "own" for the ring of one process.

    Returns:
        The descriptor of the memory.

    Raises:
        OSError: if there is not enough memory.
    """
    if nbytes > _available():  # the kernel would first reclaim memory of other processes
        raise OSError(errno.ENOMEM, "there is not enough of it")
    descriptor = os.memfd_create(f"commplan-{kind}-{name}", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _available() -> float:
    """The kernel's estimate of the bytes that can be allocated without swapping; infinite if unknown."""
    with contextlib.suppress(OSError, ValueError):
        for line in _MEMORY.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024.0 * int(line.split()[1])
    return float("inf")


def created(
    name: str, title: str, shape: Shape, facts: Mapping[str, str], *, kind: str = "feed",
    refuse: Callable[..., NoReturn] = fail, has_slots: bool = True, **values: int,
) -> SharedMemory:  # fmt: skip
    """Create a ring.

    Args:
        name: the name of the feed or group.
        title: the name of the ring in messages.
        shape: the sizes of the ring.
        facts: see `SharedMemory.lay_out`.
        kind: see `fresh`.
        refuse: raises an error with a code, a message and notes.
        has_slots: whether the file contains the data of the slots. If not, they are private memory.
        **values: words of the header.

    Raises:
        CommplanError: CP0923 if there is not enough memory; CP0928 if `facts` are too long.
    """
    nbytes = shape.nbytes if has_slots else shape.data_at
    descriptor, key = -1, (0, 0)
    try:
        descriptor = fresh(name, nbytes, kind)
        status = os.fstat(descriptor)
        key = status.st_dev, status.st_ino
        memory = SharedMemory(descriptor, key, title, shape)
        memory.lay_out(facts, **values)
    except BaseException as error:
        close_file(descriptor, key, os.getpid())
        if isinstance(error, OSError):
            message = f"{nbytes} bytes of shared memory cannot be had: {error.strerror}"
            refuse("CP0923", message, "make the batch or `prefetch` smaller")
        raise
    return memory


def opened(candidate: MemoryFile, title: str) -> SharedMemory | None:
    """Open the ring in the file of `candidate`.

    Args:
        candidate: the file. This process does not have it open: closing it would release its locks.
        title: the name of the ring in messages.

    Returns:
        The ring; None if the file contains no complete ring with a living process, or cannot be opened.
    """
    try:
        descriptor = io.open_file(candidate.path, os.O_RDWR)
    except OSError:
        return None
    memory, is_complete, status = None, False, os.fstat(descriptor)
    key = status.st_dev, status.st_ino
    try:
        head = os.pread(descriptor, 8 * len(HEADER), 0)
        if key != candidate.key or len(head) < 8 * len(HEADER):
            return None
        words = dict(zip(HEADER, memoryview(head).cast("Q"), strict=True))
        shape = Shape(**{name: words[name] for name in Shape._fields})
        if words["magic"] != MAGIC or not shape.is_valid or status.st_size < shape.nbytes:
            return None  # memory after the end of a file cannot be accessed
        if not any(is_locked(descriptor, PROCESS_LOCK + place) for place in range(shape.processes)):
            return None
        memory = SharedMemory(descriptor, key, title, shape)
        with contextlib.suppress(ValueError):  # written by another version
            memory.facts()
            is_complete = True
        return memory if is_complete else None
    finally:
        if memory is None:
            close_file(descriptor, key, os.getpid())  # unless an object that is not returned has closed it
        elif not is_complete:
            memory.close()


@contextlib.contextmanager
def visited(candidate: MemoryFile, title: str) -> Generator[SharedMemory | None]:
    """Open the ring in the file of `candidate` for inspection, as `opened`; None if it contains no ring.

    If this process already has the ring open, the result is that ring, because opening and closing the file
    again would release its locks. No other thread of this process opens or closes rings during the visit.
    """
    with OPENING:
        present = next((m for m in SharedMemory.opened if m.key == candidate.key and m.descriptor >= 0), None)
        memory = present or opened(candidate, title)
        try:
            yield memory
        finally:
            if memory is not None and memory is not present:
                memory.close()


def memory_files(name: str | None = None, kind: str = "feed") -> Iterator[MemoryFile]:
    """Find the memory of feeds, groups or caches that this user's processes have open.

    Args:
        name: the name; None for all names.
        kind: "feed", "group" or "cache".

    Yields:
        Each file once. Files of other users are skipped.
    """
    keys: set[tuple[int, int]] = set()
    for entry in list(os.scandir("/proc")):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if entry.stat().st_uid != os.getuid():
                continue
            for file in list(os.scandir(f"{entry.path}/fd")):
                with contextlib.suppress(OSError):
                    link = _LINK.fullmatch(str(Path(file.path).readlink()))
                    if link is None or link[1] != kind or name not in (None, link[2]):
                        continue
                    status = Path(file.path).stat()
                    key = (status.st_dev, status.st_ino)
                    if status.st_uid == os.getuid() and key not in keys:
                        keys.add(key)
                        yield MemoryFile(link[2], key, file.path)


@contextlib.contextmanager
def exclusive() -> Generator[None]:
    """Exclude other processes of this user from joining or creating feeds and groups.

    The mechanism is a lock on a temporary folder. The kernel releases the lock when the process ends.

    Raises:
        CommplanError: CP0928 if another process holds the lock for `MEET_S`, probably because it is stopped,
            or if no folder can be created.
    """

    def late(_: float) -> NoReturn:
        fail(
            "CP0928",
            f"another process has been joining a feed or a group for {MEET_S:g} s",
            "is one stopped?",
        )

    with _held(*until(lambda seconds: _locked(), Wait(MEET_S, late, slice_s=0.01))):
        yield


@contextlib.contextmanager
def beginning(name: str) -> Generator[None]:
    """Exclude other processes of this user from creating the feed or cache `name` during the block.

    They wait for at most `BEGIN_S`, and then enter their blocks without exclusion. Usually a feed contains
    the compiled plan of the first process by then.

    Raises:
        CommplanError: CP0928 if no folder can be created.
    """
    deadline = time.monotonic() + BEGIN_S
    while (locked := _locked(f"-begun-{name}")) is None:
        if time.monotonic() > deadline:
            yield
            return
        time.sleep(0.01)
    with _held(*locked):
        yield


@contextlib.contextmanager
def _held(descriptor: int, path: Path) -> Generator[None]:
    """Remove and unlock the folder after the block."""
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()
        os.close(descriptor)


def _locked(suffix: str = "") -> tuple[int, Path] | None:
    """Create and lock the temporary folder with this suffix.

    Only this user can read it or write to it. If another user owns a folder of this name, the next name is
    used.

    Returns:
        The descriptor and the path of the folder; None if another process has locked it.

    Raises:
        CommplanError: CP0928 if no folder can be created.
    """
    base = default_folder() / f"commplan-feeds-{os.getuid()}{suffix}"  # the sidecar uses another folder
    for number in range(1000):
        path = base.with_name(f"{base.name}.{number}") if number else base
        try:
            path.mkdir(0o700)
        except FileExistsError:
            pass
        except OSError as error:
            fail(
                "CP0928",
                f"no folder can be made in {str(base.parent)!r}: {error.strerror}",
                "programs that join a feed or a group exchange addresses there",
            )
        try:
            descriptor = io.open_folder(path)
        except FileNotFoundError:
            return None
        except OSError:
            continue
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(path.stat(), os.fstat(descriptor)):
                return descriptor, path
        os.close(descriptor)
        return None
    return fail("CP0928", f"no folder of this user can be made in {str(base.parent)!r}")
