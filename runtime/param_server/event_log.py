"""The log of the order in which a server received messages, and its replay.

The results of a server depend only on this order, so a run with the same data ends with the same bits. A file
is a line of text, a line of JSON that identifies the plan and the server, and blocks of at most `_BLOCK`
events. A block has the number of events, their bytes and CRC-32 (u32 each), then the events, u64
(worker << 32 | tag), compressed with zlib.
"""

from __future__ import annotations

import hashlib
import os
import struct
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np

from commplan import io
from commplan.diagnostics import Span, fail
from commplan.ir.types import Digest
from commplan.protocol.sites import LEAVE, Sites
from commplan.runtime.param_server.store import Array

LOST = 0  # The tag of a worker's death.
_MAGIC = b"commplan order of service 1\n"  # The first line of a file, with the version of the format.
_BLOCK = 1 << 14  # The most events in a block.
_HEAD = struct.Struct("<III")  # The head of a block: the number of events, their bytes and CRC-32.


class LogHeader(msgspec.Struct, frozen=True):
    """Identifies the plan and the server of a recording.

    Attributes:
        digest: A SHA-256 of the plan's messages between servers and workers, in hexadecimal digits.
        server: The number of the server.
        workers: The number of workers.
    """

    digest: Digest
    server: int
    workers: int


def log_header(sites: Sites, server: int) -> LogHeader:
    """The header of a recording of server number `server`. It does not depend on lines of the plan file."""
    without_lines = tuple(msgspec.structs.replace(site, span=Span(0, 0, 0, 0)) for site in sites.all)
    text = msgspec.json.encode(msgspec.structs.replace(sites, all=without_lines))
    return LogHeader(hashlib.sha256(text).hexdigest(), server, sites.workers)


class Recorder:
    """Writes a recording to a file, which is replaced.

    Args:
        path: The file.
        header: The header of the recording.

    Raises:
        CommplanError: CP0976, here and in all methods, if the file cannot be written.
    """

    def __init__(self, path: Path, header: LogHeader) -> None:
        self.path, self._events = path, array("Q")
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
            self._file = os.fdopen(io.open_file(path, flags, 0o666), "wb")
            self._file.write(_MAGIC + msgspec.json.encode(header) + b"\n")
            self._file.flush()
        except OSError as error:
            _refuse(path, f"cannot be written: {error.strerror}")

    def add(self, worker: int, tag: int) -> None:
        """Record a message, or with the tag `LOST` the death of a worker. Writes a block if it is full."""
        self._events.append(worker << 32 | tag)
        if len(self._events) >= _BLOCK:
            self.flush()

    def flush(self) -> None:
        """Write the buffered events to the file, so that they survive this process."""
        if not self._events:
            return
        packed = zlib.compress(self._events.tobytes(), 1)
        try:
            self._file.write(_HEAD.pack(len(self._events), len(packed), zlib.crc32(packed)) + packed)
            self._file.flush()
        except OSError as error:
            _refuse(self.path, f"cannot be written: {error.strerror}")
        del self._events[:]

    def close(self) -> None:
        """Write the buffered events, and close the file."""
        self.flush()
        self._file.close()


def read_events(path: Path, expected: LogHeader) -> Iterator[tuple[int, int]]:
    """Read the events of a recording.

    Args:
        path: The file.
        expected: The header of this run.

    Returns:
        The events as (worker, tag), in order. If the server was killed, the last ones may be missing.

    Raises:
        CommplanError: CP0976 if the file cannot be read, or is that of another plan or server. The iterator
            raises it if a block is damaged.
    """
    try:
        data = io.read(path, io.SCHEDULE)
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}")
    end = data.find(b"\n", len(_MAGIC))
    if not data.startswith(_MAGIC) or end < 0:
        _refuse(path, "is not a recording")
    try:
        header = io.decode_json(data[len(_MAGIC) : end], LogHeader)
    except ValueError:
        _refuse(path, "is not a recording")
    if header != expected:
        _refuse(path, "belongs to another plan, other shapes, another server or another number of workers")
    return _events(path, data, end + 1, expected.workers)


def _events(path: Path, data: bytes, offset: int, workers: int) -> Iterator[tuple[int, int]]:
    """Decode the blocks of a recording: pairs of worker and tag, in order of arrival."""
    while offset + _HEAD.size <= len(data):
        count, nbytes, crc = _HEAD.unpack_from(data, offset)
        packed = data[offset + _HEAD.size : offset + _HEAD.size + nbytes]
        if len(packed) < nbytes:
            return  # The server was killed while it wrote this block.
        if not 0 < count <= _BLOCK or zlib.crc32(packed) != crc:
            _refuse(path, f"is damaged at byte {offset}")
        try:
            events = array("Q", io.decompress(packed, 8 * count))
        except ValueError:
            _refuse(path, f"is damaged at byte {offset}")
        if any(event >> 32 >= workers for event in events):  # No message of such a worker would ever arrive.
            _refuse(path, f"is damaged at byte {offset}")
        yield from ((event >> 32, event & 0xFFFFFFFF) for event in events)
        offset += _HEAD.size + nbytes


def _refuse(path: Path, message: str) -> NoReturn:
    """Raise CP0976; `message` continues after the name of the file."""
    fail(
        "CP0976",
        f"the recording {str(path)!r} {message}",
        "record and replay the same plan on the same ranks",
    )


class Replay:
    """Passes on messages in the order of a recording, and holds back those that arrive early.

    A worker that died in the recording is dead after that point, whether it lives in this run or not.

    Args:
        events: The events of the recording, as (worker, tag).
        on_message: Called with (worker, tag, buffer) for each message in turn.
        on_death: Called with a worker that died at this point of the recording.

    Attributes:
        count: The number of recorded events that have been passed on.

    Raises:
        CommplanError: CP0977, here and in all methods, if the run differs from the recording, or continues
            after its end; the errors of `events`, `on_message` and `on_death`.
    """

    def __init__(
        self,
        events: Iterator[tuple[int, int]],
        on_message: Callable[[int, int, Array], None],
        on_death: Callable[[int], None],
    ) -> None:
        self._events, self._on_message, self._on_death = events, on_message, on_death
        # By worker, the tags and buffers of messages that have arrived and were not passed on, oldest first.
        self._early: dict[int, deque[tuple[int, Array]]] = {}
        self._dead: set[int] = set()
        self.count = 0
        self._next = next(events, None)  # The next recorded event; None after the last one.
        self._advance()

    def arrive(self, worker: int, tag: int, buffer: Array) -> None:
        """Handle a message that has arrived; ignored if the worker is dead in the recording."""
        if worker in self._dead:
            return
        self._early.setdefault(worker, deque()).append((tag, buffer))
        self._advance()

    def died(self, worker: int) -> None:
        """Handle the death of a worker in this run."""
        self.arrive(worker, LOST, np.zeros(0, np.uint8))

    def _advance(self) -> None:
        """Pass on the messages that have arrived in the recorded order. Raises CP0977 if the run differs."""
        while self._next is not None:
            worker, tag = self._next
            early = self._early.get(worker)
            if tag == LOST:
                self._dead.add(worker)
                self._early.pop(worker, None)
                self._on_death(worker)
            elif not early:
                return
            elif early[0][0] != tag:
                self._differs(worker, tag, early[0][0])
            else:
                self._on_message(worker, *early.popleft())
            self.count += 1
            self._next = next(self._events, None)
        # After the end of the recording, workers may only leave.
        for worker, early in self._early.items():
            while early:
                tag, buffer = early.popleft()
                if tag != LEAVE:
                    message = f"the recording ends after {self.count} messages, but worker {worker} continues"
                    fail("CP0977", message, "replay as many steps as were recorded")
                self._on_message(worker, tag, buffer)

    def _differs(self, worker: int, tag: int, actual: int) -> None:
        """Raise CP0977: the worker sent the tag `actual`, but the recording has `tag`."""
        event = {LEAVE: "leaves", LOST: "has died"}.get(actual, f"sends a message with tag {actual}")
        fail(
            "CP0977",
            f"worker {worker} {event}, but its message {self.count} in the recording has tag {tag}",
            "a replay needs the same program on the same ranks, step by step",
        )
