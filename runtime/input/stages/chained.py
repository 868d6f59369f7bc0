"""Results of a stage that one other stage takes, each made when that one asks for it."""

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
    from commplan.runtime.input.stages.records import Place, Record, Stage


class SkippedError(Exception):
    """The record failed, and the plan goes on without it."""


@dataclass(eq=False)
class Chained(Sequence["Record"]):
    """A column of a block that lies nowhere. Its taker calls both functions on one record after the other, so
    that what is between them is not copied: a function may return the same memory each time.

    Raises SkippedError for a record that is skipped.
    """

    stage: Stage
    place: Place
    records: Sequence[int]
    operands: Sequence[Sequence[Record]]
    cpu_s: float = 0.0  # what was asked for took, operands included
    done: int = 0
    nbytes: int = 0
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, row: int) -> Record:  # pyright: ignore[reportIncompatibleMethodOverride]
        start, record = time.thread_time(), self.records[row]
        try:
            value = self.stage.one(self.place, record, [column[row] for column in self.operands])
        except CommplanError as error:
            if not self.stage.skip:
                raise
            self.skipped += 1
            raise SkippedError from error
        finally:
            self.cpu_s += time.thread_time() - start
        self.done += 1
        self.nbytes += files.nbytes(value)
        # An array may be the function's own memory.
        return read_only(cast("Array", value)) if isinstance(value, np.ndarray) else value


def account(operands: Sequence[Sequence[Record]], cpu: Cpu) -> Cpu:
    """Say on the lines of those of `operands` that were made as they were asked for what that took, out of
    `cpu`; what is left of it. The kernel's split into user and system time is that of all together."""
    chained = [column for column in operands if isinstance(column, Chained)]
    left_s = cpu.both_s
    for column in chained:
        left_s -= column.cpu_s
        own = account(column.operands, _part(cpu, column.cpu_s))
        column.stage.meter.add(
            column.stage.key, cpu_s=own.both_s, system_s=own.system_s, records=column.done,
            nbytes=column.nbytes, skipped=column.skipped,
        )  # fmt: skip
    return _part(cpu, left_s) if chained else cpu


def _part(cpu: Cpu, seconds: float) -> Cpu:
    return Cpu(seconds, cpu.system_s * seconds / cpu.both_s if cpu.both_s else 0.0)
