"""Files that users name: read whole, and not without end; written so that nobody sees a part."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Generator
from pathlib import Path
from typing import BinaryIO

MIB = 1024**2
TEXT = 64 * MIB  # plans, topologies, shapes
SCHEDULE = 1024 * MIB


def read(path: str | Path, limit: int = TEXT) -> bytes:
    """The bytes of a file. Raises OSError, EFBIG for one larger than `limit` bytes (a device never ends)."""
    with Path(path).open("rb") as file:
        return read_stream(file, limit)


def read_stream(file: BinaryIO, limit: int = TEXT) -> bytes:
    """What is left in an open file; see `read`."""
    data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit // MIB} MiB")
    return data


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A new file beside `path` to write to, which takes its place, on the disk, where the block ends well.

    A reader of `path` sees all of it or the file as it was before. Raises OSError.
    """
    new = path.parent / f".{path.name}.{os.urandom(4).hex()}"
    os.close(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666))
    try:
        yield new
        with new.open("rb") as file:
            os.fsync(file.fileno())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
