"""Results of a stage that one other stage takes, each made when that one asks for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from commplan.diagnostics import CommplanError
from commplan.runtime.input.accounting import NO_CPU, Cpu, thread_cpu
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
    cpu: Cpu = NO_CPU  # what was asked for took, operands included
    done: int = 0
    nbytes: int = 0
    skipped: int = 0

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, row: int) -> Record:  # pyright: ignore[reportIncompatibleMethodOverride]
        start, record = thread_cpu(), self.records[row]
        try:
            (value,) = self.stage.one(self.place, record, [column[row] for column in self.operands])
        except CommplanError as error:
            if not self.stage.skip:
                raise
            self.skipped += 1
            raise SkippedError from error
        finally:
            self.cpu += thread_cpu() - start
        self.done += 1
        self.nbytes += files.nbytes(value)
        return value

    def account(self) -> Cpu:
        """Say on the stage's line what it took; with what went before it."""
        own = self.cpu - chained_cpu(self.operands)
        self.stage.meter.add(
            self.stage.key, cpu_s=own.both_s, system_s=own.system_s, records=self.done, nbytes=self.nbytes,
            skipped=self.skipped,
        )  # fmt: skip
        return self.cpu


def chained_cpu(operands: Sequence[Sequence[Record]]) -> Cpu:
    """What making those of `operands` took that were made as they were asked for; it is accounted for."""
    return sum((column.account() for column in operands if isinstance(column, Chained)), NO_CPU)
