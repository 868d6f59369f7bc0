"""The content of units: a batch of a host program, made in parts, in a slot or for one process alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from commplan.diagnostics import CommplanError, Diagnostic, fail
from commplan.input.work_partition import MOST_PARTS, Division, division
from commplan.ir.plan import Ref
from commplan.runtime.input.layout import Array, aligned
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.phase_order import fingerprint, orders
from commplan.runtime.input.program import EpochCursor, HostProgram
from commplan.runtime.input.shm import slot_status
from commplan.runtime.input.shm.slot_layout import SlotLayout, slot_layout
from commplan.runtime.input.shm.slot_status import Place, write_status
from commplan.runtime.input.sources import adapters
from commplan.runtime.input.sources.adapters import Source
from commplan.runtime.input.stages.declared import declared
from commplan.runtime.input.stages.functions import called_functions

if TYPE_CHECKING:
    from commplan.runtime.input.stages.batch_builder import BatchFactory
    from commplan.runtime.input.stages.worker_pool import Workers

_BLOCK = 64  # records of a unit that are read at once, if a source can do that
_PART_ROWS = 4  # rows of a part, at least


class Made(NamedTuple):
    """The result of making a part. records: in it. is_spoiled: it failed, or some of them were skipped."""

    records: int
    is_spoiled: bool
    error: BaseException | None = None


class UnitProgram:
    """The host program whose batches are units. epoch: units of one; order: a checksum of the order of
    records; called: the functions that it calls."""

    def __init__(
        self, program: HostProgram, epoch: int, sources: Mapping[str, Source],
        functions: Mapping[str, Callable[..., Any]],
    ) -> None:  # fmt: skip
        self.program, self.epoch, self.sources = program, epoch, sources
        self.meter = Meter(program.phase.name, program.schedule.plan)
        self.called = called_functions(program, functions)
        self.orders = orders(program, sources)
        self.order = fingerprint(program, self.orders)
        declared(program, self.meter)

    @property
    def rows(self) -> int:
        """Records of a unit in its first load."""
        return self.program.flows[0].batch


def divisions_of(program: HostProgram, parts: int) -> dict[int, Division]:
    """The rows of each flow that moves anything, cut into parts."""
    places = (place for place, flow in enumerate(program.flows) if flow.moved)
    return {place: division("all_shared", (0,) * parts) for place in places}


def parts_of(program: HostProgram, cores: int) -> int:
    """Parts of a unit, so that all `cores` make the first unit of an epoch together."""
    rows = max(flow.batch for flow in program.flows)
    return max(1, min(cores, rows // _PART_ROWS, MOST_PARTS))


class Trouble(NamedTuple):
    """The note of a part that failed, or that belongs to another unit. errors: of records; other: any other
    error, in words. process: of a group, the number of the process that made the part; -1 in a feed."""

    part: int
    place: Place
    errors: tuple[Diagnostic, ...]
    other: str
    process: int


class Units:
    """Makes the units of a program; the same bits in every process.

    load: returns the factory of their batches. It is called when the first part is made: processes that only
    consume units need less memory. course: the epochs and steps of units. order: a checksum of the order of
    records. process: of a group, the number of this process.
    """

    def __init__(
        self, load: Callable[[], BatchFactory], course: EpochCursor, order: int, layout: SlotLayout,
        process: int = -1,
    ) -> None:  # fmt: skip
        self._load, self.course, self._order, self.layout, self._process = (
            load,
            course,
            order,
            layout,
            process,
        )
        self._errors: dict[tuple[int, int], CommplanError] = {}  # of this process, by unit and part

    @functools.cached_property
    def _factory(self) -> BatchFactory:
        return self._load()

    def load(self) -> None:
        """Load the factory now. Caches end with the last process that has them open."""
        _ = self._factory

    def place(self, unit: int) -> Place:
        """Where `unit` is, counted from the start of epoch 0."""
        return Place(*self.course.at(unit), self._order)

    def fill(self, unit: int, part: int, root: Any, is_stopped: Callable[[], bool]) -> Made:
        """Make a part of `unit` in the slot whose bytes are `root`.

        Raises:
            ClosedError: if `is_stopped()` before it is complete.
        """
        try:
            moved = self.layout.views(root, writable=True)
            return self._fill(*self.course.at(unit), part, moved, is_stopped)
        except ClosedError:
            raise
        except BaseException as error:  # noqa: BLE001  every consumer of the unit raises it
            if isinstance(error, CommplanError):  # the note of a part may not hold all of it
                self._errors[unit, part] = error
            return Made(0, True, error)

    def note(self, unit: int, part: int, root: Any, error: BaseException | None) -> None:
        """Write the note of a part: its place and its error."""
        write_status(root, part, self.place(unit), error, self._process)

    def rows(self, unit: int) -> dict[int, int]:
        """The rows of each flow in `unit`."""
        states = self._factory.batch(unit).states
        return {flow: len(states[flow].rows) for flow in self.layout.divisions}

    def alone(self, epoch: int, step: int) -> dict[Ref, Array]:
        """A unit in memory of this process."""
        workers = self._factory.workers
        fresh = aligned if workers is None else workers.fresh
        moved = self.layout.views(fresh((self.layout.nbytes,), np.dtype(np.uint8)), writable=True)
        for part in range(self.layout.parts):
            self._fill(epoch, step, part, moved, lambda: False)
        return moved

    def _fill(
        self, epoch: int, step: int, part: int, moved: Mapping[Ref, Array], is_stopped: Callable[[], bool]
    ) -> Made:
        builder = self._factory.at(epoch, step)
        for task in builder.part(part, moved, self.layout.divisions):
            if is_stopped():
                raise ClosedError
            task()
        is_clean, records = True, 0
        for flow, cut in reversed(tuple(self.layout.divisions.items())):
            state = builder.states[flow]
            low, high = cut.part(len(state.rows), part)
            is_clean, records = is_clean and bool(state.valid[:, low:high].all()), high - low
        return Made(records, not is_clean)

    def release_thread(self) -> None:
        """The calling thread makes no more parts: its worker process ends, if it has one."""
        if "_factory" in self.__dict__ and self._factory.workers is not None:
            self._factory.workers.leave()

    def trouble(self, unit: int, root: Any) -> Trouble | None:
        """The first part of `unit` that failed; None if none did. root: the bytes of its slot."""
        seen, fine = memoryview(root), slot_status.head(self.place(unit))
        for part in range(self.layout.parts):
            at = part * slot_status.ROOM
            if seen[at : at + slot_status.HEAD_NBYTES].tobytes() == fine:
                continue
            if (error := self._errors.get((unit, part))) is not None:
                raise error
            return Trouble(part, *slot_status.read_status(bytes(seen[at : at + slot_status.ROOM])))
        return None

    def check(self, unit: int, root: Any, title: str) -> None:
        """Raise the error of the first part of `unit` that failed, if one did. root: the bytes of its slot.

        Raises:
            CommplanError: CP0920 if it was no error of a record; else the error of the record.
        """
        trouble = self.trouble(unit, root)
        if trouble is None:
            return
        if trouble.errors:
            raise CommplanError(*trouble.errors)
        fail(
            "CP0920",
            f"a unit of {title} cannot be made: {trouble.other}",
            "a function or source tried to end its process",
        )


def layout_of(program: HostProgram, parts: int) -> SlotLayout:
    """The layout of units in `parts`, all of which are made on one host."""
    return slot_layout(program, divisions_of(program, parts))


def units_of(content: UnitProgram, layout: SlotLayout, workers: Workers | None = None) -> Units:
    """The units of members with clocks of their own. workers: make them, if not threads."""
    program, course = content.program, EpochCursor(0, 0, content.epoch)

    def load() -> BatchFactory:
        from commplan.runtime.input.stages.batch_builder import BatchFactory  # noqa: PLC0415
        from commplan.runtime.input.stages.records import stages  # noqa: PLC0415

        made_of = stages(program, content.sources, content.called, content.meter)
        block = _BLOCK if workers is None else workers.block
        batched = adapters.together(content.sources)
        return BatchFactory(program, content.orders, made_of, content.meter, block, workers, batched, course)

    units = Units(load, course, content.order, layout)
    if program.has_caches:
        units.load()
    return units
