"""A batch as the caller receives it: its arrays, without skipped records, and counts of records."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from commplan.ir.plan import Ref
from commplan.ir.schedule import Read
from commplan.ir.types import Placement
from commplan.runtime.input.layout import ALIGNMENT, Array, Bools, agrees, aligned, compacted
from commplan.runtime.input.program import Coords, Flow, HostProgram

if TYPE_CHECKING:
    from commplan.runtime.input.unit_batches import UnitRecords

# The smallest values of a slot are copied when a batch is finished, up to 1/16 of the bytes of the slot.
_COPIED_DIVISOR = 16


class Visit(NamedTuple):
    """The records of one batch that count by the contract of a load's visit.

    Attributes:
        load: the id of the load's result.
        coords: the member's index along each axis of `Read.per`; () if all members have the same order.
        records: [n] int64, the record indices, including those of skipped records.
        skipped: the number of skipped records.
    """

    load: Ref
    coords: Coords
    records: npt.NDArray[np.int64]
    skipped: int


class Mask(NamedTuple):
    """The rows of a batch that are counted records.

    Attributes:
        rows: bool, [indices of each axis of `placement.per`, rows of this process].
        placement: the axes that split the rows, and the axes that are dimensions of all values.
    """

    rows: Bools
    placement: Placement


class HostBatch(msgspec.Struct, frozen=True, eq=False):
    """The values that the host makes in one step, by value id, as this process holds them.

    Attributes:
        values: the array of every source-only binding of the phase (outputs and `takes`) that the host makes.
            For a binding that per-record device maps make, their host-made operands instead. Layout: one
            leading dimension per `per` axis in plan order, with this process's indices along it; then the
            rows of this process's shards, in shard order; then the record's dimensions. A count has its `per`
            dimensions only (int32). Arrays are aligned to 64 bytes and do not change while a view of them
            exists: JAX may alias them. Arrays shared between processes are read-only.
        records: the record indices of every load (by the id of its result), int64, laid out like its values.
        seeds: the seed of every load, by the id of its result. Random device functions derive their keys
            from (seed, epoch, step, record, member).
        epoch: the epoch, counted from 0.
        step: the step, counted from 0 in each epoch.
        number: the number of batches that the iterator returned before.
        visits: the records that count as visited, or an object whose `visits()` returns them.
        mask: the rows that count; None if loads differ in rows or in the axes that split them.
    """

    values: dict[Ref, Array]
    records: Mapping[Ref, npt.NDArray[np.int64]]
    seeds: dict[Ref, int]
    epoch: int
    step: int
    number: int = 0
    visits: Sequence[Visit] | UnitRecords = ()
    mask: Mask | None = None


@dataclass(eq=False)
class FlowState:
    """One flow of one batch, while the batch is built. `rows` are those of this process.

    Attributes:
        flow: the flow.
        rows: [rows] int64, positions in the global batch.
        records: [rows] int64 record indices, by load and variant (indices along the axes of `Read.per`).
        counts: [rows] bool by load, whether the row counts by the contract of the load's visit.
        arrays: the arrays that this process has made for the batch, [copies, rows, ...], by value.
        valid: [variants of flow.per, rows] bool, False for a skipped record.
        layouts: by value, its shape as a view (see `layout`) or its counts. Batches with the same number of
            rows share this dictionary as a cache.
        shown: views of the slot that become part of the batch.
    """

    flow: Flow
    rows: npt.NDArray[np.int64]
    records: dict[tuple[Ref, Coords], npt.NDArray[np.int64]]
    counts: dict[Ref, Bools]
    arrays: dict[Ref, Array]
    valid: Bools
    layouts: dict[Ref, Any] = field(default_factory=dict[Ref, Any])
    shown: dict[Ref, Array] = field(default_factory=dict[Ref, Array])


def layout(
    program: HostProgram, ref: Ref, shape: Sequence[int], dtype: np.dtype[Any], rows: int
) -> tuple[int, ...] | None:
    """The shape of a value as a view of the slot; None if its layout requires a copy.

    Args:
        program: the host program.
        ref: the value.
        shape: its shape in the slot, [copies, rows of a full batch, ...].
        dtype: its dtype.
        rows: the number of rows of this batch, at most those of a full batch.
    """
    per = program.per(ref)
    if program.copies[ref] != per and (shape[0] > 1 or any(len(program.local[axis]) > 1 for axis in per)):
        return None
    if shape[0] > 1 and (rows < shape[1] or math.prod(shape[1:]) * dtype.itemsize % ALIGNMENT):
        return None  # the copies would not be contiguous, or JAX could not use their memory
    return (*(len(program.local[axis]) for axis in per), rows, *shape[2:])


def smallest(nbytes: Mapping[Ref, int], total: int) -> set[Ref]:
    """The values of a slot that batches copy, because a small view would keep the whole slot from reuse.

    Args:
        nbytes: the size of each value in bytes.
        total: the size of the slot's arrays in bytes.

    Returns:
        The smallest values, whose total size is at most 1/16 of `total`.
    """
    copied, remaining = set[Ref](), total // _COPIED_DIVISOR
    for ref, size in sorted(nbytes.items(), key=lambda item: item[1]):
        remaining -= size
        if remaining < 0:
            break
        copied.add(ref)
    return copied


def compacted_state(program: HostProgram, state: FlowState, fresh: Callable[[Ref, int], Array]) -> FlowState:
    """A copy of `state` without skipped records: the counted records of every shard come first.

    Repeats of them fill the remaining rows (see `compacted`). The values of rows without a record to repeat
    become zero.

    An interrupted caller builds the batch again from `state`, so no array of it changes.

    Args:
        program: the host program.
        state: the flow.
        fresh: allocates the array of a value, given the number of its rows.
    """
    arrays = {ref: fresh(ref, len(state.rows)) for ref in (*state.arrays, *state.shown)}
    for ref, array in arrays.items():
        array[...] = state.shown[ref] if ref in state.shown else state.arrays[ref]
    records = dict(state.records)
    shards = len(program.shards(state.flow.split))
    counted = np.logical_and.reduce([state.counts[read.result] for read in state.flow.reads])
    for number, variant in enumerate(program.variants(state.flow.per)):
        rows = compacted(counted, state.valid[number], shards)
        fixed = dict(zip(state.flow.per, variant, strict=True))
        for ref, array in arrays.items():
            per = program.per(ref)
            for index, coords in zip(np.ndindex(array.shape[: len(per)]), program.variants(per), strict=True):
                if agrees(per, coords, fixed):
                    array[index] = array[index][rows]
                    array[index][rows < 0] = 0
        for (ref, coords), ids in records.items():
            if coords == variant:
                records[ref, coords] = np.where(rows < 0, ids, ids[rows])
    return replace(state, arrays=arrays, shown={}, records=records)


def count(program: HostProgram, state: FlowState, read: Read, ref: Ref) -> npt.NDArray[np.int32]:
    """The number of counted records of load `read`, in the layout of its count.

    Args:
        program: the host program.
        state: the flow of the load.
        read: the load.
        ref: the id of the count.

    Returns:
        int32, one dimension per `per` axis of the count: members, and the axes that split the batch.
    """
    return _count(program, state, state.counts[read.result], program.per(ref))


def mask(program: HostProgram, states: Sequence[FlowState], cache: dict[Any, Any]) -> Mask | None:
    """The rows that count in every load of a batch.

    Args:
        program: the host program.
        states: the states of all flows, at least one.
        cache: masks of batches without skipped records, which later calls reuse.

    Returns:
        The mask; None if flows differ in the number of rows or in the axes that split them.
    """
    # Batches with the same rows share their `layouts` (see `FlowState`), so its identity is a key.
    key = ("mask", *(id(state.layouts) for state in states)) if all(s.valid.all() for s in states) else None
    if key not in cache:
        rows = _mask(program, states)
        if key is None:
            return rows
        cache[key] = rows
    result: Mask | None = cache[key]
    return result


def _mask(program: HostProgram, states: Sequence[FlowState]) -> Mask | None:
    """As `mask`, without a cache."""
    first = states[0]
    if any(s.flow.split != first.flow.split or len(s.rows) != len(first.rows) for s in states):
        return None
    # Only axes that are leading dimensions of all values are dimensions of the mask.
    each_per = [program.per(ref) for ref in program.roots if ref in program.elements]
    per = tuple(axis for axis in each_per[0] if all(axis in axes for axes in each_per)) if each_per else ()
    shards = len(program.shards(first.flow.split))
    places = np.arange(len(first.rows) // shards)
    rows = np.ones((*(len(program.local[axis]) for axis in per), shards, len(places)), bool)
    for state in states:
        counted = np.logical_and.reduce([state.counts[read.result] for read in state.flow.reads])
        numbers = _count(program, state, counted, (*per, *state.flow.split))
        rows &= places < numbers.reshape(*rows.shape[:-1], 1)  # counted records are first in every shard
    return Mask(rows.reshape(*rows.shape[:-2], -1), Placement(per=per, split=first.flow.split))


def _count(
    program: HostProgram, state: FlowState, counted: Bools, per: Sequence[str]
) -> npt.NDArray[np.int32]:
    """The number of counted records that were not skipped, int32 with one dimension per axis of `per`.

    Args:
        program: the host program.
        state: the flow.
        counted: whether each row counts, [rows].
        per: axes of members and shards.
    """
    shards = program.shards(state.flow.split)
    each = len(state.rows) // len(shards)
    result = aligned([len(program.local[axis]) for axis in per], np.dtype(np.int32))
    for index, coords in zip(np.ndindex(result.shape), program.variants(per), strict=True):
        named = dict(zip(per, coords, strict=True))
        shard = shards.index(program.member(state.flow.split, named)) if state.flow.split else 0
        rows = slice(shard * each, (shard + 1) * each)
        variants = program.variants(state.flow.per)
        numbers = [
            number for number, variant in enumerate(variants) if agrees(state.flow.per, variant, named)
        ]
        valid: Bools = np.asarray(state.valid[numbers, rows].all(0))  # valid for every such member
        result[index] = np.count_nonzero(valid & counted[rows])
    return result


def laid_out(
    program: HostProgram, read: Read, records: Mapping[tuple[Ref, Coords], npt.NDArray[np.int64]]
) -> npt.NDArray[np.int64]:
    """The record indices of a load, int64 [indices of each axis of `read.per`, rows].

    Args:
        program: the host program.
        read: the load.
        records: [rows] record indices, by load and variant.
    """
    if not read.per:
        return records[read.result, ()]
    ids = np.stack([records[read.result, coords] for coords in program.variants(read.per)])
    return ids.reshape(*(len(program.local[axis]) for axis in read.per), ids.shape[-1])


def variant_of(
    columns: Mapping[Coords, Sequence[Any]],
    have: Sequence[str],
    axes: Sequence[str],
    coords: Coords,
    program: HostProgram,
) -> Sequence[Any]:
    """The variant of an operand that one variant of a result is computed from.

    Args:
        columns: the operand's records, by its indices along `have`.
        have: the axes of the operand's variants.
        axes: the axes of the result's variants.
        coords: the variant of the result, its indices along `axes`.
        program: the host program.

    Returns:
        The operand's records. If the operand has axes that the result does not have, the first variant that
        agrees with `coords`.
    """
    fixed = dict(zip(axes, coords, strict=True))
    if set(have) <= set(axes):
        return columns[tuple(fixed[axis] for axis in have)]
    return next(columns[c] for c in program.variants(have) if agrees(have, c, fixed))
