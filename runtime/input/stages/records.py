"""The stages of a phase over blocks of records: call user code, check results, and report failing records.

`stages` makes a `Stage` for each load and host function. `BatchBuilder` runs them.
"""

from __future__ import annotations

import threading
import traceback
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NoReturn, cast

import numpy as np

from commplan.diagnostics import CommplanError, Diagnostic, Note, fail
from commplan.input.order import generator
from commplan.ir.plan import Ref
from commplan.ir.schedule import Map, Read, Share, results
from commplan.ir.types import ArrayType
from commplan.runtime.input.layout import read_only
from commplan.runtime.input.observe.accounting import Meter, thread_cpu
from commplan.runtime.input.program import HostProgram
from commplan.runtime.input.sources import files
from commplan.runtime.input.sources.adapters import batched
from commplan.runtime.input.sources.folders import Files
from commplan.runtime.input.sources.record_convert import (
    TEXT_HINT,
    Element,
    RecordTypeError,
    check_record,
    convert_record,
    describe,
    numpy_dtype,
)  # fmt: skip
from commplan.runtime.input.stages import user_calls
from commplan.runtime.input.stages.chained import SkippedError, account
from commplan.runtime.input.stages.declared import declared

if TYPE_CHECKING:
    from commplan.runtime.input.cache.record_cache import RecordCache

Record = Any  # an array, a NumPy or Python scalar, or bytes


@dataclass(frozen=True)
class BlockPosition:
    """The position of a block of rows, which keys its random streams.

    Attributes:
        epoch, step: the position of its batch.
        member: the row-major index of the member; -1 if the stage is the same for all members.
    """

    epoch: int
    step: int
    member: int


_warning = threading.Lock()  # protects `Stage.warned`


@dataclass(frozen=True)
class Stage:
    """A Read or a host Map, with everything that is needed to run it. Failures concern single records.

    Attributes:
        op: the op of the schedule.
        number: separates the random streams of two maps, for any design of sharing; 0 for a Read.
        elements: the types of its results in the plan, without counts.
        dtypes: the NumPy dtype of each element; None for bytes.
        call: the source's `__getitem__`, or the host function.
        seed: the seed of the flow's first load, which keys random streams.
        file: the file of the plan, for errors.
        meter: counts the costs.
        skip: whether failing records are skipped.
        many: fetches several records at once; None if the source does not support it, and for a Map.
        begins: called before user code runs, with the index of the record or -1 for several; None to call
            nothing.
        cached: its results from earlier epochs; None if it is not cached.
        warned: the failures of `many` about which a warning was printed: at most one over all threads.
    """

    op: Read | Map
    number: int
    elements: tuple[Element, ...]
    dtypes: tuple[np.dtype[Any] | None, ...]
    call: Callable[..., Any]
    seed: int
    file: str
    meter: Meter
    skip: bool
    many: Callable[[list[int]], Sequence[Any]] | None = None
    begins: Callable[[int], None] | None = None
    cached: RecordCache | None = None
    warned: list[str] = field(default_factory=list[str], compare=False)

    @property
    def key(self) -> Ref:
        """The id of its first result, by which stages and lines of the summary are identified."""
        return results(self.op)[0]

    def run(
        self,
        position: BlockPosition,
        records: Sequence[int],
        operands: Sequence[Sequence[Record]],
        valid: np.ndarray[Any, np.dtype[np.bool_]],
        targets: Sequence[np.ndarray[Any, Any] | None],
    ) -> list[Sequence[Record]]:
        """The results of a block.

        Args:
            position: the position of the block.
            records: [rows] record indices.
            operands: for each operand, a column of [rows] records; empty for a Read.
            valid: bool [rows]. Invalid rows are left out: their results are None or zero. A failing row
                becomes invalid if the stage skips.
            targets: for each result, the array [rows, ...] to fill; None for new memory. Each result is
                written there before the next call of the function, which may always return the same memory.

        Returns:
            For each result, a column of [rows] records: an array [rows, ...], or a list for bytes.

        Raises:
            CommplanError: CP0904 to CP0907 for a failing record, if the stage does not skip.
        """
        columns = [
            _column(len(records), element, dtype, target)
            for element, dtype, target in zip(self.elements, self.dtypes, targets, strict=True)
        ]
        start = thread_cpu()
        done = 0
        skipped = 0
        is_single = len(columns) == 1
        fetched, failure = self._fetch(records, valid)
        for row in np.flatnonzero(valid).tolist():
            record = records[row]
            try:  # reading an operand may run the stage that makes it, see `Chained`
                is_fetched = record in fetched
                arguments = [fetched.pop(record)] if is_fetched else [column[row] for column in operands]
            except SkippedError:
                valid[row] = False
                continue
            try:
                out = self.one(position, record, arguments)
            except CommplanError:
                if not self.skip:
                    raise
                valid[row] = False
                skipped += 1
                continue
            done += 1
            if is_single:
                columns[0][row] = out
            else:
                for column, value in zip(columns, out, strict=True):
                    column[row] = value
            # Freed now, so that the calls for the next record reuse this memory while the CPU caches it.
            arguments = out = value = None
        if failure and done and not skipped:  # the records are good, and `many` fails
            self._warn(failure)
        if done < len(records):
            for column in columns:
                if isinstance(column, np.ndarray):
                    column[~valid] = 0  # do not expose stale memory
        cpu = account(operands, thread_cpu() - start)
        moved = sum(_nbytes(column, done) for column in columns)
        self.meter.add(
            self.key, cpu_s=cpu.both_s, system_s=cpu.system_s, records=done, nbytes=moved, skipped=skipped
        )
        return [_seal(column) for column in columns]

    @user_calls.calls_user_code(with_one_record=False)
    def _fetch(
        self, records: Sequence[int], valid: np.ndarray[Any, np.dtype[np.bool_]]
    ) -> tuple[dict[int, object], str]:
        """Fetch the records of a block at once, if the source supports it.

        Returns:
            The records by index, and "". No records if the source does not support it, or if fewer than two
            are valid. If fetching failed, no records and the error: the caller then fetches them one by one,
            to find the one that fails.
        """
        usable_records = (
            [record for record, usable in zip(records, valid, strict=True) if usable] if self.many else []
        )
        if self.many is None or len(usable_records) < 2:
            return {}, ""
        try:
            if self.begins is not None:
                self.begins(-1)
            fetched = self.many(usable_records)
            count = len(fetched)
        except Exception as error:  # noqa: BLE001  raised again by the failing record
            return {}, f"{type(error).__name__}: {_message_of(error)}"
        if count != len(usable_records):
            return {}, f"it returned {count} records for {len(usable_records)} indices"
        return dict(zip(usable_records, fetched, strict=True)), ""

    def _warn(self, failure: str) -> None:
        """Warn of a source whose records can be fetched one by one, but not several at once."""
        with _warning:
            if self.warned:
                return
            self.warned.append(failure)
        source = self.op.source if isinstance(self.op, Read) else ""
        message = f"`__getitems__` of source `{source}` fails, and its records are fetched one by one"
        warnings.warn(f"{message}: {failure}", RuntimeWarning, stacklevel=2)

    def one(self, position: BlockPosition, record: int, arguments: list[Record]) -> Any:
        """The checked result for one record; a tuple if there are several results.

        Args:
            position: the position of the block.
            record: the index of the record.
            arguments: the operands of a Map; of a Read, the record if it has been fetched, else empty.

        Raises:
            CommplanError: CP0904 or CP0906 if user code raises; CP0905 or CP0907 if the result has another
                type.
        """
        out, element = self._call(position, record, arguments), self.elements[0]
        if len(self.elements) == 1:
            if isinstance(element, ArrayType) and isinstance(out, np.ndarray | np.generic):
                array = cast("np.ndarray[Any, Any]", out)
                if array.dtype == self.dtypes[0] and array.shape == element.shape:  # the common case
                    return array
            return self._check_result(record, 0, cast("object", out))
        values = _as_tuple(out)
        if values is None or len(values) != len(self.elements):
            actual = f"{len(values)} results" if values is not None else f"{describe(out)}, one result"
            self._mismatch(record, f"{len(self.elements)} results", actual)
        return tuple(self._check_result(record, number, value) for number, value in enumerate(values or ()))

    @user_calls.calls_user_code(with_one_record=True)
    def _call(self, position: BlockPosition, record: int, arguments: list[Record]) -> object:
        """The result of user code for one record. Records of sources are converted. Raises as `one`."""
        try:
            if self.begins is not None:
                self.begins(record)
            if isinstance(self.op, Read):
                value = arguments[0] if arguments else self.call(record)
                return convert_record(value, self.elements[0], self.op.source)
            if not self.op.random:
                return self.call(*arguments)
            rng = generator(self.seed, self.number, position.epoch, position.step, record, position.member)
            return self.call(*arguments, rng=rng)
        except (KeyboardInterrupt, SystemExit):
            raise
        except RecordTypeError as error:
            self._mismatch(record, str(self.elements[0]), str(error), *error.hints)
        except BaseException as error:  # any exception of user code is an error of the record
            raise CommplanError(self._diagnostic(record, error)) from error

    def _check_result(self, record: int, number: int, value: object) -> Record:
        """Result `number` of a record as `check_record` returns it. Raises as `one`."""
        element = self.elements[number]
        try:
            return check_record(value, element, self.dtypes[number])
        except RecordTypeError as error:
            subject = f"result {number + 1}: " if len(self.elements) > 1 else ""
            hints = error.hints if isinstance(self.op, Read) else ()  # they concern records
            self._mismatch(record, f"{subject}{element}", str(error), *hints)
        except Exception as error:  # an array-like that cannot be converted, such as a tensor on a device
            raise CommplanError(self._diagnostic(record, error)) from error

    def _mismatch(self, record: int, expected: str, actual: str, *hints: str) -> NoReturn:
        """Raise CP0905 or CP0907 for a result of another type."""
        if isinstance(self.op, Read):
            code = "CP0905"
            problem = f"record {record} of source `{self.op.source}` has another type than the plan says"
        else:
            code = "CP0907"
            problem = (
                f"host function `{self.op.fn}` returned another type than the plan says, for record {record}"
            )
        notes = (f"expected: {expected}", f"found: {actual}", *hints)
        fail(code, problem, *notes, span=self.op.span, file=self.file)

    def _diagnostic(self, record: int, error: BaseException) -> Diagnostic:
        """CP0904 or CP0906 for an exception of user code."""
        if isinstance(self.op, Read):
            code, activity = "CP0904", f"reading record {record} of source `{self.op.source}`"
        else:
            code, activity = "CP0906", f"host function `{self.op.fn}` on record {record}"
        notes = [Note(_last_line(error))]
        reason = _message_of(error)
        if isinstance(error, FileNotFoundError) and isinstance(getattr(self.call, "__self__", None), Files):
            notes.append(Note(TEXT_HINT))
        if "read-only" in reason:
            notes.append(Note("operands are read-only, because members share them: work on `x.copy()`"))
        message = f"{activity} raised {type(error).__name__}: {reason}"
        return Diagnostic(code, message, self.op.span, tuple(notes), file=self.file)


def _column(
    rows: int, element: Element, dtype: np.dtype[Any] | None, target: np.ndarray[Any, Any] | None
) -> list[Record] | np.ndarray[Any, Any]:
    """The destination of a block's results: `target`, or new memory."""
    if target is not None:
        return target
    if isinstance(element, ArrayType) and dtype is not None:
        return np.empty((rows, *element.shape), dtype)
    return [None] * rows


def _nbytes(column: list[Record] | np.ndarray[Any, Any], done: int) -> int:
    """The bytes of the results in a column of which `done` rows have one."""
    return done * column[:1].nbytes if isinstance(column, np.ndarray) else sum(map(files.nbytes, column))


def _seal(column: list[Record] | np.ndarray[Any, Any]) -> Sequence[Record]:
    """The column as a read-only operand: stages and members share it."""
    return cast("Sequence[Record]", read_only(column)) if isinstance(column, np.ndarray) else column


def _as_tuple(out: object) -> tuple[object, ...] | None:
    """Several results of a function; None if `out` is neither a tuple nor a list."""
    return tuple(cast("Sequence[object]", out)) if isinstance(out, tuple | list) else None


def _message_of(error: BaseException) -> str:
    """The message of an exception, escaped for terminals. Never raises, even if `str(error)` does."""
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except Exception as again:  # noqa: BLE001  user code again
        return f"(its message cannot be shown: {type(again).__name__})"


def _last_line(error: BaseException) -> str:
    """The line that raised `error`: the innermost one, also of a library."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    return f'raised at line {last.lineno} of "{last.filename}", in {last.name}'


def stages(
    program: HostProgram,
    bound: Mapping[str, files.Source],
    functions: Mapping[str, Callable[..., Any]],
    meter: Meter,
) -> dict[Ref, Stage]:
    """The stage of each Read and Map of the program, by its first result.

    Args:
        program: the host program.
        bound: the sources by name, as `bind_sources` returns them.
        functions: the host functions by name, as `checked_functions` returns them.
        meter: counts the costs. The lines of the stages are added to it.

    Raises:
        CommplanError: CP0914 for `on_error = skip` on a stage that cannot skip; CP0918 for bf16 without
            ml_dtypes; the errors of `record_cache.caches`.
    """
    stage_of: dict[Ref, Stage] = {}
    skips = declared(program, meter)
    for flow in program.flows:
        for op in flow.ops:
            if isinstance(op, Share):
                continue
            key = results(op)[0]
            names = [ref for ref in results(op) if ref in program.elements]
            elements = tuple(program.elements[ref] for ref in names)
            dtypes = tuple(numpy_dtype(e.dtype) if isinstance(e, ArrayType) else None for e in elements)
            call = bound[op.source].__getitem__ if isinstance(op, Read) else functions[op.fn]
            # The same in every schedule of the plan, unlike the position of the op.
            number = 0 if isinstance(op, Read) else zlib.crc32(op.fn.encode()) * 65536 + op.stream
            stage_of[key] = Stage(
                op, number, elements, dtypes, call, flow.reads[0].seed, program.schedule.file,
                meter, skips[key], batched(bound[op.source]) if isinstance(op, Read) else None,
            )  # fmt: skip
    for key, cache in opened_caches(program, stage_of, bound, functions).items():
        stage_of[key] = replace(stage_of[key], cached=cache)
    return stage_of


def opened_caches(
    program: HostProgram,
    stage_of: Mapping[Ref, Stage],
    bound: Mapping[str, files.Source],
    functions: Mapping[str, Callable[..., Any]],
) -> Mapping[Ref, RecordCache]:
    """The caches of the program, by the first result of their stages. See `stages` for the arguments.

    Their modules are imported only if the program has a cache.
    """
    if not program.has_caches:
        return {}
    from commplan.runtime.input.cache.record_cache import caches  # noqa: PLC0415  memory that few need

    # pyright takes the linked package for another one, with other types.
    return caches(program, cast("Any", stage_of), bound, functions)
