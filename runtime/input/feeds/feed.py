"""One member's batches of a feed."""

from __future__ import annotations

import functools
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from commplan.diagnostics import CommplanError, fail
from commplan.ir.plan import Ref
from commplan.ir.schedule import Read
from commplan.runtime.input import this_process
from commplan.runtime.input.epoch_iterator import EpochIterator
from commplan.runtime.input.feeds import compiled
from commplan.runtime.input.feeds.attachment import Sizes, attached, place_of
from commplan.runtime.input.feeds.batch import Batch
from commplan.runtime.input.feeds.facts import facts_of
from commplan.runtime.input.feeds.handed import OneUnit, handed_out, is_one_unit
from commplan.runtime.input.feeds.member_schedule import of_member, units_of
from commplan.runtime.input.feeds.recorded import start_record
from commplan.runtime.input.feeds.waiting import MemberWaiter
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.layout import Array
from commplan.runtime.input.multirate.schedule import ClockPlan
from commplan.runtime.input.multirate.units import fill
from commplan.runtime.input.observe.accounting import Meter, Summary, merged
from commplan.runtime.input.observe.visit_check import Checks
from commplan.runtime.input.observe.wait_log import LOG, ClosedError
from commplan.runtime.input.phase_order import block_of, epoch_steps, fingerprint, hints, orders, restored
from commplan.runtime.input.program import EpochCursor, host_program
from commplan.runtime.input.ring.cursor import Cursor
from commplan.runtime.input.ring.units import UnitProgram
from commplan.runtime.input.ring.words import ABSENT, CURSOR
from commplan.runtime.input.shm.slots import give_back_freed
from commplan.runtime.input.sources import files
from commplan.runtime.input.stages.declared import declared
from commplan.runtime.input.stages.functions import called_functions
from commplan.runtime.input.this_process import cores_of
from commplan.wait import check_seconds, outcome

IDLE_S = 60.0  # how long a member that has ended an epoch is waited for to begin the next
_AT_ONCE = 64  # batches that are taken until the next look at what has changed
_RECORDS, _IDLE_SINCE = CURSOR["records"], CURSOR["idle_since"]

if TYPE_CHECKING:
    from concurrent.futures import ThreadPoolExecutor

    from commplan.runtime.input.stages.batch_builder import BatchFactory


class Feed(EpochIterator):
    """What `commplan.join` returns: one member's batches, one epoch per `iter()`, as `Batch`.

    Several feeds of one process share its threads, and each is driven by a thread of its own or in turn. It
    ends with `close`, with a `with` block, when it is collected and when the interpreter exits; the others
    no longer wait for it. `.member` is its place.
    """

    _patient = ("CP0946", "CP0947")

    def __init__(
        self, name: str, plan: ClockPlan, sources: Mapping[str, Any], functions: Mapping[str, Callable[...,
        Any]], *, member: int | None, state: Mapping[str, int] | None, batch: int | None, timeout: float,
        epochs: str,
    ) -> None:  # fmt: skip
        super().__init__(plan.phase)
        check_seconds("CP0928", "timeout", timeout)
        if epochs not in ("shared", "own"):
            fail("CP0928", f"epochs of a feed are 'shared' or 'own', not {epochs!r}")
        self._has_own_epochs = epochs == "own"
        schedule, phase = plan.schedule, plan.schedule.phase(plan.phase)
        reads = [op for op in phase.ops if isinstance(op, Read)]
        bound = files.bound(schedule, sources, list(dict.fromkeys(op.source for op in reads)))
        most = schedule.axis(plan.clock).size
        if member is not None and not (hasattr(member, "__index__") and member in range(most)):
            fail("CP0929", f"`{plan.clock}` has no member {member!r}", f"its members are 0 to {most - 1}")
        self.name, self._plan, self._timeout = name, plan, timeout
        units = plan.units
        if units is None:
            fail(
                "CP0930",
                f"the members of `{plan.clock}` have nothing in common in phase `{plan.phase}`",
                "a feed shares what is the same for all members and has a size: not bytes, and nothing that"
                " is shared `via duplicate`",
                span=phase.span,
                file=schedule.file,
            )
        program = host_program(units, plan.phase, None, apart=True)
        content = UnitProgram(program, plan.epoch(bound), bound, functions)
        facts = facts_of(plan, content, bound, sources, functions)
        ahead, cores = hints(program)
        share = plan.share
        makers = share.readers if share is not None and share.readers else len(cores_of())
        first = self._first_unit(plan, bound, member or 0, batch, state, content)
        sizes = Sizes(first, ahead, makers, min(cores, len(cores_of())))
        with attached(name, facts, plan, content, sizes) as (attachment, is_new):
            self._attachment, self._ring = attachment, attachment.ring
            self._units = attachment.units
            with self._ring.memory.locked():
                self.member = place_of(attachment, member, most)
                try:
                    self._enter(bound, functions, batch, state, is_new)
                except BaseException:
                    self._ring.cursors[self.member].set(state=ABSENT, process=0)
                    raise
            attachment.members.add(self.member)
        attachment.idle[self.member] = _weakly(self)
        give_back_freed()
        self._closing = self._forgotten_later()

    def _forgotten_later(self) -> weakref.finalize[..., Any]:
        """What is done where this object is collected without being closed."""
        forget = self._attachment.forget
        closing = weakref.finalize(self, forget, self.member, self._cursor.slots, os.getpid())
        closing.atexit = False  # `attachment` leaves all feeds then
        return closing

    # --- coming ---

    def _first_unit(
        self, plan: ClockPlan, bound: Mapping[str, files.Source], member: int, batch: int | None,
        state: Mapping[str, int] | None, content: UnitProgram,
    ) -> int:  # fmt: skip
        """The first unit of this member if it begins the feed. Raises if its arguments are wrong."""
        each, epoch_records = units_of(plan, member, batch, content.rows), content.epoch * content.rows
        if batch is not None and each > content.epoch:
            fail(
                "CP0931",
                f"a batch of {batch} records is more than an epoch, which has {epoch_records}",
                f"batch={epoch_records} at most",
                file=plan.schedule.file,
            )
        program = host_program(of_member(plan, member, each), plan.phase, {plan.clock: (member,)}, apart=True)
        mine = orders(program, bound)
        steps = epoch_steps(program, mine)
        epoch, step = restored(program, mine, state, steps, fingerprint(program, mine))
        return epoch * content.epoch + step * each

    def _enter(
        self, bound: Mapping[str, files.Source], functions: Mapping[str, Callable[..., Any]], batch: int |
        None, state: Mapping[str, int] | None, is_new: bool,
    ) -> None:  # fmt: skip
        """Become a member. The caller holds the ring's lock."""
        plan, ring, member = self._plan, self._ring, self.member
        unit, self._epoch = ring.header.get("unit"), self._attachment.content.epoch
        self._each = each = units_of(plan, member, batch, unit)
        local = {plan.clock: (member,)}
        program = self._program = host_program(of_member(plan, member, each), plan.phase, local, apart=True)
        self._wanted = handed_out(program)
        mine, self._meter = orders(program, bound), Meter(plan.phase, plan.schedule.plan)
        steps, order = epoch_steps(program, mine), fingerprint(program, mine)
        place = restored(program, mine, state, steps, order)
        if state is None and not is_new and not self._has_own_epochs:
            place = self._next_place(mine, steps)
        self._start(*place, steps=steps, order=order)
        self._upto = 0  # the batches before it may be taken without a look at what has changed
        self._orders, self._bound = mine, bound
        self._called, (_, cores) = called_functions(program, functions), hints(program)
        declared(program, self._meter)
        own = [op for flow in program.flows for op in flow.after]
        self._pool = _threads(cores, f"commplan-{self.name}-own") if own else None
        is_one = is_one_unit(program, each) and steps == self._epoch  # a batch is numbered as its unit
        layout = self._units.layout
        self._one_unit = OneUnit(program, mine, layout, steps, self._wanted) if is_one else None
        self._ready: Batch | None = None  # the next one, until it is handed out
        self._records_each, self._title = each * unit, ring.memory.title
        self._checks = self._contract = Checks(program, mine, steps, place[1], self._meter)
        is_open = _weakly_open(self)
        waiter = MemberWaiter(self._attachment, member, self._timeout, is_open, plan.schedule.file)
        slots, recording = ring.memory.mapped_slots(), self._attachment.recording
        self._cursor = Cursor(ring, member, each, slots, waiter, recording)
        self._words = self._cursor.record.words
        self._cursor.enter(batch=program.flows[0].batch)
        self._attach()

    def _next_place(self, mine: Mapping[Ref, Any], steps: int) -> tuple[int, int]:
        """Where one who comes late begins: with the next epoch; at once where an epoch may be begun
        anywhere."""
        next_unit, epoch = self._ring.header.get("next"), self._epoch
        if all(order.visit == "at_least_once" for order in mine.values()):
            begun, inside = divmod(next_unit, epoch)
            step = -(-inside // self._each)
            return (begun, step) if step < steps else (begun + 1, 0)
        return -(-next_unit // epoch), 0

    def _attach(self) -> None:
        """Begin to hold units. The caller holds the ring's lock.

        It holds units from its own place on if they are all kept; else from the next unit on, and reads those
        before it by itself, while the others wait for it as for any member. If it is more than an epoch
        behind, none are held.
        """
        ring = self._ring
        place, following = self._position(self._place), ring.header.get("next")
        kept = place if ring.is_kept(place) else following
        behind = kept - place
        self._from: int | None = kept if behind <= (0 if self._has_own_epochs else self._epoch) else None
        if self._from is None:
            self._cursor.stand_alone(place)
            return
        self._cursor.hold(kept)
        if kept > place:
            LOG.warning(
                "member %d of feed %r is %d records behind: it reads them by itself", self.member, self.name,
                (kept - place) * ring.header.get("unit"),
            )  # fmt: skip

    def _position(self, place: int) -> int:
        """The first unit of the batch at `place`."""
        epoch, step = divmod(place, self._steps)
        return epoch * self._epoch + step * self._each

    @functools.cached_property
    def _factory(self) -> BatchFactory:
        """For batches that are not a unit as it lies in its slot; loaded where there is one."""
        from commplan.runtime.input.stages.batch_builder import BatchFactory  # noqa: PLC0415
        from commplan.runtime.input.stages.records import stages  # noqa: PLC0415

        program = self._program
        return BatchFactory(
            program, self._orders, stages(program, self._bound, self._called, self._meter), self._meter,
            block_of(program, hints(program)[1]), course=EpochCursor(0, 0, self._steps),
        )  # fmt: skip

    # --- taking ---

    def __iter__(self) -> Feed:
        super().__iter__()
        if self._closing.alive:
            self._begin(self._place)
        return self

    def __next__(self) -> Batch:  # pyright: ignore[reportIncompatibleMethodOverride]
        # In few calls: a step has taken the caches, and each call costs some of them again.
        if this_process.pid != self._process:
            self._refuse_forked()
        with self._turn:  # whichever thread asks next gets the next batch
            place = self._place
            if place >= self._upto:
                self._turn_to(place)
            self._attachment.drivers[self.member] = threading.get_ident()
            batch = self._ready
            try:
                if batch is None:
                    batch = self._ready = self._batch_at(place)
                if place + 1 == self._upto:
                    self._settle(place)
            except ClosedError:
                self._refuse_closed()
            except Exception as error:
                self._close_after(error)
                raise
            self._words[_RECORDS] = (place + 1 - self._first) * self._records_each
            # Whoever is interrupted before this line gets the same batch the next time.
            self._ready, self._cursor.held, self._place = None, {}, place + 1
            return batch

    def _turn_to(self, place: int) -> None:
        """Batches from `place` on are taken, up to `_upto`."""
        if not self._closing.alive:
            self._refuse_closed()
        if place // self._steps > self._armed:
            self._end_epoch()
        self._begin(place)

    def _begin(self, place: int) -> None:
        """The member begins an epoch, or goes on with it."""
        ring, begun = self._ring, place // self._steps + 1
        start_record(self._attachment)
        ring.arm(self.member, begun * self._epoch)
        if self._from is None:
            with ring.memory.locked():
                self._attach()
            ring.call_maker()
        self._words[_IDLE_SINCE] = 0
        self._upto = min(begun * self._steps, place + (_AT_ONCE if self._from is not None else 1))

    def _settle(self, place: int) -> None:
        """The batch before `_upto` is there: what it and those before it gave is counted."""
        self._note(place)
        if self._meter.least is None and self._steps > 1:
            self._meter.least = 1
        if (place + 1) % self._steps:
            return
        if self._from is not None:
            following = max(self._position(place) + self._each, self._from)
            self._cursor.pass_over(range(following, self._position(place + 1)))  # others take them
        self._words[_IDLE_SINCE] = time.monotonic_ns()

    def _note(self, place: int) -> None:
        if self._one_unit is not None and (visits := self._one_unit.visits(place // self._steps)) is not None:
            self._contract.add(visits)
            self._one_unit.forget()

    def _batch_at(self, place: int) -> Batch:
        if self._one_unit is not None and self._from is not None and place >= self._from:
            root, is_ready, is_spoiled = self._take(place)
            if not is_spoiled:
                self._meter.batches += 1
                self._meter.ready += is_ready
                return self._one_unit.batch(root, *divmod(place, self._steps))
        return self._composed_at(place)

    def _composed_at(self, place: int) -> Batch:
        epoch, step = divmod(place, self._steps)
        units, ready = self._units_of(epoch, step)
        composed = self._composed(units)
        self._meter.batches += 1
        self._meter.ready += ready
        self._note(place)  # of those before
        self._contract.add(composed)
        values = ((name, composed.values[ref], per) for name, ref, per in self._wanted)
        batch = Batch((name, array[0] if per else array) for name, array, per in values)
        mask = composed.mask and composed.mask.rows.reshape(-1)  # its member dimension has one index
        return batch.place(epoch, step, mask)

    def _units_of(self, epoch: int, step: int) -> tuple[list[Mapping[Ref, Array]], bool]:
        """The units of a batch, and whether all were ready; those that are not kept are made here."""
        flow, first = self._program.flows[0], step * self._each
        rows = self._orders[flow.reads[0].result].rows(step)
        units: list[Mapping[Ref, Array]] = []
        ready, record = True, self._cursor.record
        for inside in range(first, first - (-rows // (flow.batch // self._each))):
            if self._is_kept(epoch, inside):
                root, is_ready, _ = self._take(epoch * self._epoch + inside)
                units.append(self._units.layout.views(root, writable=False))
                ready = ready and is_ready
            else:
                units.append(self._units.alone(epoch, inside))
                record.set(alone=record.get("alone") + 1)
        return units, ready

    def _is_kept(self, epoch: int, inside: int) -> bool:
        """Whether a unit is one that others wait for this member to take."""
        length = self._epoch
        return self._from is not None and inside < length and epoch * length + inside >= self._from

    def _composed(self, units: Sequence[Mapping[Ref, Array]]) -> HostBatch:
        """A batch from its units, and what this member does for itself."""
        making = self._factory.batch(self._place)
        moved = {ref for flow in self._program.flows for ref in flow.moved}
        units = [{ref: array[0] if ref in moved else array for ref, array in unit.items()} for unit in units]
        making.moved = {
            ref: array
            for state in making.states
            if state.flow.moved
            for ref, array in fill(state, units, state.flow.batch // self._each).items()
        }
        tasks = making.second()
        if self._pool is None:
            for task in tasks:
                task()
        else:
            for future in [self._pool.submit(task) for task in tasks]:
                outcome(future)
        return making.finish()

    def _take(self, unit: int) -> tuple[Any, bool, bool]:
        """The bytes of the slot of `unit`, whether it was ready, and whether records of it were skipped."""
        root, waited_ns, is_spoiled = self._cursor.take(unit)
        self._meter.wait_s += waited_ns * 1e-9
        if waited_ns and self._place % self._steps:
            self._meter.least = 0
        if is_spoiled:
            self._units.check(unit, root, self._title)
            return root, not waited_ns, True
        return root, not waited_ns, False

    # --- the rest ---

    @property
    def is_open(self) -> bool:
        """Whether it has not been closed."""
        return self._closing.alive

    def keep_compiled(self, key: str) -> None:
        """Leave the plan as it was compiled for who brings the text of `key`."""
        compiled.keep(self._ring.memory, key, self._plan.schedule)

    def let_go_if_idle(self) -> None:
        """Where this member has not begun its next epoch for long, the others go on without it."""
        record = self._cursor.record
        since = record.get("idle_since")
        if not since or time.monotonic_ns() - since < IDLE_S * 1e9 or self._from is None:
            return
        if not self._turn.acquire(blocking=False):
            return
        try:
            if not record.get("idle_since") or not self._closing.alive:
                return
            self._cursor.recall()
            self._upto = 0
            with self._ring.memory.locked():
                self._from = None
                self._cursor.stand_alone(record.get("position"))
            self._ring.call_maker()
            LOG.warning(
                "member %d of feed %r has not begun its next epoch for %g s: the others go on", self.member,
                self.name, IDLE_S,
            )  # fmt: skip
        finally:
            self._turn.release()

    def summary(self) -> Summary:
        """What the input cost so far: what this process made for all, and what this member did for
        itself."""
        return merged(meter.summary() for meter in (self._meter, self._attachment.content.meter))

    def torch_dataset(self) -> Any:
        """An `IterableDataset` of PyTorch: an epoch of `Batch.torch()` each time that it is iterated over.
        It is for `DataLoader(dataset, batch_size=None)`, without workers: batches are made ahead
        already."""
        from commplan.runtime.input.feeds.torch_dataset import dataset  # noqa: PLC0415  needs PyTorch

        return dataset(cast("Any", self))

    def close(self) -> None:
        """Leave. Closing twice is fine. Errors: CP0923 where there is no memory to keep the batches that are
        still shown: the member is there as before."""
        if os.getpid() != self._process or self._closing.detach() is None:
            return
        self._ready, self._upto = None, 0
        try:
            self._cursor.close()
        except CommplanError:
            self._closing = self._forgotten_later()
            raise
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._attachment.leave(self.member)


def _weakly_open(feed: Feed) -> Callable[[], bool]:
    """Whether `feed` has not been closed; the threads of its process do not keep it alive."""
    reference = weakref.ref(feed)

    def is_open() -> bool:
        alive = reference()
        return alive is not None and alive.is_open

    return is_open


def _weakly(feed: Feed) -> Callable[[], None]:
    reference = weakref.ref(feed)

    def look() -> None:
        alive = reference()
        if alive is not None:
            alive.let_go_if_idle()

    return look


def _threads(count: int, name: str) -> ThreadPoolExecutor:
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  few members need any

    return ThreadPoolExecutor(count, name)
