"""Members of a run that take their batches one by one from shared units.

The runtime creates a `ClockedPhase` per phase, and `member_batches` the iterator of each member.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from commplan.diagnostics import fail
from commplan.input.prefetch import KEEP
from commplan.ir.schedule import Read, Schedule
from commplan.runtime.input.group import Group
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.iterator import PhaseBatches
from commplan.runtime.input.multirate.member import RingMember
from commplan.runtime.input.multirate.schedule import ClockPlan
from commplan.runtime.input.observe.overdue_calls import OverdueCalls
from commplan.runtime.input.observe.recorded_run import batch_record
from commplan.runtime.input.observe.wait_log import PATIENCE_S
from commplan.runtime.input.phase_order import (
    block_of,
    epoch_steps,
    fingerprint,
    hints,
    load_orders,
    position_of,
)
from commplan.runtime.input.program import EpochCursor, host_program
from commplan.runtime.input.ring import meeting
from commplan.runtime.input.ring.attachment import OPEN, Attachment
from commplan.runtime.input.ring.carriage import Carriage
from commplan.runtime.input.ring.forming import Members, join_group
from commplan.runtime.input.ring.producers import Recording
from commplan.runtime.input.ring.ring import Ring
from commplan.runtime.input.ring.units import UnitProgram, layout_of, parts_of, units_of
from commplan.runtime.input.ring.waiting import awaited
from commplan.runtime.input.ring.words import ABSENT, CURSOR, Shape
from commplan.runtime.input.sources import files
from commplan.runtime.input.stages.functions import workers_of

_RECORDS = CURSOR["records"]  # an index, because `Record.set` is too slow for every batch


@dataclass(frozen=True)
class PeerGroup:
    """The processes that share units.

    Attributes:
        group: the processes.
        start: the first unit of the group, the least first unit of its processes.
        members: [processes], the number of the first member of each process.
    """

    group: Group
    start: int
    members: tuple[int, ...]


@dataclass(frozen=True)
class SharingOptions:
    """Options for sharing between members. The first opened member of a process determines them.

    Attributes:
        ask: returns the processes that share, given the first unit of this process; None for this process
            alone.
        timeout: the timeout of waits between members in seconds.
        workers: "threads" or "processes", which make the units.
    """

    ask: Callable[[int], PeerGroup | None] = lambda _: None
    timeout: float = PATIENCE_S
    workers: str = "threads"


@dataclass
class ClockedPhase:
    """The members of one phase in this process.

    Attributes:
        plan: the schedules of the members.
        passed_sources: the sources as passed by the user, by name.
        functions: the functions by name.
        sources: the sources of the phase by name, as its loads read them.
        epoch: the number of units of an epoch.

    Raises:
        CommplanError: CP09xx for sources that do not fit the plan.
    """

    plan: ClockPlan
    passed_sources: Mapping[str, object]
    functions: Mapping[str, Callable[..., Any]]
    sources: Mapping[str, files.Source] = field(init=False)
    epoch: int = field(init=False)
    _options: SharingOptions = SharingOptions()
    _attachment: Attachment | None = None
    _lock: threading.RLock = field(default_factory=threading.RLock)  # held while a member joins

    def __post_init__(self) -> None:
        reads = [op.source for op in self.plan.schedule.phase(self.plan.phase).ops if isinstance(op, Read)]
        self.sources = files.bind_sources(self.plan.schedule, self.passed_sources, list(dict.fromkeys(reads)))
        self.epoch = self.plan.epoch(self.sources)

    @property
    def slots(self) -> int:
        """The number of slots: the most units that are kept (see `Rates.bound`)."""
        return self.plan.rates.bound // self.plan.rates.unit

    @contextlib.contextmanager
    def joined(
        self, member: int, position: int, units: Schedule, options: SharingOptions
    ) -> Generator[tuple[Attachment, float]]:
        """Open the ring for a member. Its threads start after the first member has joined.

        Args:
            member: the number of the member.
            position: the first unit of the member.
            units: the schedule whose batches are units.
            options: the options for sharing; ignored if the process has joined already.

        Yields:
            The attachment of this process, and the timeout of waits in seconds.

        Raises:
            CommplanError: CP0948 if the member is already open; otherwise as `join_group`.
        """
        with self._lock, contextlib.ExitStack() as stack:
            if self._attachment is not None:
                self._attachment.leave_forgotten()
            with meeting.OPENING:
                attachment = self._attachment if self._attachment in OPEN else None
                if attachment is not None:
                    stack.enter_context(attachment.kept())
            if attachment is not None:
                if member in attachment.members:
                    fail(
                        "CP0948",
                        f"member {member} of `{self.plan.clock}` has batches of `{self.plan.phase}` already",
                        "a member has one iterator at a time: continue with those batches, or close them",
                        file=self.plan.schedule.file,
                    )
                yield attachment, self._options.timeout
                return
            self._options = options
            attachment = self._open_attachment(member, position, units, options)
            try:
                yield attachment, options.timeout
                attachment.start()
            except BaseException:
                attachment.discard()
                raise
            self._attachment = attachment

    def _open_attachment(
        self, member: int, position: int, units: Schedule, options: SharingOptions
    ) -> Attachment:
        """Create this process's attachment: a private ring, or the ring of a group of processes.

        The arguments and errors are those of `joined`.
        """
        plan = self.plan
        program = host_program(units, plan.phase, None, apart=True)
        content = UnitProgram(program, self.epoch, self.sources, self.functions)
        cores = hints(program)[1]
        calls = OverdueCalls(options.timeout, plan.schedule.file)
        workers = workers_of(
            options.workers, cores, program, self.sources, content.called, block_of(program, cores),
            content.meter,
        )  # fmt: skip
        if workers is not None:
            calls.in_worker, calls.ask_worker = workers.call_in, workers.ask_stack

        # The ring, and the transfers between hosts.
        peers = options.ask(position)
        cursor = EpochCursor(0, 0, self.epoch)
        record = batch_record(program, cursor, None if peers is None else peers.group)
        name = f"{plan.schedule.plan}-{plan.phase}"
        if peers is None:
            ring, carriage = self._own_ring(content, position), None
            layout = layout_of(program, ring.parts)
            ring_units = units_of(content, layout, workers)
        else:
            group, count = peers.group, plan.schedule.axis(plan.clock).size
            joined_group = join_group(
                group, program, cursor, content.order, slots=self.slots,
                members=Members(member, peers.start, count),
            )  # fmt: skip
            ring, ring_units = joined_group.ring, units_of(content, joined_group.layout, workers)
            slots = ring.memory.mapped_slots()
            carrier, host = group.carrier, group.host
            carriage = None if carrier is None else Carriage(ring, ring_units, slots, carrier, host)

        ring.memory.title = f"`{plan.clock}`"
        attachment = Attachment(name, ring, content, ring_units, workers, carriage, calls, Recording(record))
        if record is not None:
            local = () if peers is None else peers.group.local
            record.watch(
                lambda: calls.oldest(attachment.producers.running), lambda: awaited(attachment, local)
            )
        return attachment

    def _own_ring(self, content: UnitProgram, first: int) -> Ring:
        """Create a ring for this process only, whose first unit is `first`."""
        program, cores = content.program, hints(content.program)[1]
        parts = parts_of(program, cores)
        cursors = self.plan.schedule.axis(self.plan.clock).size
        nbytes = layout_of(program, parts).nbytes
        memory = meeting.created(
            "alone", f"`{self.plan.clock}`", Shape(self.slots, nbytes, parts, 1, cursors), {}, kind="own",
            epoch=content.epoch, unit=content.rows, cores=cores, makers=1, next=first,
        )  # fmt: skip
        ring = Ring(memory)
        with memory.locked():
            ring.join()
        return ring


class ClockedBatches(RingMember):
    """The batches of one member, one epoch per `iter()`. `PhaseBatches` is the equivalent for all members.

    The caller may drive several members of a process in any interleaving, with one or several threads.

    Args:
        clocks: the phase.
        member: the number of the member.
        units: the schedule whose batches are units.
        local: the indices that this process holds along other axes; all indices for None or an omitted axis.
        state: a result of `.state()` of this member; None for the start of epoch 0.
        options: the options for sharing; None for the defaults.

    Raises:
        CommplanError: as `PhaseBatches`; CP0946 and CP0947 if other members block this one (the caller may
            continue after both), CP0948 if the member is already open.
    """

    def __init__(
        self,
        clocks: ClockedPhase,
        member: int,
        units: Schedule,
        *,
        local: Mapping[str, Sequence[int]] | None = None,
        state: Mapping[str, int] | None = None,
        options: SharingOptions | None = None,
    ) -> None:
        plan, sources = clocks.plan, clocks.sources
        super().__init__(plan.phase)
        indices = {**(local or {}), plan.clock: (member,)}
        program = host_program(plan.member(member), plan.phase, indices, apart=True)
        record_orders = load_orders(program, sources)
        start = position_of(
            program,
            record_orders,
            state,
            epoch_steps(program, record_orders),
            fingerprint(program, record_orders),
        )
        each = plan.rates.units[member]  # units per batch
        position = start[0] * clocks.epoch + start[1] * each  # the first unit
        # Slots for the next batch of any member must remain free.
        keep = clocks.slots - max(plan.rates.units)
        with clocks.joined(member, position, units, options or SharingOptions()) as (attachment, timeout):
            self._init_member(attachment, plan, member, each, program)
            with self._ring.memory.locked():
                try:
                    self._enter_ring(sources, clocks.functions, start, timeout, min(KEEP * each, keep))
                except BaseException:
                    self._ring.cursors[member].set(state=ABSENT, process=0)
                    raise
            attachment.members.add(member)
        self._register()
        self._records_each = each * plan.rates.unit

    def _await_due(self, position: int) -> HostBatch:
        self._driver.thread = threading.current_thread()
        if position >= self._checked_until:
            self._begin(position)
        if self._due is None:
            self._due = self._build_batch(position)
        self._visit_check.add(self._due)
        return self._due

    def _release_before(self, position: int) -> None:
        self._finish_batch(position - 1)
        self._words[_RECORDS] = (position - self._first) * self._records_each
        self._drop_roots(position)
        self._begin_ahead(position)


def member_batches(
    clocks: ClockedPhase,
    member: int,
    *,
    local: Mapping[str, Sequence[int]] | None = None,
    state: Mapping[str, int] | None = None,
    options: SharingOptions | None = None,
) -> ClockedBatches | PhaseBatches:
    """Create the batches of a member.

    If no value is equal for all members, the member reads all of its records itself.

    Args:
        clocks: the phase.
        member: the number of the member.
        local: the indices that this process holds along other axes; all indices for None or an omitted axis.
        state: a result of `.state()` of this member; None for the start of epoch 0.
        options: the options for sharing; None for the defaults.

    Raises:
        CommplanError: as `ClockedBatches` or `PhaseBatches`.
    """
    plan, units = clocks.plan, clocks.plan.units
    if units is not None:
        return ClockedBatches(clocks, member, units, local=local, state=state, options=options)
    options = options or SharingOptions()
    return PhaseBatches(
        plan.member(member, alone=True), plan.phase, clocks.passed_sources, clocks.functions,
        local={**(local or {}), plan.clock: (member,)}, state=state, workers=options.workers,
        timeout=options.timeout,
    )  # fmt: skip
