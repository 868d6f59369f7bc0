"""Units: how a process makes one, in a slot or for itself, and the threads that make them ahead."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from commplan.diagnostics import CommplanError, fail
from commplan.input.work_partition import division
from commplan.ir.plan import Ref
from commplan.runtime.input.feeds.memory import FeedMemory
from commplan.runtime.input.layout import Array, aligned
from commplan.runtime.input.multirate.schedule import ClockPlan
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.observe.wait_log import LOG, ClosedError
from commplan.runtime.input.phase_order import orders
from commplan.runtime.input.program import EpochCursor, HostProgram, host_program
from commplan.runtime.input.shm import slot_status
from commplan.runtime.input.shm.slot_layout import SlotLayout, slot_layout
from commplan.runtime.input.shm.slot_status import Place, write_status
from commplan.runtime.input.shm.slots import Slots
from commplan.runtime.input.sources.adapters import Source
from commplan.runtime.input.stages.declared import declared
from commplan.runtime.input.stages.functions import called_functions

if TYPE_CHECKING:
    from commplan.runtime.input.observe.batch_record import BatchRecord
    from commplan.runtime.input.stages.batch_builder import BatchFactory

SEATS_S = 2.0  # seconds between two looks for a seat, where nobody says that one is free
_BLOCK = 64  # records of a unit that are read at once, where a source can do that
_WIDE = 1 << 32  # more than the units of an epoch


@dataclass(frozen=True)
class _UnitCursor(EpochCursor):
    """Units by a number that says where they stand: epoch * 2**32 + step."""

    def at(self, number: int) -> tuple[int, int]:
        return divmod(number, _WIDE)


class UnitMaker:
    """Makes the units of a plan; the same bits in every process. epoch: units of one; order: a checksum of
    the order of records, which the notes in slots carry."""

    def __init__(
        self, plan: ClockPlan, sources: Mapping[str, Source], functions: Mapping[str, Callable[..., Any]],
        order: int,
    ) -> None:  # fmt: skip
        units = plan.units
        if units is None:
            raise ValueError("members that share nothing have no units")
        self.program: HostProgram = host_program(units, plan.phase, None, apart=True)
        self.epoch, self.order = plan.epoch(sources), order
        self.meter = Meter(plan.phase, plan.schedule.plan)
        self.called = called_functions(self.program, functions)
        self.orders, self._sources = orders(self.program, sources), sources
        declared(self.program, self.meter)
        places = (place for place, flow in enumerate(self.program.flows) if flow.moved)
        self.layout: SlotLayout = slot_layout(
            self.program, {p: division("single_broadcast", (0,), 1) for p in places}
        )

    @functools.cached_property
    def _factory(self) -> BatchFactory:
        """Loaded by who makes units: in a process that only takes them it is memory for nothing."""
        from commplan.runtime.input.stages.batch_builder import BatchFactory  # noqa: PLC0415
        from commplan.runtime.input.stages.records import stages  # noqa: PLC0415

        return BatchFactory(
            self.program, self.orders, stages(self.program, self._sources, self.called, self.meter),
            self.meter, _BLOCK, course=_UnitCursor(0, 0, 1),
        )  # fmt: skip

    def place(self, unit: int) -> Place:
        return Place(*divmod(unit, self.epoch), self.order)

    def make(self, epoch: int, step: int, moved: Mapping[Ref, Array]) -> tuple[int, bool]:
        """Fill `moved` with unit `step` of `epoch`, in this thread; the records in it, and whether some were
        skipped."""
        builder = self._factory.batch(epoch * _WIDE + step)
        for task in builder.whole(moved):
            task()
        return len(builder.states[0].rows), not all(state.valid.all() for state in builder.states)

    def alone(self, epoch: int, step: int) -> dict[Ref, Array]:
        """A unit in memory of this process."""
        moved = self.layout.views(aligned((self.layout.nbytes,), np.dtype(np.uint8)), writable=True)
        self.make(epoch, step, moved)
        return moved


@dataclass
class MakerThreads:
    """The threads of a process that make units for all: one that looks for seats, and one for each seat.

    gone: called when the last of them has ended, but for those that were let go. look: called every few
    seconds.
    """

    memory: FeedMemory
    maker: UnitMaker
    slots: Slots
    name: str
    gone: Callable[[], None]
    look: Callable[[], None]
    record: BatchRecord | None = None  # of the run that this process records
    _lock: threading.Lock = field(default_factory=threading.Lock)
    running: list[threading.Thread] = field(default_factory=list[threading.Thread])
    _alive: int = 0
    _making: dict[int, int] = field(default_factory=dict[int, int])  # units, by the threads that make them
    _let_go: set[int] = field(default_factory=set[int])  # threads

    def start(self) -> None:
        """Errors: CP0928 where the system gives no thread."""
        self._begin(self._keep, "seats")

    def join(self, seconds: float) -> None:
        """Wait for threads that end soon; a function of the user's may hang in one."""
        for thread in list(self.running):
            if thread is not threading.current_thread():
                thread.join(seconds)

    def let_go(self) -> None:
        """Who leaves does not wait for threads that still make units, since a function of the user's may hang
        for ever: they write on to memory of this process alone, and others make the units anew. Raises
        OSError where there is no memory for that."""
        with self._lock:
            for thread, unit in list(self._making.items()):
                self.slots.detach(unit)
                del self._making[thread]
                self._let_go.add(thread)
                self._alive -= 1
            last = self._alive == 0
        if last:
            self.gone()

    def _begin(self, target: Callable[[], None], suffix: str) -> None:
        thread = threading.Thread(target=self._run, args=(target,), name=f"{self.name}-{suffix}", daemon=True)
        with self._lock:
            self._alive += 1
            self.running = [other for other in self.running if other.is_alive()] + [thread]
        try:
            thread.start()
        except RuntimeError as error:
            with self._lock:
                self._alive -= 1
                self.running.remove(thread)
            fail("CP0928", f"a feed needs threads, and none can be started: {error}", "ulimit -u")

    def _run(self, target: Callable[[], None]) -> None:
        try:
            target()
        except ClosedError:
            pass
        except CommplanError as error:  # a process holds the feed for long: it is tried again
            LOG.warning("%s", error.diagnostics[0].message)
        finally:
            with self._lock:
                is_let_go = threading.get_ident() in self._let_go
                self._alive -= not is_let_go
                last = self._alive == 0 and not is_let_go
            if last:
                self.gone()

    def _keep(self) -> None:
        """Take the seats that are free and are for this process."""
        memory = self.memory
        while not memory.stopped:
            seen = memory.seen("seats")
            seat = memory.take_seat()
            if seat is None:
                memory.sleep("seats", seen, SEATS_S)
                with contextlib.suppress(CommplanError, OSError):  # it looks again
                    self.look()
                continue
            try:
                self._begin(lambda seat=seat: self._make_at(seat), f"maker-{seat}")
            except CommplanError as error:  # another process has a thread for it, or this one later
                memory.leave_seat(seat)
                LOG.warning("%s", error.diagnostics[0].message)
                memory.sleep("seats", memory.seen("seats"), SEATS_S)

    def _make_at(self, seat: int) -> None:
        """Make units as long as the seat is for this process."""
        memory = self.memory
        try:
            while not memory.stopped and memory.is_seat_fair():
                unit = memory.claim_or_wait()
                if unit is not None:
                    self._make(unit)
        finally:
            memory.leave_seat(seat)

    def _make(self, unit: int) -> None:
        with self._lock:
            if self.memory.stopped:
                raise ClosedError
            self._making[threading.get_ident()] = unit
        root, place = self.slots.memory(unit), self.maker.place(unit)
        record = self.record
        recorded = record.begin("make", unit) if record is not None else 0
        records, spoiled, error = 0, True, None
        try:
            views = self.maker.layout.views(root, writable=True)
            records, spoiled = self.maker.make(place.epoch, place.step, views)
        except BaseException as raised:  # noqa: BLE001  told to all who come to this unit
            error = raised
        if record is not None:
            record.end(recorded, error)
        with self._lock:
            if self._making.pop(threading.get_ident(), None) is None:  # it was let go
                raise ClosedError
            write_status(root, 0, place, error)
            self.memory.made(unit, records, spoiled=spoiled)


def check_unit(root: Any, mine: Place, name: str) -> None:
    """Raise what the making of a unit raised, CP0920 where that was no error of a record. root: its slot."""
    seen = memoryview(root)
    if seen[: slot_status.HEAD_NBYTES].tobytes() == slot_status.head(mine):
        return
    _, errors, why = slot_status.read_status(bytes(seen[: slot_status.ROOM]))
    if errors:
        raise CommplanError(*errors)
    fail(
        "CP0920",
        f"a unit of feed {name!r} cannot be made: {why}",
        "a function or source tried to end its process",
    )
