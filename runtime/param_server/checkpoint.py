"""What a server keeps in a file, so that a killed one loses nothing that a worker was told of.

Every unit of every state has two places in the file, and is written to them in turn before anything of its
new value is said to anyone: whenever the process is killed, one of the two is whole, and the newest whole one
is what counts. The file does not grow. A process that dies loses nothing of what it has written; a machine
that loses power may, but for what was on the disk when `every_s` last passed.

The file begins with a line of text and one of JSON that says of which plan and server it is; from the next
page on stand the places: version, updates, bytes and CRC-32 (u64 u64 u64 u32), and from the 64th byte on the
slots of the unit one after another, and its scalars.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
import threading
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import msgspec
import numpy as np

from commplan import io
from commplan.diagnostics import fail
from commplan.ir.types import Digest, Name
from commplan.protocol.sites import Sites
from commplan.runtime.input.layout import aligned
from commplan.runtime.input.sources.record_convert import numpy_dtype
from commplan.runtime.param_server.store import Array, Cell, Kept, Store, raw
from commplan.wait import Wait, joined

_FORMAT = b"commplan states of a server "
_MAGIC = _FORMAT + b"2\n"
_PAGE, _PLACE = 4096, 64
_MOST = 2**62  # of versions and updates
_SYNCED_S = 60.0  # in which a disk takes what was written
_HEAD = struct.Struct("<QQQI")
_OTHER = "go on from another copy of the folder, or begin with an empty one"


class CheckpointHeader(msgspec.Struct, frozen=True):
    """Of what a file is. digest: of the states' layouts on this server. states: for who reads the file."""

    digest: Digest
    server: int
    states: tuple[Name, ...]


class StoredUnit(NamedTuple):
    """What stands in a place."""

    version: int
    updates: int
    data: Array


class Places(NamedTuple):
    """Where a unit's two places begin, and how many bytes of data each has."""

    first: int
    second: int
    nbytes: int


def about(store: Store, server: int) -> CheckpointHeader:
    """The plan's part: which states lie here, and how."""
    cells = [(key, cell.layout, [kept.scalar_dtypes for kept in cell.units.values()][:1])
             for key, cell in sorted(store.cells.items())]  # fmt: skip
    digest = hashlib.sha256(msgspec.json.encode(cells)).hexdigest()
    return CheckpointHeader(digest, server, tuple(dict.fromkeys(name for name, _ in sorted(store.cells))))


class Keep:
    """The file of one server in `folder`.

    every_s: seconds between two times that it is forced to the disk; never if None. found: whether it was
    there already.

    Raises CP0973 for a file of another plan, CP0974 where it cannot be read, written or locked.
    """

    def __init__(self, folder: Path, store: Store, server: int, every_s: float | None = None) -> None:
        self.path = folder / f"server-{server}.state"
        self.store, self.about = store, about(store, server)
        self._places: dict[tuple[str, int, int], Places] = {}
        self._head = _MAGIC + msgspec.json.encode(self.about) + b"\n"
        at = -(-len(self._head) // _PAGE) * _PAGE
        for cell, kept in store:
            nbytes = _nbytes(kept)
            size = _PLACE + -(-nbytes // _PLACE) * _PLACE
            self._places[cell.name, cell.group, kept.unit.number] = Places(at, at + size, nbytes)
            at += 2 * size
        self._size = at
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock()
            self.found = self.path.exists()
            if not self.found:
                self._create()
            self._file = io.open_file(self.path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            self._refuse(f"cannot be opened: {error.strerror}")
        self._check()
        self._trouble = ""
        self._ending = threading.Event()
        self._syncing: threading.Thread | None = None
        if every_s is not None:
            self._syncing = threading.Thread(
                target=self._sync, args=(every_s,), name="commplan-checkpoint", daemon=True
            )
            self._syncing.start()

    def load(self, pairs: Sequence[tuple[str, str]] = ()) -> bool:
        """Fill the store with what was kept; whether there was anything.

        pairs: states that are updated together. If the process was killed between the two, the one that was
        written goes back to where the other is. Raises CP0974 for a unit that was written and cannot be read,
        and where two states of a pair do not meet: no kill does that, and to begin anew would be a loss.
        """
        best: dict[tuple[str, int, int], list[StoredUnit]] = {}
        for cell, kept in self.store:
            copies = sorted(self._both(cell, kept), key=lambda copy: copy.version, reverse=True)
            best[cell.name, cell.group, kept.unit.number] = copies
        for first, second in pairs:
            for (name, group, unit), copies in best.items():
                other = best.get((second, group, unit))
                if name == first and copies and other:
                    updates = min(copies[0].updates, other[0].updates)
                    for places in (copies, other):
                        places.sort(key=lambda copy: copy.updates != updates)
                    if copies[0].updates != other[0].updates:
                        self._refuse(
                            f"is damaged: unit {unit} of `{first}` is not of the time of `{second}`", _OTHER
                        )
        for cell, kept in self.store:
            for newest in best[cell.name, cell.group, kept.unit.number][:1]:
                kept.version, kept.updates = newest.version, newest.updates
                _unpack(kept, newest.data)
        return any(best.values())

    def save(self, cell: Cell, kept: Kept) -> None:
        """Keep a unit; one that is not whole yet waits for the rest of it."""
        if self._trouble:
            self._refuse(self._trouble)
        if not kept.whole:
            return
        places = self._places[cell.name, cell.group, kept.unit.number]
        at = places.second if kept.version % 2 else places.first
        arrays = [_view(raw(np.ascontiguousarray(array))) for array in kept.arrays()]
        head = _HEAD.pack(kept.version, kept.updates, places.nbytes, _crc(kept, arrays))
        try:
            self._write([memoryview(head.ljust(_PLACE, b"\0")), *arrays], at)
        except OSError as error:
            self._refuse(f"cannot be written: {error.strerror}")

    def close(self) -> None:
        """Let go of the file; it is on the disk if that was asked for."""
        self._ending.set()
        if self._syncing is not None:
            joined(self._syncing, Wait(_SYNCED_S, self._unsynced))
            os.fsync(self._file)
        os.close(self._file)
        os.close(self._locked)

    def _create(self) -> None:
        """With all its size, under its name only when it is whole."""
        new = self.path.with_suffix(".new")
        new.unlink(missing_ok=True)  # of a run that was killed; or a link, which is not followed
        file = io.open_file(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        try:
            os.pwrite(file, self._head, 0)
            os.ftruncate(file, self._size)
            os.fsync(file)
        finally:
            os.close(file)
        new.replace(self.path)

    def _lock(self) -> None:
        """Before anything is looked at: a file beside the other, never replaced and never removed."""
        lock = io.open_file(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            self._refuse("is in use by another run", "give every run a folder of its own")
        self._locked = lock

    def _check(self) -> None:
        head = os.pread(self._file, io.MIB + len(self._head), 0)
        if not head.startswith(_MAGIC):
            if head.startswith(_FORMAT):
                self._refuse(
                    "was written by another version of commplan", "go on with that version, or begin anew"
                )
            self._refuse("holds no states of a server", _OTHER)
        try:
            header = io.decode_json(head[len(_MAGIC) :].partition(b"\n")[0], CheckpointHeader)
        except ValueError:
            self._refuse("is damaged", _OTHER)
        if header == self.about:
            size = os.fstat(self._file).st_size
            if size != self._size:
                self._refuse(f"is damaged: it has {size} bytes, expected {self._size}", _OTHER)
            return
        fail(
            "CP0973",
            f"the checkpoint {str(self.path)!r} is one of another plan, of other shapes or another server",
            f"it holds {_told(header)}",
            f"expected {_told(self.about)}",
            "bind the program that it was made with, or give an empty folder",
        )

    def _both(self, cell: Cell, kept: Kept) -> list[StoredUnit]:
        """Of a unit's places those that are whole."""
        places = self._places[cell.name, cell.group, kept.unit.number]
        copies = [self._place(at, places.nbytes) for at in (places.first, places.second)]
        whole = [copy for copy in copies if copy is not None]
        if not whole and all(self._version(at) for at in (places.first, places.second)):
            self._refuse(f"is damaged: no copy of unit {kept.unit.number} of `{cell.name}` is whole", _OTHER)
        return whole

    def _version(self, at: int) -> int:
        """Of a place, 0 where nothing was ever written."""
        return int(_HEAD.unpack_from(os.pread(self._file, _PLACE, at).ljust(_PLACE, b"\0"))[0])

    def _place(self, at: int, nbytes: int) -> StoredUnit | None:
        version, updates, size, crc = _HEAD.unpack_from(os.pread(self._file, _PLACE, at).ljust(_PLACE, b"\0"))
        if not version or size != nbytes or max(version, updates) >= _MOST:
            return None
        copy = StoredUnit(version, updates, aligned((nbytes,), np.dtype(np.uint8)))
        got = os.preadv(self._file, [_view(copy.data)], at + _PLACE)
        return copy if got == nbytes and _crc(copy, [_view(copy.data)]) == crc else None

    def _write(self, pieces: Sequence[memoryview], at: int) -> None:
        wanted = sum(len(piece) for piece in pieces)
        done = os.pwritev(self._file, pieces, at)
        if done < wanted:  # a signal, or the last bytes of a disk
            rest = b"".join(bytes(piece) for piece in pieces)
            while done < wanted:
                done += os.pwrite(self._file, rest[done:], at + done)

    def _sync(self, every_s: float) -> None:
        while not self._ending.wait(every_s):
            try:
                os.fsync(self._file)
            except OSError as error:  # told at the next thing that is to be kept
                self._trouble = f"cannot be forced to the disk: {error.strerror}"

    def _unsynced(self, waited: float) -> NoReturn:
        self._refuse(
            f"has not reached its disk within {waited:.0f} s", "give a folder on a disk that answers"
        )

    def _refuse(
        self, message: str, fix: str = "give a folder that can be written, and is not full"
    ) -> NoReturn:
        fail("CP0974", f"the checkpoint {str(self.path)!r} {message}", fix)


def check_prompt(sites: Sites, file: str) -> None:
    """Raises CP0980 for an exchange that is answered before it is applied: until then it is in no file."""
    for site in sites.all:
        if site.kind == "exchange" and site.staleness:
            fail(
                "CP0980",
                f"`staleness = {site.staleness}` answers before anything is applied, and a checkpoint keeps"
                " what was answered",
                "leave `staleness` out, or write 0; or serve without a checkpoint",
                span=site.span,
                file=file,
            )


def _view(array: Any) -> memoryview:
    return memoryview(array)


def _told(header: CheckpointHeader) -> str:
    return f"{', '.join(header.states) or 'nothing'} of server {header.server}, digest {header.digest[:12]}"


def _nbytes(kept: Kept) -> int:
    slots = sum(kept.unit.size * dtype.nbytes for dtype in kept.dtypes)
    return slots + sum(dtype.nbytes for dtype in kept.scalar_dtypes)


def _crc(of: Kept | StoredUnit, arrays: Sequence[memoryview]) -> int:
    crc = zlib.crc32(struct.pack("<QQ", of.version, of.updates))
    for array in arrays:
        crc = zlib.crc32(array, crc)
    return crc


def _unpack(kept: Kept, data: Array) -> None:
    at = 0
    for number, dtype in enumerate(kept.dtypes):
        size = kept.unit.size * dtype.nbytes
        kept.slots[number] = raw(data[at : at + size]).view(numpy_dtype(dtype)).copy()
        at += size
    for number, dtype in enumerate(kept.scalar_dtypes):
        kept.scalars[number] = data[at : at + dtype.nbytes].view(numpy_dtype(dtype)).reshape(()).copy()
        at += dtype.nbytes
