"""Where records come from: anything with a length and random access, and files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, cast

import numpy as np
import numpy.typing as npt

from commplan.diagnostics import CommplanError, Diagnostic, Note, fail
from commplan.ir.schedule import Read, Schedule
from commplan.ir.types import BytesType
from commplan.runtime.input.sources import adapters, pipelines
from commplan.runtime.input.sources.adapters import Source
from commplan.tracebacks import ends_at_caller


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


@ends_at_caller
def paths(files: Iterable[str | os.PathLike[str]]) -> Files:
    """A source of type `bytes`: the contents of `files`, in the order given."""
    return Files(files)


class Folder(Files):
    """The files of a folder and its sub-folders; the first folder on a file's way is its class."""

    def __init__(self, root: str, names: Sequence[str]) -> None:
        super().__init__(os.path.join(root, name) for name in names)  # noqa: PTH118  text, as it was given
        self._tops = tuple(name.partition(os.sep)[0] if os.sep in name else "" for name in names)

    @property
    def classes(self) -> tuple[str, ...]:
        """The sub-folders that hold files, sorted by the bytes of their names."""
        return tuple(sorted({top for top in self._tops if top}, key=os.fsencode))

    @property
    def labels(self) -> npt.NDArray[np.int32]:
        """i32 [files]: the place of each file's sub-folder among `classes`, a source of type `i32`.

        Errors: CP0901 for a file that lies in none.
        """
        numbers = {name: number for number, name in enumerate(self.classes)}
        loose = next((path for path, top in zip(self.paths, self._tops, strict=True) if not top), None)
        if loose is not None:
            fail(
                "CP0901",
                f"{Path(loose).name!r} lies in no sub-folder, so it has no class",
                "move it into one",
            )
        return np.array([numbers[top] for top in self._tops], np.int32)


@ends_at_caller
def folder(path: str | os.PathLike[str], recursive: bool = False) -> Folder:
    """A source of type `bytes`: the contents of the files in the folder `path`, sorted by name.

    recursive: the files of its sub-folders as well. Where each sub-folder is a class, `.labels` is a source
    of class numbers beside it and `.classes` are their names. Sorted by the bytes of the name (of the path
    inside the folder, part by part), so the same everywhere; hidden files and folders are left out. Errors:
    CP0901 where there is no such folder, or no file in it.
    """
    root = os.fspath(path)
    try:
        names = list(_names(root, recursive))
    except OSError as error:
        where = error.filename if isinstance(error.filename, str) else root
        fail("CP0901", f"cannot read the folder {where!r}: {error.strerror}", "give a folder that exists")
    if not names:
        hint = (
            [] if recursive else ["files in sub-folders count with `commplan.folder(path, recursive=True)`"]
        )
        fail("CP0901", f"there is no file in the folder {root!r}", "records are the files in it", *hint)
    return Folder(root, sorted(names, key=lambda name: list(map(os.fsencode, Path(name).parts))))


def _names(root: str, recursive: bool) -> Iterator[str]:
    """Files below `root`, by their paths inside of it; a folder that a link leads back to is not entered
    again."""
    stack, seen = [""], set[str]()
    while stack:
        inside = stack.pop()
        folder = os.path.join(root, inside)  # noqa: PTH118
        real = os.path.realpath(folder)
        if real in seen:
            continue
        seen.add(real)
        with os.scandir(folder) as entries:
            for entry in entries:
                name = os.path.join(inside, entry.name)  # noqa: PTH118
                if entry.name.startswith("."):
                    continue
                if entry.is_file():
                    yield name
                elif recursive and entry.is_dir():
                    stack.append(name)


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


def _items(value: object) -> Sequence[object]:
    """The items of a list or tuple; of anything else none."""
    return cast("Sequence[object]", value) if isinstance(value, list | tuple) else ()


def opened(source: object, is_bytes: bool) -> Source | None:
    """`source` as random access, or None where it is not. A folder's path, or a list of paths, stands for the
    bytes of its files where the plan wants bytes, that of array_record files for their records; a string by
    itself is never a list of letters."""
    if adapters.is_array_record(source):
        return adapters.array_record([cast("str | os.PathLike[str]", source)])
    items = _items(source)
    if items and all(adapters.is_array_record(item) for item in items):
        return adapters.array_record(cast("Sequence[str]", items))
    if is_bytes and _is_path(source):
        return folder(cast("str | os.PathLike[str]", source))
    if is_bytes and items and all(_is_path(item) for item in items):
        return paths(cast("Sequence[str]", items))
    if isinstance(source, str | bytes | Mapping):
        return None
    return source if isinstance(source, Source) else None


def _bound(schedule: Schedule, name: str, given: Mapping[str, object]) -> Source:
    """The source `name`. Errors: see `bound`."""
    reads = (op for phase in schedule.phases for op in phase.ops if isinstance(op, Read))
    span = next((op.span for op in reads if op.source == name), None)

    def refuse(code: str, message: str, *notes: str) -> NoReturn:
        fail(code, message, *notes, span=span, file=schedule.file)

    if name not in given:
        names = ", ".join(sorted(given)) or "none"
        refuse("CP0900", f"source `{name}` is not bound", f"sources given: {names}")
    wants_bytes = isinstance(next(s.type for s in schedule.sources if s.name == name), BytesType)
    try:
        source = opened(given[name], wants_bytes)
    except CommplanError as error:
        first = error.diagnostics[0]
        refuse(first.code, f"source `{name}`: {first.message}", *(n.text for n in first.notes))
    if source is None:
        kind = type(given[name]).__name__
        problem = f"source `{name}` is a {kind}, which has no `__len__` and `__getitem__` by index"
        refuse("CP0902", problem, *_instead(given[name]))
    try:
        length = len(source)
    except Exception as error:  # noqa: BLE001  the user's code, or a length that is no number of records
        refuse("CP0902", f"source `{name}` has no length: {type(error).__name__}: {error}")
    if length >= sys.maxsize:
        refuse("CP0902", f"source `{name}` has no end", "leave its `.repeat()` out: the plan has epochs")
    if length == 0:
        refuse("CP0903", f"source `{name}` is empty", "an epoch needs at least one record")
    return source


def _instead(value: object) -> tuple[str, ...]:
    """What to give instead of something that has no random access."""
    if isinstance(value, Mapping):
        keys = ", ".join(map(repr, cast("Mapping[object, object]", value)))
        return (f"it is a mapping of {keys or 'nothing'}: give one of its values", "splits are sources each")
    return pipelines.hints(value) or (
        "expected: random access to records, such as a list, an array or a MapDataset of Grain",
        "an iterator cannot be a source: the order of records is decided by the plan",
    )


def bound(
    schedule: Schedule, sources: Mapping[str, object], names: Iterable[str] | None = None
) -> dict[str, Source]:
    """The sources `names` of `schedule` (None: all that it reads), checked; others given are left alone.

    Errors, all in one: CP0900 a source that is missing, or a name that the plan does not have; CP0901 a
    folder that cannot be read; CP0902 no random access; CP0903 an empty source; CP0950 and CP0951 columns and
    array_record files (see `adapters`).
    """
    types = {source.name: source.type for source in schedule.sources}
    if names is None:
        read = {op.source for phase in schedule.phases for op in phase.ops if isinstance(op, Read)}
        names = [name for name in types if name in read]
    sources_by_name: dict[str, Source] = {}
    problems: list[Diagnostic] = []
    for name in dict.fromkeys(names):
        try:
            sources_by_name[name] = _bound(schedule, name, sources)
        except CommplanError as error:
            problems += error.diagnostics
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
    return adapters.arranged(sources_by_name)


def nbytes(value: object) -> int:
    """Bytes of one record, for the accounts."""
    match value:
        case bytes() | bytearray():
            return len(value)
        case memoryview() | np.ndarray() | np.generic():
            return value.nbytes
        case _:
            return 0
