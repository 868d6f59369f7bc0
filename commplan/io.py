"""Safe access to files from outside of this process. No other module opens or replaces them.

Such a file may be an endless device, a pipe without a writer, a link to another file, or a few bytes that
decompress to gigabytes. `open_file` only opens regular files, `read` limits their size, and the decoders
raise ValueError with a reason for malformed data.
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

MIB = 1024**2  # bytes
TEXT = 64 * MIB  # most bytes of plans, topologies, calibrations, shapes and profiles
SCHEDULE = 1024 * MIB  # most bytes of schedules, reproducers, recordings of servers and latency profiles
_MOST_INTEGER = 2**1000  # largest integer in TOML: representable as a float, and printable
_DOTTED = r"""[\w"'-]++(?:[ \t]*+\.[ \t]*+[\w"'-]++)*+"""  # keys, and other words
_MOST_PARTS = 100  # most parts of a dotted key
_KINDS = {  # words for files that are not regular, by `stat.S_IFMT`
    stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip
T = TypeVar("T")  # the result of `decode_json`


def open_file(path: str | os.PathLike[str], flags: int = os.O_RDONLY, mode: int = 0o600) -> int:
    """Open the regular file at `path`; does not block on pipes.

    Args:
        path: the file.
        flags: flags of `os.open`. Use `os.O_NOFOLLOW` in folders managed by commplan, which contain no links.
        mode: mode of a file created by `os.O_CREAT`.

    Returns:
        A descriptor, which the caller closes.

    Raises:
        OSError: with a `strerror` that describes the kind of a file that is not regular.
    """
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "it is a symbolic link", os.fspath(path)) from None
        if error.errno == errno.ENXIO:  # a socket, or a pipe to write to
            raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path)) from None
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
    """Open a folder that only this user can access.

    Returns:
        A descriptor, which the caller closes.

    Raises:
        PermissionError: the folder belongs to another user, or others have access.
        OSError: it cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    status = os.fstat(descriptor)
    if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
        os.close(descriptor)
        raise PermissionError(
            errno.EPERM, "it belongs to another user, or others have access", os.fspath(path)
        )
    return descriptor


def read(path: str | os.PathLike[str], limit: int = TEXT) -> bytes:
    """Read a regular file (see `open_file`). Raises OSError, with EFBIG if it exceeds `limit` bytes."""
    with open(open_file(path, os.O_RDONLY), "rb", buffering=0) as file:
        return read_stream(file, limit, os.fstat(file.fileno()).st_size)


def read_stream(file: BinaryIO, limit: int = TEXT, expected: int = 0) -> bytes:
    """Read the remainder of an open file.

    Args:
        file: the file.
        limit: largest number of bytes.
        expected: number of bytes to expect, from the file's status; 0 if unknown.

    Raises:
        OSError: with EFBIG if there are, or `expected` states, more than `limit` bytes.
    """
    pieces: list[bytes] = []
    size, most_per_read = 0, max(expected + 1, MIB)
    while size <= limit and expected <= limit and (piece := file.read(min(most_per_read, limit + 1 - size))):
        pieces.append(piece)
        size += len(piece)
    if max(size, expected) > limit:
        raise OSError(errno.EFBIG, f"it is larger than {limit // MIB} MiB")
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def write(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file atomically and durably, preserving the mode of an existing file. Raises OSError."""
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
    """Context for replacing `path` by a temporary file, atomically and durably, if the block succeeds.

    Readers of `path` see either the old or the new content. A link at `path` is replaced, not its target.

    Raises:
        OSError: the file cannot be written.
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
    """Decode JSON as `kind`, a type that msgspec supports. Raises ValueError with a reason."""
    import msgspec  # noqa: PLC0415  sidecars start without it

    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(str(error)) from None


def decode_toml(text: str) -> dict[str, Any]:
    """Decode a TOML table. Raises ValueError with a reason."""
    import re  # noqa: PLC0415  sidecars start without it
    import tomllib  # noqa: PLC0415  as above

    if any(match[0].count(".") >= _MOST_PARTS for match in re.finditer(_DOTTED, text)):
        raise ValueError(f"it has a key of more than {_MOST_PARTS} parts")  # tomllib is slow for these
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except ValueError:  # too many digits for Python, or an invalid date
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
    """Decompress zlib data of `size` bytes. Raises ValueError for other data.

    Data of another size is not decompressed completely.
    """
    import zlib  # noqa: PLC0415  sidecars start without it

    stream = zlib.decompressobj()
    try:
        whole = stream.decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(whole) != size or not stream.eof or stream.unused_data:
        raise ValueError(f"it does not unpack to {size} bytes")
    return whole
