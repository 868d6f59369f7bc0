"""Where feeds are found: among the open files of this user's processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from commplan import io
from commplan.diagnostics import fail
from commplan.runtime.input.shm.locks import default_folder
from commplan.wait import Wait, until

_PREFIX = "commplan-feed-"
_LINK = re.compile(rf"/memfd:{_PREFIX}([A-Za-z0-9_.-]+)(?: \(deleted\))?")
BEGIN_S = 20.0  # seconds for another process to compile its plan
MEET_S = 60.0  # seconds for another process to come or leave, which takes milliseconds
HAS_FEEDS = sys.platform.startswith("linux") and hasattr(os, "memfd_create")


class Found(NamedTuple):
    """A file of memory that a process has open. key: what tells it from others. path: opens it."""

    name: str
    key: tuple[int, int]
    path: str


def check_name(name: object) -> str:
    """`name`, if a feed may be so called here. Raises CP0928."""
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name):
        fail("CP0928", f"a feed is named with letters, digits and `-_.`, up to 100 of them, not {name!r}")
    if not HAS_FEEDS:
        fail(
            "CP0928", f"feeds need Linux, and this is {sys.platform}", "run.batches shares between processes"
        )
    return name


def fresh(name: str, nbytes: int) -> int:
    """A new file of memory for the feed `name`, of `nbytes`. Raises OSError."""
    descriptor = os.memfd_create(f"{_PREFIX}{name}", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.posix_fallocate(descriptor, 0, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def found(name: str | None = None) -> Iterator[Found]:
    """The memory of the feed `name` (None: of all feeds) that processes of this user have open, each once.

    The files of other users' processes cannot be read, and are not looked at where they can.
    """
    seen: set[tuple[int, int]] = set()
    for entry in list(os.scandir("/proc")):
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            if entry.stat().st_uid != os.getuid():
                continue
            for file in list(os.scandir(f"{entry.path}/fd")):
                with contextlib.suppress(OSError):
                    link = _LINK.fullmatch(str(Path(file.path).readlink()))
                    if link is None or name not in (None, link[1]):
                        continue
                    status = Path(file.path).stat()
                    key = (status.st_dev, status.st_ino)
                    if status.st_uid == os.getuid() and key not in seen:
                        seen.add(key)
                        yield Found(link[1], key, file.path)


@contextlib.contextmanager
def meeting() -> Generator[None]:
    """No other process of this user comes to a feed, or makes one, while this runs.

    A lock on a folder that is there for so long alone; the kernel lets go of it with the process. Raises
    CP0928 where another process holds it for a minute: it is stopped, or was interrupted there.
    """

    def late(_: float) -> NoReturn:
        fail("CP0928", f"another process has been joining a feed for {MEET_S:g} s", "is one stopped?")

    with _held(*until(lambda seconds: _locked(), Wait(MEET_S, late, slice_s=0.01))):
        yield


@contextlib.contextmanager
def beginning(name: str) -> Generator[None]:
    """Another process of this user that begins the feed `name` meanwhile waits, so that it finds this one's
    plan; where that takes long it goes on."""
    last = time.monotonic() + BEGIN_S
    while (locked := _locked(f"-begun-{name}")) is None:
        if time.monotonic() > last:
            yield
            return
        time.sleep(0.01)
    with _held(*locked):
        yield


@contextlib.contextmanager
def _held(descriptor: int, path: Path) -> Generator[None]:
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.rmdir()
        os.close(descriptor)


def _locked(suffix: str = "") -> tuple[int, Path] | None:
    """The folder, locked and still there; None where another process has it.

    Nobody but this user can read it or put anything into it. Where another user has made one of its name,
    which anybody can, the next name is taken. Raises CP0928 where none can be made.
    """
    base = default_folder() / f"commplan-feeds-{os.getuid()}{suffix}"  # the sidecar has a folder of its own
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
                "programs that join a feed meet there for a moment",
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
