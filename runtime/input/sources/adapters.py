"""Data sets of other libraries as sources: columns, batched access, locks, array_record files.

Nothing here imports those libraries, except Grain for the path of an array_record file: attributes of a
record determine its kind.
"""

from __future__ import annotations

import contextlib
import glob
import importlib
import os
import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np

from commplan.diagnostics import fail
from commplan.runtime.input.sources.record_convert import RecordTypeError, describe
from commplan.tracebacks import ends_at_caller

Key = str | int  # the name of a column, or its index in a tuple
_MOST_ROWS = 64  # maximum number of records that a thread caches for its other columns: a few blocks


@runtime_checkable
class Source(Protocol):
    """Random access to records, as in Grain's random-access data sources.

    `source[i]` for 0 <= i < len(source), with a Python int, is called from several threads at once, in any
    order (see `commplan.serial`). If the source has `__getitems__`, that is called instead, with lists of
    indices.
    """

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


def batched(source: object) -> Callable[[list[int]], Sequence[Any]] | None:
    """The source's method to fetch several records at once; None if it has none that is worth using.

    PyTorch's loaders and Hugging Face's data sets call it `__getitems__`. It maps a list of indices to a list
    of records. That of array_record is not used, because it starts threads: it takes 60 microseconds of CPU
    per record, `__getitem__` 15.
    """
    fetch: Any = getattr(source, "__getitems__", None)
    if not callable(fetch) or isinstance(source, _array_record()):
        return None
    return cast("Callable[[list[int]], Sequence[Any]]", fetch)


def _array_record() -> tuple[type, ...]:
    """The class of array_record's sources; empty if the program has not imported it."""
    module = sys.modules.get("array_record.python.array_record_data_source")
    kind = getattr(module, "ArrayRecordDataSource", None)
    return (kind,) if isinstance(kind, type) else ()


# --- one thread at a time ---


# The lock of each data set, by its id. It is the same even if the data set is wrapped several times.
_LOCKS: weakref.WeakValueDictionary[int, threading.Lock] = weakref.WeakValueDictionary()
_MAKING = threading.Lock()  # protects `_LOCKS`


def _lock_of(dataset: object) -> threading.Lock:
    """The lock of a data set, which the caller must hold together with the data set."""
    with _MAKING:
        # While a `Serial` holds the data set and the lock, the id is not reused.
        return _LOCKS.setdefault(id(dataset), threading.Lock())


class Serial:
    """A source that only one thread at a time calls. See `serial`.

    It has `__getitems__` if `batched` finds that of the data set.

    Attributes:
        dataset: the data set.
    """

    def __init__(self, dataset: Source) -> None:
        self.dataset = dataset
        self._lock = _lock_of(dataset)
        self._many = batched(dataset)
        if self._many is not None:
            self.__getitems__ = self._several

    def __len__(self) -> int:
        with self._lock:
            return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        with self._lock:
            return self.dataset[index]

    def _several(self, indices: list[int]) -> Sequence[Any]:
        """The method `__getitems__`, if the data set has one."""
        with self._lock:
            return self._many(indices) if self._many else [self.dataset[index] for index in indices]

    def __reduce__(self) -> tuple[Any, ...]:
        return Serial, (self.dataset,)  # a lock cannot be pickled

    def __repr__(self) -> str:
        return f"Serial({self.dataset!r})"


@ends_at_caller
def serial(dataset: Source) -> Serial:
    """`dataset` as a source that only one thread at a time calls, for data sets that are not thread-safe.

    Other sources are called from several threads. If a data set is wrapped twice, both results share a lock.
    Each worker process has a separate copy of the data set and a separate lock.

    Args:
        dataset: has `len(dataset)` and `dataset[i]`.

    Returns:
        The source.
    """
    return Serial(dataset)


# --- columns ---


class Rows:
    """A data set of which several columns are in use. Each column calls it for each record.

    A thread caches a record until all columns have read it, but at most `_MOST_ROWS` records.

    Attributes:
        dataset: the data set.
        columns: the number of columns in use, at least 1.
    """

    def __init__(self, dataset: Source, columns: int) -> None:
        self.dataset, self.columns = dataset, columns
        self._many = batched(dataset)
        self._local = threading.local()

    def __reduce__(self) -> tuple[Any, ...]:
        return Rows, (self.dataset, self.columns)

    def _cache(self) -> OrderedDict[int, tuple[Any, int]]:
        """The records that this thread caches, by index, oldest first, each with the number of reads left."""
        if not hasattr(self._local, "rows"):
            self._local.rows = OrderedDict[int, tuple[Any, int]]()
        return cast("OrderedDict[int, tuple[Any, int]]", self._local.rows)

    def _keep(self, index: int, row: Any, reads: int) -> Any:
        """Cache a record for `reads` further reads, if any, and return it."""
        cache = self._cache()
        if reads > 0:
            cache[index] = row, reads
            if len(cache) > _MOST_ROWS:
                cache.popitem(last=False)
        return row

    def one(self, index: int) -> Any:
        """The record at `index`, for one column."""
        cached = self._cache().pop(index, None)
        if cached is not None:
            row, reads = cached
            return self._keep(index, row, reads - 1)
        return self._keep(index, self.dataset[index], self.columns - 1)

    def several(self, indices: list[int]) -> list[Any]:
        """The records at `indices`, for one column. Those that are not cached are fetched at once."""
        cache = self._cache()
        missing = [index for index in dict.fromkeys(indices) if index not in cache]
        fresh: dict[int, Any] = {}
        if missing and self._many is not None:
            fresh = dict(zip(missing, self._many(missing), strict=True))
        elif missing:
            fresh = {index: self.dataset[index] for index in missing}
        return [
            self._keep(index, fresh[index], self.columns - 1) if index in fresh else self.one(index)
            for index in indices
        ]


class ColumnSource:
    """A source: one column of a data set's records. See `column`.

    Attributes:
        dataset: the data set.
        keys: the key of the column, then keys inside of it; empty for whole records.
        rows: fetches the records, also for other columns; by default for this column alone.

    Raises:
        RecordTypeError: from `__getitem__`, if a record has no such column.
    """

    def __init__(self, dataset: Source, keys: tuple[Key, ...], rows: Rows | None = None) -> None:
        self.dataset, self.keys = dataset, keys
        self.rows = rows or Rows(dataset, 1)
        if batched(dataset) is not None:
            self.__getitems__ = self._several

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        return self._of(self.rows.one(index))

    def _several(self, indices: list[int]) -> list[Any]:
        """The method `__getitems__`, if the data set has one."""
        return [self._of(row) for row in self.rows.several(indices)]

    def _of(self, row: Any) -> Any:
        """The column of a record."""
        value = row
        for depth, key in enumerate(self.keys):
            try:
                value = value[key]
            except (KeyError, IndexError, TypeError):
                parents = "".join(f"[{parent!r}]" for parent in self.keys[:depth])
                raise RecordTypeError(
                    f"no column {key!r} in {f'`{parents}` of ' if parents else ''}it: {describe(value)}"
                ) from None
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return ColumnSource, (self.dataset, self.keys, self.rows)

    def __repr__(self) -> str:
        return f"Column({self.dataset!r}, {', '.join(map(repr, self.keys))})"


@ends_at_caller
def column(dataset: Source, key: Key, *more: Key) -> ColumnSource:
    """A source: one column of the records of `dataset`.

    Columns of one data set that a plan reads in one order fetch each record once.

    Args:
        dataset: anything with `len(dataset)` and `dataset[i]` whose records are mappings or tuples: a Hugging
            Face `Dataset`, a PyTorch map-style data set.
        key: the column's name, or its index in a tuple.
        *more: keys inside of the column: `column(dataset, "objects", "label")`.

    Returns:
        The source.

    Raises:
        CommplanError: CP0950 if the data set lists its columns and `key` is not one of them.

    >>> pairs = [(b"a", 0), (b"b", 1)]
    >>> column(pairs, 1)[1]
    1
    """
    names = column_names(dataset)
    if names is not None and key not in names:
        fail("CP0950", f"the data set has no column {key!r}", f"its columns: {', '.join(names)}")
    return ColumnSource(dataset, (key, *more))


def column_names(dataset: object) -> list[str] | None:
    """The attribute `column_names` of a data set, or of that in a `Serial`; None unless a list of names."""
    inner = dataset.dataset if isinstance(dataset, Serial) else dataset
    names = getattr(inner, "column_names", None)
    if isinstance(names, list) and all(isinstance(name, str) for name in cast("list[object]", names)):
        return cast("list[str]", names)
    return None


def narrowed(source: ColumnSource) -> ColumnSource:
    """Reduce a data set to the column in use, if it has Hugging Face's `select_columns`.

    The other columns are then neither read nor decoded. Returns `source` itself if the data set does not
    support it or has only this column, or if it has a custom transform, which may need all columns.
    """
    select = getattr(source.dataset, "select_columns", None)
    names = column_names(source.dataset)
    key = source.keys[0] if source.keys else None
    form = getattr(source.dataset, "format", None)
    kind = cast("Mapping[str, object]", form).get("type") if isinstance(form, Mapping) else None
    if not callable(select) or not isinstance(key, str) or names is None or kind == "custom":
        return source
    if names == [key]:
        return source
    return ColumnSource(cast("Source", select([key])), source.keys)


def arranged(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Replace sources by others with the same records, which fetch each record as few times as possible.

    For a data set with named columns, the source is the column with the source's name, or the only column.
    Sources that are columns of one data set share fetched records.

    Args:
        sources: the sources by name.

    Raises:
        CommplanError: CP0950 if a data set has several columns and none with the source's name.
    """
    chosen: dict[str, Source] = {}
    for name, source in sources.items():
        chosen[name] = narrowed(source) if isinstance(source, ColumnSource) else _select_column(name, source)
    by_dataset: dict[int, list[str]] = {}
    for name, source in chosen.items():
        by_dataset.setdefault(id(_base(source)), []).append(name)
    for names in by_dataset.values():
        if len(names) < 2 or not any(_holds_rows(chosen[name]) for name in names):
            continue
        rows = Rows(_base(chosen[names[0]]), len(names))
        for name in names:
            source = chosen[name]
            keys = source.keys if isinstance(source, ColumnSource) else ()
            chosen[name] = ColumnSource(rows.dataset, keys, rows)
    return chosen


def fetch_groups(sources: Mapping[str, object]) -> list[tuple[str, ...]]:
    """The groups of sources that fetch records together, as `arranged` made them."""
    groups: dict[int, list[str]] = {}
    for name, source in sources.items():
        if isinstance(source, ColumnSource) and source.rows.columns > 1:
            groups.setdefault(id(source.rows), []).append(name)
    return [tuple(names) for names in groups.values()]


def _base(source: Source) -> Source:
    """The data set of a column; `source` itself if it is none."""
    return source.dataset if isinstance(source, ColumnSource) else source


def _holds_rows(source: Source) -> bool:
    """Whether caching the records of a source may save time: not if they are in memory."""
    return not isinstance(source, list | tuple | np.ndarray)


def _select_column(name: str, source: Source) -> Source:
    """The column `name` of a data set, or its only column; `source` itself if it lists no columns.

    Raises:
        CommplanError: CP0950 if it has several columns and none of this name.
    """
    names = column_names(source)
    if names is None:
        return source
    if name not in names and len(names) > 1:
        fail(
            "CP0950",
            f"source `{name}` is a data set with several columns, and none of that name",
            f"its columns: {', '.join(names)}",
            f"name one: sources={{{name!r}: commplan.column(dataset, {names[0]!r})}}",
        )
    return narrowed(ColumnSource(source, (name if name in names else names[0],)))


# --- array_record files ---


_GRAIN = ("grain.sources", "grain.python")  # modules that may have `ArrayRecordDataSource`, by version


def is_array_record(path: object) -> bool:
    """Whether a path names an array_record file, or one shard of many (`x.array_record-00001-of-00010`)."""
    if not isinstance(path, str | os.PathLike):
        return False
    name = os.path.basename(os.fsdecode(cast("str | os.PathLike[str]", path)))  # noqa: PTH119  any path-like
    stem, dot, suffix = name.rpartition(".array_record")
    return bool(stem and dot) and (not suffix or suffix[0] == "-" or suffix[0] == "*")


def array_record(paths: Sequence[str | os.PathLike[str]]) -> Source:
    """The records of array_record files, one file after another, through Grain.

    Args:
        paths: files, at least one; a `*` in a name matches its shards.

    Returns:
        The source.

    Raises:
        CommplanError: CP0951 if a file is missing or cannot be read, or if Grain is not installed.
    """
    names: list[str] = []
    for path in paths:
        name = os.fspath(path)
        files = sorted(glob.glob(name)) if "*" in name else [name]  # noqa: PTH207  a pattern with its folder
        names += files
        missing = not files or not all(Path(file).is_file() for file in files)
        if missing:
            fail("CP0951", f"there is no array_record file {name!r}", "give the path of a file that exists")
    source_of: Any = None
    for module in _GRAIN:
        with contextlib.suppress(ImportError):
            source_of = source_of or getattr(importlib.import_module(module), "ArrayRecordDataSource", None)
    if source_of is None:
        fail(
            "CP0951",
            f"reading {Path(names[0]).name!r} needs Grain and array_record, which are not installed",
            "install them: pip install 'commplan[sources]'",
        )
    try:
        return cast("Source", source_of(names))
    except Exception as error:  # noqa: BLE001  any error of that library concerns these files
        fail("CP0951", f"{Path(names[0]).name!r} cannot be read as array_record: {error}")
