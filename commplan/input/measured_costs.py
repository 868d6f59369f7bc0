"""Measured costs of input work: the `[input]` section of a calibration file.

`commplan.runtime` measures them, and the compiler derives the settings of `commplan.input.costs` from them.
An example of a section:

[input]
date = "2026-11-21"
host = "n0"            # the host of the measurement
cores = 2              # the number of CPUs of the measurement
copy = 6.1e-11         # CPU seconds per byte copied into a slot
record = 4.1e-06       # CPU seconds per record, pipeline step and member, without functions
batch = 1.9e-04        # CPU seconds per batch and member, without records
wire = 4.0e-10         # CPU seconds per byte sent to or received from another host; optional
[[input.source]]
name = "images"
cpu = 2.1e-05          # CPU seconds (user and system) per record
wait = 1.3e-05         # seconds per record without CPU use, such as reads from disk
nbytes = 48213.0       # mean bytes per record
[[input.fn]]
name = "decode"
cpu = 1.74e-03         # CPU seconds per record, including the write into a batch
held = 0.03            # the fraction of them under the interpreter's lock, 0 to 1; optional
nbytes_in = 48213.0
nbytes_out = 150528.0
[[input.consumer]]
plan = "ensemble_shared"
phase = "step"
seconds = 0.021        # seconds of a step that never waits for its batch
cpu = 0.018            # CPU seconds of a step, 0 if a device computes
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from commplan.ir.types import Name, Printed

Positive = Annotated[float, msgspec.Meta(gt=0)]
AtLeastZero = Annotated[float, msgspec.Meta(ge=0)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]

WIRE_COPIES = 3  # the CPU cost of a byte through a socket at one end, in copies, if `wire` was not measured


class SourceCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The mean costs of reading one record of a source.

    Attributes:
        name: the name of the source in plans.
        cpu: CPU seconds, user and system.
        wait: seconds without CPU use, such as reads from disk.
        nbytes: bytes of the record.
        records: the number of measured records; 0 if unknown.
    """

    name: Name
    cpu: AtLeastZero
    wait: AtLeastZero = 0.0
    nbytes: AtLeastZero = 0.0
    records: int = 0


class FnCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The mean costs of one call of a host function, for one record.

    Attributes:
        name: the name of the function in plans.
        cpu: CPU seconds, including the write of the result into a batch.
        held: the fraction of `cpu` under the interpreter's lock; None if it could not be measured, as on a
            single core.
        nbytes_in: bytes of the operands.
        nbytes_out: bytes of the results.
        records: the number of measured calls; 0 if unknown.
    """

    name: Name
    cpu: AtLeastZero
    held: Share | None = None
    nbytes_in: AtLeastZero = 0.0
    nbytes_out: AtLeastZero = 0.0
    records: int = 0


class ConsumerCost(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The costs of one step of the training program, which consumes one batch of a phase.

    Attributes:
        plan: the name of the plan.
        phase: the name of the phase.
        seconds: seconds of a step that does not wait for its batch.
        cpu: CPU seconds of one member's process; 0 if a device computes.
    """

    plan: Name
    phase: Name
    seconds: Positive
    cpu: AtLeastZero = 0.0


class InputCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the `[input]` section (see the module).

    Attributes:
        date: the date of the measurement.
        cores: the number of CPUs of the measurement.
        copy: CPU seconds per byte copied into a slot.
        record: CPU seconds of the pipeline itself per record, pipeline stage and member.
        batch: CPU seconds of the pipeline itself per batch and member.
        wire: CPU seconds per byte sent to or received from another host; None if not measured.
        host: the host of the measurement; "" if unknown.
        source: the costs of each measured source.
        fn: the costs of each measured host function.
        consumer: the costs of each measured phase.
    """

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
        """CPU seconds per byte sent to, and per byte received from, another host."""
        return WIRE_COPIES * self.copy if self.wire is None else self.wire

    def source_named(self, name: str) -> SourceCost | None:
        """The costs of source `name`; None if it was not measured."""
        return next((cost for cost in self.source if cost.name == name), None)

    def fn_named(self, name: str) -> FnCost | None:
        """The costs of host function `name`; None if it was not measured."""
        return next((cost for cost in self.fn if cost.name == name), None)

    def consumer_of(self, plan: str, phase: str) -> ConsumerCost | None:
        """The costs of a step that consumes batches of `phase`; None if it was not measured."""
        return next((cost for cost in self.consumer if (cost.plan, cost.phase) == (plan, phase)), None)


def merged(old: InputCosts | None, new: InputCosts) -> InputCosts:
    """`new`, plus the sources, functions, consumers and `wire` of `old` that `new` does not have.

    Costs from another host or number of cores are not comparable: then `old` is dropped.
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
