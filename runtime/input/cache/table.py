"""The table of a cache: one row for each record, in memory of the host or in a file.

    header (one page) | a word for each row | the rows of each result

A row is written before its word, and words are not cleared, so readers need no lock. A process claims a row
before it computes the row. If the process is killed while it writes the row, the word is still empty and
another process can claim the row. If two processes write the same row, both write the same bytes.

Rows are in the order of the records. If a source does not fit, only its first records have rows.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
import threading
import time
import weakref
import zlib
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt

from commplan import io
from commplan.diagnostics import fail
from commplan.runtime.input.layout import Array, Bools, rounded
from commplan.runtime.input.observe.wait_log import log_warning

_MAGIC = b"commplan"  # the first bytes of a table
_HEAD = struct.Struct("<8sIQ")  # magic, then checksum and length of the facts that follow
_PAGE = 4096  # bytes
_WORD = struct.Struct("<II")  # the generation that last wrote or checked the row, and the checksum of the row
_FIRST = 1  # the first generation
_GENERATIONS = range(_FIRST, 2**32 - 1)  # 0 marks a row that has not been written
_MEET_S = 60.0  # seconds to wait for another process that prepares a file, which takes milliseconds
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # differs after each start of the host


class Column(NamedTuple):
    """A result of the cached function.

    Attributes:
        dtype: the dtype.
        shape: the shape of one row; () for a scalar.
    """

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The size of one row in bytes."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Shape(NamedTuple):
    """The layout of a table.

    Attributes:
        key: the digest of the source and of all functions that compute a row.
        columns: the results.
        rows: the number of rows; 0 if none fits.
    """

    key: str
    columns: tuple[Column, ...]
    rows: int

    @staticmethod
    def of(key: str, columns: Sequence[Column], records: int, limit: int) -> Shape:
        """The layout with a row for as many of `records` records as fit into `limit` bytes.

        See `Shape` for `key` and `columns`.
        """
        row_nbytes = _WORD.size + sum(column.nbytes for column in columns)
        header_nbytes = (len(columns) + 2) * _PAGE  # the header, and padding of the words and of each column
        return Shape(key, tuple(columns), min(records, max(0, limit - header_nbytes) // row_nbytes))

    @property
    def offsets(self) -> tuple[int, ...]:
        """The byte offset of each column, and last the size of the table in bytes."""
        places = [_PAGE + rounded(self.rows * _WORD.size, _PAGE)]
        for column in self.columns:
            places.append(places[-1] + rounded(self.rows * column.nbytes, _PAGE))
        return tuple(places)

    def facts(self, generation: int) -> dict[str, Any]:
        """The content of the header, as JSON values."""
        columns = [[column.dtype.str, column.dtype.name, list(column.shape)] for column in self.columns]
        return {
            "key": self.key,
            "rows": self.rows,
            "columns": columns,
            "boot": _boot(),
            "generation": generation,
        }


class Table:
    """Rows by record number. Methods may be called from several threads and processes at the same time.

    Args:
        descriptor: the open memory or file; closed by the table.
        shape: the layout.
        generation: increases whenever a process opens a file that no other process has open. Rows of earlier
            generations are checked before use, because a power failure may have lost parts of them.
        is_file: whether the table is in a file.

    Attributes:
        shape: the layout.
        is_file: whether the table is in a file.
        nbytes: the size of the table.
    """

    def __init__(self, descriptor: int, shape: Shape, generation: int, *, is_file: bool) -> None:
        self.shape, self.is_file = shape, is_file
        self.nbytes = shape.offsets[-1]
        self._descriptor, self._generation = descriptor, generation
        self._is_full = False
        self._claims, self._claiming = set[int](), threading.Lock()
        memory = mmap.mmap(descriptor, self.nbytes, access=mmap.ACCESS_READ)
        words = np.ndarray((shape.rows, 2), "<u4", memory, _PAGE)
        self._generations, self._checksums = words[:, 0], words[:, 1]
        self._columns = [
            np.ndarray((shape.rows, *column.shape), column.dtype, memory, offset)
            for column, offset in zip(shape.columns, shape.offsets[:-1], strict=True)
        ]
        self._closing = weakref.finalize(self, os.close, descriptor)
        self._closing.atexit = False

    def has(self, records: npt.NDArray[np.int64]) -> Bools:
        """Whether each of `records` has a valid row: [len(records)].

        Rows of earlier generations are checked, and marked if they are valid.
        """
        if not self.shape.rows:
            return np.zeros(len(records), bool)
        inside = records < self.shape.rows
        words = self._generations[np.minimum(records, self.shape.rows - 1)]
        hits: Bools = inside & (words == self._generation)
        if self.is_file:
            for row in np.flatnonzero(inside & ~hits & (words != 0)).tolist():
                hits[row] = self._check(int(records[row]))
        return hits

    def read(self, records: npt.NDArray[np.int64], rows: Bools, targets: Sequence[Array]) -> None:
        """Copy rows of the table.

        Args:
            records: [n], the numbers of records.
            rows: [n], whether to copy the row of each record, which is valid then.
            targets: an array [n, ...] for each column. Other indices are not changed.
        """
        if rows.all():
            for column, target in zip(self._columns, targets, strict=True):
                np.take(column, records, axis=0, out=target, mode="clip")
            return
        for row in np.flatnonzero(rows).tolist():
            for column, target in zip(self._columns, targets, strict=True):
                target[row] = column[records[row]]

    @contextlib.contextmanager
    def claimed(self, record: int, *, anyway: bool = False) -> Generator[bool]:
        """Claim `record` for this thread during the block.

        The claim is a lock on a byte of the row's word, which the kernel releases when the process dies.
        Records without a row need no claim.

        Args:
            record: the number of the record.
            anyway: whether to ignore claims of other processes.

        Yields:
            Whether this thread must compute the record.
        """
        if record >= self.shape.rows:
            yield True
            return
        with self._claiming:
            is_free = record not in self._claims
            is_free = is_free and (_lock_byte(self._descriptor, _PAGE + record * _WORD.size) or anyway)
            if is_free:
                self._claims.add(record)
        try:
            yield is_free
        finally:
            if is_free:
                with self._claiming:
                    self._claims.discard(record)
                    _lock_byte(self._descriptor, _PAGE + record * _WORD.size, fcntl.F_UNLCK)

    def write(self, record: int, values: Sequence[Any]) -> None:
        """Store the results of `record`, one of each column. Does nothing for a record without a row.

        After a failure to allocate space, this object stores nothing more.
        """
        if record >= self.shape.rows or self._is_full:
            return
        try:
            for column, offset, value in zip(
                self.shape.columns, self.shape.offsets[:-1], values, strict=True
            ):
                _write(self._descriptor, _as_bytes(value), offset + record * column.nbytes)
            self._mark(record, _checksum(record, values) if self.is_file else 0)
        except OSError as error:
            self._is_full = True
            log_warning("the cache of records stores no further records: %s", error.strerror)

    def _mark(self, record: int, checksum: int) -> None:
        """Mark the row as valid in this generation."""
        word = _WORD.pack(self._generation, checksum)
        _write(self._descriptor, word, _PAGE + record * _WORD.size)

    def _check(self, record: int) -> bool:
        """Whether a row of an earlier generation is intact. If so, mark it with this generation."""
        checksum = _checksum(record, [column[record] for column in self._columns])
        if checksum != int(self._checksums[record]):
            return False
        with contextlib.suppress(OSError):
            self._mark(record, checksum)
        return True


def _as_bytes(value: Any) -> Any:
    """The bytes of an array or a scalar, as a contiguous array."""
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _checksum(record: int, values: Sequence[Any]) -> int:
    """The CRC-32 of a row, which depends on its record number, too."""
    checksum = record & 0xFFFFFFFF
    for value in values:
        checksum = zlib.crc32(_as_bytes(value), checksum)
    return checksum


def _lock_byte(descriptor: int, byte: int, kind: int = fcntl.F_WRLCK) -> bool:
    """Lock a byte against all other open file descriptions; False if one of them has locked it.

    `kind` is `F_WRLCK` to lock the byte and `F_UNLCK` to unlock it.
    """
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))
    except BlockingIOError:
        return False
    return True


def _write(descriptor: int, data: Any, offset: int) -> None:
    """Write with `pwrite`, which raises OSError without space. A store to a mapping would raise SIGBUS."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


# --- in memory ---


def in_memory(shape: Shape) -> Table:
    """Open the table of `shape` of another process of this user, or create one.

    Memory for a row is allocated when the row is written.

    Raises:
        CommplanError: CP0923 if there is no memory for the words, CP0928 as `meeting.beginning`.
    """
    from commplan.runtime.input.ring import meeting  # noqa: PLC0415  not needed for files

    name = f"{shape.key}{shape.rows:x}"
    with meeting.beginning(f"cache-{name}"):
        for candidate in meeting.memory_files(name, "cache"):
            with contextlib.suppress(OSError):
                descriptor = io.open_file(candidate.path, os.O_RDWR)
                if _facts(descriptor) == shape.facts(_FIRST) and _is_own(descriptor, shape.offsets[-1]):
                    return Table(descriptor, shape, _FIRST, is_file=False)
                os.close(descriptor)
        descriptor = os.memfd_create(f"commplan-cache-{name}", os.MFD_CLOEXEC)
        try:
            os.fchmod(descriptor, 0o600)
            _lay_out(descriptor, shape, _FIRST)
        except OSError as error:
            os.close(descriptor)
            nbytes = shape.offsets[0]
            fail("CP0923", f"{nbytes} bytes of memory for a cache cannot be allocated: {error.strerror}")
        return Table(descriptor, shape, _FIRST, is_file=False)


def _is_own(descriptor: int, nbytes: int) -> bool:
    """Whether the memory belongs to this user and has the expected size."""
    status = os.fstat(descriptor)
    return status.st_uid == os.getuid() and status.st_size == nbytes


# --- in a file ---


def in_file(path: str, shape: Shape) -> Table:
    """Open or create the table in the file at `path`.

    If no process has the file open, a table of other functions, another source or another size is replaced.

    Raises:
        CommplanError: CP0958 if the file cannot be opened or prepared, is not a cache, belongs to another
            user, is in use on another host or with another layout, or is locked for too long.
    """

    def refuse(problem: str, *notes: str) -> NoReturn:
        fail("CP0958", f"the cache {path!r} {problem}", *notes)

    try:
        descriptor = io.open_file(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
    except OSError as error:
        refuse(f"cannot be opened: {error.strerror}", "give the path of a file in a folder that exists")
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            refuse("is a file of another user", "give a path of your own")
        deadline = time.monotonic() + _MEET_S
        # The first process has an exclusive lock while it prepares the file. All users have a shared lock.
        while True:
            is_first = _lock(descriptor, fcntl.LOCK_EX)
            if is_first:
                _prepare(descriptor, shape, refuse)
            if _lock(descriptor, fcntl.LOCK_SH):
                break
            if time.monotonic() > deadline:
                refuse(f"has been locked by another process for {_MEET_S:g} s", "is one stopped?")
            time.sleep(0.01)
        facts = _facts(descriptor) or {}
        generation = facts.get("generation", 0)
        if facts != shape.facts(generation):
            users = "on another host" if facts.get("boot") != _boot() else "with other functions or sources"
            refuse(f"is in use {users}", "give each its own path, on a disk of the host")
        return Table(descriptor, shape, generation, is_file=True)
    except OSError as error:
        os.close(descriptor)
        refuse(f"cannot be prepared: {error.strerror}")
    except BaseException:
        os.close(descriptor)
        raise


def _prepare(descriptor: int, shape: Shape, refuse: Any) -> None:
    """Prepare the file for `shape`, and keep rows of an equal table. No other process has the file open.

    `refuse` raises an error about the file, from a problem and notes.
    """
    head = os.pread(descriptor, len(_MAGIC), 0)
    if head and head != _MAGIC:
        refuse("is not a cache file", "give the path of a file that does not exist")
    facts = _facts(descriptor)
    generation = facts["generation"] if facts is not None else 0
    is_same = facts is not None and {**facts, "boot": _boot()} == shape.facts(generation)
    if not is_same or generation + 1 not in _GENERATIONS:
        os.ftruncate(descriptor, 0)
        generation = 0
    _lay_out(descriptor, shape, generation + 1)


def _lock(descriptor: int, kind: int) -> bool:
    """Lock the file, `LOCK_EX` or `LOCK_SH`; False if another process has a conflicting lock."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- memory and files ---


def _lay_out(descriptor: int, shape: Shape, generation: int) -> None:
    """Write the header, and allocate space for the words. Rows are allocated when they are written.

    Raises:
        OSError: if there is no space, or the header does not fit into a page.
    """
    os.ftruncate(descriptor, shape.offsets[-1])
    os.posix_fallocate(descriptor, 0, shape.offsets[0])
    text = json.dumps(shape.facts(generation)).encode()
    if _HEAD.size + len(text) > _PAGE:
        raise OSError(0, "its rows have too many results")
    _write(descriptor, _HEAD.pack(_MAGIC, zlib.crc32(text), len(text)) + text, 0)


def _facts(descriptor: int) -> dict[str, Any] | None:
    """Read the header of a table; None if it is missing or damaged."""
    page = os.pread(descriptor, _PAGE, 0)
    if len(page) < _HEAD.size:
        return None
    magic, checksum, length = _HEAD.unpack_from(page)
    text = page[_HEAD.size : _HEAD.size + length]
    if magic != _MAGIC or zlib.crc32(text) != checksum:
        return None
    with contextlib.suppress(ValueError):
        facts = io.decode_json(text, dict[str, Any])
        generation = facts.get("generation")
        return facts if isinstance(generation, int) and generation in _GENERATIONS else None
    return None


def _boot() -> str:
    """The identifier of the present boot of this host; "" if unknown."""
    try:
        return io.read(_BOOT).decode().strip()
    except OSError:
        return ""
