"""Proposes changes to a program that would shorten a step: worker processes, and a cache of records.

The proposals are part of the reasons in remarks of the pass `share`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from commplan.input.costs import (
    COST_TOLERANCE,
    TIME_TOLERANCE,
    Links,
    Predicted,
    Prefer,
    RecordWork,
    Setting,
    SharingCut,
    predict,
)
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.analysis.input_slice import cache_violation
from commplan.ir.hints import Cache
from commplan.ir.plan import Ref
from commplan.ir.schedule import Map, Op, Read, Schedule, Share
from commplan.ir.schedule import results as results_of
from commplan.ir.types import sized, timed

_LARGE = 1 << 60  # bytes of a cache that holds any record

# Returns the cut of a design. The argument replaces the work of some ops, by their first results.
CutOf = Callable[[Mapping[Ref, RecordWork]], SharingCut]


@dataclass(frozen=True)
class CacheCandidate:
    """A host function whose results could be kept in a cache.

    Attributes:
        op: The call of the function.
        nbytes: Bytes of the results for one record.
        works: By the first result of an op, its work for a record in the cache: a copy for `op`, and nothing
            for ops that only `op` needs. Other ops keep their work.
    """

    op: Map
    nbytes: int
    works: dict[Ref, RecordWork]


def cache_candidates(
    schedule: Schedule,
    ops: Sequence[Op],
    bound: Collection[Ref],
    record_size: Callable[[Ref], int],
    copy: float,
) -> list[CacheCandidate]:
    """The host functions of a flow that could have a cache; empty if one of them has a cache already.

    Args:
        schedule: The schedule.
        ops: The ops of the flow.
        bound: The values that leave the phase.
        record_size: Returns the bytes of one record of a value.
        copy: CPU seconds per copied byte.
    """
    if any(isinstance(op, Map) and op.hints.cache for op in ops):
        return []
    uses = DefUse(ops)
    candidates: list[CacheCandidate] = []
    for op in ops:
        if not isinstance(op, Map) or cache_violation(schedule, uses, op, Cache(_LARGE)):
            continue
        before = uses.ancestors(op.results)
        if any(isinstance(earlier, Share) for earlier in before):
            continue
        nbytes = sum(map(record_size, op.results))
        works = {op.results[0]: RecordWork(copy * nbytes, steps=1)}
        # The last of `before` is `op` itself. An earlier op has no work if all of its readers have none.
        for earlier in reversed(before[:-1]):
            # The record counts of a load follow from the plan, without reading the records.
            values = (earlier.result,) if isinstance(earlier, Read) else results_of(earlier)
            readers = [results_of(reader)[0] for ref in values for reader in uses.readers(ref)]
            if all(reader in works for reader in readers) and not any(ref in bound for ref in values):
                works[results_of(earlier)[0]] = RecordWork()
        candidates.append(CacheCandidate(op, nbytes, works))
    return candidates


def cache_proposal(
    candidates: Sequence[CacheCandidate], cut: CutOf, setting: Setting, selected: Predicted,
    links: Links | None, prefer: Prefer,
) -> str:  # fmt: skip
    """Propose the cache that makes a step shortest.

    The step is one of the second epoch or later, with all records in the cache, under the selected design.

    Args:
        candidates: The functions that could have a cache.
        cut: Returns the cut of the selected design.
        setting: The machine and the load.
        selected: The prediction of the selected design, without a cache.
        links: The times of transfers between hosts; None if all members are on one host.
        prefer: With `cpu`, less CPU time is enough if the step gets no longer.

    Returns:
        A description that begins with "; ", to be appended to a reason. "" if no cache makes a step clearly
        shorter, or with `cpu` saves enough CPU time.
    """
    design = (selected.design, selected.readers, links, selected.limit)
    predictions = [(predict(setting, cut(candidate.works), *design), candidate) for candidate in candidates]
    if not predictions:
        return ""
    cached, candidate = min(predictions, key=lambda pair: (pair[0].wall, pair[0].cpu, pair[1].nbytes))
    is_shorter = cached.wall * (1 + TIME_TOLERANCE) < selected.wall
    saves_cpu = cached.cpu * (1 + COST_TOLERANCE) < selected.cpu and cached.wall <= selected.wall
    if not is_shorter and not (prefer == "cpu" and saves_cpu):
        return ""
    return (
        f"; {timed(cached.wall)} and {timed(cached.cpu)} from the second epoch on with a cache, "
        f"`map {candidate.op.fn}(..) {{ cache = SIZE }}`, which takes {sized(candidate.nbytes)} a record"
    )


def worker_processes(setting: Setting, selected: Predicted, links: Links | None) -> str:
    """Propose worker processes for functions that wait for the interpreter's lock.

    Args:
        setting: The machine and the load.
        selected: The prediction of the selected design.
        links: The times of transfers between hosts; None if all members are on one host.

    Returns:
        A description that begins with "; ", to be appended to a reason. "" if a step gets not clearly
        shorter.
    """
    with_processes = replace(setting, processes=True)
    other = predict(with_processes, selected.cut, selected.design, selected.readers, links, selected.limit)
    if other.wall * (1 + TIME_TOLERANCE) >= selected.wall:
        return ""
    option = '`run.batches(workers="processes")`'
    return f"; {timed(other.wall)} with worker processes, which do not wait for one lock: {option}"
