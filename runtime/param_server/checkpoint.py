"""The checkpoint file of a server. A killed server loses no update that a worker received an answer for.

Every unit of every state has two places in the file. New values are written to them alternately, before any
worker receives an answer. If the process is killed, at least one of the two is complete, and the newest
complete one is used. The file does not grow. Written values survive the death of the process. If the machine
loses power, values survive that were written before the last fsync (`every_s`).

The file begins with a line of text and a line of JSON, which identifies the plan and the server. The places
begin on the next page. Each has version, updates, bytes and CRC-32 (u64 u64 u64 u32), and from byte 64 on the
slots of the unit and its scalars.
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
from commplan.runtime.param_server.store import Array, Shard, StateCell, Store, raw
from commplan.wait import Wait, join

_FORMAT = b"commplan states of a server "  # The begin of a file of any version of the format.
_MAGIC = _FORMAT + b"2\n"  # The first line of a file.
_PAGE = 4096  # The places begin at a multiple of these bytes.
_PLACE = 64  # The bytes of the head of a place. Sizes of places are multiples of it.
_MOST = 2**62  # The limit of versions and updates: larger ones are damaged.
_SYNCED_S = 60.0  # Seconds until an fsync counts as hung.
_HEAD = struct.Struct("<QQQI")  # The head of a place: version, updates, bytes of data, and CRC-32.
_RESTORE_FIX = "restore the folder from another copy, or start with an empty one"


class CheckpointHeader(msgspec.Struct, frozen=True):
    """Identifies the plan and the server of a checkpoint file.

    Attributes:
        digest: A SHA-256 of the layouts of the states on this server, in hexadecimal digits.
        server: The number of the server.
        states: The names of the states, sorted.
    """

    digest: Digest
    server: int
    states: tuple[Name, ...]


class StoredCopy(NamedTuple):
    """The content of a place.

    Attributes:
        version: The version of the unit; see `Shard`.
        updates: The number of updates of the unit; see `Shard`.
        data: The slots and then the scalars of the unit, u8[nbytes].
    """

    version: int
    updates: int
    data: Array


class Places(NamedTuple):
    """The two places of a unit in the file.

    Attributes:
        first: The offset of the place for even versions.
        second: The offset of the place for odd versions.
        nbytes: The bytes of data in each, without its head.
    """

    first: int
    second: int
    nbytes: int


def header_of(store: Store, server: int) -> CheckpointHeader:
    """The header for the states of `store` on this server."""
    # All units of a state have the same scalars.
    cells = [(key, cell.layout, [shard.scalar_dtypes for shard in cell.units.values()][:1])
             for key, cell in sorted(store.cells.items())]  # fmt: skip
    digest = hashlib.sha256(msgspec.json.encode(cells)).hexdigest()
    return CheckpointHeader(digest, server, tuple(dict.fromkeys(name for name, _ in sorted(store.cells))))


class ServerCheckpoint:
    """The checkpoint file of one server in `folder`. It is created if necessary, and locked until `close`.

    Args:
        folder: The folder; created if necessary.
        store: The states of the server.
        server: The number of the server.
        every_s: Seconds between two calls of fsync; None for no calls.

    Attributes:
        path: The file.
        store: The states of the server.
        header: The header of the file.
        existed: Whether the file existed.

    Raises:
        CommplanError: CP0973 for the file of another plan; CP0974 if it cannot be read, written or locked, or
            if it is damaged.
    """

    def __init__(self, folder: Path, store: Store, server: int, every_s: float | None = None) -> None:
        self.path = folder / f"server-{server}.state"
        self.store, self.header = store, header_of(store, server)
        self._places: dict[tuple[str, int, int], Places] = {}  # By state, group and unit.
        self._head = _MAGIC + msgspec.json.encode(self.header) + b"\n"
        offset = -(-len(self._head) // _PAGE) * _PAGE
        for cell, shard in store:
            nbytes = _nbytes(shard)
            size = _PLACE + -(-nbytes // _PLACE) * _PLACE
            self._places[cell.name, cell.group, shard.unit.number] = Places(offset, offset + size, nbytes)
            offset += 2 * size
        self._size = offset

        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock()
            self.existed = self.path.exists()
            if not self.existed:
                self._create()
            self._file = io.open_file(self.path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError as error:
            self._refuse(f"cannot be opened: {error.strerror}")
        self._check()

        self._sync_error = ""  # The error of the last fsync that failed, for the next `save`.
        self._ending = threading.Event()
        self._syncing: threading.Thread | None = None
        if every_s is not None:
            self._syncing = threading.Thread(
                target=self._sync, args=(every_s,), name="commplan-checkpoint", daemon=True
            )
            self._syncing.start()

    def load(self, pairs: Sequence[tuple[str, str]] = ()) -> bool:
        """Restore the store from the file. Returns whether the file contained any values.

        Args:
            pairs: States that are updated together. If the process was killed between two writes, the state
                that was written is restored to the previous version.

        Raises:
            CommplanError: CP0974 for a unit that was written and has no readable copy, and for a pair of
                states without copies of the same update. A killed process does not cause either.
        """
        best: dict[tuple[str, int, int], list[StoredCopy]] = {}
        for cell, shard in self.store:
            copies = sorted(self._both(cell, shard), key=lambda copy: copy.version, reverse=True)
            best[cell.name, cell.group, shard.unit.number] = copies

        for first, second in pairs:
            for (name, group, unit), copies in best.items():
                other = best.get((second, group, unit))
                if name == first and copies and other:
                    # Move the copies of the earlier update to the front. The sort is stable.
                    updates = min(copies[0].updates, other[0].updates)
                    for copies_of_unit in (copies, other):
                        copies_of_unit.sort(key=lambda copy: copy.updates != updates)
                    if copies[0].updates != other[0].updates:
                        self._refuse(
                            f"is damaged: unit {unit} of `{first}` and `{second}` are of different updates",
                            _RESTORE_FIX,
                        )

        for cell, shard in self.store:
            for newest in best[cell.name, cell.group, shard.unit.number][:1]:
                shard.version, shard.updates = newest.version, newest.updates
                _unpack(shard, newest.data)
        return any(best.values())

    def save(self, cell: StateCell, shard: Shard) -> None:
        """Write a unit, if all of its values are set.

        Raises CP0974 if that fails, or if an fsync has failed before.
        """
        if self._sync_error:
            self._refuse(self._sync_error)
        if not shard.is_complete:
            return
        places = self._places[cell.name, cell.group, shard.unit.number]
        offset = places.second if shard.version % 2 else places.first
        arrays = [_view(raw(np.ascontiguousarray(array))) for array in shard.arrays()]
        head = _HEAD.pack(shard.version, shard.updates, places.nbytes, _crc(shard, arrays))
        try:
            self._write([memoryview(head.ljust(_PLACE, b"\0")), *arrays], offset)
        except OSError as error:
            self._refuse(f"cannot be written: {error.strerror}")

    def close(self) -> None:
        """Close the file, after an fsync if `every_s` was set.

        Raises CP0974 if an fsync has failed since the last `save`, or a pending one hangs. In the latter case
        the file stays open, since closing it can hang too.
        """
        self._ending.set()
        if self._syncing is not None:
            join(self._syncing, Wait(_SYNCED_S, self._fail_sync))
            self._sync_file()
        os.close(self._file)
        os.close(self._locked)
        if self._sync_error:
            self._refuse(self._sync_error)

    def _create(self) -> None:
        """Create the file with its full size. It gets its name only once it is complete."""
        new = self.path.with_suffix(".new")
        new.unlink(missing_ok=True)  # Left by a run that was killed; or a link, which is not followed.
        file = io.open_file(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
        try:
            os.pwrite(file, self._head, 0)
            os.ftruncate(file, self._size)
            os.fsync(file)
        finally:
            os.close(file)
        new.replace(self.path)

    def _lock(self) -> None:
        """Lock a separate file, which is never replaced or removed, before the checkpoint is read.

        Raises CP0974 if another process has locked it, and an `OSError` if it cannot be locked.
        """
        lock = io.open_file(self.path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(lock)
            if error.errno not in (errno.EAGAIN, errno.EACCES):
                raise
            self._refuse("is in use by another run", "use a separate folder for each run")
        self._locked = lock

    def _check(self) -> None:
        """Compare the header and the size of the file with those of this server. Raises CP0973 or CP0974."""
        head = os.pread(self._file, io.MIB + len(self._head), 0)
        if not head.startswith(_MAGIC):
            if head.startswith(_FORMAT):
                self._refuse(
                    "was written by another version of commplan",
                    "continue with that version, or start with an empty folder",
                )
            self._refuse("is not a checkpoint of a server", _RESTORE_FIX)
        try:
            header = io.decode_json(head[len(_MAGIC) :].partition(b"\n")[0], CheckpointHeader)
        except ValueError:
            self._refuse("is damaged", _RESTORE_FIX)
        if header == self.header:
            size = os.fstat(self._file).st_size
            if size != self._size:
                self._refuse(f"is damaged: it has {size} bytes, expected {self._size}", _RESTORE_FIX)
            return
        fail(
            "CP0973",
            f"the checkpoint {str(self.path)!r} belongs to another plan, other shapes or another server",
            f"it contains {_describe(header)}",
            f"expected {_describe(self.header)}",
            "bind the program that wrote it, or use an empty folder",
        )

    def _both(self, cell: StateCell, shard: Shard) -> list[StoredCopy]:
        """The complete copies of a unit, none if it was not written.

        Raises CP0974 if both places were written and neither is complete.
        """
        places = self._places[cell.name, cell.group, shard.unit.number]
        copies = [self._place(offset, places.nbytes) for offset in (places.first, places.second)]
        complete = [copy for copy in copies if copy is not None]
        if not complete and all(self._version(offset) for offset in (places.first, places.second)):
            unit = shard.unit.number
            self._refuse(f"is damaged: unit {unit} of `{cell.name}` has no complete copy", _RESTORE_FIX)
        return complete

    def _version(self, offset: int) -> int:
        """The version in a place; 0 if nothing was written there."""
        return int(_HEAD.unpack_from(os.pread(self._file, _PLACE, offset).ljust(_PLACE, b"\0"))[0])

    def _place(self, offset: int, nbytes: int) -> StoredCopy | None:
        """The content of a place with `nbytes` of data; None if it is empty or not complete."""
        version, updates, size, crc = _HEAD.unpack_from(
            os.pread(self._file, _PLACE, offset).ljust(_PLACE, b"\0")
        )
        if not version or size != nbytes or max(version, updates) >= _MOST:
            return None
        copy = StoredCopy(version, updates, aligned((nbytes,), np.dtype(np.uint8)))
        nbytes_read = os.preadv(self._file, [_view(copy.data)], offset + _PLACE)
        return copy if nbytes_read == nbytes and _crc(copy, [_view(copy.data)]) == crc else None

    def _write(self, pieces: Sequence[memoryview], offset: int) -> None:
        """Write `pieces` one after another. Raises an `OSError` if that fails."""
        total = sum(len(piece) for piece in pieces)
        written = os.pwritev(self._file, pieces, offset)
        if written < total:  # After a signal, or if the disk is full.
            data = b"".join(bytes(piece) for piece in pieces)
            while written < total:
                written += os.pwrite(self._file, data[written:], offset + written)

    def _sync(self, every_s: float) -> None:
        """Call fsync periodically; the body of a thread."""
        while not self._ending.wait(every_s):
            self._sync_file()

    def _sync_file(self) -> None:
        """Call fsync once. An error is kept in `_sync_error`: the kernel reports it to one call only."""
        try:
            os.fsync(self._file)
        except OSError as error:
            self._sync_error = f"cannot be synchronized to the disk: {error.strerror}"

    def _fail_sync(self, waited: float) -> NoReturn:
        """Raise CP0974 for an fsync that has taken `waited` seconds."""
        self._refuse(
            f"was not synchronized to the disk within {waited:.0f} s", "use a folder on a disk that responds"
        )

    def _refuse(
        self, message: str, fix: str = "use a folder that is writable and has free space"
    ) -> NoReturn:
        """Raise CP0974; `message` continues after the name of the file."""
        fail("CP0974", f"the checkpoint {str(self.path)!r} {message}", fix)


def check_prompt(sites: Sites, file: str) -> None:
    """Raise CP0980 for an exchange with `staleness`, which is answered before its update is stored."""
    for site in sites.all:
        if site.kind == "exchange" and site.staleness:
            fail(
                "CP0980",
                f"`staleness = {site.staleness}` answers requests before they are applied, but a checkpoint"
                " must contain every answered update",
                "remove `staleness` or set it to 0, or serve without a checkpoint",
                span=site.span,
                file=file,
            )


def _view(array: Any) -> memoryview:
    return memoryview(array)


def _describe(header: CheckpointHeader) -> str:
    return f"{', '.join(header.states) or 'nothing'} of server {header.server}, digest {header.digest[:12]}"


def _nbytes(shard: Shard) -> int:
    """The bytes of all slots and scalars of a unit."""
    slots = sum(shard.unit.size * dtype.nbytes for dtype in shard.dtypes)
    return slots + sum(dtype.nbytes for dtype in shard.scalar_dtypes)


def _crc(copy: Shard | StoredCopy, arrays: Sequence[memoryview]) -> int:
    """CRC-32 of the version, the number of updates and the data, which `arrays` contain in order."""
    crc = zlib.crc32(struct.pack("<QQ", copy.version, copy.updates))
    for array in arrays:
        crc = zlib.crc32(array, crc)
    return crc


def _unpack(shard: Shard, data: Array) -> None:
    """Set the slots and scalars of `shard` to copies of `data`."""
    offset = 0
    for number, dtype in enumerate(shard.dtypes):
        size = shard.unit.size * dtype.nbytes
        shard.slots[number] = raw(data[offset : offset + size]).view(numpy_dtype(dtype)).copy()
        offset += size
    for number, dtype in enumerate(shard.scalar_dtypes):
        shard.scalars[number] = (
            data[offset : offset + dtype.nbytes].view(numpy_dtype(dtype)).reshape(()).copy()
        )
        offset += dtype.nbytes
