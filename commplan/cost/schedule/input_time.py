"""The time of a process's share of the input work, from measured costs of sources and host functions.

`prediction` uses it for the reads and host functions of a phase.
"""

from __future__ import annotations

import math

from commplan.input.measured_costs import InputCosts
from commplan.input.prefetch import MOST_THREADS
from commplan.ir.plan import Ref
from commplan.ir.schedule import Map, Phase, Read, Schedule, Share, operands, results
from commplan.topology import Topology


def input_work(schedule: Schedule, phase: Phase, costs: InputCosts, topology: Topology) -> dict[Ref, float]:
    """Seconds of each read and host function of `phase` whose cost was measured, by its first result.

    A process computes its part of the rows of a shared value, and otherwise all of them. It has an equal part
    of the cores of its host, but uses no more cores than threads.

    Args:
        schedule: The schedule.
        phase: One of its phases.
        costs: Measured seconds per record.
        topology: The topology, whose number of cores is preferred to that of `costs`.
    """
    values = {value.id: value for value in phase.values}
    parts = _parts(schedule, phase)
    ranks = math.prod(schedule.mesh_sizes.values())
    cores = (topology.cores or costs.cores) / min(ranks, topology.host_places)
    seconds: dict[Ref, float] = {}
    for op in phase.ops:
        # `cost` is the seconds of the processor and of waiting, per record; None if it was not measured.
        if isinstance(op, Read):
            source = costs.source_named(op.source)
            cost = (source.cpu + costs.record, source.wait) if source else None
            rows = max(op.batch) // schedule.size(op.split)
        elif isinstance(op, Map) and op.lane == "host_compute":
            fn = costs.fn_named(op.fn)
            leaves = values[op.results[0]].leaves
            cost = (fn.cpu + costs.record, 0.0) if fn and leaves and leaves[0].shape else None
            rows = leaves[0].shape[0] if leaves and leaves[0].shape else 0
        else:
            continue
        if cost is None:
            continue
        threads = op.hints.cores or MOST_THREADS
        first = results(op)[0]
        seconds[first] = rows / parts.get(first, 1) * (cost[0] / min(threads, cores) + cost[1] / threads)
    return seconds


def _parts(schedule: Schedule, phase: Phase) -> dict[Ref, int]:
    """By value: the number of processes among which its work is divided; absent if it is not shared."""
    parts: dict[Ref, int] = {}
    for op in reversed(phase.ops):
        if isinstance(op, Share) and op.design != "duplicate":
            parts[op.operand] = op.readers or schedule.size(op.axes)
            continue
        divisor = max((parts.get(ref, 1) for ref in results(op)), default=1)
        if divisor > 1:
            parts.update(dict.fromkeys((results(op)[0], *operands(op)), divisor))
    return parts
