"""A system for tests of the benches: it does as `how` says, without any network."""

from __future__ import annotations

import os

import numpy as np

from bench.harness.work import Floats, Operation, Work
from bench.harness.work import expected as truth


class Lying:
    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def prepare(self, work: Work) -> Operation:
        if work.how == "cannot":
            raise NotImplementedError("there is no way")
        return Answer(self, work)


class Answer(Operation):
    def __init__(self, system: Lying, work: Work) -> None:
        self.note = "by heart"
        self._system, self._work, self._variant = system, work, 0

    def fill(self, variant: int) -> None:
        self._variant = variant

    def run(self) -> None:
        if self._work.how == "die" and self._system.rank == 1:
            print("this rank has had enough", flush=True)
            os._exit(7)

    def results(self) -> list[Floats]:
        system, variant = self._system, 0 if self._work.how == "stale" else self._variant
        right = [
            truth(self._work, i, system.rank, system.ranks, variant) for i in range(len(self._work.counts))
        ]
        if self._work.how == "wrong" and system.rank == 1:
            right[-1][5] = np.nan
        return right


def connect() -> Lying:
    return Lying()
