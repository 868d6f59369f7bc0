"""A member that takes its batches from the units of a ring, independently of other members."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from commplan.diagnostics import CommplanError
from commplan.ir.plan import Ref
from commplan.runtime.input.epoch_iterator import EpochIterator
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.layout import Array
from commplan.runtime.input.multirate.schedule import ClockPlan
from commplan.runtime.input.multirate.units import fill
from commplan.runtime.input.observe.accounting import Meter, Summary, merged
from commplan.runtime.input.observe.visit_check import Checks
from commplan.runtime.input.observe.wait_log import log_warning
from commplan.runtime.input.phase_order import block_of, epoch_steps, fingerprint, hints, load_orders
from commplan.runtime.input.program import EpochCursor, HostProgram
from commplan.runtime.input.ring.attachment import Attachment, Driver
from commplan.runtime.input.ring.cursor import Cursor
from commplan.runtime.input.ring.waiting import MemberWaiter
from commplan.runtime.input.ring.words import CURSOR
from commplan.runtime.input.sources import files
from commplan.runtime.input.stages.declared import declared
from commplan.runtime.input.stages.functions import called_functions
from commplan.wait import result_of

if TYPE_CHECKING:
    from concurrent.futures import Future

    from commplan.runtime.input.stages.batch_builder import BatchBuilder, BatchFactory

_AT_ONCE = 64  # the most batches between two calls of `_begin` in an epoch
_IDLE_SINCE = CURSOR["idle_since"]


class _PendingBatch(NamedTuple):
    """A batch whose units are available.

    Attributes:
        position: the number of batches before this one, since the start of epoch 0.
        builder: builds the batch.
        tasks: the stages that this member runs itself, in threads; () if they have been run.
        is_ready: whether all units were available without a wait.
    """

    position: int
    builder: BatchBuilder
    tasks: list[Future[None]]
    is_ready: bool


class RingMember(EpochIterator):
    """The batches of a member, one epoch per `iter()`. Each batch consists of one or more units.

    Other members wait for this member during its epoch. Between two epochs its units are kept for at least
    `idle_s`, and then until another member needs their slots. The member reads missing units itself.

    Attributes:
        member: the number of the member and of its cursor.
        idle_s: seconds between two epochs after which other members need not wait for this one.
    """

    _patient = ("CP0946", "CP0947")  # errors after which the iterator can continue
    idle_s = 0.5

    # --- joining ---

    def _init_member(
        self, attachment: Attachment, plan: ClockPlan, member: int, units_per_batch: int, program: HostProgram
    ) -> None:
        """Initialize the attributes of all kinds of members.

        Args:
            attachment: the ring and the members of this process.
            plan: the schedules of the members.
            member: the number of the member.
            units_per_batch: the number of units of a full batch.
            program: the host program of the member.
        """
        self._attachment, self._ring, self._units = attachment, attachment.ring, attachment.units
        self.member, self._plan, self._program = member, plan, program
        self._units_per_batch = units_per_batch
        self._epoch = attachment.content.epoch
        self._meter = Meter(plan.phase, plan.schedule.plan)
        declared(program, self._meter)

    def _enter_ring(
        self, bound: Mapping[str, files.Source], functions: Mapping[str, Callable[..., Any]],
        start: tuple[int, int], timeout: float, keep: int,
    ) -> None:  # fmt: skip
        """Join the ring. The caller holds its lock.

        Args:
            bound: the sources by name.
            functions: the functions by name.
            start: the epoch and step of the first batch.
            timeout: the timeout of waits in seconds.
            keep: the most units that arrays may reference without a copy.
        """
        plan, program, member, ring = self._plan, self._program, self.member, self._ring
        self._orders = record_orders = load_orders(program, bound)
        steps = epoch_steps(program, record_orders)
        self._start(*start, steps=steps, order=fingerprint(program, record_orders))
        self._ahead: _PendingBatch | None = None
        self._bound, self._called = bound, called_functions(program, functions)
        has_own = any(flow.after for flow in program.flows)
        self._threads = hints(program)[1] if has_own else 0
        self._visit_check = Checks(program, record_orders, steps, start[1], self._meter)
        waiter = MemberWaiter(
            self._attachment, member, timeout, self.idle_s, _weakly_open(self), plan.schedule.file,
            plan.first_load.span, self._is_paced(),
        )  # fmt: skip
        slots, recording = ring.memory.mapped_slots(), self._attachment.recording
        self._cursor = Cursor(ring, member, keep, slots, waiter, recording)
        self._words = self._cursor.record.words
        self._cursor.enter(batch=program.flows[0].batch)
        self._attach()
        self._driver = self._attachment.drivers[member] = Driver(threading.current_thread())

    def _is_paced(self) -> bool:
        """Whether members advance independently; see `MemberWaiter.is_paced`."""
        return self._plan.is_paced

    def _register(self) -> None:
        """Register this member with its attachment."""
        self._attachment.looks[self.member] = weakref.ref(self)
        self._closing = self._make_finalizer()

    def _make_finalizer(self) -> weakref.finalize[..., Any]:
        """Create the finalizer for the case that this object is collected without being closed."""
        forget = self._attachment.forget
        closing = weakref.finalize(self, forget, self.member, self._cursor.slots, os.getpid())
        closing.atexit = False  # the module `attachment` leaves all rings at exit
        return closing

    def _attach(self) -> None:
        """Begin to hold units. The caller holds the ring's lock.

        If its first units are no longer in the ring, the member reads them itself while the others wait.
        """
        ring, next_unit = self._ring, self._first_unit_of(self._position)
        ring.begin_at(next_unit)
        first_kept = next_unit if ring.is_kept(next_unit) else ring.header.get("next")
        self._first_ring_unit: int | None = self._hold(next_unit, first_kept)

    def _hold(self, next_unit: int, first_kept: int) -> int | None:
        """Make the other members wait for this member.

        Args:
            next_unit: the next unit of this member.
            first_kept: the first unit that is still in the ring.

        Returns:
            The first unit that the member takes from the ring. It reads earlier units itself. None if it
            reads all units itself.
        """
        self._hold_from(next_unit, first_kept - next_unit)
        return first_kept

    def _hold_from(self, unit: int, behind: int) -> None:
        """Hold units from `unit` on. The member first reads `behind` units itself."""
        self._cursor.hold(unit)
        if behind > 0:
            log_warning(
                "member %d of %s is %d records behind: it reads them by itself", self.member,
                self._ring.memory.title, behind * self._ring.header.get("unit"),
            )  # fmt: skip

    def _first_unit_of(self, position: int) -> int:
        """The first unit of batch `position`."""
        epoch, step = divmod(position, self._steps)
        return epoch * self._epoch + step * self._units_per_batch

    @functools.cached_property
    def _factory(self) -> BatchFactory:
        """The factory for batches other than a single unmodified unit; created on first use."""
        from commplan.runtime.input.stages.batch_builder import BatchFactory  # noqa: PLC0415
        from commplan.runtime.input.stages.records import stages  # noqa: PLC0415

        program = self._program
        return BatchFactory(
            program, self._orders, stages(program, self._bound, self._called, self._meter), self._meter,
            block_of(program, hints(program)[1]), epoch_cursor=EpochCursor(0, 0, self._steps),
        )  # fmt: skip

    # --- taking ---

    def __iter__(self) -> Self:
        super().__iter__()
        if self._closing.alive:
            self._begin(self._position)
        return self

    def _begin(self, position: int) -> None:
        """Begin or continue the epoch of batch `position`; batches before `_checked_until` need no check."""
        ring, next_epoch = self._ring, position // self._steps + 1
        self._words[_IDLE_SINCE], self._driver.thread = 0, threading.current_thread()
        ring.arm(self.member, next_epoch * self._epoch)
        if self._first_ring_unit is None:
            with ring.memory.locked():
                self._attach()
            ring.call_maker()
        count = _AT_ONCE if self._first_ring_unit is not None else 1
        self._checked_until = min(next_epoch * self._steps, position + count)

    def _finish_batch(self, position: int) -> None:
        """Update the state after batch `position`."""
        if self._meter.least is None and self._steps > 1:
            self._meter.least = 1
        if (position + 1) % self._steps:
            return
        if self._first_ring_unit is not None:
            units = self._units_at(*divmod(position, self._steps))
            # Only other members take the units after those of the last batch.
            self._cursor.pass_over(range(units.stop, self._first_unit_of(position + 1)))
        self._words[_IDLE_SINCE] = time.monotonic_ns()

    def _units_at(self, epoch: int, step: int) -> range:
        """The units of the batch at `step` of `epoch`."""
        flow, first = self._program.flows[0], epoch * self._epoch + step * self._units_per_batch
        rows = self._orders[flow.reads[0].result].rows(step)
        return range(first, first - (-rows // (flow.batch // self._units_per_batch)))

    def _is_kept(self, unit: int, epoch: int) -> bool:
        """Whether the ring keeps `unit` of `epoch` for this member."""
        return self._first_ring_unit is not None and self._first_ring_unit <= unit < (epoch + 1) * self._epoch

    def _build_batch(self, position: int) -> HostBatch:
        """Build batch `position`, including the private work of this member."""
        pending, self._ahead = self._ahead, None
        if pending is None or pending.position != position:
            pending = self._begin_batch(position)
        begin = time.perf_counter()
        for task in pending.tasks:
            result_of(task)
        batch = pending.builder.finish()
        self._meter.batches += 1
        self._meter.ready += pending.is_ready
        if pending.tasks:
            self._meter.wait_s += time.perf_counter() - begin
        return batch

    def _begin_ahead(self, position: int) -> None:
        """Begin the private work for batch `position` if its units are made."""
        epoch, step = divmod(position, self._steps)
        if not self._threads or self._ahead is not None or position >= self._checked_until:
            return
        units = self._units_at(epoch, step)
        if all(self._is_kept(unit, epoch) and self._ring.is_made(unit) for unit in units):
            try:
                self._ahead = self._begin_batch(position)
            except CommplanError:
                self._ahead = None  # the error is raised again when the batch is due

    def _begin_batch(self, position: int) -> _PendingBatch:
        """Wait for the units of batch `position`, and begin the stages that this member runs itself.

        The member makes units itself that the ring does not keep for it.
        """
        epoch, step = divmod(position, self._steps)
        units: list[Mapping[Ref, Array]] = []
        is_ready, record = True, self._cursor.record
        for unit in self._units_at(epoch, step):
            if self._is_kept(unit, epoch):
                root, is_made, _ = self._take(unit)
                units.append(self._units.layout.views(root, writable=False))
                is_ready = is_ready and is_made
            else:
                units.append(self._units.make_private(epoch, unit - epoch * self._epoch))
                record.set(private=record.get("private") + 1)
                if (
                    self._first_ring_unit is not None
                    and record.get("position") <= unit < self._first_ring_unit
                ):
                    self._cursor.pass_over((unit,))
        builder = self._builder(position, units)
        tasks = builder.second()
        if self._threads:
            threads = self._attachment.stage_threads(self._threads)
            return _PendingBatch(position, builder, [threads.submit(task) for task in tasks], is_ready)
        for task in tasks:
            task()
        return _PendingBatch(position, builder, [], is_ready)

    def _builder(self, position: int, units: Sequence[Mapping[Ref, Array]]) -> BatchBuilder:
        """Create the builder of batch `position` from the arrays of its units, by id."""
        builder = self._factory.batch(position)
        moved = {ref for flow in self._program.flows for ref in flow.moved}
        # Moved values have one copy in a unit, because they are equal for all members.
        units = [{ref: array[0] if ref in moved else array for ref, array in unit.items()} for unit in units]
        builder.moved = {
            ref: array
            for state in builder.states
            if state.flow.moved
            for ref, array in fill(state, units, state.flow.batch // self._units_per_batch).items()
        }
        return builder

    def _drop_roots(self, position: int) -> None:
        """Release the units of the batches before `position`, except those that arrays still reference."""
        first, roots = self._first_unit_of(position), self._cursor.roots
        for unit in [unit for unit in roots if unit < first]:
            del roots[unit]

    def _take(self, unit: int) -> tuple[Any, bool, bool]:
        """Take `unit` from the ring.

        Returns:
            The bytes of its slot, whether it was ready, and whether records were skipped.

        Raises:
            CommplanError: the error of the unit, or that of the wait.
        """
        root, waited_ns, is_spoiled = self._cursor.take(unit)
        self._meter.wait_s += waited_ns * 1e-9
        if waited_ns and self._position % self._steps:
            self._meter.least = 0
        if is_spoiled:
            self._units.check(unit, root, self._ring.memory.title)
        return root, not waited_ns, bool(is_spoiled)

    # --- the rest ---

    @property
    def is_open(self) -> bool:
        """Whether the member has not been closed."""
        return self._closing.alive

    def let_go_if_idle(self) -> None:
        """Release units if the member is idle between two epochs and another member needs a slot."""
        record = self._cursor.record
        since = record.get("idle_since")
        if not since or time.monotonic_ns() - since < self.idle_s * 1e9 or self._first_ring_unit is None:
            return
        following = record.get("position") + self._ring.slot_count  # the next unit in the slot of this member
        if not self._ring.is_wanted(following) or not self._turn.acquire(blocking=False):
            return
        try:
            if record.get("idle_since") and self._closing.alive:
                self.let_go()
                self._on_idle()
        finally:
            self._turn.release()

    def _on_idle(self) -> None:
        """Called when the other members no longer wait for this idle member."""

    def let_go(self) -> None:
        """Stop keeping units for this member until its next batch. The calling thread drives the member."""
        self._drop_ahead()
        self._cursor.recall()
        self._checked_until = 0
        with self._ring.memory.locked():
            self._first_ring_unit = None
            self._cursor.hold_none(self._cursor.record.get("position"))
        self._ring.call_maker()

    def _drop_ahead(self) -> None:
        """Cancel the private work for the next batch."""
        pending, self._ahead = self._ahead, None
        if pending is not None:
            for task in pending.tasks:
                task.cancel()

    @property
    def meters(self) -> tuple[Meter, ...]:
        """The meters of the private work and of the units that the members of this process share."""
        return self._meter, self._attachment.content.meter

    def summary(self) -> Summary:
        """The cost of the input so far: the shared work of this process and the work of this member."""
        return merged(meter.summary() for meter in self.meters)

    def close(self) -> None:
        """Leave the ring. Further calls have no effect.

        Raises:
            CommplanError: CP0923 if there is no memory for copies of batches that arrays still reference. The
                member then stays open.
        """
        if os.getpid() != self._process or self._closing.detach() is None:
            return
        self._drop_ahead()
        self._due, self._checked_until = None, 0
        try:
            self._cursor.close()
        except CommplanError:
            self._closing = self._make_finalizer()
            raise
        self._attachment.leave(self.member)


def _weakly_open(member: RingMember) -> Callable[[], bool]:
    """Return a function that reports whether `member` is open, without keeping `member` alive."""
    reference = weakref.ref(member)

    def is_open() -> bool:
        alive = reference()
        return alive is not None and alive.is_open

    return is_open
