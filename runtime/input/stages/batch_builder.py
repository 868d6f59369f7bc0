"""Construction of one batch: the tasks that run its stages, and the layout of their records in arrays."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from commplan.diagnostics import fail
from commplan.input.order import Order
from commplan.input.work_partition import Division
from commplan.ir.plan import Ref
from commplan.ir.schedule import Map, Read, Share, operands, results
from commplan.ir.types import ArrayType, BytesType
from commplan.runtime.input import host_batch
from commplan.runtime.input.host_batch import FlowState, HostBatch, Mask, Visit
from commplan.runtime.input.layout import Array, Bools, Fresh, agrees, aligned, blocks, fill_rows, read_only
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.program import (
    FIRST_BATCH,
    Coords,
    EpochCursor,
    Flow,
    HostOp,
    HostProgram,
    identity,
    validity,
)
from commplan.runtime.input.sources.record_convert import numpy_dtype
from commplan.runtime.input.stages.chained import Chained
from commplan.runtime.input.stages.records import BlockPosition, Record, Stage

if TYPE_CHECKING:
    from commplan.runtime.input.cache.record_cache import Caches
    from commplan.runtime.input.stages.worker_pool import Workers

Task = Callable[[], None]  # a part of the work on a batch; any thread may run it


@dataclass(frozen=True)
class BatchFactory:
    """Makes the batches of one phase.

    Attributes:
        program, meter, workers, epoch_cursor, memory: see `BatchInputs`.
        orders: the order of records of each load, by the id of its result.
        stages: by the first result of their ops.
        block: the maximum number of rows of a task.
        source_groups: groups of sources that fetch their records together.
    """

    program: HostProgram
    orders: Mapping[Ref, Order]
    stages: Mapping[Ref, Stage]
    meter: Meter
    block: int
    workers: Workers | None = None
    source_groups: Sequence[Sequence[str]] = ()
    epoch_cursor: EpochCursor = FIRST_BATCH
    memory: Fresh = aligned
    # Facts common to most batches: the rows of a step, which of them count, the roots of a flow.
    _facts: dict[Any, Any] = field(default_factory=dict[Any, Any], repr=False, compare=False)

    def batch(self, number: int) -> BatchBuilder:
        """The builder of batch `number`, counted from the first batch of this iterator."""
        return self.at(*self.epoch_cursor.at(number), number)

    def at(self, epoch: int, step: int, number: int = 0) -> BatchBuilder:
        """The builder of the batch of a step."""
        states = [self.state(flow, step) for flow in self.program.flows]
        return BatchBuilder(self, number, epoch, step, states)

    @functools.cached_property
    def caches(self) -> Caches | None:
        """The caches of the stages; None if no stage has one."""
        opened = {ref: stage.cached for ref, stage in self.stages.items() if stage.cached is not None}
        if not opened:
            return None
        from commplan.runtime.input.cache.record_cache import Caches  # noqa: PLC0415  memory that few need

        return Caches(self.program, opened)

    def chained(self, flow: Flow, before: bool) -> frozenset[Ref]:
        """Results of functions and of loads of bytes that a single host function reads, record by record.

        A function may return the same memory on every call. A reader of a chained result therefore has no
        other chained operand, and is not called with memory that it returned.
        """
        key = (flow.reads[0].result, before)
        if key not in self._facts:
            ops = flow.before if before else flow.after
            outputs = {*flow.moved, *self.roots(flow)}
            takers: dict[Ref, list[HostOp]] = {}
            for op in flow.ops:
                for ref in operands(op):
                    takers.setdefault(ref, []).append(op)
            memory: dict[Ref, list[Callable[..., Any]]] = {}  # functions whose memory each result may alias
            fed: set[Ref] = set()  # results of ops that have a chained operand
            for op in ops:
                refs = [ref for ref in results(op) if ref in self.program.elements]
                if isinstance(op, Share) or len(refs) != 1:
                    continue
                (ref,) = refs
                if ref in outputs or not self._is_taken_once(ref, takers.get(ref, []), ops):
                    continue
                if isinstance(op, Read):
                    stage = self.stages[ref]
                    if isinstance(stage.elements[0], BytesType) and stage.many is None:
                        memory[ref] = []  # bytes never change
                    continue
                if self.stages[ref].cached is not None:
                    continue  # its column is filled from the cache
                (taker,) = takers[ref]
                calls = [self.stages[ref].call]
                calls += (call for operand in operands(op) for call in memory.get(operand, ()))
                first = results(taker)[0]
                if first not in fed and self.stages[first].call not in calls:
                    fed.add(first)
                    memory[ref] = calls
            self._facts[key] = frozenset(memory)
        return self._facts[key]

    def _is_taken_once(self, ref: Ref, takers: Sequence[HostOp], ops: Sequence[HostOp]) -> bool:
        """Whether a single function takes `ref`, one of `ops`, and once for each record."""
        copies = self.program.copies
        is_single = len(takers) == 1 and isinstance(takers[0], Map) and takers[0] in ops
        return is_single and copies[results(takers[0])[0]] == copies[ref]

    # --- one batch ---

    def state(self, flow: Flow, step: int) -> FlowState:
        """The initial state of a flow in a batch, without its records (see `look_up`)."""
        rows = self.orders[flow.reads[0].result].rows(step)
        counted = tuple(self.orders[read.result].counted(step) for read in flow.reads)
        key = (flow.reads[0].result, rows, counted)
        if key not in self._facts:
            owned = self.program.rows(flow, rows)
            counts = {read.result: self.orders[read.result].counts(step)[owned] for read in flow.reads}
            valid = np.ones((len(self.program.variants(flow.per)), len(owned)), bool)
            self._facts[key] = (owned, counts, valid, {})
        owned, counts, valid, layouts = self._facts[key]
        return FlowState(flow, owned, {}, counts, {}, valid.copy(), layouts)

    def mask(self, states: Sequence[FlowState]) -> Mask | None:
        """See `host_batch.mask`."""
        return host_batch.mask(self.program, states, self._facts)

    def look_up(self, state: FlowState, epoch: int, step: int) -> None:
        """Compute the records of the rows, in the order of each load."""
        program, records = self.program, dict(state.records)
        for read in state.flow.reads:
            for coords in program.variants(read.per):
                member = program.member(read.per, dict(zip(read.per, coords, strict=True)))
                ids = self.orders[read.result].records(epoch, step, member if read.per else None)
                records[read.result, coords] = ids[state.rows]
        state.records = records  # complete, or unchanged after an interruption

    def roots(self, flow: Flow) -> list[Ref]:
        """The flow's values that are part of the batch, without counts."""
        key = flow.reads[0].result
        if key not in self._facts:
            computed = {ref for op in flow.ops for ref in results(op)}
            self._facts[key] = [
                ref for ref in self.program.roots if ref in computed and ref in self.program.elements
            ]
        return self._facts[key]

    def fresh(self, ref: Ref, rows: int) -> Array:
        """A new array for a value, [members, rows, ...]. Raises CP0913 for values of variable length."""
        element = self.program.elements[ref]
        if not isinstance(element, ArrayType):
            fail("CP0913", f"`{ref.rpartition('.')[0]}` is of variable length and cannot leave the host")
        leading = [len(self.program.local[axis]) for axis in self.program.per(ref)]
        fresh = self.memory if self.workers is None else self.workers.fresh
        return blocks(leading, (rows, *element.shape), numpy_dtype(element.dtype), fresh)


@dataclass
class BatchBuilder:
    """One batch under construction.

    For shared values: run the tasks of `parts` for all parts, then call `receive` when they are done.
    For all batches: run the tasks of `second`, then call `finish`.

    Attributes:
        maker: the factory.
        number, epoch, step: the number of the batch, and its position.
        states: the state of each flow.
        moved: the arrays of the shared values in their slot, [copies, rows, ...]; empty before `parts`.
        received: whether `receive` was called.
    """

    maker: BatchFactory
    number: int
    epoch: int
    step: int
    states: list[FlowState]
    moved: Mapping[Ref, Array] = field(default_factory=dict[Ref, Array])
    received: bool = False

    def parts(
        self, parts: range, moved: Mapping[Ref, Array], divisions: Mapping[int, Division]
    ) -> list[Task]:
        """Return the tasks that fill consecutive parts of the shared rows.

        Args:
            parts: the indices of the parts. Several parts are cheap: they are one task per flow.
            moved: the arrays of the slot.
            divisions: the divisions of the flows with shared values, by the index of the flow.
        """
        self.moved = moved
        tasks: list[list[Task]] = [[] for _ in self.states]
        for index, state in enumerate(self.states):
            if state.flow.moved:
                self.maker.look_up(state, self.epoch, self.step)
                bounds = [divisions[index].part(len(state.rows), part) for part in (parts[0], parts[-1])]
                tasks[index] = self._fill(state, bounds[0][0], bounds[1][1], is_one_task=len(parts) > 1)
        return self._join_tasks(tasks)

    def _fill(self, state: FlowState, low: int, high: int, *, is_one_task: bool) -> list[Task]:
        """Tasks that fill rows of a flow. Writes the record indices of these rows to the slot."""
        state.valid = self.moved[validity(state.flow)][:, : len(state.rows)].view(bool)
        state.valid[:, low:high] = True
        for read in state.flow.reads:
            for row, coords in enumerate(self.maker.program.variants(read.per)):
                ids = state.records[read.result, coords]
                self.moved[identity(read)][row, low:high] = ids[low:high]
        if is_one_task and self.maker.workers is None:
            return [functools.partial(self.block, state, True, low, high)]
        return self._tasks(state, True, low, high)

    def receive(
        self, moved: Mapping[Ref, Array], parts: Sequence[int] | None, divisions: Mapping[int, Division]
    ) -> None:
        """Take the shared values from `moved`. parts: those that this process made; None for all."""
        is_again, self.moved, self.received = self.received, moved, True  # called again after an interruption
        for index, state in enumerate(self.states):
            if state.flow.moved:
                self._copy_records(state)
                if parts is not None and not is_again:
                    self._account(state, parts, divisions[index])

    def _account(self, state: FlowState, parts: Sequence[int], division: Division) -> None:
        """Report the rows that other processes made to the meter. parts: those that this process made."""
        number, failed = len(state.rows), ~np.asarray(state.valid.all(0))
        skipped = int(np.count_nonzero(failed))
        for low, high in (division.part(len(state.rows), part) for part in parts):
            number -= high - low
            skipped -= int(np.count_nonzero(failed[low:high]))
        for op in state.flow.before:
            if isinstance(op, Share) and op.result in state.flow.moved:
                nbytes = number * self.moved[op.result][:, :1].nbytes
                self.maker.meter.add(op.result, records=number, nbytes=nbytes, skipped=skipped)
                skipped = 0  # count the flow's skipped rows once, for any number of shared values

    def second(self) -> Sequence[Task]:
        """Tasks that only this process needs, on all the rows that it holds."""
        tasks: list[list[Task]] = [[] for _ in self.states]
        for index, state in enumerate(self.states):
            flow, rows = state.flow, len(state.rows)
            roots = self.maker.roots(flow)
            if not state.records:
                self.maker.look_up(state, self.epoch, self.step)
            if flow.moved and state.valid.all():
                self._show(state, roots)
            state.arrays = {ref: self.maker.fresh(ref, rows) for ref in roots if ref not in state.shown}
            if state.arrays or flow.after:
                tasks[index] += self._tasks(state, False, 0, rows)
        return self._join_tasks(tasks)

    def _copy_records(self, state: FlowState) -> None:
        """Copy record indices and validity flags from the slot, which other processes share."""
        rows = len(state.rows)
        state.valid = self.moved[validity(state.flow)][:, :rows].astype(bool)
        for read in state.flow.reads:
            ids = self.moved[identity(read)][:, :rows].copy()
            for row, coords in enumerate(self.maker.program.variants(read.per)):
                state.records[read.result, coords] = ids[row]

    def _show(self, state: FlowState, roots: Sequence[Ref]) -> None:
        """Collect the roots that can be views of the slot."""
        rows = len(state.rows)
        for ref in state.flow.moved:
            if ref not in roots:
                continue
            if ref not in state.layouts:
                array = self.moved[ref]
                program = self.maker.program
                state.layouts[ref] = host_batch.layout(program, ref, array.shape, array.dtype, rows)
            if state.layouts[ref] is not None:
                state.shown[ref] = self.moved[ref][:, :rows].reshape(state.layouts[ref])

    def _join_tasks(self, tasks: list[list[Task]]) -> list[Task]:
        """The tasks of all flows. The same blocks of flows that share fetched records become one task."""
        for names in self.maker.source_groups:
            reading = [
                index
                for index, state in enumerate(self.states)
                if tasks[index] and any(read.source in names for read in state.flow.reads)
            ]
            if len(reading) > 1 and len({len(tasks[index]) for index in reading}) == 1:
                by_block = zip(*(tasks[index] for index in reading), strict=True)
                tasks[reading[0]] = [functools.partial(_in_turn, block_tasks) for block_tasks in by_block]
                for index in reading[1:]:
                    tasks[index] = []
        return [task for flow_tasks in tasks for task in flow_tasks]

    def _tasks(self, state: FlowState, before: bool, low: int, high: int) -> list[Task]:
        """Tasks that run rows low..high - 1 of a flow, in blocks. For the arguments, see `block`."""
        workers, size = self.maker.workers, self.maker.block
        run = self.block if workers is None else functools.partial(workers.run, cast("Any", self))
        return [
            functools.partial(run, state, before, start, min(start + size, high))
            for start in range(low, high, size)
        ]

    def block(self, state: FlowState, before: bool, low: int, high: int) -> None:
        """Run rows low..high - 1 of a flow through its stages, `before` or after the transfer."""
        # The inputs: shared values. The outputs: rows of the slot or of the batch.
        program, flow = self.maker.program, state.flow
        computed: dict[Ref, dict[Coords, Sequence[Record]]] = {}
        for ref in () if before else flow.moved:
            computed[ref] = {
                coords: cast("Sequence[Record]", read_only(self.moved[ref][index, low:high]))
                for index, coords in enumerate(program.variants(program.copies[ref]))
            }
        targets = {
            ref: [(coords, array[low:high]) for coords, array in self._targets(state, ref, before)]
            for ref in (flow.moved if before else state.arrays)
        }
        ops = flow.before if before else flow.after
        destinations = self._destinations(ops, targets)
        chained = self.maker.chained(flow, before)
        caches = self.maker.caches
        missing = {} if caches is None else caches.missing(ops, targets, state.records, low, high)
        for op in ops:  # once for each combination of members for which its results differ
            refs = [ref for ref in results(op) if ref in program.elements]
            axes = program.copies[refs[0]]
            computed.update({ref: {} for ref in refs})
            for coords in program.variants(axes):
                inputs = [
                    host_batch.variant_of(computed[ref], program.copies[ref], axes, coords, program)
                    for ref in operands(op)
                ]
                if isinstance(op, Share):
                    computed[op.result][coords] = inputs[0]
                    continue
                arrays = [
                    next((a for c, a in destinations.get(ref, ()) if c == coords), None) for ref in refs
                ]
                named = dict(zip(axes, coords, strict=True))
                columns = self._run(
                    state, op, named, low, high, inputs, arrays, ahead=refs[0] in chained,
                    needed=missing.get(refs[0]),
                )  # fmt: skip
                for ref, column in zip(refs, columns, strict=True):
                    computed[ref][coords] = column
        # Results that no stage wrote in place.
        for ref, copies in targets.items():
            key = next(results(op)[0] for op in flow.ops if ref in results(op))
            with self.maker.meter.working(key):
                for coords, array in copies:
                    fill_rows(array, computed[ref][coords])

    def _destinations(
        self, ops: Sequence[HostOp], targets: Mapping[Ref, list[tuple[Coords, Array]]]
    ) -> dict[Ref, list[tuple[Coords, Array]]]:
        """`targets`, and the same arrays for operands of shares: stages write their results in place."""
        destinations, copies = dict(targets), self.maker.program.copies
        for op in (op for op in reversed(ops) if isinstance(op, Share)):
            if op.result in destinations and copies[op.operand] == copies[op.result]:
                destinations.setdefault(op.operand, destinations[op.result])
        return destinations

    def _targets(self, state: FlowState, ref: Ref, before: bool) -> list[tuple[Coords, Array]]:
        """The arrays of a value in the slot or the batch, each with the coordinates of the copy in it."""
        program = self.maker.program
        variants = program.variants(program.copies[ref])
        if before:
            return list(zip(variants, self.moved[ref], strict=True))
        per, array = program.per(ref), state.arrays[ref]
        targets: list[tuple[Coords, Array]] = []
        for index, coords in zip(np.ndindex(array.shape[: len(per)]), program.variants(per), strict=True):
            fixed = dict(zip(per, coords, strict=True))
            variant = next(c for c in variants if agrees(program.copies[ref], c, fixed))
            targets.append((variant, array[index]))
        return targets

    def _run(
        self, state: FlowState, op: Read | Map, coords: Mapping[str, int], low: int, high: int,
        inputs: list[Sequence[Record]], targets: list[Array | None], *, ahead: bool, needed: Bools | None,
    ) -> list[Sequence[Record]]:  # fmt: skip
        """The results of `op`.

        Args:
            coords: the index along each axis for which the results are computed.
            low, high: the first row, and the row after the last one.
            inputs: a column for each operand.
            targets: the destination of each result; None for new memory.
            ahead: whether to return a column that computes each record when the consuming stage reads it.
            needed: the rows to compute; None for all.
        """
        program = self.maker.program
        if needed is not None and not needed.any():
            return [[None] * (high - low) for ref in results(op) if ref in program.elements]
        read = op if isinstance(op, Read) else state.flow.reads[0]
        records = state.records[read.result, tuple(coords[axis] for axis in read.per)]
        variants = self._variants(state, coords)
        valid_before: Bools = np.asarray(state.valid[variants, low:high].all(0))
        valid_before = valid_before if needed is None else valid_before & needed
        valid = valid_before.copy()
        member = program.member(op.per, coords) if isinstance(op, Map) and op.per else -1
        block_position = BlockPosition(self.epoch, self.step, member)
        stage, numbers = self.maker.stages[results(op)[0]], records[low:high].tolist()
        if ahead:
            return [Chained(stage, block_position, numbers, inputs)]
        run = stage.run
        if stage.cached is not None:
            keys = stage.cached.keys(state.records, coords)[low:high]
            run = functools.partial(stage.cached.run, stage, keys)
        out = run(block_position, numbers, inputs, valid, targets)
        for failed in np.flatnonzero(valid_before & ~valid):
            state.valid[variants, low + failed] = False
        return out

    def _variants(self, state: FlowState, coords: Mapping[str, int]) -> list[int]:
        """The rows of the validity flags that concern `coords`."""
        per = state.flow.per
        variants = enumerate(self.maker.program.variants(per))
        return [index for index, variant in variants if agrees(per, variant, coords)]

    def finish(self) -> HostBatch:
        """The finished batch, without skipped records.

        Changes nothing, so that an interrupted caller can call it again. The builder keeps the slot.
        """
        program = self.maker.program
        values: dict[Ref, Array] = {}
        records: dict[Ref, npt.NDArray[np.int64]] = {}
        visits: list[Visit] = []
        shown = self._slot_views()
        for initial in self.states:
            clean = bool(initial.valid.all())
            visits += self._visits(initial, clean)
            state = initial if clean else host_batch.compacted_state(program, initial, self.maker.fresh)
            for ref in self.maker.roots(state.flow):
                values[ref] = state.arrays[ref] if ref in state.arrays else shown[ref]
            for read in state.flow.reads:
                records[read.result] = host_batch.laid_out(program, read, state.records)
                if read.count in program.roots:
                    values[read.count] = self._count(state, read, read.count, clean)
        seeds = {read.result: read.seed for state in self.states for read in state.flow.reads}
        rows = self.maker.mask(self.states)
        return HostBatch(values, records, seeds, self.epoch, self.step, self.number, tuple(visits), rows)

    def _slot_views(self) -> dict[Ref, Array]:
        """The values in the slot: views, and copies of small ones, which must not keep the slot in use."""
        shown = {ref: view for state in self.states for ref, view in state.shown.items()}
        total = sum(array.nbytes for array in self.moved.values())
        for ref in host_batch.smallest({ref: view.nbytes for ref, view in shown.items()}, total):
            copy = self.maker.memory(shown[ref].shape, shown[ref].dtype)
            copy[...] = shown[ref]
            shown[ref] = read_only(copy)
        return shown

    def _count(self, state: FlowState, read: Read, ref: Ref, clean: bool) -> Array:
        """See `host_batch.count`. If no record was skipped (`clean`), the counts are computed once."""
        if not clean:
            return host_batch.count(self.maker.program, state, read, ref)
        if ref not in state.layouts:
            state.layouts[ref] = host_batch.count(self.maker.program, state, read, ref)
        counts: Array = state.layouts[ref]
        copy = aligned(counts.shape, counts.dtype)
        copy[...] = counts
        return copy

    def _visits(self, state: FlowState, clean: bool) -> list[Visit]:
        """The records that count, per load and member. clean: whether no record was skipped."""
        visits: list[Visit] = []
        for read in state.flow.reads:
            counts = state.counts[read.result]
            for coords in self.maker.program.variants(read.per):
                skipped = 0
                if not clean:
                    valid = state.valid[self._variants(state, dict(zip(read.per, coords, strict=True)))]
                    skipped = int(np.count_nonzero(~valid.all(0) & counts))
                visits.append(Visit(read.result, coords, state.records[read.result, coords][counts], skipped))
        return visits


def _in_turn(tasks: Sequence[Task]) -> None:
    """Run tasks one after another, as one task."""
    for task in tasks:
        task()
