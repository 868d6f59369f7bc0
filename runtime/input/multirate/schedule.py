"""Schedules of members that take their batches one by one: the shared part, and the part of each member.

A phase whose load has `batch [32, 32, 64] over member` becomes two phases. In the first one a batch is a
unit; its size divides the batch size of each member. This phase contains the values that are equal for all
members: the load, and the host maps after it that are neither random nor `per`. In the second one a member
takes some units at each step.

If all members have the same clock and share a value, a unit is a batch up to the stages that share.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from commplan.diagnostics import fail
from commplan.input.order import Order, phase_steps
from commplan.input.rates import PREFETCH, Rates, rates
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.plan import AxisKind, Ref
from commplan.ir.schedule import (
    Binding,
    Map,
    Op,
    Phase,
    Read,
    Schedule,
    Share,
    rename_results,
    results,
    substitute,
)
from commplan.ir.types import SAME, BytesType, Element
from commplan.runtime.input.program import record_types
from commplan.runtime.input.sources.adapters import Source

OWN = "/own"  # suffix of the id of a value before it is shared


@dataclass(frozen=True)
class ClockPlan:
    """The schedules of the members of `clock` in phase `phase` of `schedule`.

    Attributes:
        schedule: the schedule.
        phase: the name of the phase.
        clock: the ensemble axis of the members.
        rates: the rates of the first load. All loads have the same number of units for a step of a member.
        shared: the phase with the stages that share; None if no value can be shared (see `clock_plan`).
    """

    schedule: Schedule
    phase: str
    clock: str
    rates: Rates
    shared: Phase | None

    @property
    def is_paced(self) -> bool:
        """Whether members advance independently. If not, each step of a member is one unit."""
        return clocked(self.schedule.phase(self.phase)) is not None

    @property
    def first_load(self) -> Read:
        """The first load whose batches differ between members; otherwise the first load."""
        reads = [op for op in self.schedule.phase(self.phase).ops if isinstance(op, Read)]
        return next((op for op in reads if op.clock), reads[0])

    @property
    def share(self) -> Share | None:
        """The first stage that shares; None if no value is shared."""
        ops = self.shared.ops if self.shared is not None else ()
        return next((op for op in ops if isinstance(op, Share) and _shares(op, self.clock)), None)

    def member(self, place: int, *, alone: bool = False, units: int | None = None) -> Schedule:
        """Return the schedule of a member.

        Args:
            place: the index of the member, which determines its batch size.
            alone: whether the member reads all of its records itself, without the stages that share.
            units: the number of units of a batch; None for the batch size of the plan.
        """
        member_phase = self.schedule.phase(self.phase)
        base = member_phase if alone or self.shared is None else self.shared

        def rebatched(op: Op) -> Op:
            """A load with the batch size of the member; any other op as it is."""
            if not isinstance(op, Read):
                return op
            sizes = batches(op, self.clock, self.schedule)
            batch = sizes[place] if units is None else units * rates(sizes).unit
            return msgspec.structs.replace(op, batch=(batch,))

        return self._with(msgspec.structs.replace(base, ops=tuple(map(rebatched, base.ops))))

    def units_of(self, place: int, batch: int | None, unit: int) -> int:
        """The number of units in a batch of a member.

        Args:
            place: the index of the member.
            batch: the number of records in a batch; None for the batch size of the plan.
            unit: the number of records in a unit.

        Raises:
            CommplanError: CP0931 if the batch is not a positive multiple of the unit.
        """
        records = self.rates.batches[place] if batch is None else batch
        if not hasattr(records, "__index__") or records < 1 or records % unit:
            fail(
                "CP0931",
                f"a batch of {records!r} records is no multiple of the feed's unit of {unit}",
                f"such as batch={2 * unit}; a smaller batch in the plan makes a smaller unit",
                file=self.schedule.file,
            )
        return records // unit

    @property
    def units(self) -> Schedule | None:
        """The schedule whose batches are units, equal along all axes; None if no value is shared."""
        if self.shared is None:
            return None
        ahead = [op for op in self.shared.ops if isinstance(op, Share) and _shares(op, self.clock)]
        made_of = DefUse(self.shared.ops).ancestors(op.result for op in ahead)
        ops = [self._unit(op) if isinstance(op, Read) else op for op in made_of]
        refs = {ref for op in ops for ref in results(op)}
        values = tuple(
            msgspec.structs.replace(value, placement=SAME) for value in self.shared.values if value.id in refs
        )
        outputs = tuple(Binding(op.result, op.result, source_only=True) for op in ahead)
        phase = msgspec.structs.replace(
            self.shared, ops=tuple(ops), values=values, outputs=outputs, takes=(), updates=()
        )
        return self._with(phase)

    def _unit(self, read: Read) -> Read:
        """The load of a unit instead of a batch."""
        unit = rates(batches(read, self.clock, self.schedule)).unit
        return msgspec.structs.replace(read, batch=(unit,), clock=None, split=(), count=None)

    def epoch(self, sources: Mapping[str, Source]) -> int:
        """The number of units of an epoch: the maximum over all members, or the steps if they are not paced.

        Args:
            sources: the sources by name, for their lengths.
        """
        reads = [op for op in self.schedule.phase(self.phase).ops if isinstance(op, Read)]
        if not self.is_paced:
            orders = [
                Order(len(sources[read.source]), read.batch[0], read.seed, read.visit, read.tail)
                for read in reads
            ]
            return phase_steps(orders)
        return max(
            rates(batches(op, self.clock, self.schedule)).epoch(len(sources[op.source]), op.visit, op.tail)
            for op in reads
        )

    def _with(self, phase: Phase) -> Schedule:
        """The schedule with `phase` instead of the phase of the same name."""
        phases = tuple(phase if other.name == phase.name else other for other in self.schedule.phases)
        return msgspec.structs.replace(self.schedule, phases=phases)


def clocked(phase: Phase) -> str | None:
    """The ensemble whose members advance independently in `phase`; None if all have the same clock."""
    return next((op.clock for op in phase.ops if isinstance(op, Read) and op.clock), None)


def shared_stream_axis(schedule: Schedule, phase: Phase) -> str | None:
    """The ensemble whose members take the batches of `phase` one by one from a common stream.

    The members advance independently, or they share a value.

    Returns:
        The name of the axis; None if each member reads for itself.
    """
    ensembles = [axis.name for axis in schedule.axes if axis.kind is AxisKind.ENSEMBLE]
    sharing = (name for name in ensembles if any(_shares(op, name) for op in phase.ops))
    return clocked(phase) or next(sharing, None)


def _shares(op: Op, clock: str) -> bool:
    """Whether `op` shares a value between the members of `clock`, so that it is made once."""
    return isinstance(op, Share) and op.axes == (clock,) and op.design != "duplicate"


def batches(read: Read, clock: str, schedule: Schedule) -> tuple[int, ...]:
    """The batch size of each member for the load `read`, in order of the members of `clock`."""
    return read.batch if read.clock == clock else read.batch * schedule.axis(clock).size


def clock_plan(schedule: Schedule, name: str) -> ClockPlan:
    """Create the `ClockPlan` of a phase whose members share loads or advance independently.

    Members with separate clocks share all values that are equal for them. Others share the values of the
    plan's `share` stages. Values of variable length are not shared.

    Args:
        schedule: the schedule.
        name: the name of the phase.

    Raises:
        CommplanError: CP0945 if the batch sizes of two loads are not proportional.
        ValueError: if the members do not share anything.
    """
    phase = schedule.phase(name)
    clock = shared_stream_axis(schedule, phase)
    if clock is None:
        raise ValueError(f"the members of phase {name!r} share no value")
    reads = [op for op in phase.ops if isinstance(op, Read)]
    depths = (op.hints.prefetch for op in phase.ops if isinstance(op, Read | Map))
    prefetch = max((depth for depth in depths if depth), default=PREFETCH)
    load_rates = [rates(batches(read, clock, schedule), prefetch) for read in reads]
    for read, read_rates in zip(reads, load_rates, strict=True):
        if read_rates.units != load_rates[0].units:
            fail(
                "CP0945",
                f"the loads of phase `{name}` have different clocks",
                *(
                    f"line {load.span.line}: `{load.source}` gives the members of `{clock}`"
                    f" {list(batches(load, clock, schedule))} records a step"
                    for load in (reads[0], read)
                ),
                "keep the batch sizes of both in proportion, or put the loads in separate phases",
                span=read.span,
                file=schedule.file,
            )
    if clocked(phase) is None:
        shared = _without_variable_shares(schedule, phase, clock)
    else:
        shared = _add_shares(schedule, phase, clock)
    return ClockPlan(schedule, name, clock, load_rates[0], shared)


def _without_variable_shares(schedule: Schedule, phase: Phase, clock: str) -> Phase | None:
    """Remove the stages that share records of variable length, which have no slot, from `phase`.

    Returns:
        The phase; None if it shares no other value, or if a function makes one of these records.
    """
    types: dict[Ref, Element] = {}
    uses = DefUse(phase.ops)
    for op in uses.ancestors(op.result for op in phase.ops if isinstance(op, Share) and _shares(op, clock)):
        if isinstance(op, Read | Map | Share):
            types |= record_types(schedule, op, types)
    texts = {
        op.result: op.operand
        for op in phase.ops
        if isinstance(op, Share) and _shares(op, clock) and isinstance(types[op.result], BytesType)
    }
    if any(isinstance(uses.maker(ref), Map) for ref in texts.values()):
        return None
    ops = tuple(
        substitute(op, texts) for op in phase.ops if not (isinstance(op, Share) and op.result in texts)
    )
    return msgspec.structs.replace(phase, ops=ops) if any(_shares(op, clock) for op in ops) else None


def _add_shares(schedule: Schedule, phase: Phase, clock: str) -> Phase | None:
    """Add a share after the last stages of `phase` whose results are equal for all members.

    pixels = map decode(raw)  -->  pixels/own = map decode(raw); pixels = share pixels/own

    Returns:
        The phase. None if no value is equal, if a function makes one of these values of variable length,
        which has no slot, or if the pipeline of passes disables sharing.
    """
    if any(f"share{{design={design}" in schedule.pipeline for design in ("duplicate", "none")):
        return None
    alike = _equal_values(schedule, phase)
    # Outputs of the host, and values that other stages of the members read, in plan order.
    bound = [binding.value for binding in (*phase.outputs, *phase.takes) if binding.source_only]
    sources = DefUse(phase.ops).sources(bound, alike)
    ends = [ref for op in phase.ops for ref in results(op) if ref in sources]
    types: dict[Ref, Element] = {}
    for op in phase.ops:
        if isinstance(op, Read | Map) and alike.intersection(results(op)):
            types |= record_types(schedule, op, types)
    texts = {ref for ref in ends if isinstance(types[ref], BytesType)}
    uses = DefUse(phase.ops)
    moved = [ref for ref in ends if ref not in texts]
    if not moved or any(isinstance(uses.maker(ref), Map) for ref in texts):
        return None
    names = {ref: f"{ref}{OWN}" for ref in moved}
    ops: list[Op] = []
    for op in phase.ops:
        ops.append(rename_results(substitute(op, names), names) if alike.intersection(results(op)) else op)
        ends_here = [ref for ref in moved if ref in results(op)]
        ops += [Share(ref, names[ref], (clock,), "all_shared", op.span) for ref in ends_here]
    values = {value.id: value for value in phase.values}
    renamed = tuple(msgspec.structs.replace(values[ref], id=names[ref]) for ref in moved)
    return msgspec.structs.replace(phase, ops=tuple(ops), values=(*phase.values, *renamed))


def _equal_values(schedule: Schedule, phase: Phase) -> set[Ref]:
    """The values of the host that are equal for all members: loads, and maps of equal values."""
    fns = {fn.name: fn for fn in schedule.fns}
    equal: set[Ref] = set()
    for op in phase.ops:
        if isinstance(op, Read) and not op.per:
            equal.add(op.result)
        elif isinstance(op, Map) and fns[op.fn].where == "host" and not op.random and not op.per:
            equal.update(op.results if equal.issuperset(op.operands) else ())
    return equal
