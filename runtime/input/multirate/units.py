"""Batches of units: which rows of which unit a batch takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from commplan.ir.plan import Ref
from commplan.runtime.input.host_batch import FlowState
from commplan.runtime.input.layout import Array, aligned, read_only
from commplan.runtime.input.program import identity


def fill(state: FlowState, units: Sequence[Mapping[Ref, Array]], each: int) -> dict[Ref, Array]:
    """What a batch takes from units of `each` rows, by id, [1, rows, ...]; what lies in one unit is shown.

    units: what was made of them, with validity and the numbers of the records where those are known.
    """
    flow = state.flow
    runs = _runs(state.rows, each)
    for read in flow.reads:
        flags = [unit.get(f"{read.result}?") for unit in units]
        for own, unit, theirs in runs:
            valid = flags[unit]
            if valid is not None:
                state.valid[:, own] &= valid[0, theirs].astype(bool)
    moved = {ref: _join(runs, [unit[ref] for unit in units]) for ref in flow.moved}
    for read in flow.reads:
        if all(identity(read) in unit for unit in units):
            numbers = _join(runs, [unit[identity(read)][0] for unit in units])
            state.records[read.result, ()] = numbers[0]  # as those who made the rows say
    return moved


def _runs(rows: npt.NDArray[np.int64], each: int) -> list[tuple[slice, int, slice]]:
    """Rows of a batch, ascending, as runs inside units of `each` rows: where they go, the unit, its rows."""
    if not len(rows):
        return []
    ends = np.flatnonzero((np.diff(rows) != 1) | (rows[1:] % each == 0)) + 1
    starts = [0, *ends.tolist()]
    return [
        (slice(a, b), int(rows[a]) // each, slice(int(rows[a]) % each, int(rows[a]) % each + b - a))
        for a, b in zip(starts, [*ends.tolist(), len(rows)], strict=True)
    ]


def _join(runs: Sequence[tuple[slice, int, slice]], parts: Sequence[Array]) -> Array:
    """[1, rows, ...]: rows of units, without a copy where they lie in one."""
    if len(runs) == 1:
        (_, unit, theirs), *_ = runs
        return read_only(parts[unit][theirs])[None]
    joined = aligned((runs[-1][0].stop, *parts[0].shape[1:]), parts[0].dtype)
    for own, unit, theirs in runs:
        joined[own] = parts[unit][theirs]
    return joined[None]
