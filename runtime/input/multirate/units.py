"""Building the batch of a member from rows of one or more units of a ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from commplan.ir.plan import Ref
from commplan.runtime.input.host_batch import FlowState
from commplan.runtime.input.layout import Array, aligned, read_only
from commplan.runtime.input.program import identity


def fill(state: FlowState, units: Sequence[Mapping[Ref, Array]], each: int) -> dict[Ref, Array]:
    """Collect the rows of a batch from units, and update validity and record numbers in `state`.

    Args:
        state: the flow of the batch; `state.rows` are the rows, ascending, counted from the first row of
            `units`.
        units: the consecutive units of the batch, each with its arrays by id: moved values [rows, ...], and
            validity flags and record numbers [1, rows] if available.
        each: the number of rows of a full unit.

    Returns:
        The moved values of the batch, by id: [1, rows, ...]. They are views if all rows are in one unit.
    """
    flow = state.flow
    runs = _runs(state.rows, each)
    for read in flow.reads:
        # The key is that of `validity`, for flows of the units that begin with this load.
        flags = [unit.get(f"{read.result}?") for unit in units]
        for rows, unit, unit_rows in runs:
            valid = flags[unit]
            if valid is not None:
                state.valid[:, rows] &= valid[0, unit_rows].astype(bool)
    moved = {ref: _join(runs, [unit[ref] for unit in units]) for ref in flow.moved}
    for read in flow.reads:
        if all(identity(read) in unit for unit in units):
            numbers = _join(runs, [unit[identity(read)][0] for unit in units])
            state.records[read.result, ()] = numbers[0]  # the numbers that the makers of the units stored
    return moved


def _runs(rows: npt.NDArray[np.int64], each: int) -> list[tuple[slice, int, slice]]:
    """Split the ascending rows of a batch into runs inside units of `each` rows.

    Returns:
        For each run its rows in the batch, the index of the unit, and its rows in the unit.
    """
    if not len(rows):
        return []
    # A run ends before a gap and before the first row of a unit.
    ends = (np.flatnonzero((np.diff(rows) != 1) | (rows[1:] % each == 0)) + 1).tolist()
    runs: list[tuple[slice, int, slice]] = []
    for start, end in zip([0, *ends], [*ends, len(rows)], strict=True):
        unit, unit_row = divmod(int(rows[start]), each)
        runs.append((slice(start, end), unit, slice(unit_row, unit_row + end - start)))
    return runs


def _join(runs: Sequence[tuple[slice, int, slice]], unit_arrays: Sequence[Array]) -> Array:
    """Join rows of units.

    Args:
        runs: the result of `_runs`, not empty.
        unit_arrays: [rows, ...], the array of each unit.

    Returns:
        [1, rows, ...]. It is a read-only view if all rows are in one unit.
    """
    if len(runs) == 1:
        (_, unit, unit_rows), *_ = runs
        return read_only(unit_arrays[unit][unit_rows])[None]
    result = aligned((runs[-1][0].stop, *unit_arrays[0].shape[1:]), unit_arrays[0].dtype)
    for rows, unit, unit_rows in runs:
        result[rows] = unit_arrays[unit][unit_rows]
    return result[None]
