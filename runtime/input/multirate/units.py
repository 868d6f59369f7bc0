"""Building a batch from rows of units."""

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
        state: the flow of the batch; `state.rows` are the rows, counted from the first row of `units`.
        units: the arrays of each unit, by id, with validity and record numbers if available.
        each: the number of rows of a unit.

    Returns:
        The moved values of the batch, by id: [1, rows, ...]. There is no copy if all rows are in one unit.
    """
    flow = state.flow
    runs = _runs(state.rows, each)
    for read in flow.reads:
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
        For each run the rows of the batch, the index of the unit, and the rows of the unit.
    """
    if not len(rows):
        return []
    ends = np.flatnonzero((np.diff(rows) != 1) | (rows[1:] % each == 0)) + 1
    starts = [0, *ends.tolist()]
    return [
        (slice(a, b), int(rows[a]) // each, slice(int(rows[a]) % each, int(rows[a]) % each + b - a))
        for a, b in zip(starts, [*ends.tolist(), len(rows)], strict=True)
    ]


def _join(runs: Sequence[tuple[slice, int, slice]], parts: Sequence[Array]) -> Array:
    """Join rows of units: [1, rows, ...]. There is no copy if all rows are in one unit."""
    if len(runs) == 1:
        (_, unit, unit_rows), *_ = runs
        return read_only(parts[unit][unit_rows])[None]
    result = aligned((runs[-1][0].stop, *parts[0].shape[1:]), parts[0].dtype)
    for rows, unit, unit_rows in runs:
        result[rows] = parts[unit][unit_rows]
    return result[None]
