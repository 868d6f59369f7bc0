"""The batches of one member of a feed: joining its ring, and taking units from it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

from commplan.diagnostics import fail
from commplan.input.prefetch import KEEP
from commplan.ir.plan import Ref
from commplan.ir.schedule import Read
from commplan.runtime.input.feeds import compiled
from commplan.runtime.input.feeds.batch import Batch
from commplan.runtime.input.feeds.joining import Sizes, attached, check_member, facts_of, place_of
from commplan.runtime.input.feeds.outputs import OneUnit, is_one_unit, member_outputs
from commplan.runtime.input.feeds.recorded import start_record
from commplan.runtime.input.multirate.member import RingMember
from commplan.runtime.input.multirate.schedule import ClockPlan
from commplan.runtime.input.observe.wait_log import ClosedError, log_warning
from commplan.runtime.input.phase_order import epoch_steps, fingerprint, hints, load_orders, position_of
from commplan.runtime.input.program import host_program
from commplan.runtime.input.ring.units import UnitProgram
from commplan.runtime.input.ring.words import ABSENT, CURSOR
from commplan.runtime.input.shm.slots import give_back_freed
from commplan.runtime.input.sources import files
from commplan.runtime.input.unit_batches import UnitBatches
from commplan.wait import check_seconds

IDLE_S = 60.0  # seconds between two epochs of a member after which others no longer wait for it
_RECORDS = CURSOR["records"]  # an index, because `Record.set` is too slow for every batch


class Feed(RingMember):
    """The batches of one member of a feed, one epoch per `iter()`; the result of `commplan.join`.

    Several feeds of a process share its threads. Each feed can be driven by a separate thread, or one thread
    can drive several feeds in turn.

    A feed is closed by `close`, at the end of a `with` block, by the garbage collector, and at exit of the
    interpreter. Other members then no longer wait for this one.

    Args:
        name: the name of the feed.
        plan: the schedules of the members.
        sources: the sources by name, as passed by the user.
        functions: the functions by name.
        member: the number of the member; None for the first free one.
        state: a result of `.state()` of this member; None to begin as `epochs` says.
        batch: the number of records of a batch, a multiple of the unit; None for the batch size of the plan.
        timeout: the timeout of waits in seconds.
        epochs: if "shared", a member that joins a running feed begins with the next epoch that no member has
            begun, or with the next unit if all loads are `at_least_once`. If "own", it begins with epoch 0,
            and makes units itself until it has caught up.

    Attributes:
        member: the number of the member.
        name: the name of the feed.

    Raises:
        CommplanError: CP09xx. CP0928 for invalid options, CP0929 if there is no such member or it is taken,
            CP0930 if members share no value, CP0931 for a batch that does not fit; otherwise as
            `PhaseBatches` and `joining.attached`.
    """

    def __init__(
        self, name: str, plan: ClockPlan, sources: Mapping[str, Any], functions: Mapping[str, Callable[...,
        Any]], *, member: int | None, state: Mapping[str, int] | None, batch: int | None, timeout: float,
        epochs: str,
    ) -> None:  # fmt: skip
        super().__init__(plan.phase)

        # The arguments.
        check_seconds("CP0928", "timeout", timeout)
        if epochs not in ("shared", "own"):
            fail("CP0928", f"epochs of a feed are 'shared' or 'own', not {epochs!r}")
        self._has_own_epochs = epochs == "own"
        schedule, phase = plan.schedule, plan.schedule.phase(plan.phase)
        reads = [op for op in phase.ops if isinstance(op, Read)]
        bound = files.bind_sources(schedule, sources, list(dict.fromkeys(op.source for op in reads)))
        most = check_member(plan, member)
        self.name, self._plan, self._timeout = name, plan, timeout

        # The program of the units, and the sizes of the ring if this process creates it.
        units = plan.units
        if units is None:
            fail(
                "CP0930",
                f"the members of `{plan.clock}` share no value in phase `{plan.phase}`",
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
        available = len(os.sched_getaffinity(0))
        makers = share.readers if share is not None and share.readers else available
        first = self._first_unit(plan, bound, member or 0, batch, state, content)
        sizes = Sizes(first, ahead, makers, min(cores, available))

        # The member joins under the ring's lock, and gives its cursor back if it fails.
        with attached(name, facts, plan, content, sizes) as (attachment, is_new):
            ring = attachment.ring
            with ring.memory.locked():
                member_number = place_of(attachment, member, most)
                units_per_batch = plan.units_of(member_number, batch, ring.header.get("unit"))
                local = {plan.clock: (member_number,)}
                schedule = plan.member(member_number, units=units_per_batch)
                program = host_program(schedule, plan.phase, local, apart=True)
                self._init_member(attachment, plan, member_number, units_per_batch, program)
                try:
                    self._join_ring(bound, functions, state, is_new)
                except BaseException:
                    ring.cursors[member_number].set(state=ABSENT, process=0)
                    raise
            attachment.members.add(member_number)
        self._register()
        give_back_freed()

    @property
    def idle_s(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Seconds between two epochs after which other members no longer wait for this one."""
        return IDLE_S

    def _is_paced(self) -> bool:
        return True  # members of a feed always advance independently

    # --- joining ---

    def _first_unit(
        self, plan: ClockPlan, bound: Mapping[str, files.Source], member: int, batch: int | None,
        state: Mapping[str, int] | None, content: UnitProgram,
    ) -> int:  # fmt: skip
        """The first unit of this member if it creates the feed.

        Raises:
            CommplanError: CP0931 if `batch` is invalid, CP0910 if `state` is.
        """
        units_per_batch = plan.units_of(member, batch, content.rows)
        epoch_records = content.epoch * content.rows
        if batch is not None and units_per_batch > content.epoch:
            fail(
                "CP0931",
                f"a batch of {batch} records is more than an epoch, which has {epoch_records}",
                f"batch={epoch_records} at most",
                file=plan.schedule.file,
            )
        schedule = plan.member(member, units=units_per_batch)
        program = host_program(schedule, plan.phase, {plan.clock: (member,)}, apart=True)
        record_orders = load_orders(program, bound)
        steps = epoch_steps(program, record_orders)
        epoch, step = position_of(program, record_orders, state, steps, fingerprint(program, record_orders))
        return epoch * content.epoch + step * units_per_batch

    def _join_ring(
        self, bound: Mapping[str, files.Source], functions: Mapping[str, Callable[..., Any]],
        state: Mapping[str, int] | None, is_new: bool,
    ) -> None:  # fmt: skip
        """Join the ring as a member. The caller holds the ring's lock.

        Args:
            bound: the sources by name.
            functions: the functions by name.
            state: a result of `.state()` of this member; None for the start of the feed or as `epochs` says.
            is_new: whether this process has created the feed.
        """
        program, units_per_batch, unit = self._program, self._units_per_batch, self._ring.header.get("unit")
        self._outputs = member_outputs(program)
        record_orders = load_orders(program, bound)
        steps = epoch_steps(program, record_orders)
        start = position_of(program, record_orders, state, steps, fingerprint(program, record_orders))
        if state is None and not is_new and not self._has_own_epochs:
            start = self._start_in_running_feed(record_orders, steps)
        self._enter_ring(bound, functions, start, self._timeout, KEEP * units_per_batch)
        # If a batch is one unit, and an epoch has as many batches as units, both have the same numbers.
        is_one = is_one_unit(program, units_per_batch) and steps == self._epoch
        layout = self._units.layout
        units = UnitBatches(program, record_orders, layout, steps) if is_one else None
        self._one_unit = None if units is None else OneUnit(units, self._outputs, steps)
        self._ready: Batch | None = None  # the next batch, until the caller receives it
        self._records_each = units_per_batch * unit

    def _start_in_running_feed(self, record_orders: Mapping[Ref, Any], steps: int) -> tuple[int, int]:
        """The first epoch and step of a member that joins a running feed.

        This is the start of the next epoch. If all loads visit records at least once, an epoch may start at
        any step, and the member starts at the next unit.
        """
        next_unit, epoch = self._ring.header.get("next"), self._epoch
        if all(order.visit == "at_least_once" for order in record_orders.values()):
            begun, inside = divmod(next_unit, epoch)
            step = -(-inside // self._units_per_batch)
            return (begun, step) if step < steps else (begun + 1, 0)
        return -(-next_unit // epoch), 0

    def _hold(self, next_unit: int, first_kept: int) -> int | None:
        """Hold units from `first_kept` on: the others do not wait while this member reads earlier ones.

        No units are kept for a member that is more than an epoch behind. With `epochs="own"`, no units are
        kept for a member that is behind at all.
        """
        if first_kept - next_unit > (0 if self._has_own_epochs else self._epoch):
            self._cursor.hold_none(next_unit)
            return None
        self._hold_from(first_kept, first_kept - next_unit)
        return first_kept

    # --- taking ---

    def __next__(self) -> Batch:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The next batch of the epoch.

        Raises:
            StopIteration: after the last batch of the epoch.
            CommplanError: the error of the batch; CP0916 if the feed is closed or this process was forked
                from its process; CP0946 and CP0947 if other members block this one (the caller may continue
                after both).
        """
        # Few calls: after a training step the CPU caches are cold, so that each call is expensive.
        if os.getpid() != self._process:
            self._refuse_forked()
        with self._turn:  # each thread that acquires the lock receives the next batch
            position = self._position
            if position >= self._checked_until:
                self._prepare(position)
                self._begin(position)
            self._driver.thread = threading.current_thread()
            batch = self._ready
            try:
                if batch is None:
                    batch = self._ready = self._batch_at(position)
                if position + 1 == self._checked_until:
                    self._finish_batch(position)
            except ClosedError:
                self._refuse_closed()
            except Exception as error:
                self._close_after(error)
                raise
            self._words[_RECORDS] = (position + 1 - self._first) * self._records_each
            if self._threads:
                self._drop_roots(position + 1)
                self._begin_ahead(position + 1)
            else:
                self._cursor.roots = {}
            # If interrupted before this line, the iterator does not advance.
            self._ready, self._position = None, position + 1
            return batch

    def _begin(self, position: int) -> None:
        """As `RingMember._begin`. Later epochs may belong to another recorded run."""
        start_record(self._attachment)
        super()._begin(position)

    def _finish_batch(self, position: int) -> None:
        """Count the records of all batches up to the last one before `_checked_until`."""
        self._note(position)
        super()._finish_batch(position)

    def _note(self, position: int) -> None:
        """Count the records of batches that are one unit, up to that at `position`, in the visit check."""
        if self._one_unit is None:
            return
        visits = self._one_unit.visits(position // self._steps)
        if visits is not None:
            self._visit_check.add(visits)
            self._one_unit.forget()

    def _batch_at(self, position: int) -> Batch:
        """Wait for the batch at `position`. It is a set of views of a slot if possible."""
        if (
            self._one_unit is not None
            and self._first_ring_unit is not None
            and position >= self._first_ring_unit
        ):
            root, is_ready, is_spoiled = self._take(position)
            if not is_spoiled:
                self._meter.batches += 1
                self._meter.ready += is_ready
                return self._one_unit.batch(root, *divmod(position, self._steps))
        host_batch = self._build_batch(position)
        self._note(position)  # records of earlier batches
        self._visit_check.add(host_batch)
        values = ((name, host_batch.values[ref], per) for name, ref, per in self._outputs)
        batch = Batch((name, array[0] if per else array) for name, array, per in values)
        mask = host_batch.mask and host_batch.mask.rows.reshape(-1)  # the member dimension has size 1
        return batch.place(*divmod(position, self._steps), mask)

    # --- the rest ---

    def keep_compiled(self, key: str) -> None:
        """Store the compiled plan for members that join with the same text; see `compiled.key_of`."""
        compiled.keep(self._ring.memory, key, self._plan.schedule)

    def _on_idle(self) -> None:
        """Log that the other members no longer wait for this one."""
        log_warning(
            "member %d of feed %r has not begun its next epoch for %g s: the others go on", self.member,
            self.name, IDLE_S,
        )  # fmt: skip

    def torch_dataset(self) -> Any:
        """Return a PyTorch `IterableDataset`. Each iteration yields `Batch.torch()` for one epoch.

        Use it with `DataLoader(dataset, batch_size=None)` without workers, because the feed already makes
        batches ahead.

        Raises:
            CommplanError: CP0918 if PyTorch is not installed.
        """
        from commplan.runtime.input.feeds.torch_dataset import dataset  # noqa: PLC0415  needs PyTorch

        return dataset(cast("Any", self))

    def close(self) -> None:
        """Leave the feed. Raises as `RingMember.close`."""
        self._ready = None
        super().close()
