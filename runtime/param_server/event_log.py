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

LOST = 0  # the tag of a worker's death
_MAGIC = b"commplan order of service 1\n"
_BLOCK = 1 << 14
_HEAD = struct.Struct("<III")


class LogHeader(msgspec.Struct, frozen=True):
    """Identifies a recording. `digest` is that of all messages between servers and workers."""

    digest: Digest
    server: int
    workers: int


def log_header(sites: Sites, server: int) -> LogHeader:
    """The header of a recording of this plan. Line numbers in the plan file are ignored."""
    without_lines = tuple(msgspec.structs.replace(site, span=Span(0, 0, 0, 0)) for site in sites.all)
    text = msgspec.json.encode(msgspec.structs.replace(sites, all=without_lines))
    return LogHeader(hashlib.sha256(text).hexdigest(), server, sites.workers)


class Recorder:
    """Writes a recording. Raises CP0976 if that fails."""

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
        self.flush()
        self._file.close()


def read_events(path: Path, expected: LogHeader) -> Iterator[tuple[int, int]]:
    """The events of a recording as (worker, tag), as far as it was written. Raises CP0976."""
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
            return  # the server was killed while it wrote this block
        if not 0 < count <= _BLOCK or zlib.crc32(packed) != crc:
            _refuse(path, f"is damaged at byte {offset}")
        try:
            events = array("Q", io.decompress(packed, 8 * count))
        except ValueError:
            _refuse(path, f"is damaged at byte {offset}")
        if any(event >> 32 >= workers for event in events):  # no message of such a worker would ever arrive
            _refuse(path, f"is damaged at byte {offset}")
        yield from ((event >> 32, event & 0xFFFFFFFF) for event in events)
        offset += _HEAD.size + nbytes


def _refuse(path: Path, message: str) -> NoReturn:
    fail(
        "CP0976",
        f"the recording {str(path)!r} {message}",
        "record and replay the same plan on the same ranks",
    )


class Replay:
    """Passes on messages in the order of a recording, and holds back those that arrive early.

    Args:
        events: The events of the recording.
        hear: Called with (worker, tag, buffer).
        lose: Called with a worker that died at this point of the recording.

    Raises:
        CommplanError: CP0977 if the run differs from the recording, or continues after its end.
    """

    def __init__(
        self,
        events: Iterator[tuple[int, int]],
        hear: Callable[[int, int, Array], None],
        lose: Callable[[int], None],
    ) -> None:
        self._events, self._hear, self._lose = events, hear, lose
        self._early: dict[int, deque[tuple[int, Array]]] = {}
        self._dead: set[int] = set()
        self.count = 0
        self._next = next(events, None)
        self._advance()

    def arrive(self, worker: int, tag: int, buffer: Array) -> None:
        """Handle a message that has arrived."""
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
                self._lose(worker)
            elif not early:
                return
            elif early[0][0] != tag:
                self._differs(worker, tag, early[0][0])
            else:
                self._hear(worker, *early.popleft())
            self.count += 1
            self._next = next(self._events, None)
        for worker, early in self._early.items():
            while early:
                tag, buffer = early.popleft()
                if tag != LEAVE:
                    message = f"the recording ends after {self.count} messages, but worker {worker} continues"
                    fail("CP0977", message, "replay as many steps as were recorded")
                self._hear(worker, tag, buffer)

    def _differs(self, worker: int, tag: int, actual: int) -> None:
        event = {LEAVE: "leaves", LOST: "has died"}.get(actual, f"sends a message with tag {actual}")
        fail(
            "CP0977",
            f"worker {worker} {event}, but its message {self.count} in the recording has tag {tag}",
            "a replay needs the same program on the same ranks, step by step",
        )
