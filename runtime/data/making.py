"""One batch in the making: which tasks it takes, and how their records become arrays."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from commplan.diagnostics import fail
from commplan.input.order import Order
from commplan.ir.plan import Ref
from commplan.ir.schedule import Map, Read, Share, operands, results
from commplan.ir.types import ArrayType
from commplan.runtime.data.layout import Array, Bools, agrees, aligned, compacted, projected
from commplan.runtime.data.program import Coords, Flow, HostOp, HostProgram
from commplan.runtime.data.records import Place, Record, Stage, numpy_dtype
from commplan.runtime.data.ring import Task
from commplan.runtime.data.sources import Source
from commplan.runtime.data.usage import Cpu, Meter, thread_cpu

BLOCK = 16  # records of one task, at most: small enough that threads share a batch evenly


@dataclass(frozen=True)
class HostBatch:
    """One step's host-made values, by value id, as this process holds them.

    values: for every source-only binding of the phase (outputs and `takes`) the array itself where the
        host makes it, else the host-made operands of the per-record device maps that make it. Layout:
        one leading dimension per `per` axis in plan order, as long as the number of this process's
        indices along it, then the rows of this process's shards, in shard order, then the record's own
        dimensions. A count has its `per` dimensions only (int32). Arrays start at multiples of 64 bytes
        and are never written again: JAX may alias them.
    records: for every load (by the id of its result) the record indices, int64, laid out like its values.
    seeds: the seed of every load, by the id of its result: random device functions derive their keys from
        (seed, epoch, step, record, member).
    epoch, step: place in the order; step counts from 0 in each epoch.
    """

    values: dict[Ref, Array]
    records: dict[Ref, npt.NDArray[np.int64]]
    seeds: dict[Ref, int]
    epoch: int
    step: int


class Exchange(Protocol):
    """Memory that the processes of a host share, in slots; a slot holds what travels in one batch."""

    @property
    def index(self) -> int: ...

    @property
    def count(self) -> int: ...

    def arrays(self, number: int) -> Mapping[Ref, Array]:
        """The arrays of batch `number`: the moved values, and for each flow its validity."""
        ...

    def publish(self, number: int, epoch: int, step: int, error: BaseException | None) -> None: ...

    def taken(self, number: int) -> None: ...


@dataclass(frozen=True)
class Maker:
    """Makes the batches of one phase. orders, sources: by the id of the load's result, and by name."""

    program: HostProgram
    orders: Mapping[Ref, Order]
    stages: Mapping[Ref, Stage]  # by the first result of its op
    meter: Meter
    block: int
    exchange: Exchange | None = None

    def batch(self, number: int, epoch: int, step: int) -> BatchInTheMaking:
        states = [self._state(flow, epoch, step) for flow in self.program.flows]
        return BatchInTheMaking(self, number, epoch, step, states)

    def _state(self, flow: Flow, epoch: int, step: int) -> FlowState:
        program = self.program
        order = self.orders[flow.reads[0].result]
        rows = program.rows(flow, order.rows(step))
        records: dict[tuple[Ref, Coords], npt.NDArray[np.int64]] = {}
        for read in flow.reads:
            for coords in program.variants(read.per):
                member = program.member(read.per, dict(zip(read.per, coords, strict=True)))
                ids = self.orders[read.result].records(epoch, step, member if read.per else None)
                records[read.result, coords] = ids[rows]
        counts = {read.result: self.orders[read.result].counts(step)[rows] for read in flow.reads}
        arrays = {ref: self._fresh(ref, len(rows)) for ref in self.roots(flow)}
        valid = np.ones((len(program.variants(flow.per)), len(rows)), bool)
        return FlowState(flow, rows, records, counts, arrays, valid)

    def roots(self, flow: Flow) -> list[Ref]:
        """The flow's values that are handed over, counts left out."""
        made = {ref for op in flow.ops for ref in results(op)}
        return [ref for ref in self.program.roots if ref in made and ref in self.program.elements]

    def _fresh(self, ref: Ref, rows: int) -> Array:
        element = self.program.elements[ref]
        if not isinstance(element, ArrayType):
            fail("CP0913", f"`{ref.rpartition('.')[0]}` is of variable length and cannot leave the host")
        leading = [len(self.program.local[axis]) for axis in self.program.per(ref)]
        return aligned((*leading, rows, *element.shape), numpy_dtype(element.dtype))


@dataclass
class FlowState:
    """One flow of one batch. rows: [rows] places in the global batch. records: [rows] per load and variant.
    counts: [rows] per load, which slots count by the visit's contract. arrays: what is handed over.
    valid: [variants of flow.per, rows], cleared where a record was skipped."""

    flow: Flow
    rows: npt.NDArray[np.int64]
    records: dict[tuple[Ref, Coords], npt.NDArray[np.int64]]
    counts: dict[Ref, Bools]
    arrays: dict[Ref, Array]
    valid: Bools


@dataclass
class BatchInTheMaking:
    """See `commplan.runtime.data.ring.Making`."""

    maker: Maker
    number: int
    epoch: int
    step: int
    states: list[FlowState]
    moved: Mapping[Ref, Array] = field(default_factory=dict[Ref, Array])

    def first(self) -> Sequence[Task]:
        """This process's part of what travels: its run of the rows, straight into the shared slot."""
        exchange = self.maker.exchange
        if exchange is None:
            return ()
        self.moved = exchange.arrays(self.number)
        tasks: list[Task] = []
        for state in self.states:
            if not state.flow.moved:
                continue
            state.valid = self.moved[validity(state.flow)][:, : len(state.rows)].view(bool)
            low = exchange.index * len(state.rows) // exchange.count
            high = (exchange.index + 1) * len(state.rows) // exchange.count
            state.valid[:, low:high] = True
            tasks += self._tasks(state, state.flow.before, low, high, self._put_moved)
        return tasks

    def publish(self, error: BaseException | None) -> None:
        if self.maker.exchange is not None:
            self.maker.exchange.publish(self.number, self.epoch, self.step, error)

    def second(self) -> Sequence[Task]:
        """What this process does for itself, on all the rows that it holds."""
        tasks: list[Task] = []
        for state in self.states:
            if state.flow.moved:
                state.valid = state.valid.copy()  # the slot's own flags are the peers' as well
            tasks += self._tasks(state, state.flow.after, 0, len(state.rows), self._put_roots)
        return tasks

    def _tasks(
        self, state: FlowState, ops: Sequence[HostOp], low: int, high: int, put: Callable[..., None]
    ) -> list[Task]:
        block = self.maker.block
        return [
            functools.partial(self._block, state, ops, start, min(start + block, high), put)
            for start in range(low, high, block)
        ]

    def _block(
        self, state: FlowState, ops: Sequence[HostOp], low: int, high: int, put: Callable[..., None]
    ) -> None:
        """Rows low..high of the flow through `ops`, variant by variant."""
        program = self.maker.program
        made: dict[Ref, dict[Coords, Sequence[Record]]] = {}
        for ref in state.flow.moved if put == self._put_roots else ():
            made[ref] = {
                coords: _rows(self.moved[ref][place, low:high])
                for place, coords in enumerate(program.variants(program.copies[ref]))
            }
        for op in ops:
            names = [ref for ref in results(op) if ref in program.elements]
            axes = program.copies[names[0]]
            made.update({ref: {} for ref in names})
            for coords in program.variants(axes):
                inputs = [_of(made[ref], program.copies[ref], axes, coords, program) for ref in operands(op)]
                if isinstance(op, Share):
                    made[op.result][coords] = inputs[0]
                    continue
                at = self._slot if put == self._put_moved else self._root
                targets = [at(state, ref, coords, low, high) for ref in names]
                named = dict(zip(axes, coords, strict=True))
                columns = self._run(state, op, named, low, high, inputs, targets)
                for ref, column in zip(names, columns, strict=True):
                    made[ref][coords] = column
        put(state, made, low, high)

    def _run(
        self, state: FlowState, op: Read | Map, coords: Mapping[str, int], low: int, high: int,
        inputs: list[Sequence[Record]], targets: list[Array | None],
    ) -> list[Sequence[Record]]:  # fmt: skip
        program = self.maker.program
        read = op if isinstance(op, Read) else state.flow.reads[0]
        records = state.records[read.result, tuple(coords[axis] for axis in read.per)]
        chosen = [
            place
            for place, variant in enumerate(program.variants(state.flow.per))
            if agrees(state.flow.per, variant, coords)
        ]
        before: Bools = np.asarray(state.valid[chosen, low:high].all(0))
        valid = before.copy()
        member = program.member(op.per, coords) if isinstance(op, Map) and op.per else -1
        place = Place(self.epoch, self.step, member)
        out = self.maker.stages[results(op)[0]].run(place, records[low:high].tolist(), inputs, valid, targets)
        for failed in np.flatnonzero(before & ~valid):
            state.valid[chosen, low + failed] = False
        return out

    def _slot(self, state: FlowState, ref: Ref, coords: Coords, low: int, high: int) -> Array | None:
        """Where the copy `coords` of a value that travels goes: a part of the shared slot."""
        if ref not in state.flow.moved:
            return None
        return self.moved[ref][
            self.maker.program.variants(self.maker.program.copies[ref]).index(coords), low:high
        ]

    def _root(self, state: FlowState, ref: Ref, coords: Coords, low: int, high: int) -> Array | None:
        """Where the copy `coords` of a value goes in the batch: None where it is not handed over."""
        if ref not in state.arrays:
            return None
        program, array = self.maker.program, state.arrays[ref]
        per, copies = program.per(ref), program.copies[ref]
        for place, variant in zip(np.ndindex(array.shape[: len(per)]), program.variants(per), strict=True):
            fixed = dict(zip(per, variant, strict=True))
            if next(c for c in program.variants(copies) if agrees(copies, c, fixed)) == coords:
                return array[(*place, slice(low, high))]
        return None

    def _put_moved(self, state: FlowState, made: _Made, low: int, high: int) -> None:
        program = self.maker.program
        for ref in state.flow.moved:
            start = thread_cpu()
            for place, coords in enumerate(program.variants(program.copies[ref])):
                _fill(self.moved[ref][place, low:high], made[ref][coords])
            self._charge(state, ref, start)

    def _put_roots(self, state: FlowState, made: _Made, low: int, high: int) -> None:
        program = self.maker.program
        for ref, array in state.arrays.items():
            start = thread_cpu()
            per, copies = program.per(ref), program.copies[ref]
            for place, coords in zip(np.ndindex(array.shape[: len(per)]), program.variants(per), strict=True):
                fixed = dict(zip(per, coords, strict=True))
                column = next(made[ref][c] for c in program.variants(copies) if agrees(copies, c, fixed))
                _fill(array[(*place, slice(low, high))], column)
            self._charge(state, ref, start)

    def _charge(self, state: FlowState, ref: Ref, start: Cpu) -> None:
        """Put the time of a copy on the line that made `ref`."""
        key = next(results(op)[0] for op in state.flow.ops if ref in results(op))
        spent = thread_cpu() - start
        self.maker.meter.add(key, cpu_s=spent.both_s, system_s=spent.system_s)

    def finish(self) -> HostBatch:
        """Let go of the slot, put skipped records out of the way, count."""
        if self.maker.exchange is not None:
            for state in self.states:
                for ref in state.flow.moved:
                    self._received(state, ref)
            self.moved = {}
            self.maker.exchange.taken(self.number)
        program = self.maker.program
        values: dict[Ref, Array] = {}
        records: dict[Ref, npt.NDArray[np.int64]] = {}
        for state in self.states:
            if not state.valid.all():
                self._compact(state)
            values.update(state.arrays)
            for read in state.flow.reads:
                leading = [len(program.local[axis]) for axis in read.per]
                ids = np.stack([state.records[read.result, c] for c in program.variants(read.per)])
                records[read.result] = ids.reshape(*leading, len(state.rows))
                if read.count in program.roots:
                    values[read.count] = self._count(state, read, read.count)
        seeds = {read.result: read.seed for state in self.states for read in state.flow.reads}
        return HostBatch(values, records, seeds, self.epoch, self.step)

    def _received(self, state: FlowState, ref: Ref) -> None:
        """Account for what others made of a shared value."""
        op = next(op for op in state.flow.before if ref in results(op))
        exchange = self.maker.exchange
        if exchange is not None and isinstance(op, Share):
            rows = len(state.rows)
            mine = (exchange.index + 1) * rows // exchange.count - exchange.index * rows // exchange.count
            each = self.moved[ref][:, :1].nbytes
            self.maker.meter.add(op.result, records=rows - mine, nbytes=(rows - mine) * each)

    def _compact(self, state: FlowState) -> None:
        """In every shard the counted records first, repeats of them after: counts say how many."""
        program = self.maker.program
        variants = program.variants(state.flow.per)
        shards = len(program.shards(state.flow.split))
        for place, variant in enumerate(variants):
            counted = np.logical_and.reduce([state.counts[read.result] for read in state.flow.reads])
            rows = compacted(counted, state.valid[place], shards)
            fixed = dict(zip(state.flow.per, variant, strict=True))
            for ref, array in state.arrays.items():
                per = program.per(ref)
                for at, coords in zip(
                    np.ndindex(array.shape[: len(per)]), program.variants(per), strict=True
                ):
                    if agrees(per, coords, fixed):
                        array[at] = array[at][rows]
                        array[at][rows < 0] = 0
            for (ref, coords), ids in state.records.items():
                if coords == variant:
                    state.records[ref, coords] = np.where(rows < 0, ids, ids[rows])

    def _count(self, state: FlowState, read: Read, ref: Ref) -> npt.NDArray[np.int32]:
        """Counted records, for every combination of the count's `per` axes (members, and shards)."""
        program = self.maker.program
        per = program.per(ref)
        shards = program.shards(state.flow.split)
        each = len(state.rows) // len(shards)
        result = aligned([len(program.local[axis]) for axis in per], np.dtype(np.int32))
        for at, coords in zip(np.ndindex(result.shape), program.variants(per), strict=True):
            named = dict(zip(per, coords, strict=True))
            shard = shards.index(program.member(state.flow.split, named)) if state.flow.split else 0
            here = slice(shard * each, (shard + 1) * each)
            variants = program.variants(state.flow.per)
            chosen = [p for p, v in enumerate(variants) if agrees(state.flow.per, v, named)]
            valid: Bools = np.asarray(state.valid[chosen, here].all(0))
            result[at] = np.count_nonzero(valid & state.counts[read.result][here])
        return result


_Made = Mapping[Ref, Mapping[Coords, Sequence[Record]]]


def validity(flow: Flow) -> Ref:
    """The name under which a slot holds a flow's validity flags: that of its first load."""
    return f"{flow.reads[0].result}?"


def _of(
    made: Mapping[Coords, Sequence[Record]],
    have: Sequence[str],
    axes: Sequence[str],
    coords: Coords,
    program: HostProgram,
) -> Sequence[Record]:
    """The variant of an operand that the variant `coords` (along `axes`) of a result is made from."""
    if set(have) <= set(axes):
        return made[projected(axes, coords, have)]
    fixed = dict(zip(axes, coords, strict=True))
    return next(made[c] for c in program.variants(have) if agrees(have, c, fixed))


def _rows(array: Array) -> Sequence[Record]:
    """The rows of a slot as records: nobody may write to them."""
    view = array.view()
    view.flags.writeable = False
    return cast("Sequence[Record]", view)


def _fill(target: Array, column: Sequence[Any]) -> None:
    """Write a block's records, where they are not there yet; rows without one (skipped) become zero."""
    if isinstance(column, np.ndarray):
        if not np.may_share_memory(target, cast("Array", column)):
            target[...] = column
        return
    for row, value in enumerate(column):
        target[row] = 0 if value is None else value


def _numbers(program: HostProgram) -> dict[Ref, int]:
    """What tells the random streams of the maps of a phase apart: the function, and which use of it.

    Uses are counted as the plan writes them: passes move ops, and rename what is shared.
    """
    uses: dict[str, int] = {}
    found: dict[Ref, int] = {}
    maps = [op for op in program.phase.ops if isinstance(op, Map)]
    for op in sorted(maps, key=lambda op: op.span):
        uses[op.fn] = uses.get(op.fn, 0) + 1
        found[op.results[0]] = zlib.crc32(op.fn.encode()) * 65536 + uses[op.fn]
    return found


def stages(
    program: HostProgram,
    sources: Mapping[str, Source],
    functions: Mapping[str, Callable[..., Any]],
    meter: Meter,
) -> dict[Ref, Stage]:
    """What runs each Read and Map of the program.

    Errors: CP0914 where `on_error = skip` stands on a stage that cannot skip.
    """
    made: dict[Ref, Stage] = {}
    numbers = _numbers(program)
    file = program.schedule.file
    for flow in program.flows:
        skips = any(read.hints.on_error == "skip" for read in flow.reads)
        alike = all(read.per == flow.per for read in flow.reads)
        for op in flow.ops:
            key = results(op)[0]
            if isinstance(op, Share):
                meter.line(key, f"share {key.rpartition('.')[0]} via {op.design}", op.span)
                continue
            own = op.hints.on_error
            may = alike and set(program.per(key)) <= set(flow.per)
            if own == "skip" and not may:
                fail(
                    "CP0914",
                    "a record cannot be skipped where members differ: the others have it already",
                    "put `on_error = skip` on the load, or on a map before the first `per`",
                    span=op.span,
                    file=file,
                )
            names = [ref for ref in results(op) if ref in program.elements]
            elements = tuple(program.elements[ref] for ref in names)
            dtypes = tuple(numpy_dtype(e.dtype) if isinstance(e, ArrayType) else None for e in elements)
            call = sources[op.source].__getitem__ if isinstance(op, Read) else functions[op.fn]
            what = f"load {op.source}" if isinstance(op, Read) else f"map {op.fn}"
            meter.line(key, what, op.span)
            random = isinstance(op, Map) and op.random
            made[key] = Stage(
                op, numbers.get(key, 0), elements, dtypes, call, flow.reads[0].seed, random, file, meter,
                (own == "skip" or (own is None and skips)) and may,
            )  # fmt: skip
    return made
