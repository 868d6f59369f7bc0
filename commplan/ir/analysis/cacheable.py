"""Whether the results of a host function of a schedule can be kept by record."""

from __future__ import annotations

from commplan.ir.analysis.def_use import DefUse
from commplan.ir.hints import Cache
from commplan.ir.schedule import Map, Op, Read, Schedule
from commplan.ir.stages.rules import Violation, cached


def cache_violation(schedule: Schedule, uses: DefUse[Op], op: Map, cache: Cache) -> Violation | None:
    """The rule that `cache` on `op` violates, if any. uses: of the ops of its phase, or of its flow."""
    if op.lane != "host_compute":
        return Violation(f"`{op.fn}` runs on the device, and a cache keeps results of the host")
    before = uses.ancestors(op.results)
    random = [each.fn for each in before if isinstance(each, Map) and each.random]
    sources = [each.source for each in before if isinstance(each, Read)]
    return cached(op.fn, random[::-1], sources, schedule.fn(op.fn).results, cache)
