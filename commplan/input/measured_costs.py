"""What input work was measured to cost, as the `[input]` part of a calibration keeps it.

[input]
date = "2026-11-21"
host = "n0"            # where it was measured
cores = 2              # CPUs that the measurement could use
copy = 6.1e-11         # CPU seconds for each byte copied into a slot
record = 4.1e-06       # CPU seconds for each record, step of the pipeline and member, beside the functions
batch = 1.9e-04        # CPU seconds for each batch and member, beside the records
wire = 4.0e-10         # CPU seconds for each byte sent to or received from another host; may be left out
[[input.source]]
name = "images"
cpu = 2.1e-05          # CPU seconds (user and system) for each record read
wait = 1.3e-05         # seconds for each record beside the CPU: the disk
nbytes = 48213.0       # of a record, on average
[[input.fn]]
name = "decode"
cpu = 1.74e-03         # CPU seconds for each record, its result written into a batch
held = 0.03            # the part of them under the interpreter's lock, 0 to 1; left out where unknown
nbytes_in = 48213.0
nbytes_out = 150528.0
[[input.consumer]]
plan = "ensemble_shared"
phase = "step"
seconds = 0.021        # of a step that never waits for its batch
cpu = 0.018            # CPU seconds of a step, 0 where a device computes
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from commplan.ir.types import Name, Printed

Positive = Annotated[float, msgspec.Meta(gt=0)]
AtLeastZero = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

WIRE_COPIES = 3  # what a byte through a socket costs at one end, in copies, where `wire` was not measured


class SourceCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Reading one record: CPU seconds, seconds of waiting beside them, bytes."""

    name: Name
    cpu: AtLeastZero
    wait: AtLeastZero = 0.0
    nbytes: AtLeastZero = 0.0
    records: int = 0  # how many were measured


class FnCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One call of a host function: CPU seconds, the part of them under the interpreter's lock (None where one
    core could not tell), bytes."""

    name: Name
    cpu: AtLeastZero
    held: Share | None = None
    nbytes_in: AtLeastZero = 0.0
    nbytes_out: AtLeastZero = 0.0
    records: int = 0


class ConsumerCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of one phase of a plan: seconds, and CPU seconds of one member's process."""

    plan: Name
    phase: Name
    seconds: Positive
    cpu: AtLeastZero = 0.0


class InputCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See the head of this module; all are seconds, or seconds per byte."""

    date: Printed
    cores: Annotated[int, msgspec.Meta(ge=1)]
    copy: AtLeastZero
    record: AtLeastZero = 0.0
    batch: AtLeastZero = 0.0
    wire: AtLeastZero | None = None
    host: Printed = ""
    source: tuple[SourceCost, ...] = ()
    fn: tuple[FnCost, ...] = ()
    consumer: tuple[ConsumerCost, ...] = ()

    @property
    def crossing(self) -> float:
        """CPU seconds for each byte sent to, and for each received from, another host."""
        return WIRE_COPIES * self.copy if self.wire is None else self.wire

    def source_named(self, name: str) -> SourceCost | None:
        return next((cost for cost in self.source if cost.name == name), None)

    def fn_named(self, name: str) -> FnCost | None:
        return next((cost for cost in self.fn if cost.name == name), None)

    def consumer_of(self, plan: str, phase: str) -> ConsumerCost | None:
        return next((cost for cost in self.consumer if (cost.plan, cost.phase) == (plan, phase)), None)


def merged(old: InputCosts | None, new: InputCosts) -> InputCosts:
    """`new`, with the sources, functions and consumers of `old` that it does not measure again.

    Costs of another host or number of cores do not go together with new ones: then `old` is dropped.
    """
    if old is None or (old.host, old.cores) != (new.host, new.cores):
        return new
    sources = {cost.name: cost for cost in (*old.source, *new.source)}
    fns = {cost.name: cost for cost in (*old.fn, *new.fn)}
    consumers = {(cost.plan, cost.phase): cost for cost in (*old.consumer, *new.consumer)}
    return msgspec.structs.replace(
        new,
        wire=old.wire if new.wire is None else new.wire,
        source=tuple(sources.values()),
        fn=tuple(fns.values()),
        consumer=tuple(consumers.values()),
    )
