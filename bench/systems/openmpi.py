"""Open MPI through mpi4py, on NumPy arrays: the floor for everything that runs over it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.harness.work import Floats, Operation, Work
from bench.harness.worker import operands

MPI: Any = importlib.import_module("mpi4py.MPI")


class OpenMPI:
    def __init__(self) -> None:
        self.comm = MPI.COMM_WORLD.Dup()
        self.rank: int = self.comm.Get_rank()
        self.ranks: int = self.comm.Get_size()

    def prepare(self, work: Work) -> Operation:
        if work.how == "fused":
            return Fused(self, work)
        return Each(self, work)

    def call(self, kind: str) -> Callable[[Floats, Floats], None]:
        """(operand, result) -> None, by the name of the collective; broadcast is in place in the result."""
        comm = self.comm
        calls: dict[str, Callable[[Floats, Floats], None]] = {
            "all_reduce": lambda x, y: comm.Allreduce(x, y, op=MPI.SUM),
            "broadcast": lambda _, y: comm.Bcast(y, root=0),
            "reduce_scatter": lambda x, y: comm.Reduce_scatter_block(x, y, op=MPI.SUM),
            "all_gather": comm.Allgather,
        }
        return calls[kind]


class Each(Operation):
    """One call for each tensor."""

    def __init__(self, system: OpenMPI, work: Work) -> None:
        self._given = operands(work, system.rank, system.ranks)
        self._call = system.call(work.kind)
        self._in_place = work.kind == "broadcast"
        sizes = [n // system.ranks if work.kind == "reduce_scatter" else n for n in work.counts]
        self._operands: list[Floats] = self._given[0]
        self._results = [np.empty(size, np.float32) for size in sizes]

    def fill(self, variant: int) -> None:
        self._operands = self._given[variant]
        for given, result in zip(self._operands, self._results, strict=True):
            result[:] = given if self._in_place else np.nan

    def run(self) -> None:
        for given, result in zip(self._operands, self._results, strict=True):
            self._call(given, result)

    def results(self) -> list[Floats]:
        return self._results


class Fused(Operation):
    """All tensors copied into one buffer, one all-reduce, copied back."""

    def __init__(self, system: OpenMPI, work: Work) -> None:
        self._given = operands(work, system.rank, system.ranks)
        self._call = system.call(work.kind)
        self._operands: list[Floats] = self._given[0]
        self._results = [np.empty(n, np.float32) for n in work.counts]
        self._ends = np.cumsum(work.counts).tolist()
        self._packed, self._summed = (np.empty(self._ends[-1], np.float32) for _ in range(2))

    def fill(self, variant: int) -> None:
        self._operands = self._given[variant]
        for result in self._results:
            result[:] = np.nan

    def run(self) -> None:
        np.concatenate(self._operands, out=self._packed)
        self._call(self._packed, self._summed)
        for end, result in zip(self._ends, self._results, strict=True):
            result[:] = self._summed[end - result.size : end]

    def results(self) -> list[Floats]:
        return self._results


def connect() -> OpenMPI:
    return OpenMPI()
