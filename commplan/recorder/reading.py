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
from commplan.recorder import file

_WHOLE = (0, file.SIZE), (0, file.HEADER.size)
_RANKS = 2**24  # maximum number of ranks of a job


def read_records(paths: Iterable[str]) -> list[file.Record]:
    """The records in files and folders, by rank and lane. Links in folders, records of other versions, and
    records that are being created are skipped. Raises CP1114 for a file that is not a record."""
    records: list[file.Record] = []
    for place in map(Path, paths):
        if place.is_dir():
            for path in sorted(place.glob(f"{file.prefix()}*.rec")):
                with contextlib.suppress(OSError):
                    data, after = _pieces(path, *_WHOLE, flags=os.O_NOFOLLOW)
                    # Before its process writes the record, the file is empty, or all zeros.
                    if data[: len(file.MAGIC)].strip(b"\0") and _version(data) == file.VERSION:
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


def read_open(path: Path, descriptor: int) -> file.Record:
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
    if data.startswith(file.MAGIC) and len(data) >= len(file.MAGIC) + 8:
        return int(struct.unpack_from("<q", data, len(file.MAGIC))[0])
    return file.VERSION


def _record(path: Path, data: bytes, after: bytes) -> file.Record:
    """The record in a file that may still be written. after: its header, read after `data`."""
    if (version := _version(data)) != file.VERSION:
        message = f"{path} is a record of version {version}"
        fail("CP1114", message, f"this is version {file.VERSION}", file=str(path))
    if len(data) < file.SIZE or len(after) != file.HEADER.size or data[: len(file.MAGIC)] != file.MAGIC:
        note = "expected a file that a run wrote, whole: *.rec"
        fail("CP1114", f"{path} is not a record of a rank", note, file=str(path))
    _, _, process, rank, ranks, unix_ns, boot_ns, capacity, head, count, failed, *texts = (
        file.HEADER.unpack_from(data)
    )
    if capacity != file.CAPACITY:
        fail("CP1114", f"{path} is a damaged record: it has room for {capacity} events", file=str(path))
    if not 0 <= rank < ranks <= _RANKS:
        fail("CP1114", f"{path} is a damaged record: it is of rank {rank} of {ranks}", file=str(path))
    (host, lane), (space, _), (plan, sizes) = map(_texts, texts)
    clock_ns = unix_ns - boot_ns
    # Events that were overwritten during the read are lost, and so is the slot that is written next.
    written = file.HEADER.unpack_from(after)[8]
    lost = max(0, head - file.CAPACITY, written - file.CAPACITY + (written > head))
    events = sorted(_events(data, lost, head, count, clock_ns), key=lambda event: event.seconds)
    return file.Record(
        str(path), plan, rank, ranks, host, space, process, unix_ns / 1e9, bool(failed), lost, tuple(events),
        clock_ns / 1e9, _sizes(sizes, ranks), lane, _texts(data[file.ENDING : file.STACK_SIGNAL])[0],
        _call(data[file.CALL : file.LIVE], clock_ns),
    )  # fmt: skip


def read_call(path: Path) -> file.Call | None:
    """The call in the record of a process of this machine that may still run, with its seconds on
    `time.monotonic`."""
    with contextlib.suppress(OSError):
        return _call(_pieces(path, (file.CALL, file.LIVE - file.CALL))[0], 0)
    return None


def writer(record: Path) -> tuple[int, int]:
    """The process that writes a record, and the signal that requests its stacks; 0 for either if the process
    is not of this machine, or does not handle `SIGNAL`, the only one that counts. Raises OSError."""
    header, number = _pieces(record, (0, file.HEADER.size), (file.STACK_SIGNAL, 8))
    if len(header) < file.HEADER.size or len(number) < 8 or header[: len(file.MAGIC)] != file.MAGIC:
        return 0, 0
    _, _, process, *_, space, _ = file.HEADER.unpack(header)
    if process <= 0 or _texts(space)[0] != file.machine():
        return 0, 0
    offered = struct.unpack("<q", number)[0] == file.SIGNAL and file.is_handled(
        file.SIGNAL, "SigCgt:", process=process
    )
    return process, file.SIGNAL if offered else 0


def _call(data: bytes, offset_ns: int) -> file.Call | None:
    if len(data) < file.SINCE.size:
        return None
    text, stack = _texts(data[file.SINCE.size :])
    return file.Call(text, (file.SINCE.unpack_from(data)[0] + offset_ns) / 1e9, stack) if text else None


def _events(data: bytes, first: int, head: int, count: int, offset_ns: int) -> Iterator[file.Event]:
    """Events from `first` to before `head`, without damaged ones."""
    places = (file.HEADER.size + file.NAME * index for index in range(min(count, file.MOST_NAMES)))
    names = [_texts(data[at : at + file.NAME]) for at in places]
    details = [_details(text) for _, text in names]
    for index in range(first, head):
        place = file.EVENTS + file.EVENT.size * (index % file.CAPACITY)
        nanoseconds, kind, name, operation, runs, nbytes = file.EVENT.unpack_from(data, place)
        if file.BEGIN <= kind <= file.ROUND and 0 <= name < len(names):
            when = (nanoseconds + offset_ns) / 1e9
            yield file.Event(when, kind, names[name][0], operation, runs, nbytes, details[name])


def _texts(field: bytes) -> tuple[str, str]:
    """A text that ends with a zero byte, and the text that follows it."""
    text, _, behind = field.partition(b"\0")
    return text.decode(errors="replace"), behind.split(b"\0")[0].decode(errors="replace")


def _details(text: str) -> file.Details | None:
    try:
        kind, algorithm, nbytes, dtype, root, opens, axes = text.split(" ")
        return file.Details(
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
