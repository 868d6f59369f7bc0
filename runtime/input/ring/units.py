"""The content of units: a batch of a host program, made in parts, in a slot or for one process alone."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from commplan.diagnostics import CommplanError, fail
from commplan.input.work_partition import Division, division
from commplan.ir.plan import Ref
from commplan.runtime.input.layout import Array, aligned
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.phase_order import fingerprint, orders
from commplan.runtime.input.program import EpochCursor, HostProgram
from commplan.runtime.input.ring.words import MOST_PARTS
from commplan.runtime.input.shm import slot_status
from commplan.runtime.input.shm.slot_layout import SlotLayout, slot_layout
from commplan.runtime.input.shm.slot_status import Place, write_status
from commplan.runtime.input.sources.adapters import Source
from commplan.runtime.input.stages.declared import declared
from commplan.runtime.input.stages.functions import called_functions

if TYPE_CHECKING:
    from commplan.runtime.input.stages.batch_builder import BatchFactory

_BLOCK = 64  # records of a unit that are read at once, if a source can do that
_PART_ROWS = 4  # rows of a part, at least
_WIDE = 1 << 32  # more than the units of an epoch


@dataclass(frozen=True)
class _UnitCursor(EpochCursor):
    """Units by a number that says where they are: epoch * 2**32 + step."""

    def at(self, number: int) -> tuple[int, int]:
        return divmod(number, _WIDE)


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

    def divisions(self, parts: int) -> dict[int, Division]:
        """How the rows of each flow that moves anything are cut into parts."""
        places = (place for place, flow in enumerate(self.program.flows) if flow.moved)
        makers = (0,) * parts
        return {place: division("all_shared", makers, parts) for place in places}

    def parts(self, cores: int) -> int:
        """Parts of a unit, so that all `cores` make the first unit of an epoch together."""
        rows = max(flow.batch for flow in self.program.flows)
        return max(1, min(cores, rows // _PART_ROWS, MOST_PARTS))


class Units:
    """Makes the units of a program; the same bits in every process. parts: of each unit."""

    def __init__(self, content: UnitProgram, parts: int) -> None:
        self.content, self.parts = content, parts
        self.divisions = content.divisions(parts)
        self.layout: SlotLayout = slot_layout(content.program, self.divisions)

    @functools.cached_property
    def _factory(self) -> BatchFactory:
        """Loaded when the first part is made: processes that only consume units need less memory."""
        from commplan.runtime.input.stages.batch_builder import BatchFactory  # noqa: PLC0415
        from commplan.runtime.input.stages.records import stages  # noqa: PLC0415

        content = self.content
        return BatchFactory(
            content.program, content.orders,
            stages(content.program, content.sources, content.called, content.meter), content.meter, _BLOCK,
            course=_UnitCursor(0, 0, 1), divisions=self.divisions,
        )  # fmt: skip

    def place(self, unit: int) -> Place:
        """Where `unit` is, counted from the start of epoch 0."""
        return Place(*divmod(unit, self.content.epoch), self.content.order)

    def fill(self, unit: int, part: int, root: Any) -> Made:
        """Make a part of `unit` in the slot whose bytes are `root`."""
        try:
            return self._fill(self.place(unit), part, self.layout.views(root, writable=True))
        except BaseException as error:  # noqa: BLE001  every consumer of the unit raises it
            return Made(0, True, error)

    def note(self, unit: int, part: int, root: Any, error: BaseException | None) -> None:
        """Write the note of a part: its place and its error."""
        write_status(root, part, self.place(unit), error)

    def alone(self, epoch: int, step: int) -> dict[Ref, Array]:
        """A unit in memory of this process."""
        moved = self.layout.views(aligned((self.layout.nbytes,), np.dtype(np.uint8)), writable=True)
        for part in range(self.parts):
            self._fill(Place(epoch, step, self.content.order), part, moved)
        return moved

    def _fill(self, place: Place, part: int, moved: Mapping[Ref, Array]) -> Made:
        builder = self._factory.batch(place.epoch * _WIDE + place.step)
        for task in builder.part(part, moved):
            task()
        is_clean, records = True, 0
        for flow, cut in reversed(self.divisions.items()):
            state = builder.states[flow]
            low, high = cut.part(len(state.rows), part)
            is_clean, records = is_clean and bool(state.valid[:, low:high].all()), high - low
        return Made(records, not is_clean)

    def check(self, unit: int, root: Any, title: str) -> None:
        """Raise the error of the first part of `unit` that failed, if one did. root: the bytes of its slot.

        Raises:
            CommplanError: CP0920 if it was no error of a record; else the error of the record.
        """
        seen, fine = memoryview(root), slot_status.head(self.place(unit))
        for part in range(self.parts):
            at = part * slot_status.ROOM
            if seen[at : at + slot_status.HEAD_NBYTES].tobytes() == fine:
                continue
            _, errors, why = slot_status.read_status(bytes(seen[at : at + slot_status.ROOM]))
            if errors:
                raise CommplanError(*errors)
            fail(
                "CP0920",
                f"a unit of {title} cannot be made: {why}",
                "a function or source tried to end its process",
            )
