"""The host part of a phase: its stages, the copies of each value, and the values of a batch.

`host_program` derives it from the schedule. `EpochCursor` converts numbers of batches to epochs and steps;
`FIRST_BATCH` is the cursor at the first batch of a run.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import SupportsIndex, cast

import numpy as np
import numpy.typing as npt

from commplan.diagnostics import fail
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.analysis.input_slice import connected
from commplan.ir.plan import AxisKind, Ref
from commplan.ir.refs import name_of
from commplan.ir.schedule import Map, Phase, Read, Schedule, Share, operands, results
from commplan.ir.types import BytesType, Element, TreeType

HostOp = Read | Map | Share  # a stage that the host runs
Coords = tuple[int, ...]  # indices along the axes of a value's copies


@dataclass(frozen=True)
class EpochCursor:
    """Converts the number of a batch to epoch and step.

    Attributes:
        epoch: the epoch of batch 0.
        step: the step of batch 0.
        steps: the steps of an epoch.
    """

    epoch: int
    step: int
    steps: int

    def at(self, number: int) -> tuple[int, int]:
        """Epoch and step of batch `number`."""
        epochs, step = divmod(self.step + number, self.steps)
        return self.epoch + epochs, step

    def count(self, number: int) -> int:
        """The position of batch `number` over all epochs, counted from 1, as shown to users.

        >>> EpochCursor(epoch=1, step=2, steps=5).count(0)
        8
        """
        return self.epoch * self.steps + self.step + number + 1


# For factories whose callers pass the epoch and the step of each batch.
FIRST_BATCH = EpochCursor(epoch=0, step=0, steps=1)


@dataclass(frozen=True)
class Flow:
    """Connected stages: one batch of rows passes through all of them.

    Stages are divided at the slots of a ring. A process without a group runs all stages into the slots.

    Attributes:
        ops: the stages in plan order.
        reads: the loads, at least one.
        split: the axes that split the batch; () for whole batches.
        per: the ensembles whose members have separate orders; () if all members have the same order.
        before: the stages that are run once for all processes, and whose results are written into slots.
        after: the stages that every process runs itself, on rows from a slot. Loads of bytes may be in both.
        moved: the values that are written into slots; () if a group of processes shares none of this flow's
            values, or if no value of fixed size is read later.
        shared: the first stage that shares a value between processes; None if no value is shared, or if none
            is moved.
    """

    ops: tuple[HostOp, ...]
    reads: tuple[Read, ...]
    split: tuple[str, ...]
    per: tuple[str, ...]
    before: tuple[HostOp, ...]
    after: tuple[HostOp, ...]
    moved: tuple[Ref, ...]
    shared: Share | None = None

    @property
    def batch(self) -> int:
        """The number of rows of a full global batch."""
        return self.reads[0].batch[0]


@dataclass(frozen=True)
class HostProgram:
    """The host part of one phase in one process.

    Attributes:
        schedule: the compiled plan.
        phase: one of its phases.
        flows: connected sets of stages.
        roots: the host-made values of a batch, counts included.
        elements: the record type of each value, without counts.
        copies: the axes along which each value is computed separately: its `per` axes, those of each
            `duplicate` downstream of it, up to the next share of another design, and those of its operands,
            except the axes over which such a share has them in common.
        local: the indices that this process holds along each axis.
    """

    schedule: Schedule
    phase: Phase
    flows: tuple[Flow, ...]
    roots: tuple[Ref, ...]
    elements: Mapping[Ref, Element]
    copies: Mapping[Ref, tuple[str, ...]]
    local: Mapping[str, tuple[int, ...]]

    @property
    def has_caches(self) -> bool:
        """Whether a host function caches its results across epochs."""
        return any(op.hints.cache for flow in self.flows for op in flow.ops if isinstance(op, Map))

    def per(self, ref: Ref) -> tuple[str, ...]:
        """The axes that are leading dimensions of a value's arrays."""
        return next(value.placement.per for value in self.phase.values if value.id == ref)

    def variants(self, axes: Sequence[str]) -> list[Coords]:
        """Every combination of this process's indices along `axes`, row-major."""
        return list(itertools.product(*(self.local[axis] for axis in axes)))

    def member(self, axes: Sequence[str], coords: Mapping[str, int]) -> int:
        """The row-major index of `coords` (indices by axis) along `axes`; 0 without axes."""
        index = 0
        for axis in axes:
            index = index * self.schedule.axis(axis).size + coords[axis]
        return index

    def shards(self, split: Sequence[str]) -> list[int]:
        """The numbers of the shards that this process holds, ascending; [0] if the batch is not split."""
        indices = itertools.product(*(self.local[axis] for axis in split))
        return sorted(self.member(split, dict(zip(split, coords, strict=True))) for coords in indices)

    def rows(self, flow: Flow, rows: int) -> npt.NDArray[np.int64]:
        """The rows of a global batch of `rows` rows that this process holds, in shard order."""
        if not flow.split:
            return np.arange(rows)
        shard_rows = rows // self.schedule.size(flow.split)
        return np.concatenate(
            [np.arange(shard * shard_rows, (shard + 1) * shard_rows) for shard in self.shards(flow.split)]
        )


def local_indices(
    schedule: Schedule, local: Mapping[str, Sequence[int]] | None
) -> dict[str, tuple[int, ...]]:
    """The indices that this process holds along every axis.

    Args:
        schedule: declares the axes and their sizes.
        local: the indices by axis, at least one for each; None for no axes. A process holds all indices of
            axes that are not in `local`.

    Raises:
        CommplanError: CP0915 for an unknown axis, for indices that are missing, repeated or out of range, or
            for a value that is no sequence of integers.
    """
    chosen = dict(local or {})
    sizes = {axis.name: axis.size for axis in schedule.axes}
    for name, indices in chosen.items():
        if not _are_indices(indices):
            fail(
                "CP0915",
                f"what a process holds of `{name}` is {indices!r}: a sequence of indices was expected",
                f"such as {{{name!r}: (0,)}}",
            )
        if name not in sizes:
            fail("CP0915", f"the plan has no axis `{name}`", f"axes: {', '.join(sizes) or 'none'}")
        wrong = (
            not indices or len(set(indices)) < len(indices) or not all(0 <= i < sizes[name] for i in indices)
        )
        if wrong:
            fail(
                "CP0915",
                f"a process cannot hold {list(indices)} of `{name}`",
                f"expected: different indices from 0 to {sizes[name] - 1}, at least one",
            )
    return {name: tuple(chosen.get(name, range(size))) for name, size in sizes.items()}


def _are_indices(value: object) -> bool:
    """Whether `value` is a sequence of integers, which may be out of range. Texts and bytes are not."""
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        return False
    return all(isinstance(index, SupportsIndex) for index in cast("Sequence[object]", value))


def _copies(schedule: Schedule, phase: Phase, ops: Sequence[HostOp]) -> dict[Ref, tuple[str, ...]]:
    """The axes along which each value is computed separately (see HostProgram)."""
    # Backwards: a value has separate copies for each `duplicate` downstream of it, up to the next sharing
    # design.
    pinned: dict[Ref, frozenset[str]] = {}
    for op in reversed(ops):
        downstream = frozenset[str]().union(*(pinned.get(ref, frozenset[str]()) for ref in results(op)))
        if isinstance(op, Share):
            downstream = downstream | frozenset(op.axes) if op.design == "duplicate" else frozenset[str]()
        for ref in operands(op):
            pinned[ref] = pinned.get(ref, frozenset[str]()) | downstream

    # Forwards: a result has the axes of its operands, except those over which it is shared.
    per = {value.id: frozenset(value.placement.per) for value in phase.values}
    ensembles = [axis.name for axis in schedule.axes if axis.kind is AxisKind.ENSEMBLE]
    copies: dict[Ref, frozenset[str]] = {}
    for op in ops:
        from_operands = frozenset[str]().union(*(copies[ref] for ref in operands(op)))
        if isinstance(op, Share) and op.design != "duplicate":
            from_operands -= frozenset(op.axes)
        count = op.count if isinstance(op, Read) else None  # the same in all copies of a batch
        records = [ref for ref in results(op) if ref != count]
        # One call makes the records of all results, so these have the same copies.
        axes = frozenset[str]().union(*(per[ref] | pinned.get(ref, frozenset[str]()) for ref in records))
        copies.update(dict.fromkeys(results(op), from_operands))
        copies.update(dict.fromkeys(records, from_operands | axes))
    return {ref: tuple(a for a in ensembles if a in axes) for ref, axes in copies.items()}


def record_types(schedule: Schedule, op: HostOp, elements: Mapping[Ref, Element]) -> dict[Ref, Element]:
    """The record types of an op's results, without counts.

    Args:
        schedule: declares the types of sources and functions.
        op: one of its loads, host maps or shares.
        elements: the record types of its operands.
    """
    match op:
        case Read():
            return {op.result: next(s.type for s in schedule.sources if s.name == op.source)}
        case Map():
            # Host functions return records, unlike device functions, whose results may have other types.
            declared = cast("tuple[Element, ...]", schedule.fn(op.fn).results)
            return dict(zip(op.results, declared, strict=True))
        case Share():
            return {op.result: elements[op.operand]}


def _flow(
    ops: Sequence[HostOp],
    phase: Phase,
    roots: Sequence[Ref],
    elements: Mapping[Ref, Element],
    apart: bool,
    file: str,
) -> Flow:
    """The flow of one connected set of stages.

    Args:
        ops: the stages of the set, in plan order.
        phase: the phase that contains them.
        roots: the host-made values of a batch.
        elements: the record type of each value.
        apart: whether shared values travel between processes. If not, all stages run before the slots.
        file: the file of the plan.

    Raises:
        CommplanError: CP0913 if a result of variable length is shared, CP0925 if stages share in different
            ways.
    """
    reads = tuple(op for op in ops if isinstance(op, Read))
    split = next(v.placement.split for v in phase.values if v.id == reads[0].result)
    per = tuple(dict.fromkeys(axis for read in reads for axis in read.per))
    shares = [op for op in ops if isinstance(op, Share) and op.design != "duplicate"] if apart else []
    _agree(shares, file)
    # One process makes whole batches in the slots of its ring.
    before = DefUse(ops).ancestors(op.result for op in shares) if apart else tuple(ops)
    computed = {ref for op in before for ref in results(op)} & set(elements)

    # Values that later stages or the caller read are moved.
    after = [op for op in ops if op not in before]
    consumed = set(roots).union(*(operands(op) for op in after))
    moved: list[Ref] = []
    reread: list[HostOp] = []
    for op in before:
        for ref in results(op):
            if ref not in computed or ref not in consumed:
                continue
            if not isinstance(elements[ref], BytesType):
                moved.append(ref)
            elif isinstance(op, Read):
                reread.append(op)  # bytes have unknown length: each process reads them again
            else:
                fail(
                    "CP0913",
                    f"`{name_of(ref)}` holds records of variable length, which do not "
                    "travel between processes",
                    "share the decoded array instead: an array has one size",
                    span=op.span,
                    file=file,
                )
    if not moved:  # nothing goes through slots
        before, reread, after = (), [], list(ops)
    shared = shares[0] if moved and shares else None
    return Flow(tuple(ops), reads, split, per, tuple(before), (*reread, *after), tuple(moved), shared)


def _agree(shares: Sequence[Share], file: str) -> None:
    """Check that connected shares have one design and the same readers.

    Raises:
        CommplanError: CP0925 if they differ.
    """
    for op in shares[1:]:
        first = shares[0]
        if (op.design, op.readers) != (first.design, first.readers):
            fail(
                "CP0925",
                f"`{name_of(op.result)}` is shared in another way than what is made with it",
                f"line {first.span.line}: `{name_of(first.result)}` via {designed(first)}",
                f"line {op.span.line}: via {designed(op)}",
                "share values that come from the same load in one way",
                span=op.span,
                file=file,
            )


def designed(op: Share) -> str:
    """The design of a share in the syntax of the plan, such as `multi_broadcast(readers = 2)`."""
    return op.design if op.readers is None else f"{op.design}(readers = {op.readers})"


def validity(flow: Flow) -> Ref:
    """The key of a flow's validity flags in a slot, derived from its first load."""
    return f"{flow.reads[0].result}?"


def host_program(
    schedule: Schedule, phase_name: str, local: Mapping[str, Sequence[int]] | None, *, apart: bool = False
) -> HostProgram:
    """The host part of phase `phase_name`.

    Args:
        schedule: the compiled plan.
        phase_name: one of its phases.
        local: the indices that this process holds along each axis (see `local_indices`).
        apart: whether shared values travel between processes.

    Raises:
        CommplanError: CP0817 for an unknown phase, CP0915 for invalid indices, CP0912 and CP0913 for ops that
            this runtime does not support, CP0925 for connected values that are shared in different ways.
    """
    phase = schedule.phase(phase_name)
    indices = local_indices(schedule, local)
    on_host: dict[Ref, HostOp] = {}
    for op in phase.ops:
        # A share of a device-made value is no work of the host.
        is_host = isinstance(op, Read) or (isinstance(op, Share) and op.operand in on_host)
        is_host = is_host or (isinstance(op, Map) and schedule.fn(op.fn).where == "host")
        if is_host and isinstance(op, Read | Map | Share):
            on_host.update(dict.fromkeys(results(op), op))
    bound = (binding.value for binding in (*phase.outputs, *phase.takes) if binding.source_only)
    roots = tuple(DefUse(phase.ops).sources(bound, on_host))
    chosen = DefUse(dict.fromkeys(on_host.values())).ancestors(roots)
    elements: dict[Ref, Element] = {}
    for op in chosen:
        elements.update(record_types(schedule, op, elements))
        _refuse(schedule, op, elements)
    flows = tuple(_flow(ops, phase, roots, elements, apart, schedule.file) for ops in connected(chosen))
    copies = _copies(schedule, phase, chosen)
    return HostProgram(schedule, phase, flows, roots, elements, copies, indices)


def _refuse(schedule: Schedule, op: HostOp, elements: Mapping[Ref, Element]) -> None:
    """Raise an error for an op that the compiler accepts and this runtime does not support."""
    if isinstance(op, Read) and op.clock and len(op.batch) > 1:
        fail(
            "CP0912",
            f"the members of `{op.clock}` go by clocks of their own, and have no batches in common",
            "each member has an iterator of its own: run.batches(..., member=m)",
            span=op.span,
            file=schedule.file,
        )
    for ref in results(op):
        if isinstance(elements.get(ref), TreeType):
            fail(
                "CP0913",
                f"`{name_of(ref)}` is a tree, and records on the host are arrays or bytes",
                "give the function one result per array",
                span=op.span,
                file=schedule.file,
            )


def identity(read: Read) -> Ref:
    """The key of the record indices of a load in a slot, as written by the makers of its rows."""
    return f"{read.result}#"
