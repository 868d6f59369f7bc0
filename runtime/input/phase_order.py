"""The order of the batches of a phase: the orders of its loads, the steps of an epoch, and saved positions.

The hints for its work ahead, from the braces of loads and maps, are here, too.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from typing import get_args

from commplan.diagnostics import fail, type_of
from commplan.input.order import Order, phase_steps
from commplan.input.prefetch import prefetch, threads
from commplan.ir.plan import Ref
from commplan.ir.schedule import Op
from commplan.ir.types import Visit
from commplan.runtime.input.program import HostProgram
from commplan.runtime.input.sources.adapters import Source

BLOCK = 16  # the most records of one task: few enough to divide a batch evenly over threads


def load_orders(program: HostProgram, sources: Mapping[str, Source]) -> dict[Ref, Order]:
    """The order of records of each load, by the id of its result. `sources` are by name."""
    return {
        read.result: Order(len(sources[read.source]), read.batch[0], read.seed, read.visit, read.tail)
        for flow in program.flows
        for read in flow.reads
    }


def epoch_steps(program: HostProgram, record_orders: Mapping[Ref, Order]) -> int:
    """The number of batches in an epoch, on which all loads of the phase must agree (see `phase_steps`).

    Raises:
        CommplanError: CP0917 for a phase without loads, CP0903 for an epoch without a batch, CP0909 if loads
            do not agree.
    """
    phase, file = program.phase, program.schedule.file
    if not record_orders:
        fail(
            "CP0917",
            f"phase `{phase.name}` has no output that depends on sources alone, so it has no batches",
            span=phase.span,
            file=file,
        )
    reads = [read for flow in program.flows for read in flow.reads]
    for read in reads:
        order = record_orders[read.result]
        if order.steps == 0:
            fail(
                "CP0903",
                f"an epoch of `{read.source}` has no batch: {order.length} records do not fill "
                f"a batch of {read.batch[0]}, and `tail drop` discards incomplete batches",
                span=read.span,
                file=file,
            )
    by_visit = {
        visit: [record_orders[read.result].steps for read in reads if read.visit == visit]
        for visit in get_args(Visit)
    }
    # An `exactly_once` load has as many batches as the phase, an `at_least_once` load at most as many, and an
    # `at_most_once` load at least as many.
    exact, least, most = by_visit.values()
    steps = phase_steps([record_orders[read.result] for read in reads])
    agree = set(exact) <= {steps} and max(least, default=steps) <= steps <= min(most, default=steps)
    # All loads of a flow have the same rows in each batch; only the last batch may be shorter.
    same_rows = all(
        len({record_orders[read.result].rows(step) for read in flow.reads}) == 1
        for flow in program.flows
        for step in (0, steps - 1)
    )
    if not agree or not same_rows:
        fail(
            "CP0909",
            f"the loads of phase `{phase.name}` do not end together",
            *(
                f"line {read.span.line}: `{read.source}` has {order.steps} batches an epoch "
                f"({order.length} records, {read.visit}, tail {read.tail})"
                for read in reads
                for order in (record_orders[read.result],)
            ),
            "repeat the shorter one with `visit at_least_once`, or put the loads in separate phases",
            span=reads[-1].span,
            file=file,
        )
    return steps


def fingerprint(program: HostProgram, record_orders: Mapping[Ref, Order]) -> int:
    """A checksum (CRC-32) of the inputs of the order of records.

    These are the source, length, batch size, seed, visit, tail and `per` axes of each load.
    """
    facts = [
        (read.source, order.length, order.batch, order.seed, order.visit, order.tail, read.per)
        for flow in program.flows
        for read in flow.reads
        for order in (record_orders[read.result],)
    ]
    return zlib.crc32(repr(facts).encode())


def position_of(
    program: HostProgram, record_orders: Mapping[Ref, Order], state: Mapping[str, int] | None, steps: int,
    order: int,
) -> tuple[int, int]:  # fmt: skip
    """The epoch and step of a saved position.

    Args:
        program: the host program.
        record_orders: the order of records of each load, for the message.
        state: a result of `EpochIterator.state`; None for the start of epoch 0.
        steps: the number of steps of an epoch.
        order: the checksum of the order of records (see `fingerprint`).

    Raises:
        CommplanError: CP0910 if `state` is not a position, or one of another order of records.
    """
    if state is None:
        return 0, 0
    phase = program.phase
    keys = ("epoch", "step", "order")
    if not isinstance(state, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
        actual, fix = f"found {type_of(state)}", "pass the result of `.state()` of batches"
        fail("CP0910", "this is not a state of batches", actual, fix, span=phase.span)
    if set(state) != set(keys) or not all(type(state[key]) is int and state[key] >= 0 for key in keys):
        fail("CP0910", "this is not a state of batches", f"found: {dict(state)}", span=phase.span)
    if state["order"] != order or state["step"] >= steps:
        reads = [
            f"`{read.source}`: {visits.length} records, batch {visits.batch}, {visits.visit}, "
            f"tail {visits.tail}, seed {visits.seed}"
            for flow in program.flows
            for read in flow.reads
            for visits in (record_orders[read.result],)
        ]
        fail(
            "CP0910",
            f"the state belongs to another order of records than phase `{phase.name}` has now",
            *(f"now {line}" for line in reads),
            "restore it with the source, batch size, visit, seed and tail that it was saved with",
            span=phase.span,
            file=program.schedule.file,
        )
    return state["epoch"], state["step"]


def hints(program: HostProgram) -> tuple[int, int]:
    """The number of prefetched batches, and the number of threads (see `commplan.input.prefetch`)."""
    ops = ops_of(program)
    return prefetch(ops), threads(ops, len(os.sched_getaffinity(0)))


def block_of(program: HostProgram, cores: int) -> int:
    """The number of records in a task: the rows of a batch divided by `cores`, between 1 and `BLOCK`."""
    rows = max((len(program.rows(flow, flow.batch)) for flow in program.flows), default=1)
    return max(1, min(BLOCK, -(-rows // cores)))


def ops_of(program: HostProgram) -> list[Op]:
    """The ops of all flows, in plan order within each flow."""
    return [op for flow in program.flows for op in flow.ops]
