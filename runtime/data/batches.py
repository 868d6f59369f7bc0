"""The batches of one phase: read, mapped on the host, laid out, in an order that only the plan decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from commplan.ir.plan import Ref
from commplan.ir.schedule import Schedule


class Source(Protocol):
    """Random access to records: what Grain calls a random-access data source."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


@dataclass(frozen=True)
class HostBatch:
    """One step's host-made values, by value id, as this process holds them.

    values: for every source-only binding of the phase (outputs and `takes`) the array itself where the
        host makes it, else the host-made operands of the per-record device maps that make it. Layout:
        one leading dimension per `per` axis in plan order, as long as the number of this process's
        indices along it, then the rows of this process's shards, in shard order, then the record's own
        dimensions. A count has its `per` dimensions only (int32).
    records: for every load (by the id of its result) the record indices, int64, laid out like its values.
    epoch, step: place in the order; step counts from 0 in each epoch.
    seeds: the seed of every load, by the id of its result: random device functions derive their keys from
        (seed, epoch, step, record, member).
    """

    values: dict[Ref, np.ndarray[Any, Any]]
    records: dict[Ref, np.ndarray[Any, Any]]
    epoch: int
    step: int
    seeds: dict[Ref, int] = field(default_factory=dict[Ref, int])


class PhaseBatches(Iterator[HostBatch]):
    """Batches of one phase, one epoch per `iter()`: `for batch in batches` runs to the end of the epoch
    that it stands in, the next `for` runs the next epoch.

    schedule, phase: what to read and map. sources, functions: by the names of the plan; functions of the
    device are ignored. local: for each axis the indices that this process holds (None, or an axis left
    out: all of them), such as `{"member": (1,), "data": (0, 1, 2, 3)}`. group: the processes of this host
    between which `all_shared` values travel; all of them hold the same indices of every replica axis.
    state: what `.state()` returned, here or under another number of ranks or design.
    """

    def __init__(
        self,
        schedule: Schedule,
        phase: str,
        sources: Mapping[str, Source],
        functions: Mapping[str, Callable[..., Any]],
        *,
        local: Mapping[str, Sequence[int]] | None = None,
        group: Any | None = None,
        state: Mapping[str, int] | None = None,
    ) -> None:
        raise NotImplementedError

    def __next__(self) -> HostBatch:
        raise NotImplementedError

    def state(self) -> dict[str, int]:
        """Where the next batch stands: integers, fit for JSON; the same under any number of ranks."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the work ahead, join its threads and leave the group. Closing twice is fine."""
        raise NotImplementedError
