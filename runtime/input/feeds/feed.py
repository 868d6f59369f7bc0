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
from commplan.input.prefetch import KEEP
from commplan.ir.plan import Ref
from commplan.ir.schedule import Read
from commplan.runtime.input import this_process
from commplan.runtime.input.epoch_iterator import EpochIterator
from commplan.runtime.input.feeds import compiled
from commplan.runtime.input.feeds.attachment import Attachment, attached, place_of
from commplan.runtime.input.feeds.batch import Batch
from commplan.runtime.input.feeds.facts import facts_of
from commplan.runtime.input.feeds.handed import OneUnit, handed_out, is_one_unit
from commplan.runtime.input.feeds.layout import (
    ALONE,
    ARMED,
    HOLDS,
    IDLE_SINCE,
    MADE,
    RECORDS,
    SPOILED,
    WAITED_NS,
    WAITS_SINCE,
    WANTED,
)
from commplan.runtime.input.feeds.maker import UnitMaker, check_unit
from commplan.runtime.input.feeds.member_schedule import of_member, units_of
from commplan.runtime.input.feeds.memory import IDLE_S
from commplan.runtime.input.feeds.recorded import start_record
from commplan.runtime.input.feeds.waiting import wait_on
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.layout import Array
from commplan.runtime.input.multirate.schedule import ClockPlan
from commplan.runtime.input.multirate.units import fill
from commplan.runtime.input.observe.accounting import Meter, Summary, merged
from commplan.runtime.input.observe.visit_check import Checks
from commplan.runtime.input.observe.wait_log import LOG, ClosedError
from commplan.runtime.input.phase_order import block_of, epoch_steps, fingerprint, hints, orders, restored
from commplan.runtime.input.program import EpochCursor, host_program
from commplan.runtime.input.shm.shm_control import LOOK_S, cores_of
from commplan.runtime.input.shm.slots import CompletionCounter, give_back_freed
from commplan.runtime.input.sources import files
from commplan.runtime.input.stages.declared import declared
from commplan.runtime.input.stages.functions import called_functions
from commplan.wait import check_seconds, outcome

_AT_ONCE = 64  # batches that are taken until the next look at what has changed

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
    ) -> None:  # fmt: skip
        super().__init__(plan.phase)
        check_seconds("CP0928", "timeout", timeout)
        schedule, phase = plan.schedule, plan.schedule.phase(plan.phase)
        reads = [op for op in phase.ops if isinstance(op, Read)]
        bound = files.bound(schedule, sources, list(dict.fromkeys(op.source for op in reads)))
        most = schedule.axis(plan.clock).size
        if member is not None and not (hasattr(member, "__index__") and member in range(most)):
            fail("CP0929", f"`{plan.clock}` has no member {member!r}", f"its members are 0 to {most - 1}")
        self.name, self._plan, self._timeout = name, plan, timeout
        maker = UnitMaker(plan, bound, functions, self._order_of(plan, bound))
        unit = maker.program.flows[0].batch
        facts = facts_of(name, plan, unit, maker, bound, sources, functions)
        ahead, cores = hints(maker.program)
        share = plan.share
        readers = share.readers if share is not None and share.readers else len(cores_of())
        first = self._first_unit(plan, bound, member or 0, batch, state, maker, unit)
        with attached(
            facts, plan, maker, first=first, ahead=ahead, readers=readers, cores=min(cores, len(cores_of()))
        ) as (attachment, begun):
            self._memory, self._maker = attachment.memory, attachment.maker
            with attachment.memory.locked():
                self.member = place_of(attachment, member, most)
                try:
                    self._enter(bound, functions, batch, state, attachment, begun)
                except BaseException:
                    attachment.memory.unlock_member(self.member)
                    raise
            attachment.members.add(self.member)
        self._attachment = attachment
        attachment.idle[self.member] = _weakly(self)
        give_back_freed()
        self._closing = self._forgotten_later()

    def _forgotten_later(self) -> weakref.finalize[..., Any]:
        """What is done where this object is collected without being closed."""
        forget = self._attachment.forget
        closing = weakref.finalize(self, forget, self.member, self._slots, os.getpid())
        closing.atexit = False  # `attachment` leaves all feeds then
        return closing

    # --- coming ---

    def _order_of(self, plan: ClockPlan, bound: Mapping[str, files.Source]) -> int:
        units = plan.units
        if units is None:
            fail(
                "CP0930",
                f"the members of `{plan.clock}` have nothing in common in phase `{plan.phase}`",
                "a feed shares what is the same for all members and has a size: not bytes, and nothing that"
                " is shared `via duplicate`",
                span=plan.schedule.phase(plan.phase).span,
                file=plan.schedule.file,
            )
        program = host_program(units, plan.phase, None, apart=True)
        return fingerprint(program, orders(program, bound))

    def _first_unit(
        self, plan: ClockPlan, bound: Mapping[str, files.Source], member: int, batch: int | None,
        state: Mapping[str, int] | None, maker: UnitMaker, unit: int,
    ) -> int:  # fmt: skip
        """Where this member begins if it is the first; what is wrong with its own arguments is raised
        here."""
        each = units_of(plan, member, batch, unit)
        if batch is not None and each > maker.epoch:
            fail(
                "CP0931",
                f"a batch of {batch} records is more than an epoch, which has {maker.epoch * unit}",
                f"batch={maker.epoch * unit} at most",
                file=plan.schedule.file,
            )
        program = host_program(of_member(plan, member, each), plan.phase, {plan.clock: (member,)}, apart=True)
        mine = orders(program, bound)
        steps = epoch_steps(program, mine)
        epoch, step = restored(program, mine, state, steps, fingerprint(program, mine))
        return epoch * maker.epoch + step * each

    def _enter(
        self, bound: Mapping[str, files.Source], functions: Mapping[str, Callable[..., Any]], batch: int |
        None, state: Mapping[str, int] | None, attachment: Attachment, begun: bool,
    ) -> None:  # fmt: skip
        """Become a member (under the feed's lock)."""
        plan, memory, member = self._plan, self._memory, self.member
        self._each = each = units_of(plan, member, batch, memory.header.get("unit"))
        local = {plan.clock: (member,)}
        program = self._program = host_program(of_member(plan, member, each), plan.phase, local, apart=True)
        self._wanted = handed_out(program)
        mine, self._meter = orders(program, bound), Meter(plan.phase, plan.schedule.plan)
        steps, order = epoch_steps(program, mine), fingerprint(program, mine)
        place = restored(program, mine, state, steps, order)
        if state is None and not begun:
            place = self._next_place(mine, steps)
        self._start(*place, steps=steps, order=order)
        self._upto = 0  # the batches before it may be taken without a look at what has changed
        self._orders, self._bound = mine, bound
        self._called, (_, cores) = called_functions(program, functions), hints(program)
        declared(program, self._meter)
        own = [op for flow in program.flows for op in flow.after]
        self._pool = _threads(cores, f"commplan-{self.name}-own") if own else None
        is_one = is_one_unit(program, each) and steps == self._maker.epoch  # a batch is numbered as its unit
        layout = self._maker.layout
        self._one_unit = OneUnit(program, mine, layout, steps, self._wanted) if is_one else None
        self._ready: Batch | None = None  # the next one, until it is handed out, and the slots that it shows
        self._held: dict[int, Any] = {}
        self._look_s = min(LOOK_S, self._timeout)
        self._slot_words, self._count = memory.slot_words, memory.slots
        self._kept_before = min(KEEP * each, memory.slots) - 1
        self._records_each, self._words = each * memory.header.get("unit"), memory.members[member].words
        self._checks = self._contract = Checks(program, mine, steps, place[1], self._meter)
        self._slots = attachment.slots()
        self._returns = returns = CompletionCounter(functools.partial(memory.pass_on, member))

        self._slots.returned = returns.add  # holds nothing that holds this object
        words = memory.members[member]
        values = {
            "pid": os.getpid(), "process": memory.process + 1, "batch": program.flows[0].batch,
            "since": time.monotonic_ns(),
            **dict.fromkeys(("records", "waited_ns", "wanted", "alone", "armed", "idle_since"), 0),
        }  # fmt: skip
        for name, value in values.items():
            words.set(name, value)
        self._attach()

    def _next_place(self, mine: Mapping[Ref, Any], steps: int) -> tuple[int, int]:
        """Where one who comes late begins: with the next epoch; at once where an epoch may be begun
        anywhere."""
        next_unit, epoch = self._memory.header.get("next"), self._maker.epoch
        if all(order.visit == "at_least_once" for order in mine.values()):
            begun, inside = divmod(next_unit, epoch)
            step = -(-inside // self._each)
            return (begun, step) if step < steps else (begun + 1, 0)
        return -(-next_unit // epoch), 0

    def _attach(self) -> None:
        """From where on units are kept for this member (under the feed's lock).

        From its own place where nothing of it has gone; else from the next unit, and it reads by itself
        what comes before, while the others wait for it as for any other member. Where it is more than an
        epoch behind they do not.
        """
        memory, words = self._memory, self._memory.members[self.member]
        place, following = self._position(self._place), memory.header.get("next")
        kept = place if memory.is_kept(place) else following
        self._from: int | None = kept if kept - place <= self._maker.epoch else None
        if self._from is None:
            words.set("position", place)
            words.set("state", ALONE)
            return
        self._returns.upto = kept
        words.set("position", kept)
        words.set("state", HOLDS)
        if kept > place:
            LOG.warning(
                "member %d of feed %r is %d records behind: it reads them by itself", self.member, self.name,
                (kept - place) * memory.header.get("unit"),
            )  # fmt: skip

    def _position(self, place: int) -> int:
        """The first unit of the batch at `place`."""
        epoch, step = divmod(place, self._steps)
        return epoch * self._maker.epoch + step * self._each

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
            self._words[RECORDS] = (place + 1 - self._first) * self._records_each
            # Whoever is interrupted before this line gets the same batch the next time.
            self._ready, self._held, self._place = None, {}, place + 1
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
        memory, words, begun = self._memory, self._words, place // self._steps + 1
        start_record(self._attachment)
        if words[ARMED] < begun:
            words[ARMED] = begun
            memory.ring("taken")
        if self._from is None:
            with memory.locked():
                self._attach()
            memory.ring("taken")  # who found nobody to make units for looks again
        words[IDLE_SINCE] = 0
        self._upto = min(begun * self._steps, place + (_AT_ONCE if self._from is not None else 1))

    def _settle(self, place: int) -> None:
        """The batch before `_upto` is there: what it and those before it gave is counted."""
        self._note(place)
        if self._meter.least is None and self._steps > 1:
            self._meter.least = 1
        if (place + 1) % self._steps:
            return
        if self._from is not None:
            for unit in range(max(self._position(place) + self._each, self._from), self._position(place + 1)):
                self._returns.add(unit)  # which others take, and this member passes over
        self._words[IDLE_SINCE] = time.monotonic_ns()

    def _note(self, place: int) -> None:
        if self._one_unit is not None and (visits := self._one_unit.visits(place // self._steps)) is not None:
            self._contract.add(visits)
            self._one_unit.forget()

    def _batch_at(self, place: int) -> Batch:
        if self._one_unit is not None and self._from is not None and place >= self._from:
            root, at_once, is_spoiled = self._lent(place)
            if not is_spoiled:
                self._meter.batches += 1
                self._meter.ready += at_once
                return self._one_unit.batch(root, *divmod(place, self._steps))
        return self._composed_at(place)

    def _composed_at(self, place: int) -> Batch:
        epoch, step = divmod(place, self._steps)
        units, ready = self._units(epoch, step)
        composed = self._composed(units)
        self._meter.batches += 1
        self._meter.ready += ready
        self._note(place)  # of those before
        self._contract.add(composed)
        values = ((name, composed.values[ref], per) for name, ref, per in self._wanted)
        batch = Batch((name, array[0] if per else array) for name, array, per in values)
        mask = composed.mask and composed.mask.rows.reshape(-1)  # its member dimension has one index
        return batch.place(epoch, step, mask)

    def _units(self, epoch: int, step: int) -> tuple[list[Mapping[Ref, Array]], bool]:
        """The units of a batch, and whether all were there at once; those that have gone are made here."""
        flow, first = self._program.flows[0], step * self._each
        rows = self._orders[flow.reads[0].result].rows(step)
        units: list[Mapping[Ref, Array]] = []
        ready, words = True, self._memory.members[self.member]
        for inside in range(first, first - (-rows // (flow.batch // self._each))):
            if self._is_kept(epoch, inside):
                root, at_once, _ = self._lent(epoch * self._maker.epoch + inside)
                units.append(self._maker.layout.views(root, writable=False))
                ready = ready and at_once
            else:
                units.append(self._maker.alone(epoch, inside))
                words.set("alone", words.get("alone") + 1)
        return units, ready

    def _is_kept(self, epoch: int, inside: int) -> bool:
        """Whether a unit is one that others wait for this member to take."""
        length = self._maker.epoch
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

    def _lent(self, unit: int) -> tuple[Any, bool, bool]:
        """Unit `unit` as it lies in its slot, whether it was there at once, and whether some records of it
        were skipped."""
        slots, slot = self._slots, self._slot_words[unit % self._count].words
        slots.recall_before(unit - self._kept_before)  # `unit` needs a slot of its own
        at_once = slot[MADE] == unit + 1
        if not at_once:
            self._wait(unit)
        root = slots.lend(unit, self._held)  # it is kept until the batch is handed out
        if slot[SPOILED]:
            check_unit(root, self._maker.place(unit), self.name)
            return root, at_once, True
        return root, at_once, False

    # --- waiting ---

    def _wait(self, unit: int) -> None:
        words, meter, begun = self._words, self._meter, time.monotonic_ns()
        words[WAITS_SINCE], words[WANTED] = begun, unit + 1
        record = self._attachment.threads.record
        recorded = record.begin("wait", unit) if record is not None else 0
        try:
            if not self._memory.await_made(unit, self._look_s):
                wait_on(
                    self._attachment, self.member, unit, self._timeout, lambda: self._closing.alive,
                    self._plan.schedule.file,
                )  # fmt: skip
        finally:
            words[WANTED] = 0
            if record is not None:
                record.end(recorded)
            waited = time.monotonic_ns() - begun
            words[WAITED_NS] += waited
            meter.wait_s += waited * 1e-9
            if self._place % self._steps:
                meter.least = 0

    # --- the rest ---

    def keep_compiled(self, key: str) -> None:
        """Leave the plan as it was compiled for who brings the text of `key`."""
        compiled.keep(self._memory, key, self._plan.schedule)

    def let_go_if_idle(self) -> None:
        """Where this member has not begun its next epoch for long, the others go on without it."""
        words = self._memory.members[self.member]
        since = words.get("idle_since")
        if not since or time.monotonic_ns() - since < IDLE_S * 1e9 or self._from is None:
            return
        if not self._turn.acquire(blocking=False):
            return
        try:
            if not words.get("idle_since") or not self._closing.alive:
                return
            for unit in self._slots.lent():
                self._slots.recall(unit)
            self._upto = 0
            with self._memory.locked():
                self._from = None
                words.set("state", ALONE)
            self._memory.ring("taken")
            LOG.warning(
                "member %d of feed %r has not begun its next epoch for %g s: the others go on", self.member,
                self.name, IDLE_S,
            )  # fmt: skip
        finally:
            self._turn.release()

    def summary(self) -> Summary:
        """What the input cost so far: what this process made for all, and what this member did for
        itself."""
        return merged(meter.summary() for meter in (self._meter, self._maker.meter))

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
        self._ready, self._held, self._upto = None, {}, 0
        try:
            self._slots.close()
        except CommplanError:
            self._closing = self._forgotten_later()
            raise
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._attachment.leave(self.member)


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
