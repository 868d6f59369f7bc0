"""Reading files that users name: whole, and not without end."""

from __future__ import annotations

import errno
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
