"""Reads record files (`recorder.file`), also while their processes write them.

A damaged file, which a user may have changed, must not end a reader: files are read and not mapped, and all
numbers in them are checked.
"""

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

# (begin, size) in bytes of the parts that are read: the file, then its header again, see `_record`.
_WHOLE = (0, file.SIZE), (0, file.HEADER.size)
_RANKS = 2**24  # maximum number of ranks of a job in an intact record


def read_records(paths: Iterable[str]) -> list[file.Record]:
    """The records in files and folders, in order of their plan, rank and lane.

    Args:
        paths: Files, and folders of which the records of this user are read. In folders, symbolic links,
            unreadable files, records of other versions and records that are being created are skipped.

    Raises:
        CommplanError: CP1114 if a file in `paths` cannot be read or is of another version, or if any file
            that is not skipped is damaged or not a record.
    """
    records: list[file.Record] = []
    for path in map(Path, paths):
        if path.is_dir():
            for inner in sorted(path.glob(f"{file.prefix()}*.rec")):
                with contextlib.suppress(OSError):
                    data, after = _pieces(inner, *_WHOLE, flags=os.O_NOFOLLOW)
                    # Before its process writes the record, the file is empty, or all zeros.
                    if data[: len(file.MAGIC)].strip(b"\0") and _version(data) == file.VERSION:
                        records.append(_record(inner, data, after))
            continue
        try:
            data, after = _pieces(path, *_WHOLE)
        except OSError as error:
            fail("CP1114", f"{path} cannot be read: {error.strerror or error}", file=str(path))
        except ValueError as error:  # a NUL in the name
            fail("CP1114", f"{str(path)!r} cannot be read: {error}")
        records.append(_record(path, data, after))
    return sorted(records, key=lambda record: (record.plan, record.rank, record.lane))


def read_open(path: Path, descriptor: int) -> file.Record:
    """The record in an open file that may have been removed.

    Args:
        path: The path of the file, for `Record.path` and messages.
        descriptor: The open file.

    Raises:
        OSError: If it cannot be read.
        CommplanError: CP1114 if it is not a record of this version, or is damaged.
    """
    data, after = (os.pread(descriptor, size, begin) for begin, size in _WHOLE)
    return _record(path, data, after)


def _pieces(path: Path, *spans: tuple[int, int], flags: int = os.O_RDONLY) -> list[bytes]:
    """The bytes of a file at `spans`, (begin, size), read one after another.

    Raises:
        OSError: If it cannot be read.
        ValueError: If the path contains a NUL.
    """
    descriptor = io.open_file(path, flags)
    try:
        return [os.pread(descriptor, size, begin) for begin, size in spans]
    finally:
        os.close(descriptor)


def _version(data: bytes) -> int:
    """The version of a record, at the same position in all versions; `VERSION` if `data` is not a record."""
    if data.startswith(file.MAGIC) and len(data) >= len(file.MAGIC) + 8:
        return int(struct.unpack_from("<q", data, len(file.MAGIC))[0])
    return file.VERSION


def _record(path: Path, data: bytes, after: bytes) -> file.Record:
    """The record in a file that may still be written.

    Args:
        path: The file.
        data: Its first `SIZE` bytes.
        after: Its header, read after `data`: shows which events were overwritten while `data` was read.

    Raises:
        CommplanError: CP1114 if it is not a record of this version, or is damaged.
    """
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
    """The call in the record of a process of this machine, which may run. Its time is on `time.monotonic`.

    None if there is none, or if the record cannot be read.
    """
    with contextlib.suppress(OSError):
        return _call(_pieces(path, (file.CALL, file.LIVE - file.CALL))[0], 0)
    return None


def writer(record: Path) -> tuple[int, int]:
    """The process that writes a record, and the signal that requests its stacks.

    Returns:
        The process number; 0 if the file is not a record of a process of this machine. `file.SIGNAL`; 0 if
        the record does not offer stacks on this signal, or the process does not handle it.

    Raises:
        OSError: If the record cannot be read, or the process has ended.
    """
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
    """The call in the bytes between `file.CALL` and `file.LIVE`, with its time moved by `offset_ns`."""
    if len(data) < file.SINCE.size:
        return None
    text, stack = _texts(data[file.SINCE.size :])
    return file.Call(text, (file.SINCE.unpack_from(data)[0] + offset_ns) / 1e9, stack) if text else None


def _events(data: bytes, first: int, head: int, count: int, offset_ns: int) -> Iterator[file.Event]:
    """The events with numbers from `first` to `head - 1`, without damaged ones.

    Args:
        data: The file.
        first, head: Numbers of events, counted from the first event of the record.
        count: The number of names.
        offset_ns: Nanoseconds from 1970 to the boot of the machine.
    """
    offsets = (file.HEADER.size + file.NAME * index for index in range(min(count, file.MOST_NAMES)))
    names = [_texts(data[offset : offset + file.NAME]) for offset in offsets]
    details = [_details(text) for _, text in names]
    for index in range(first, head):
        offset = file.EVENTS + file.EVENT.size * (index % file.CAPACITY)
        nanoseconds, kind, name, operation, runs, nbytes = file.EVENT.unpack_from(data, offset)
        if file.BEGIN <= kind <= file.ROUND and 0 <= name < len(names):
            when = (nanoseconds + offset_ns) / 1e9
            yield file.Event(when, kind, names[name][0], operation, runs, nbytes, details[name])


def _texts(field: bytes) -> tuple[str, str]:
    """A text that ends with a zero byte, and the text that follows it; empty if there is none."""
    text, _, second = field.partition(b"\0")
    return text.decode(errors="replace"), second.split(b"\0")[0].decode(errors="replace")


def _details(text: str) -> file.Details | None:
    """The details in a result of `Details.text`; None if they are incomplete, or if there are none."""
    try:
        kind, algorithm, nbytes, dtype, root, opens, axes = text.split(" ")
        return file.Details(
            kind, algorithm, int(nbytes), dtype, int(root), "" if opens == "-" else opens,
            tuple(filter(None, axes.split(","))),
        )  # fmt: skip
    except ValueError:
        return None


def _sizes(text: str, ranks: int) -> Mapping[str, int]:
    """The sizes of axes in a text such as `data=4,node=2`; empty if their product is not `ranks`."""
    pairs = [part.partition("=") for part in text.split(",") if part]
    sizes = {axis: int(size) for axis, _, size in pairs if size.isdecimal()}
    return sizes if math.prod(sizes.values()) == ranks else {}
