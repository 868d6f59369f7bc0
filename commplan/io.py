"""The only module of the package that opens, reads and replaces files from outside this process.

Such a file may be anything: a device without end, a pipe without a writer, a link to another file, or a few
bytes that unpack to gigabytes. `open_file` opens regular files only, `read` bounds their size, and the
decoders raise ValueError, with the reason, for any malformed data.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar, cast, overload

if TYPE_CHECKING:
    import msgspec

MIB = 1024**2
TEXT = 64 * MIB  # plans, topologies, calibrations, shapes, profiles
SCHEDULE = 1024 * MIB  # schedules, reproducers, recordings of servers, latency profiles
_MOST_INTEGER = 2**1000  # that a float can hold, and that can be printed
_DOTTED = r"""[\w"'-]++(?:[ \t]*+\.[ \t]*+[\w"'-]++)*+"""  # keys, and other words
_MOST_PARTS = 100  # of a dotted key
_KINDS = {
    stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
T = TypeVar("T")


def open_file(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """A descriptor of the regular file at `path`, which the caller closes.

    flags: of `os.open`; `os.O_NOFOLLOW` in folders of our own, where no file is a symbolic link. mode: of a
    file that `os.O_CREAT` creates. Raises OSError, whose `strerror` says what the file is if it is no regular
    one. Does not wait for the other end of a pipe.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "it is a symbolic link", os.fspath(path)) from None
        if error.errno == errno.ENXIO:  # a socket, or a pipe to write to
            raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path)) from None
        raise
    kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
    if kind != stat.S_IFREG:
        os.close(descriptor)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        name = _KINDS.get(kind, "something else")
        raise OSError(errno.EINVAL, f"it is {name}, not a regular file", os.fspath(path))
    return descriptor


def open_folder(path: str | os.PathLike[str]) -> int:
    """A descriptor of a folder that only this user may enter. Raises OSError, PermissionError for a folder of
    another user and for one that is open to others."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "it is of another user, or open to others", os.fspath(path))
    return descriptor


def read(path: str | os.PathLike[str], limit: int = TEXT, flags: int = os.O_RDONLY) -> bytes:
    """The bytes of a regular file; see `open_file`. Raises OSError, EFBIG for more than `limit` bytes."""
    with open(open_file(path, flags), "rb", buffering=0) as file:
        return read_stream(file, limit, os.fstat(file.fileno()).st_size)


def read_stream(file: BinaryIO, limit: int = TEXT, expected: int = 0) -> bytes:
    """What is left in an open file, `expected` bytes if that is known. Raises OSError, EFBIG for more than
    `limit` bytes."""
    pieces: list[bytes] = []
    size, step = 0, max(expected + 1, MIB)
    while size <= limit and expected <= limit and (piece := file.read(min(step, limit + 1 - size))):
        pieces.append(piece)
        size += len(piece)
    if max(size, expected) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit // MIB} MiB")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file, whole and on the disk or not at all; one that is there keeps its mode. Raises OSError."""
    place = Path(path)
    with replacing(place) as new:
        descriptor = open_file(new, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.fchmod(descriptor, stat.S_IMODE(place.stat().st_mode))
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
        finally:
            os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path) -> Generator[Path]:
    """A new file beside `path` to write to, which takes its place, on the disk, where the block ends well.

    A reader of `path` sees all of it or the file as it was before. If `path` is a link, the link is
    replaced, and not the file that it leads to. Raises OSError.
    """
    new = path.parent / f".{path.name}.{os.urandom(4).hex()}"
    os.close(open_file(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    try:
        yield new
        descriptor = open_file(new, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@overload
def decode_json(data: bytes | str | msgspec.Raw, kind: type[T]) -> T: ...
@overload
def decode_json(data: bytes | str | msgspec.Raw, kind: Any) -> Any: ...
def decode_json(data: bytes | str | msgspec.Raw, kind: Any) -> Any:
    """`data` as `kind`. Raises ValueError for other data, with the reason."""
    import msgspec  # noqa: PLC0415  sidecars start without it

    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


def decode_toml(text: str) -> dict[str, Any]:
    """The table in `text`. Raises ValueError for other texts, with the reason."""
    import re  # noqa: PLC0415  sidecars start without it
    import tomllib  # noqa: PLC0415  as above

    if any(match[0].count(".") >= _MOST_PARTS for match in re.finditer(_DOTTED, text)):
        raise ValueError(f"it has a key of more than {_MOST_PARTS} parts")  # for which tomllib takes long
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError:  # more digits than Python reads; some dates
        raise ValueError("it has a number or a date that is out of range") from None
    pending: list[Any] = [content]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            pending += cast("dict[str, Any]", value).values()
        elif isinstance(value, list):
            pending += cast("list[Any]", value)
        elif isinstance(value, int) and abs(value) > _MOST_INTEGER:
            raise ValueError("it has an integer of more than 300 digits")
    return content


def decompress(data: bytes, size: int) -> bytes:
    """The `size` bytes that zlib made `data` of. Raises ValueError for other data, however much they hold."""
    import zlib  # noqa: PLC0415  sidecars start without it

    stream = zlib.decompressobj()
    try:
        whole = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(whole) != size or not stream.eof or stream.unused_data:
        raise ValueError(f"it does not unpack to {size} bytes")
    return whole
