"""Where records come from: anything with a length and random access, and files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from commplan.diagnostics import CommplanError, Diagnostic, Note, fail
from commplan.ir.schedule import Read, Schedule
from commplan.ir.types import BytesType


@runtime_checkable
class Source(Protocol):
    """Random access to records: what Grain calls a random-access data source.

    `source[i]` for 0 <= i < len(source) is called from several threads at once, in any order.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class Files:
    """The bytes of files, one record each, in the order given."""

    def __init__(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        self.paths = tuple(os.fspath(path) for path in paths)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> bytes:
        # One open, one stat, one read: `Path.read_bytes` costs three times the system calls.
        descriptor = os.open(self.paths[index], os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            pieces: list[bytes] = []
            size = os.fstat(descriptor).st_size
            while piece := os.read(descriptor, max(1, size)):
                pieces.append(piece)
                size -= len(piece)
                if size <= 0:
                    break
            return pieces[0] if len(pieces) == 1 else b"".join(pieces)
        finally:
            os.close(descriptor)

    def __repr__(self) -> str:
        return f"Files({len(self)} files)"


def paths(files: Iterable[str | os.PathLike[str]]) -> Files:
    """A source of type `bytes`: the contents of `files`, in the order given."""
    return Files(files)


def folder(path: str | os.PathLike[str]) -> Files:
    """A source of type `bytes`: the contents of the files in the folder `path`, sorted by name.

    Sorted by the bytes of the name, so the same everywhere; hidden files and folders are left out.
    Errors: CP0901 where there is no such folder, or no file in it.
    """
    root = Path(path)
    try:
        with os.scandir(root) as entries:
            found = [entry.path for entry in entries if not entry.name.startswith(".") and entry.is_file()]
    except OSError as error:
        fail("CP0901", f"cannot read the folder {str(root)!r}: {error.strerror}", "give a folder that exists")
    if not found:
        fail("CP0901", f"there is no file in the folder {str(root)!r}", "records are the files in it")
    return Files(sorted(found, key=os.fsencode))


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


def opened(source: object, is_bytes: bool) -> Source | None:
    """`source` as random access, or None where it is not. A folder's path, or a list of paths, stands for the
    bytes of its files where the plan wants bytes; a string by itself is never a list of letters."""
    if is_bytes and _is_path(source):
        return folder(cast("str | os.PathLike[str]", source))
    if is_bytes and isinstance(source, list | tuple) and source:
        items = cast("Sequence[object]", source)
        if all(_is_path(item) for item in items):
            return paths(cast("Sequence[str]", items))
    if isinstance(source, str | bytes | Mapping):
        return None
    return cast("Source", source) if isinstance(source, Source) else None


def _bound(schedule: Schedule, name: str, given: Mapping[str, object]) -> Source | Diagnostic:
    """The source `name`, or what is wrong with it."""
    span = next(
        (
            op.span
            for phase in schedule.phases
            for op in phase.ops
            if isinstance(op, Read) and op.source == name
        ),
        None,
    )

    def problem(code: str, message: str, *notes: str) -> Diagnostic:
        return Diagnostic(code, message, span, tuple(Note(n) for n in notes), file=schedule.file)

    if name not in given:
        found = ", ".join(sorted(given)) or "none"
        return problem("CP0900", f"source `{name}` is not bound", f"sources given: {found}")
    wants_bytes = isinstance(next(s.type for s in schedule.sources if s.name == name), BytesType)
    try:
        source = opened(given[name], wants_bytes)
    except CommplanError as error:
        first = error.diagnostics[0]
        return problem(first.code, f"source `{name}`: {first.message}", *(n.text for n in first.notes))
    if source is None:
        kind = type(given[name]).__name__
        return problem(
            "CP0902",
            f"source `{name}` is a {kind}, which has no `__len__` and `__getitem__` by index",
            "expected: random access to records, such as a list, an array or a Grain data source",
            "an iterator cannot be a source: the order of records is decided by the plan",
        )
    if len(source) == 0:
        return problem("CP0903", f"source `{name}` is empty", "an epoch needs at least one record")
    return source


def bound(
    schedule: Schedule, sources: Mapping[str, object], names: Iterable[str] | None = None
) -> dict[str, Source]:
    """The sources `names` of `schedule` (None: all that it reads), checked; others given are left alone.

    Errors, all in one: CP0900 a source that is missing, or a name that the plan does not have; CP0901 a
    folder that cannot be read; CP0902 no random access; CP0903 an empty source.
    """
    types = {source.name: source.type for source in schedule.sources}
    if names is None:
        read = {op.source for phase in schedule.phases for op in phase.ops if isinstance(op, Read)}
        names = [name for name in types if name in read]
    found: dict[str, Source] = {}
    problems: list[Diagnostic] = []
    for name in dict.fromkeys(names):
        result = _bound(schedule, name, sources)
        if isinstance(result, Diagnostic):
            problems.append(result)
        else:
            found[name] = result
    problems += [
        Diagnostic(
            "CP0900",
            f"the plan has no source `{name}`",
            notes=(Note(f"sources of the plan: {', '.join(types) or 'none'}"),),
            file=schedule.file,
        )
        for name in sources
        if name not in types
    ]
    if problems:
        raise CommplanError(*problems)
    return found


def nbytes(value: object) -> int:
    """Bytes of one record, for the accounts."""
    match value:
        case bytes() | bytearray():
            return len(value)
        case memoryview() | np.ndarray() | np.generic():
            return value.nbytes
        case _:
            return 0
