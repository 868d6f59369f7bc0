"""The memory of a cache: one row for each record, in memory of the host or in a file.

A page with the header, then a word for each row, then the rows of each result. A row is written before its
word, and a word is never taken back, so that readers need no lock. Processes claim the rows that they
compute; one that is killed while it writes a row leaves the word empty, and another one claims the row. Two
processes that write one row all the same write the same bytes.

Rows lie in the order of the records: of a source that does not fit, the first records have a row.
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
from commplan.runtime.input.observe.wait_log import LOG

_MAGIC = b"commplan"
_HEAD = struct.Struct("<8sIQ")  # magic, checksum and length of the facts behind it
_PAGE = 4096
_WORD = struct.Struct("<II")  # the generation in which a row was written or checked, and its checksum
_FIRST = 1  # generation
_GENERATIONS = range(_FIRST, 2**32 - 1)  # a word of 0 is of none
_MEET_S = 60.0  # seconds for another process to prepare a file, which takes milliseconds
_BOOT = Path("/proc/sys/kernel/random/boot_id")


class Column(NamedTuple):
    """One result of the function: the type and shape of a row."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Shape(NamedTuple):
    """The layout of a table. key: the digest of the source and of all functions that make a row."""

    key: str
    columns: tuple[Column, ...]
    rows: int

    @staticmethod
    def of(key: str, columns: Sequence[Column], records: int, limit: int) -> Shape:
        """As many of `records` as fit into `limit` bytes."""
        each = _WORD.size + sum(column.nbytes for column in columns)
        return Shape(key, tuple(columns), min(records, max(0, limit - (len(columns) + 2) * _PAGE) // each))

    @property
    def offsets(self) -> tuple[int, ...]:
        """Of each column, and the size of the whole."""
        places = [_PAGE + rounded(self.rows * _WORD.size, _PAGE)]
        for column in self.columns:
            places.append(places[-1] + rounded(self.rows * column.nbytes, _PAGE))
        return tuple(places)

    def facts(self, generation: int) -> dict[str, Any]:
        columns = [[column.dtype.str, column.dtype.name, list(column.shape)] for column in self.columns]
        return {
            "key": self.key,
            "rows": self.rows,
            "columns": columns,
            "boot": _boot(),
            "generation": generation,
        }


class Table:
    """Rows by record number. descriptor: of the memory, which the table closes.

    generation: of a file, the number of times that it was opened by a first process. Rows of earlier
    generations are checked before they are used: the machine may have lost power before they were written.
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
        """Whether each of `records` has its row here."""
        if not self.shape.rows:
            return np.zeros(len(records), bool)
        inside = records < self.shape.rows
        words = self._generations[np.minimum(records, self.shape.rows - 1)]
        hits: Bools = inside & (words == self._generation)
        if self.is_file:
            for place in np.flatnonzero(inside & ~hits & (words != 0)).tolist():
                hits[place] = self._check(int(records[place]))
        return hits

    def read(self, records: npt.NDArray[np.int64], rows: Bools, targets: Sequence[Array]) -> None:
        """Copy the rows of those `records` that `rows` selects to the same places of `targets`."""
        if rows.all():
            for column, target in zip(self._columns, targets, strict=True):
                np.take(column, records, axis=0, out=target, mode="clip")
            return
        for place in np.flatnonzero(rows).tolist():
            for column, target in zip(self._columns, targets, strict=True):
                target[place] = column[records[place]]

    @contextlib.contextmanager
    def claimed(self, record: int, *, anyway: bool = False) -> Generator[bool]:
        """Whether this thread is the one that computes `record`, while the body runs.

        By a lock on the byte of its word, which the kernel releases when the process dies. anyway: without a
        look at other processes. Records without a row are not claimed.
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
        """Keep the results of `record`. Without memory or space for it nothing is kept from then on."""
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
            LOG.warning("a cache of records keeps no more of them: %s", error.strerror)

    def _mark(self, record: int, checksum: int) -> None:
        word = _WORD.pack(self._generation, checksum)
        _write(self._descriptor, word, _PAGE + record * _WORD.size)

    def _check(self, record: int) -> bool:
        """Whether a row of an earlier generation is whole; then it is of this one."""
        checksum = _checksum(record, [column[record] for column in self._columns])
        if checksum != int(self._checksums[record]):
            return False
        with contextlib.suppress(OSError):
            self._mark(record, checksum)
        return True


def _as_bytes(value: Any) -> Any:
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def _checksum(record: int, values: Sequence[Any]) -> int:
    checksum = record & 0xFFFFFFFF
    for value in values:
        checksum = zlib.crc32(_as_bytes(value), checksum)
    return checksum


def _lock_byte(descriptor: int, byte: int, kind: int = fcntl.F_WRLCK) -> bool:
    """Lock a byte for all that open the file by other ways than this descriptor; False if another has it."""
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, byte, 1, 0))
    except BlockingIOError:
        return False
    return True


def _write(descriptor: int, data: Any, offset: int) -> None:
    """By `pwrite`, which raises OSError for a lack of space; a store to mapped memory would be SIGBUS."""
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written


# --- in memory ---


def in_memory(shape: Shape) -> Table:
    """The table of `shape` that another process of this user has open, or a new one.

    Errors: CP0923 if there is no memory for its words.
    """
    from commplan.runtime.input.ring import meeting  # noqa: PLC0415  tables in files do without

    name = f"{shape.key}{shape.rows:x}"
    with meeting.beginning(f"cache-{name}"):
        for candidate in meeting.found(name, "cache"):
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
            fail("CP0923", f"{nbytes} bytes of memory for a cache cannot be had: {error.strerror}")
        return Table(descriptor, shape, _FIRST, is_file=False)


def _is_own(descriptor: int, nbytes: int) -> bool:
    status = os.fstat(descriptor)
    return status.st_uid == os.getuid() and status.st_size == nbytes


# --- in a file ---


def in_file(path: str, shape: Shape) -> Table:
    """The table in the file at `path`, created if it is missing.

    A table of other functions, of another source or of another size is replaced, unless a process has it
    open. Errors: CP0958 for a file that is no cache, is of another user, or is in use for something else.
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
            others = "on another host" if facts.get("boot") != _boot() else "with other functions or sources"
            refuse(f"is in use {others}", "give each its own path, on a disk of the host")
        return Table(descriptor, shape, generation, is_file=True)
    except OSError as error:
        os.close(descriptor)
        refuse(f"cannot be prepared: {error.strerror}")
    except BaseException:
        os.close(descriptor)
        raise


def _prepare(descriptor: int, shape: Shape, refuse: Any) -> None:
    """Make the file a table of `shape`, with the rows that it has of one. No other process has it open."""
    head = os.pread(descriptor, len(_MAGIC), 0)
    if head and head != _MAGIC:
        refuse("is a file of something else", "give the path of a file that does not exist")
    facts = _facts(descriptor)
    generation = facts["generation"] if facts is not None else 0
    is_same = facts is not None and {**facts, "boot": _boot()} == shape.facts(generation)
    if not is_same or generation + 1 not in _GENERATIONS:
        os.ftruncate(descriptor, 0)
        generation = 0
    _lay_out(descriptor, shape, generation + 1)


def _lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


# --- both ---


def _lay_out(descriptor: int, shape: Shape, generation: int) -> None:
    """Size and header, with room for the words; the rows are a hole until they are written."""
    os.ftruncate(descriptor, shape.offsets[-1])
    os.posix_fallocate(descriptor, 0, shape.offsets[0])
    text = json.dumps(shape.facts(generation)).encode()
    if _HEAD.size + len(text) > _PAGE:
        raise OSError(0, "its rows have too many results")
    _write(descriptor, _HEAD.pack(_MAGIC, zlib.crc32(text), len(text)) + text, 0)


def _facts(descriptor: int) -> dict[str, Any] | None:
    """The header of a table; None if there is none, or it is damaged."""
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
    """Tells apart the hosts, and the times that one was started."""
    try:
        return io.read(_BOOT).decode().strip()
    except OSError:
        return ""
