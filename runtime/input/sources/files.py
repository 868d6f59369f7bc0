"""The sources of a program: conversion of the user's objects to random access, and validation.

`bind_sources` is the entry point. `adapters`, `folders` and `pipelines` handle the kinds of sources.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn, cast

import numpy as np

from commplan.diagnostics import MOST_LISTED, CommplanError, Diagnostic, Note, did_you_mean, fail, type_of
from commplan.ir.schedule import Read, Schedule
from commplan.ir.types import BytesType
from commplan.runtime.input.sources import adapters, pipelines
from commplan.runtime.input.sources.adapters import Source
from commplan.runtime.input.sources.folders import check_classes, folder, paths
from commplan.runtime.input.sources.record_convert import TEXT_HINT

_LONGEST = 80  # maximum characters of a path in a message: a long text may be taken for a path
_BYTES_HINT = "text is given as bytes in a list of records: `[text.encode() for text in texts]`"


def _is_path(value: object) -> bool:
    return isinstance(value, str | os.PathLike)


def _items(value: object) -> Sequence[object]:
    """The items of a list or tuple; empty for any other object."""
    return cast("Sequence[object]", value) if isinstance(value, list | tuple) else ()


def as_source(source: object, is_bytes: bool) -> Source | None:
    """`source` as random access to records; None if it has none.

    A path of an array_record file, or a list of such paths, means the records in the files. Text is never a
    sequence of characters.

    Args:
        source: the object that the user passes.
        is_bytes: whether the plan's type is bytes. If so, the path of a folder, or a list of paths, means the
            bytes of the files.

    Raises:
        CommplanError: CP0901 for a path of a file that is not in a list, or of a file or folder that does not
            exist; CP0951 for an array_record file that cannot be read.
    """
    if adapters.is_array_record(source):
        return adapters.array_record([cast("str | os.PathLike[str]", source)])
    items = _items(source)
    if items and all(adapters.is_array_record(item) for item in items):
        return adapters.array_record(cast("Sequence[str]", items))
    if is_bytes and _is_path(source):
        path = os.fspath(cast("str | os.PathLike[str]", source))
        if not os.path.isdir(path):  # noqa: PTH112  pathlib raises OSError for long text
            fail("CP0901", f"{type_of(source)} names a folder, and {_describe_missing(path)}", _BYTES_HINT)
        return folder(path)
    if is_bytes and items and all(_is_path(item) for item in items):
        if isinstance(items[0], str) and not os.path.exists(items[0]):  # noqa: PTH110
            fail("CP0901", f"there is no file {_shorten(items[0])}", TEXT_HINT)
        return paths(cast("Sequence[str]", items))
    if isinstance(source, str | bytes | Mapping):
        return None
    return source if isinstance(source, Source) else None


def _describe_missing(path: str) -> str:
    """The reason why `path` is not a folder."""
    if os.path.exists(path):  # noqa: PTH110
        return f"{path!r} is a file: give `commplan.paths([{path!r}])`"
    return f"there is no folder {_shorten(path)}"


def _shorten(path: str) -> str:
    return repr(path) if len(path) <= _LONGEST else f"{path[:_LONGEST]!r}..."


def _bind_source(schedule: Schedule, name: str, sources: Mapping[str, object]) -> Source:
    """The checked source `name`. Raises the errors of `bind_sources` for one source, at the load's line."""
    reads = (op for phase in schedule.phases for op in phase.ops if isinstance(op, Read))
    span = next((op.span for op in reads if op.source == name), None)

    def fail_source(code: str, message: str, *notes: str) -> NoReturn:
        fail(code, message, *notes, span=span, file=schedule.file)

    if name not in sources:
        names = ", ".join(sorted(sources)) or "none"
        fail_source("CP0900", f"source `{name}` is not bound", f"sources given: {names}")
    wants_bytes = isinstance(next(s.type for s in schedule.sources if s.name == name), BytesType)
    try:
        source = as_source(sources[name], wants_bytes)
    except CommplanError as error:
        first = error.diagnostics[0]
        fail_source(first.code, f"source `{name}`: {first.message}", *(n.text for n in first.notes))
    if source is None:
        kind = type(sources[name]).__name__
        problem = f"source `{name}` is of type {kind}, which does not return records by index"
        fail_source("CP0902", problem, *_random_access_hints(sources[name]))
    try:
        length = len(source)
    except Exception as error:  # noqa: BLE001  user code, or an invalid length
        fail_source("CP0902", f"source `{name}` has no length: {type(error).__name__}: {error}")
    if length >= sys.maxsize:
        fail_source("CP0902", f"source `{name}` has no end", "remove its `.repeat()`: the plan has epochs")
    if length == 0:
        fail_source("CP0903", f"source `{name}` is empty", "an epoch needs at least one record")
    return source


def _random_access_hints(value: object) -> tuple[str, ...]:
    """Hints for an object without random access."""
    if isinstance(value, Mapping):
        mapping = cast("Mapping[object, object]", value)
        keys = ", ".join(map(repr, list(mapping)[:MOST_LISTED]))
        if len(mapping) > MOST_LISTED:
            keys += ", .."
        if mapping and all(isinstance(key, int) for key in mapping):
            return (
                f"it is a mapping with the keys {keys}: give its records as a list, `list(records.values())`",
            )
        return (f"it is a mapping of {keys or 'nothing'}: give one of its values", "each split is a source")
    if isinstance(value, bytes):
        return ("these are the bytes of one record: give a list of records, such as `[data]`",)
    if isinstance(value, str):
        return ("a str names a folder, whose files are `bytes`: give an array or a list",)
    return pipelines.hints(value) or (
        "expected: random access to records, such as a list, an array or a MapDataset of Grain",
        "an iterator cannot be a source: the order of records is decided by the plan",
    )


def bind_sources(
    schedule: Schedule, sources: Mapping[str, object], names: Iterable[str] | None = None
) -> dict[str, Source]:
    """The checked sources `names` of `schedule`; other items of `sources` are ignored.

    Args:
        schedule: the schedule.
        sources: the objects that the user passes, by the names of sources.
        names: the sources to check; None for all that the schedule reads.

    Returns:
        The sources by name, see `adapters.arranged`.

    Raises:
        CommplanError: all problems in one error: CP0900 a source that is missing, or a name that the plan
            does not have; CP0901 a file or folder that does not exist; CP0902 no random access or no length;
            CP0903 an empty source; CP0951 an array_record file that cannot be read; CP0956 class numbers of
            folders that differ. If there is none of these, CP0950 for a data set with several columns and
            none of the source's name.
    """
    types = {source.name: source.type for source in schedule.sources}
    if names is None:
        names_read = {op.source for phase in schedule.phases for op in phase.ops if isinstance(op, Read)}
        names = [name for name in types if name in names_read]
    sources_by_name: dict[str, Source] = {}
    problems: list[Diagnostic] = []
    for name in dict.fromkeys(names):
        try:
            sources_by_name[name] = _bind_source(schedule, name, sources)
        except CommplanError as error:
            problems += error.diagnostics
    problems += [
        Diagnostic(
            "CP0900",
            f"the plan has no source `{name}`",
            notes=(Note(did_you_mean(name, list(types), "sources of the plan:")),),
            file=schedule.file,
        )
        for name in sources
        if name not in types
    ]
    problems += check_classes(sources_by_name, schedule.file)
    if problems:
        raise CommplanError(*problems)
    return adapters.arranged(sources_by_name)


def nbytes(value: object) -> int:
    """The bytes of one record, for summaries; 0 for a record that is neither bytes nor an array."""
    match value:
        case bytes() | bytearray():
            return len(value)
        case memoryview() | np.ndarray() | np.generic():
            return value.nbytes
        case _:
            return 0
