"""The outputs of a phase for a member, and a fast path for batches that consist of one unit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from commplan.diagnostics import fail
from commplan.ir.plan import Ref
from commplan.runtime.input.feeds.batch import Batch
from commplan.runtime.input.host_batch import HostBatch
from commplan.runtime.input.layout import Bools
from commplan.runtime.input.program import HostProgram
from commplan.runtime.input.unit_batches import UnitBatches, UnitTable, are_units


def member_outputs(program: HostProgram) -> list[tuple[str, Ref, bool]]:
    """List the outputs of a phase that a member receives.

    Returns:
        For each output its name, its value, and whether the value has a dimension for the member.

    Raises:
        CommplanError: CP0932 if a device function computes an output.
    """
    phase, schedule = program.phase, program.schedule
    bindings = {
        binding.name: binding.value for binding in (*phase.outputs, *phase.takes) if binding.source_only
    }
    for name, ref in bindings.items():
        if ref not in program.roots:
            fail(
                "CP0932",
                f"`{name}` of phase `{phase.name}` is made by a function of the device, and a feed has none",
                "output what that function is given, and call it in the training step",
                span=phase.span,
                file=schedule.file,
            )
    return [(name, ref, bool(program.per(ref))) for name, ref in bindings.items()]


class _Table(NamedTuple):
    """The layout of all batches with the same number of rows.

    Attributes:
        arrays: name, shape, dtype and byte offset in the slot of each array.
        counts: the outputs that are counts, by name: read-only scalars.
        mask: bool [rows], False for padding; None if the loads have different numbers of rows.
        units: the facts of the units.
    """

    arrays: list[tuple[str, tuple[int, ...], np.dtype[Any], int]]
    counts: dict[str, npt.NDArray[np.int32]]
    mask: Bools | None
    units: UnitTable


class OneUnit:
    """Creates batches that are one unit without skipped records: views of the slot.

    It keeps the record numbers of these batches for the visit check, which counts many batches at once.

    Args:
        units: describes batches that are units.
        outputs: the result of `member_outputs`.
        steps: the number of steps of an epoch.
    """

    def __init__(self, units: UnitBatches, outputs: Sequence[tuple[str, Ref, bool]], steps: int) -> None:
        self._units, self._last_step = units, steps - 1
        self._full, self._last = (_table(units.table(step), outputs) for step in (0, steps - 1))
        self._ids: dict[int, bytes] = {}  # the bytes with record numbers of each batch, by step

    def batch(self, root: Any, epoch: int, step: int) -> Batch:
        """Create a batch.

        Args:
            root: the bytes of the slot. The arrays keep a reference to them.
            epoch: the epoch.
            step: the step in the epoch.
        """
        table = self._full if step < self._last_step else self._last
        batch = Batch(table.counts)
        for name, shape, dtype, offset in table.arrays:
            array = batch[name] = np.ndarray(shape, dtype, root, offset)
            array.setflags(write=False)
        batch.place(epoch, step, table.mask)
        self._ids[step] = self._units.identities(root)
        return batch

    def visits(self, epoch: int) -> HostBatch | None:
        """Collect the visits of all batches since `forget`.

        Args:
            epoch: the epoch of all of these batches.

        Returns:
            One batch without arrays, at the position of the last of them, with their visits; None if there
            are none.
        """
        if not self._ids:
            return None
        tables = [(self._full if step < self._last_step else self._last).units for step in self._ids]
        visits = [table.visits(data) for table, data in zip(tables, self._ids.values(), strict=True)]
        merged = (
            same[0]._replace(records=np.concatenate([visit.records for visit in same]))
            for same in zip(*visits, strict=True)
        )
        return HostBatch({}, {}, self._units.seeds, epoch, max(self._ids), 0, tuple(merged))

    def forget(self) -> None:
        """Drop the records that `visits` has returned."""
        self._ids = {}


def _table(units: UnitTable, outputs: Sequence[tuple[str, Ref, bool]]) -> _Table:
    """The facts of batches, with arrays by name and without a dimension for the member.

    Args:
        units: the facts of the units.
        outputs: the result of `member_outputs`.
    """
    views = {view.ref: view for view in units.views}
    arrays = [
        (name, view.shape[1:] if per else view.shape, view.dtype, view.offset)
        for name, ref, per in outputs
        if (view := views.get(ref)) is not None
    ]
    # Copies own their memory: `Batch.torch` cannot make a view of them writable.
    counts = {name: units.counts[ref].reshape(()).copy() for name, ref, _ in outputs if ref in units.counts}
    mask = None if units.mask is None else units.mask.rows.reshape(-1)
    for array in (*counts.values(), *(() if mask is None else (mask,))):
        array.setflags(write=False)
    return _Table(arrays, counts, mask, units)


def is_one_unit(program: HostProgram, each: int) -> bool:
    """Whether `OneUnit` can create the batches of a member that takes `each` units per step.

    The caller checks that an epoch of the member has as many steps as units.
    """
    return each == 1 and are_units(program) and not any(flow.per for flow in program.flows)
