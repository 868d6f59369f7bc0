"""The contents of units: batches of a host program, made in parts, in slots or in private memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from commplan.diagnostics import CommplanError, Diagnostic, fail
from commplan.input.work_partition import MOST_PARTS, Division, division
from commplan.ir.plan import Ref
from commplan.runtime.input.layout import Array, aligned
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.observe.wait_log import ClosedError
from commplan.runtime.input.phase_order import fingerprint, load_orders
from commplan.runtime.input.program import EpochCursor, HostProgram
from commplan.runtime.input.shm import slot_status
from commplan.runtime.input.shm.slot_layout import SlotLayout, slot_layout
from commplan.runtime.input.shm.slot_status import BatchPosition, write_status
from commplan.runtime.input.sources import adapters
from commplan.runtime.input.sources.adapters import Source
from commplan.runtime.input.stages.declared import declared
from commplan.runtime.input.stages.functions import called_functions

if TYPE_CHECKING:
    from commplan.runtime.input.stages.batch_builder import BatchFactory
    from commplan.runtime.input.stages.worker_pool import Workers

_BLOCK = 64  # the most records of a unit that are read in one call, if the source supports it
_PART_ROWS = 4  # the least number of rows of a part, unless a unit has fewer


class Made(NamedTuple):
    """The result of making parts.

    Attributes:
        records: the number of rows of the parts in the first flow; 0 if a part failed.
        is_spoiled: whether a part failed or some of its records were skipped.
        error: the error if a part failed, else None.
    """

    records: int
    is_spoiled: bool
    error: BaseException | None = None


class UnitProgram:
    """The host program whose batches are units.

    Args:
        program: the program.
        epoch: the number of units in an epoch.
        sources: the sources by name.
        functions: the host functions by name; others are ignored.

    Attributes:
        program: the program.
        epoch: the number of units in an epoch.
        sources: the sources by name.
        meter: the costs of making units in this process.
        orders: the order of records of each load.
        order: a checksum of `orders`.
        called: the functions that the program calls, by name.
    """

    def __init__(
        self, program: HostProgram, epoch: int, sources: Mapping[str, Source],
        functions: Mapping[str, Callable[..., Any]],
    ) -> None:  # fmt: skip
        self.program, self.epoch, self.sources = program, epoch, sources
        self.meter = Meter(program.phase.name, program.schedule.plan)
        self.called = called_functions(program, functions)
        self.orders = load_orders(program, sources)
        self.order = fingerprint(program, self.orders)
        declared(program, self.meter)

    @property
    def rows(self) -> int:
        """The number of records of a unit in its first load."""
        return self.program.flows[0].batch


def divisions_of(program: HostProgram, parts: int) -> dict[int, Division]:
    """The division of each flow that moves values into parts made on one host, by the index of the flow.

    `readers` of these divisions are numbers of parts, not processes: any process may make each part.
    """
    indices = (index for index, flow in enumerate(program.flows) if flow.moved)
    return {index: division("all_shared", (0,) * parts) for index in indices}


def parts_of(program: HostProgram, cores: int) -> int:
    """The number of parts of a unit: one for each of `cores`, which all work on the first unit of an epoch.

    Parts of the largest flow have at least `_PART_ROWS` rows, unless there is one part. There are at most
    `MOST_PARTS`.
    """
    rows = max(flow.batch for flow in program.flows)
    return max(1, min(cores, rows // _PART_ROWS, MOST_PARTS))


class Trouble(NamedTuple):
    """The status of a part that failed or that belongs to another unit.

    Attributes:
        part: the index of the part.
        position: the epoch, step and order of records of the part.
        errors: errors of records; () if there are none.
        other: the text of any other error; "" if there is none.
        process: the index in its group of the process that made the part; -1 in a feed.
    """

    part: int
    position: BatchPosition
    errors: tuple[Diagnostic, ...]
    other: str
    process: int


class Units:
    """Makes the units of a program, with identical bits in all processes.

    Args:
        load: returns the factory of the batches. It is called before the first part is made, so that
            processes that only consume units need less memory.
        epoch_cursor: the epochs and steps of units.
        order: a checksum of the order of records.
        layout: the layout of a slot.
        process: the index of this process in its group; -1 in a feed.
        is_single: whether no other process consumes the units. Then all errors are raised as they are, not
            only those that can be written into a slot.

    Attributes:
        epoch_cursor: the epochs and steps of units.
        layout: the layout of a slot.
    """

    def __init__(
        self, load: Callable[[], BatchFactory], epoch_cursor: EpochCursor, order: int, layout: SlotLayout,
        process: int = -1, *, is_single: bool = False,
    ) -> None:  # fmt: skip
        self._load, self.epoch_cursor, self._order = load, epoch_cursor, order
        self.layout, self._process, self._is_single = layout, process, is_single
        self._errors: dict[tuple[int, int], BaseException] = {}  # of this process, by (unit, part)

    @functools.cached_property
    def _factory(self) -> BatchFactory:
        return self._load()

    def load(self) -> None:
        """Create the factory now, which opens the caches. A cache exists until the last process closes it."""
        _ = self._factory

    def close(self) -> None:
        """Release the factory with its caches. No parts are made afterwards."""
        self.__dict__.pop("_factory", None)
        self._load = _closed

    def position(self, unit: int) -> BatchPosition:
        """The epoch, the step and the order of records of `unit`."""
        return BatchPosition(*self.epoch_cursor.at(unit), self._order)

    def fill(self, unit: int, parts: range, root: Any, is_stopped: Callable[[], bool]) -> Made:
        """Make consecutive parts of `unit`.

        Args:
            unit: the unit.
            parts: the indices of the parts.
            root: the bytes of the slot.
            is_stopped: returns whether to stop. It is called before each task.

        Returns:
            The number of records, or the error of the parts.

        Raises:
            ClosedError: if `is_stopped()` returns True before the parts are complete.
        """
        try:
            moved = self.layout.views(root, writable=True)
            return self._fill(*self.epoch_cursor.at(unit), parts, moved, is_stopped)
        except ClosedError:
            raise
        except BaseException as error:  # noqa: BLE001  every consumer of the unit raises it
            if isinstance(error, CommplanError) or self._is_single:
                self._errors[unit, parts[0]] = error  # the status of a part may be too short for it
            return Made(0, True, error)

    def note(self, unit: int, part: int, root: Any, error: BaseException | None) -> None:
        """Write the status of a part into its slot: the position of its unit and its error.

        Args:
            unit: the unit.
            part: the index of the part.
            root: the bytes of the slot.
            error: the error of the part; None if there is none.
        """
        write_status(root, part, self.position(unit), error, self._process)

    def rows(self, unit: int) -> dict[int, int]:
        """The number of rows of `unit` in each flow that moves values, by the index of the flow."""
        states = self._factory.batch(unit).states
        return {flow: len(states[flow].rows) for flow in self.layout.divisions}

    def make_private(self, epoch: int, step: int) -> dict[Ref, Array]:
        """Make a unit in private memory.

        Returns:
            The arrays of the unit, by id.

        Raises:
            CommplanError: the error of a record. Other errors are raised as they are, too.
        """
        workers = self._factory.workers
        fresh = aligned if workers is None else workers.fresh
        moved = self.layout.views(fresh((self.layout.nbytes,), np.dtype(np.uint8)), writable=True)
        self._fill(epoch, step, range(self.layout.parts), moved, lambda: False)
        return moved

    def _fill(
        self, epoch: int, step: int, parts: range, moved: Mapping[Ref, Array], is_stopped: Callable[[], bool]
    ) -> Made:
        """Make consecutive parts of the unit at `step` of `epoch` in `moved`, its arrays."""
        builder = self._factory.at(epoch, step)
        for task in builder.parts(parts, moved, self.layout.divisions):
            if is_stopped():
                raise ClosedError
            task()
        is_clean, records = True, 0
        # Backwards: `records` are those of the first flow.
        for flow, cut in reversed(tuple(self.layout.divisions.items())):
            state = builder.states[flow]
            low, high = cut.part(len(state.rows), parts[0])[0], cut.part(len(state.rows), parts[-1])[1]
            is_clean, records = is_clean and bool(state.valid[:, low:high].all()), high - low
        return Made(records, not is_clean)

    def release_thread(self) -> None:
        """End the worker process of the calling thread, if any, because the thread makes no more parts."""
        if "_factory" in self.__dict__ and self._factory.workers is not None:
            self._factory.workers.leave()

    def trouble(self, unit: int, root: Any) -> Trouble | None:
        """Find the first part of `unit` that failed.

        Args:
            unit: the unit.
            root: the bytes of its slot.

        Returns:
            The status of the part; None if all parts succeeded.

        Raises:
            BaseException: the error of the part, if this process made it and still has the error.
        """
        statuses, without_error = memoryview(root), slot_status.head(self.position(unit))
        for part in range(self.layout.parts):
            offset = part * slot_status.NOTE_NBYTES
            if statuses[offset : offset + slot_status.HEAD_NBYTES].tobytes() == without_error:
                continue
            status = bytes(statuses[offset : offset + slot_status.NOTE_NBYTES])
            if (error := self._errors.get((unit, part))) is not None:
                raise error
            return Trouble(part, *slot_status.read_status(status))
        return None

    def check(self, unit: int, root: Any, title: str) -> None:
        """Raise the error of the first part of `unit` that failed, if any.

        Args:
            unit: the unit.
            root: the bytes of its slot.
            title: the name of the ring in messages.

        Raises:
            CommplanError: the errors of records, or CP0920 for any other error.
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


def _closed() -> NoReturn:
    raise ClosedError


def layout_of(program: HostProgram, parts: int) -> SlotLayout:
    """The layout of a slot for units with `parts` parts, made on one host."""
    return slot_layout(program, divisions_of(program, parts))


def units_of(content: UnitProgram, layout: SlotLayout, workers: Workers | None = None) -> Units:
    """Create the units of members that advance independently.

    Args:
        content: the program of the units.
        layout: the layout of a slot.
        workers: worker processes that make the units; None for threads.

    Raises:
        CommplanError: as `cache.record_cache.caches`, if the program has caches.
    """
    program, epoch_cursor = content.program, EpochCursor(0, 0, content.epoch)

    def load() -> BatchFactory:
        """Create the factory of the units, with modules that processes without makers do not need."""
        from commplan.runtime.input.stages.batch_builder import BatchFactory  # noqa: PLC0415
        from commplan.runtime.input.stages.records import stages  # noqa: PLC0415

        made_of = stages(program, content.sources, content.called, content.meter)
        block = _BLOCK if workers is None else workers.block
        batched = adapters.fetch_groups(content.sources)
        return BatchFactory(
            program, content.orders, made_of, content.meter, block, workers, batched, epoch_cursor
        )

    units = Units(load, epoch_cursor, content.order, layout)
    if program.has_caches:
        units.load()
    return units
