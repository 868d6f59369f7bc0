"""Results of a stage with a single consumer, each computed when the consumer reads it.

`BatchFactory.chained` decides which results are chained.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from commplan.diagnostics import CommplanError
from commplan.runtime.input.layout import Array, read_only
from commplan.runtime.input.observe.accounting import Cpu
from commplan.runtime.input.sources import files

if TYPE_CHECKING:
    from commplan.runtime.input.stages.records import BlockPosition, Record, Stage


class SkippedError(Exception):
    """A record failed in an earlier stage, and the plan skips it."""


@dataclass(eq=False)
class Chained(Sequence["Record"]):
    """The results of a stage for a block of records, each computed when its row is read.

    The consumer reads each row once, in any order. It has used a result before it reads the next one. The
    intermediate values are therefore not copied, and a function may return the same memory on every call.

    Attributes:
        stage: the stage.
        position: the position of the block.
        records: the record index of each row.
        operands: a column for each operand of the stage; empty for a load.
        cpu_s: CPU seconds for the rows read so far, including their operands.
        done: the number of results so far.
        nbytes: the bytes of these results.
        skipped: the number of rows that failed in this stage so far.

    Raises:
        SkippedError: from `__getitem__`, for a row that fails and is skipped here or in an earlier stage.
        CommplanError: from `__getitem__`, for a row that fails and is not skipped.
    """

    stage: Stage
    position: BlockPosition
    records: Sequence[int]
    operands: Sequence[Sequence[Record]]
    cpu_s: float = 0.0
    done: int = 0
    nbytes: int = 0
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, row: int) -> Record:  # pyright: ignore[reportIncompatibleMethodOverride]
        start, record = time.thread_time(), self.records[row]
        try:
            value = self.stage.one(self.position, record, [column[row] for column in self.operands])
        except CommplanError as error:
            if not self.stage.skip:
                raise
            self.skipped += 1
            raise SkippedError from error
        finally:
            self.cpu_s += time.thread_time() - start
        self.done += 1
        self.nbytes += files.nbytes(value)
        # The function may keep a reference to this array.
        return read_only(cast("Array", value)) if isinstance(value, np.ndarray) else value


def account(operands: Sequence[Sequence[Record]], cpu: Cpu) -> Cpu:
    """Report the cost of chained operands to the meter, on their own lines.

    Args:
        operands: a column for each operand of a stage. All their rows have been read.
        cpu: the CPU time of the stage, including that of chained operands.

    Returns:
        The CPU time of the stage alone. System time is divided in proportion to CPU time.
    """
    chained = [column for column in operands if isinstance(column, Chained)]
    stage_s = cpu.both_s
    for column in chained:
        stage_s -= column.cpu_s
        cost = account(column.operands, _part(cpu, column.cpu_s))
        column.stage.meter.add(
            column.stage.key, cpu_s=cost.both_s, system_s=cost.system_s, records=column.done,
            nbytes=column.nbytes, skipped=column.skipped,
        )  # fmt: skip
    return _part(cpu, stage_s) if chained else cpu


def _part(cpu: Cpu, seconds: float) -> Cpu:
    """`seconds` of `cpu`, with the same share of system time."""
    return Cpu(seconds, cpu.system_s * seconds / cpu.both_s if cpu.both_s else 0.0)
