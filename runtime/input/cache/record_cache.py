"""Cached host functions: results are looked up by record before the function is called."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from commplan import __version__
from commplan.diagnostics import fail
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.hints import Cache
from commplan.ir.plan import Ref
from commplan.ir.schedule import Map, Read, operands, results
from commplan.ir.types import ArrayType
from commplan.runtime.input.cache.digest import UnknownError, declared_key, digest, function_digest
from commplan.runtime.input.cache.table import Column, Shape, Table, in_file, in_memory
from commplan.runtime.input.layout import Array, Bools, read_only
from commplan.runtime.input.observe.accounting import Cpu, thread_cpu
from commplan.runtime.input.program import Coords, Flow, HostOp, HostProgram
from commplan.runtime.input.sources import pipelines
from commplan.runtime.input.sources.adapters import ColumnSource as AdaptedColumn
from commplan.runtime.input.sources.adapters import Serial, Source
from commplan.runtime.input.sources.folders import Files
from commplan.runtime.input.stages.chained import Chained

if TYPE_CHECKING:
    from commplan.runtime.input.stages.records import BlockPosition, Record, Stage

Records = Mapping[tuple[Ref, Coords], npt.NDArray[np.int64]]  # record numbers of a batch, by load and member

_PATIENCE_S = 5.0  # seconds to wait for another process that computes a row
# The least and most seconds between two checks of rows that other processes compute.
_SHORTEST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.01

_OPENING = threading.Lock()  # held while a table is opened. A fork waits for it: the child needs it unlocked.
os.register_at_fork(
    before=_OPENING.acquire, after_in_parent=_OPENING.release, after_in_child=_OPENING.release
)
# The open tables, by PID, shape and path.
_TABLES: weakref.WeakValueDictionary[tuple[object, ...], Table] = weakref.WeakValueDictionary()
# Tables in memory of the last bound program. They outlive its batches, so that the next program can use them.
_LAST: list[Table] = []


@dataclass(frozen=True)
class RecordCache:
    """The cached results of one stage.

    Attributes:
        table: the rows of results.
        read: the load whose record numbers are the numbers of the rows.
    """

    table: Table
    read: Read

    def keys(self, records: Records, coords: Mapping[str, int]) -> npt.NDArray[np.int64]:
        """The row numbers of the records of a batch, [rows] int64.

        Args:
            records: the record numbers of the batch.
            coords: the member's index along each ensemble.
        """
        return records[self.read.result, tuple(coords[axis] for axis in self.read.per)]

    def run(
        self, stage: Stage, keys: npt.NDArray[np.int64], position: BlockPosition, records: Sequence[int],
        inputs: Sequence[Sequence[Record]], valid: Bools, targets: Sequence[Array | None],
    ) -> list[Sequence[Record]]:  # fmt: skip
        """Read cached results, and run the stage for all other records (see `Stage.run`).

        A record that fails and is skipped is not cached, so it is retried in each epoch.

        Args:
            stage: the stage.
            keys: [rows] the row numbers of the records.
            position: see `Stage.run`.
            records: see `Stage.run`.
            inputs: see `Stage.run`.
            valid: [rows] which records are valid; updated if records are skipped.
            targets: an array for each result, [rows, ...], or None to allocate one.

        Returns:
            The results of all records, [rows, ...], read-only. Rows of invalid records are zero.

        Raises:
            CommplanError: as `Stage.run`.
        """
        begun = thread_cpu()
        columns = [
            np.empty((len(records), *column.shape), column.dtype) if target is None else target
            for column, target in zip(self.table.shape.columns, targets, strict=True)
        ]
        hits = valid & self.table.has(keys)
        missing = np.flatnonzero(valid & ~hits).tolist()
        spent = thread_cpu() - begun  # the costs of the cache itself; `Stage.run` counts the others
        for row in self._turns(missing, keys, hits):
            part = slice(row, row + 1)
            outputs = [column[part] for column in columns]
            stage.run(
                position, records[part], [_part(column, part) for column in inputs], valid[part], outputs
            )  # fmt: skip
            if valid[row]:
                self.table.write(int(keys[row]), outputs)
        begun = thread_cpu()
        if hits.any():
            self.table.read(keys, hits, columns)
        if not valid.all():
            for column in columns:
                column[~valid] = 0  # a batch must not contain stale memory
        cached, spent = (
            int(np.count_nonzero(hits)),
            Cpu(*map(sum, zip(spent, thread_cpu() - begun, strict=True))),
        )
        stage.meter.add(
            stage.key, cpu_s=spent.both_s, system_s=spent.system_s,
            cached=cached, nbytes=cached * sum(column.nbytes for column in self.table.shape.columns),
        )  # fmt: skip
        return [cast("Sequence[Record]", read_only(column)) for column in columns]

    def _turns(self, missing: Sequence[int], keys: npt.NDArray[np.int64], hits: Bools) -> Iterator[int]:
        """Yield the rows of `missing` that this thread must compute.

        Rows that other threads or processes compute are added to `hits` when they are written. If another
        process takes longer than `_PATIENCE_S`, because it is stopped or its function hangs, this thread
        computes its rows, too.
        """
        pending = list(missing)
        deadline = time.monotonic() + _PATIENCE_S
        pause = _SHORTEST_PAUSE_S
        while pending:
            later: list[int] = []
            for row in pending:
                record = int(keys[row])
                with self.table.claimed(record, anyway=time.monotonic() > deadline) as is_claimed:
                    if self.table.has(keys[row : row + 1])[0]:
                        hits[row] = True
                    elif is_claimed:
                        yield row
                        deadline = time.monotonic() + _PATIENCE_S
                    else:
                        later.append(row)
            if len(later) == len(pending):
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            else:
                pause = _SHORTEST_PAUSE_S
            pending = later


@dataclass(frozen=True)
class Caches:
    """The caches of a program.

    Attributes:
        program: the host program.
        opened: the cache of each cached stage, by its first result.
    """

    program: HostProgram
    opened: Mapping[Ref, RecordCache]

    def missing(
        self, ops: Sequence[HostOp], targets: Container[Ref], records: Records, low: int, high: int
    ) -> dict[Ref, Bools]:
        """Find the rows of each op that must be available, by the first result of the op.

        A row is not needed if the caches of later stages already contain all results computed from it.

        Args:
            ops: the ops in plan order.
            targets: the values that are moved or that the caller receives; all of their rows are needed.
            records: the record numbers of the batch.
            low: the first row.
            high: the end of the rows.

        Returns:
            [high - low] for each op, whether the row is needed.
        """
        rows_of: dict[Ref, Bools] = {}  # the needed rows of each value
        missing: dict[Ref, Bools] = {}
        for op in reversed(ops):
            first = results(op)[0]
            rows = np.zeros(high - low, bool)
            for ref in results(op):
                rows |= True if ref in targets else rows_of.get(ref, False)
            missing[first] = rows
            if first in self.opened:
                rows = rows & ~self._cached_rows(self.opened[first], first, records, low, high)
            for ref in operands(op):
                rows_of[ref] = rows_of.get(ref, False) | rows
        return missing

    def _cached_rows(self, cache: RecordCache, ref: Ref, records: Records, low: int, high: int) -> Bools:
        """Whether the cache contains each row for all members that this process computes: [high - low]."""
        axes, rows = self.program.copies[ref], np.ones(high - low, bool)
        for coords in self.program.variants(axes):
            rows &= cache.table.has(cache.keys(records, dict(zip(axes, coords, strict=True)))[low:high])
        return rows


def caches(
    program: HostProgram,
    stage_of: Mapping[Ref, Stage],
    sources: Mapping[str, Source],
    functions: Mapping[str, Callable[..., Any]],
) -> dict[Ref, RecordCache]:
    """Open the caches of all stages with a `cache` hint.

    Args:
        program: the host program.
        stage_of: the stage of each op, by its first result.
        sources: the sources by name.
        functions: the host functions by name.

    Returns:
        The caches by the first result of each stage, without those that are too small for a row.

    Raises:
        CommplanError: CP0957 if a function or a source cannot be identified, CP0923 if there is no memory,
            CP0958 if a file cannot be used.
    """
    opened: dict[Ref, RecordCache] = {}
    for flow in program.flows:
        for op in flow.ops:
            if isinstance(op, Map) and op.hints.cache is not None:
                stage = stage_of[results(op)[0]]
                cache = _open_cache(program, flow, op, op.hints.cache, stage, sources, functions)
                if cache.table.shape.rows:
                    opened[stage.key] = cache
    if opened:
        _LAST[:] = [cache.table for cache in opened.values() if not cache.table.is_file]
    return opened


def _part(column: Sequence[Record], part: slice) -> Sequence[Record]:
    """The rows `part` of an operand."""
    if not isinstance(column, Chained):
        return column[part]
    chained_operands = [_part(operand, part) for operand in column.operands]
    return replace(column, records=column.records[part], operands=chained_operands)


def _open_cache(
    program: HostProgram, flow: Flow, op: Map, cache: Cache, stage: Stage, sources: Mapping[str, Source],
    functions: Mapping[str, Callable[..., Any]],
) -> RecordCache:  # fmt: skip
    """Open the cache of a host map. Caches with the same key, size and path share a table in this process.

    The key is a digest of everything that determines a row: the source, and the functions up to `op` with
    their connections.
    """
    before = DefUse(flow.ops).ancestors(results(op))
    (read,) = [each for each in before if isinstance(each, Read)]
    source = sources[read.source]
    columns = [
        Column(dtype, element.shape)
        for element, dtype in zip(stage.elements, stage.dtypes, strict=True)
        if isinstance(element, ArrayType) and dtype is not None
    ]
    key = digest(
        __version__, str(program.elements[read.result]), len(source),
        _source_key(program, read, source, cache),
        *(_wiring(program, each, functions, before) for each in before if isinstance(each, Map)),
    )  # fmt: skip
    shape = Shape.of(key, columns, len(source), cache.nbytes)
    path = None if cache.path is None else str(Path(cache.path).expanduser().absolute())
    with _OPENING:
        at = (os.getpid(), shape, path)
        table = _TABLES.get(at)
        if table is None:
            table = in_memory(shape) if path is None else in_file(path, shape)
            _TABLES[at] = table
    return RecordCache(table, read)


def _wiring(
    program: HostProgram, op: Map, functions: Mapping[str, Callable[..., Any]], before: Sequence[object]
) -> tuple[object, ...]:
    """The digest of an op's function, the positions in `before` of its operands' makers, its result count.

    Raises:
        CommplanError: CP0957 if the function cannot be identified.
    """
    try:
        function = function_digest(functions[op.fn])
    except UnknownError as error:
        fail(
            "CP0957", f"the cache cannot detect changes of `{op.fn}`: {error}",
            f"give the function a `key` that changes whenever its results do: `{op.fn}.key = \"1\"`",
            span=op.span, file=program.schedule.file,
        )  # fmt: skip
    makers = {ref: number for number, maker in enumerate(before) for ref in results(maker)}  # pyright: ignore
    return function, tuple(makers.get(ref, -1) for ref in op.operands), len(op.results)


def _source_key(program: HostProgram, read: Read, source: Source, cache: Cache) -> str:
    """The identity of the records of a source, as a digest.

    It is derived from the first of these that the source has: a `key`, its parts if it is a known pipeline,
    the files of a folder, its content.

    Raises:
        CommplanError: CP0957 if it has none of them, or if the cache is in a file and the content is neither
            a list nor a tuple nor an array.
    """
    data, column = source, None
    while isinstance(data, AdaptedColumn | Serial):
        column = (data.keys, column) if isinstance(data, AdaptedColumn) else column
        data = data.dataset
    why: str = "its records may change between runs, and it has no `key`"
    try:
        key = declared_key(data)
        words = pipelines.content(data, _callable_digest)
        if key is not None:
            return digest(key, words, column)
        if words is not None:
            records = [_source_key(program, read, each, cache) for each in pipelines.sources(data)]
            return digest(key, words, records, column)
        if isinstance(data, Files):
            return digest([_stamp(path) for path in data.paths], column)
        if cache.path is None or type(data) in (list, tuple, np.ndarray):
            return digest(data, column)
    except UnknownError as error:
        why = str(error)
    return fail(
        "CP0957", f"the cache cannot detect changes of source `{read.source}`: {why}",
        "give the source an attribute `key`, a str or an int that changes whenever its records do",
        span=read.span, file=program.schedule.file,
    )  # fmt: skip


def _callable_digest(function: object) -> str:
    """As `function_digest`, for functions of unknown type."""
    return function_digest(cast("Callable[..., Any]", function))


def _stamp(path: str) -> tuple[str, int, int]:
    """A path with the size in bytes and the modification time in nanoseconds of its file; -1 if unknown."""
    try:
        status = os.stat(path)  # noqa: PTH116  a str, as passed by the user
    except OSError:
        return path, -1, -1
    return path, status.st_size, status.st_mtime_ns
