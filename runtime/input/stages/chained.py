"""Results of a stage with a single consumer, each computed when the consumer reads it."""

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
    """The record failed, and the plan skips it."""


@dataclass(eq=False)
class Chained(Sequence["Record"]):
    """A column of a block without storage. Its consumer calls both functions on one record after the other.

    The intermediate value is therefore not copied, and a function may return the same memory on every call.

    Raises:
        SkippedError: for a record that is skipped.
    """

    stage: Stage
    position: BlockPosition
    records: Sequence[int]
    operands: Sequence[Sequence[Record]]
    cpu_s: float = 0.0  # of the records computed so far, operands included
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
    """Report the cost of chained operands on their own lines.

    Args:
        operands: the columns of a stage.
        cpu: the CPU time of the stage, operands included.

    Returns:
        The rest of `cpu`. System time is divided in proportion to CPU time.
    """
    chained = [column for column in operands if isinstance(column, Chained)]
    left_s = cpu.both_s
    for column in chained:
        left_s -= column.cpu_s
        cost = account(column.operands, _part(cpu, column.cpu_s))
        column.stage.meter.add(
            column.stage.key, cpu_s=cost.both_s, system_s=cost.system_s, records=column.done,
            nbytes=column.nbytes, skipped=column.skipped,
        )  # fmt: skip
    return _part(cpu, left_s) if chained else cpu


def _part(cpu: Cpu, seconds: float) -> Cpu:
    return Cpu(seconds, cpu.system_s * seconds / cpu.both_s if cpu.both_s else 0.0)
