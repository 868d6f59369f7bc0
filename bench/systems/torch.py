"""torch.distributed over Gloo, on torch tensors.

Fused is what DistributedDataParallel does: buckets of 25 MiB, all of them under way at once.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.harness.work import Floats, Operation, Work
from bench.harness.worker import operands

torch: Any = importlib.import_module("torch")
dist: Any = importlib.import_module("torch.distributed")
Tensor = Any
BUCKET = 25 << 20  # bytes: DistributedDataParallel's default


class Torch:
    def __init__(self) -> None:
        dist.init_process_group("gloo")  # from RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def prepare(self, work: Work) -> Operation:
        if work.how == "fused":
            return Buckets(self, work)
        return Each(self, work)


class Each(Operation):
    """One call for each tensor; all-reduce and broadcast are in place, as they are in torch."""

    def __init__(self, system: Torch, work: Work) -> None:
        self._given = [[torch.from_numpy(x) for x in xs] for xs in operands(work, system.rank, system.ranks)]
        self._in_place = work.kind in ("all_reduce", "broadcast")
        sizes = [n // system.ranks if work.kind == "reduce_scatter" else n for n in work.counts]
        self._operands = self._given[0]
        self._results = [torch.empty(size) for size in sizes]
        calls: dict[str, Callable[[Tensor, Tensor], None]] = {
            "all_reduce": lambda _, y: dist.all_reduce(y),
            "broadcast": lambda _, y: dist.broadcast(y, 0),
            "reduce_scatter": lambda x, y: dist.reduce_scatter_tensor(y, x),
            "all_gather": lambda x, y: dist.all_gather_into_tensor(y, x),
        }
        self._call = calls[work.kind]

    def fill(self, variant: int) -> None:
        self._operands = self._given[variant]
        for given, result in zip(self._operands, self._results, strict=True):
            if self._in_place:
                result.copy_(given)
            else:
                result.fill_(np.nan)

    def run(self) -> None:
        for given, result in zip(self._operands, self._results, strict=True):
            self._call(given, result)

    def results(self) -> list[Floats]:
        return [result.numpy() for result in self._results]


class Buckets(Operation):
    """Copied into buckets of at most 25 MiB, all-reduced all at once, copied back."""

    def __init__(self, system: Torch, work: Work) -> None:
        self._given = [[torch.from_numpy(x) for x in xs] for xs in operands(work, system.rank, system.ranks)]
        self._operands = self._given[0]
        self._results = [torch.empty(n) for n in work.counts]
        self._members: list[list[int]] = [[]]
        for index, count in enumerate(work.counts):
            held = 4 * sum(work.counts[i] for i in self._members[-1])
            if held and held + 4 * count > BUCKET:
                self._members.append([])
            self._members[-1].append(index)
        self._buffers = [torch.empty(sum(work.counts[i] for i in own)) for own in self._members]

    def fill(self, variant: int) -> None:
        self._operands = self._given[variant]
        for result in self._results:
            result.fill_(np.nan)

    def run(self) -> None:
        waiting: list[Any] = []
        for own, buffer in zip(self._members, self._buffers, strict=True):
            torch.cat([self._operands[i] for i in own], out=buffer)
            waiting.append(dist.all_reduce(buffer, async_op=True))
        for own, buffer, handle in zip(self._members, self._buffers, waiting, strict=True):
            handle.wait()
            parts = buffer.split([self._results[i].numel() for i in own])
            for index, part in zip(own, parts, strict=True):
                self._results[index].copy_(part)

    def results(self) -> list[Floats]:
        return [result.numpy() for result in self._results]


def connect() -> Torch:
    return Torch()
