"""The order in which a server heard its workers, written down; and the same order again.

What a server does follows from that order alone, so a run with the same data ends with the same bits. A file
is a line of text, one of JSON that says of which plan and server it is, and blocks of at most `_BLOCK`
events: their number, bytes and CRC-32 (u32 each), then the events, u64 (worker << 32 | tag), through zlib.
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


class About(msgspec.Struct, frozen=True):
    """Of what a recording is. digest: of all that servers and workers say to each other."""

    digest: Digest
    server: int
    workers: int


def about(sites: Sites, server: int) -> About:
    """The plan's part in a recording: where it stands in its file does not matter."""
    nowhere = tuple(msgspec.structs.replace(site, span=Span(0, 0, 0, 0)) for site in sites.all)
    text = msgspec.json.encode(msgspec.structs.replace(sites, all=nowhere))
    return About(hashlib.sha256(text).hexdigest(), server, sites.workers)


class Recorder:
    """Writes a recording. Raises CP0976 where it cannot be written."""

    def __init__(self, path: Path, header: About) -> None:
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
        """Hand what there is to the system: it outlives this process."""
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


def recorded(path: Path, expected: About) -> Iterator[tuple[int, int]]:
    """The events of a recording, (worker, tag), as far as it was written. Raises CP0976."""
    try:
        data = io.read(path, io.SCHEDULE)
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}")
    end = data.find(b"\n", len(_MAGIC))
    if not data.startswith(_MAGIC) or end < 0:
        _refuse(path, "is no recording")
    try:
        header = io.decode_json(data[len(_MAGIC) : end], About)
    except ValueError:
        _refuse(path, "is no recording")
    if header != expected:
        _refuse(path, "is one of another plan, other shapes, another server or another number of workers")
    return _events(path, data, end + 1, expected.workers)


def _events(path: Path, data: bytes, at: int, workers: int) -> Iterator[tuple[int, int]]:
    while at + _HEAD.size <= len(data):
        count, nbytes, crc = _HEAD.unpack_from(data, at)
        packed = data[at + _HEAD.size : at + _HEAD.size + nbytes]
        if len(packed) < nbytes:
            return  # the server was killed while it wrote this
        if not 0 < count <= _BLOCK or zlib.crc32(packed) != crc:
            _refuse(path, f"is damaged at byte {at}")
        try:
            events = array("Q", io.decompress(packed, 8 * count))
        except ValueError:
            _refuse(path, f"is damaged at byte {at}")
        if any(event >> 32 >= workers for event in events):  # nobody would ever send what is waited for
            _refuse(path, f"is damaged at byte {at}")
        yield from ((event >> 32, event & 0xFFFFFFFF) for event in events)
        at += _HEAD.size + nbytes


def _refuse(path: Path, message: str) -> NoReturn:
    fail(
        "CP0976",
        f"the recording {str(path)!r} {message}",
        "record and replay the same plan on the same ranks",
    )


class Replay:
    """Hands messages on in the order of a recording; those that come early wait.

    hear: (worker, tag, buffer). lose: (worker), a worker that died then; living ones are to be told. Raises
    CP0977 where the run is another one than was recorded, or goes on after its end.
    """

    def __init__(
        self,
        events: Iterator[tuple[int, int]],
        hear: Callable[[int, int, Array], None],
        lose: Callable[[int], None],
    ) -> None:
        self._events, self._hear, self._lose = events, hear, lose
        self._early: dict[int, deque[tuple[int, Array]]] = {}
        self._gone: set[int] = set()
        self.count = 0
        self._next = next(events, None)
        self._go_on()

    def arrive(self, worker: int, tag: int, buffer: Array) -> None:
        """A message has come."""
        if worker in self._gone:
            return
        self._early.setdefault(worker, deque()).append((tag, buffer))
        self._go_on()

    def died(self, worker: int) -> None:
        """A worker has died now."""
        self.arrive(worker, LOST, np.zeros(0, np.uint8))

    def _go_on(self) -> None:
        while self._next is not None:
            worker, tag = self._next
            early = self._early.get(worker)
            if tag == LOST:
                self._gone.add(worker)
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
                    message = f"the recording ends after {self.count} messages, and worker {worker} goes on"
                    fail("CP0977", message, "replay as many steps as were recorded")
                self._hear(worker, tag, buffer)

    def _differs(self, worker: int, tag: int, actual: int) -> None:
        event = {LEAVE: "leaves", LOST: "has died"}.get(actual, f"sends a message with tag {actual}")
        fail(
            "CP0977",
            f"worker {worker} {event}, and its message {self.count} of the recording has tag {tag}",
            "a replay needs the same program on the same ranks, step by step",
        )
