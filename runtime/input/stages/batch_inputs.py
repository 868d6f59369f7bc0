"""`BatchInputs`: the inputs of the batches of a phase, from which their factory is made on first use."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from commplan.input.order import Order
from commplan.ir.plan import Ref
from commplan.runtime.input.layout import Fresh, aligned
from commplan.runtime.input.observe.accounting import Meter
from commplan.runtime.input.program import EpochCursor, HostProgram
from commplan.runtime.input.sources import adapters
from commplan.runtime.input.sources.adapters import Source

if TYPE_CHECKING:
    from commplan.runtime.input.stages.batch_builder import BatchFactory
    from commplan.runtime.input.stages.worker_pool import Workers


@dataclass(frozen=True)
class BatchInputs:
    """The inputs of the batches of a phase.

    Attributes:
        program: the host program.
        orders: the order of records of each load, by the id of its result.
        sources: the sources by name, as `bind_sources` returns them.
        functions: the host functions by name.
        meter: the costs of the input.
        block: the maximum number of records in a task.
        workers: worker processes that make the batches; None for threads.
        epoch_cursor: converts the number of a batch to its epoch and step.
        memory: allocates the arrays that this process makes, if there are no `workers`.
    """

    program: HostProgram
    orders: Mapping[Ref, Order]
    sources: Mapping[str, Source]
    functions: Mapping[str, Callable[..., Any]]
    meter: Meter
    block: int
    workers: Workers | None
    epoch_cursor: EpochCursor
    memory: Fresh = aligned

    @functools.cached_property
    def factory(self) -> BatchFactory:
        """The factory of the batches. Until a process makes a batch, it does not load the modules for it."""
        from commplan.runtime.input.stages.batch_builder import BatchFactory  # noqa: PLC0415
        from commplan.runtime.input.stages.records import stages  # noqa: PLC0415

        return BatchFactory(
            self.program, self.orders, stages(self.program, self.sources, self.functions, self.meter),
            self.meter, self.block, self.workers, adapters.fetch_groups(self.sources), self.epoch_cursor,
            self.memory,
        )  # fmt: skip
