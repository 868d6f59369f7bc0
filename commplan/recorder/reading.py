"""Reads records, also of processes that run."""

from __future__ import annotations

import contextlib
import math
import os
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from commplan import io
from commplan.diagnostics import fail
from commplan.recorder.file import (
    BEGIN,
    CALL,
    CAPACITY,
    ENDING,
    EVENT,
    EVENTS,
    HEADER,
    LIVE,
    MAGIC,
    MOST_NAMES,
    NAME,
    ROUND,
    SIGNAL,
    SINCE,
    SIZE,
    STACK_SIGNAL,
    VERSION,
    Call,
    Details,
    Event,
    Record,
    is_handled,
    machine,
    prefix,
)  # fmt: skip

_WHOLE = (0, SIZE), (0, HEADER.size)
_RANKS = 2**24  # no job has more


def read_records(paths: Iterable[str]) -> list[Record]:
    """The records in files and folders, by rank and lane. Links in folders, records of other versions, and
    records that are being created are skipped. Raises CP1114 for a file that is not a record."""
    records: list[Record] = []
    for place in map(Path, paths):
        if place.is_dir():
            for path in sorted(place.glob(f"{prefix()}*.rec")):
                with contextlib.suppress(OSError):
                    data, after = _pieces(path, *_WHOLE, flags=os.O_NOFOLLOW)
                    # Before its process writes the record, the file is empty, or all zeros.
                    if data[: len(MAGIC)].strip(b"\0") and _version(data) == VERSION:
                        records.append(_record(path, data, after))
            continue
        try:
            data, after = _pieces(place, *_WHOLE)
        except OSError as error:
            fail("CP1114", f"{place} cannot be read: {error.strerror or error}", file=str(place))
        except ValueError as error:  # a NUL in the name
            fail("CP1114", f"{str(place)!r} cannot be read: {error}")
        records.append(_record(place, data, after))
    return sorted(records, key=lambda record: (record.plan, record.rank, record.lane))


def read_open(path: Path, descriptor: int) -> Record:
    """The record in an open file that may have been removed. Raises OSError, and CP1114 if it is damaged."""
    data, after = (os.pread(descriptor, size, begin) for begin, size in _WHOLE)
    return _record(path, data, after)


def _pieces(path: Path, *places: tuple[int, int], flags: int = os.O_RDONLY) -> list[bytes]:
    """The bytes of a file at `places`, (begin, size), read one after another. Raises OSError."""
    descriptor = io.open_file(path, flags)
    try:
        return [os.pread(descriptor, size, begin) for begin, size in places]
    finally:
        os.close(descriptor)


def _version(data: bytes) -> int:
    """The version of a record, at the same position in all versions; `VERSION` if this is not a record."""
    if data.startswith(MAGIC) and len(data) >= len(MAGIC) + 8:
        number: int = struct.unpack_from("<q", data, len(MAGIC))[0]
        return number
    return VERSION


def _record(path: Path, data: bytes, after: bytes) -> Record:
    """The record in a file that may still be written. after: its header, read after `data`."""
    if (version := _version(data)) != VERSION:
        message = f"{path} is a record of version {version}"
        fail("CP1114", message, f"this is version {VERSION}", file=str(path))
    if len(data) < SIZE or len(after) != HEADER.size or data[: len(MAGIC)] != MAGIC:
        note = "expected a file that a run wrote, whole: *.rec"
        fail("CP1114", f"{path} is not a record of a rank", note, file=str(path))
    _, _, process, rank, ranks, unix_ns, boot_ns, capacity, head, count, failed, *texts = HEADER.unpack_from(
        data
    )
    if capacity != CAPACITY:
        fail("CP1114", f"{path} is a damaged record: it has room for {capacity} events", file=str(path))
    if not 0 <= rank < ranks <= _RANKS:
        fail("CP1114", f"{path} is a damaged record: it is of rank {rank} of {ranks}", file=str(path))
    (host, lane), (space, _), (plan, sizes) = map(_texts, texts)
    # Events that were overwritten during the read are lost, and so is the slot that is written next.
    written = HEADER.unpack_from(after)[8]
    lost = max(0, head - CAPACITY, written - CAPACITY + (written > head))
    events = sorted(_events(data, lost, head, count, unix_ns - boot_ns), key=lambda event: event.seconds)
    return Record(
        str(path), plan, rank, ranks, host, space, process, unix_ns / 1e9, bool(failed), lost, tuple(events),
        (unix_ns - boot_ns) / 1e9, _sizes(sizes, ranks), lane, _texts(data[ENDING:STACK_SIGNAL])[0],
        _call(data[CALL:LIVE], unix_ns - boot_ns),
    )  # fmt: skip


def read_call(path: Path) -> Call | None:
    """The call in the record of a process of this machine that may still run, with its seconds on
    `time.monotonic`."""
    with contextlib.suppress(OSError):
        return _call(_pieces(path, (CALL, LIVE - CALL))[0], 0)
    return None


def writer(record: Path) -> tuple[int, int]:
    """The process that writes a record, and the signal that requests its stacks; 0 for either if the process
    is not of this machine, or does not handle `SIGNAL`, the only one that counts. Raises OSError."""
    header, number = _pieces(record, (0, HEADER.size), (STACK_SIGNAL, 8))
    if len(header) < HEADER.size or len(number) < 8 or header[: len(MAGIC)] != MAGIC:
        return 0, 0
    _, _, process, *_, space, _ = HEADER.unpack(header)
    if process <= 0 or _texts(space)[0] != machine():
        return 0, 0
    offered = struct.unpack("<q", number)[0] == SIGNAL and is_handled(SIGNAL, "SigCgt:", process=process)
    return process, SIGNAL if offered else 0


def _call(data: bytes, offset_ns: int) -> Call | None:
    if len(data) < SINCE.size:
        return None
    text, stack = _texts(data[SINCE.size :])
    return Call(text, (SINCE.unpack_from(data)[0] + offset_ns) / 1e9, stack) if text else None


def _events(data: bytes, first: int, head: int, count: int, offset_ns: int) -> Iterator[Event]:
    """Events from `first` to before `head`, without damaged ones."""
    places = (HEADER.size + NAME * index for index in range(min(count, MOST_NAMES)))
    names = [_texts(data[at : at + NAME]) for at in places]
    details = [_details(text) for _, text in names]
    for index in range(first, head):
        place = EVENTS + EVENT.size * (index % CAPACITY)
        nanoseconds, kind, name, operation, runs, nbytes = EVENT.unpack_from(data, place)
        if BEGIN <= kind <= ROUND and 0 <= name < len(names):
            when = (nanoseconds + offset_ns) / 1e9
            yield Event(when, kind, names[name][0], operation, runs, nbytes, details[name])


def _texts(field: bytes) -> tuple[str, str]:
    """A text that ends with a zero byte, and the text that follows it."""
    text, _, behind = field.partition(b"\0")
    return text.decode(errors="replace"), behind.split(b"\0")[0].decode(errors="replace")


def _details(text: str) -> Details | None:
    try:
        kind, algorithm, nbytes, dtype, root, opens, axes = text.split(" ")
        return Details(
            kind, algorithm, int(nbytes), dtype, int(root), "" if opens == "-" else opens,
            tuple(filter(None, axes.split(","))),
        )  # fmt: skip
    except ValueError:
        return None


def _sizes(text: str, ranks: int) -> Mapping[str, int]:
    """The axes in `data=4,node=2`; empty if their product is not the number of ranks."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    sizes = {axis: int(size) for axis, _, size in pairs if size.isdecimal()}
    return sizes if math.prod(sizes.values()) == ranks else {}
