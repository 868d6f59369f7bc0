"""The order in which a phase issues its ops, so that communication overlaps computation.

The pass `overlap` uses `issue_order` for the ops of every phase, and `delay_readers` for phases with split
collectives or servers.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from itertools import pairwise

from commplan.ir.analysis.def_use import DefUse
from commplan.ir.analysis.server_ops import worker_operands
from commplan.ir.plan import Ref
from commplan.ir.schedule import Cast, Collective, Decode, Encode, LocalSum, Op, Scale, Value
from commplan.ir.schedule import operands as operands_of
from commplan.ir.schedule import results as results_of


def issue_order(ops: Sequence[Op], *, levels_apart: bool = False) -> list[Op]:
    """Reorder the ops of a phase: collectives are issued as early as possible, the most urgent first.

        pack a; pack b; reduce a; reduce b; unpack  -->  pack a; reduce a; pack b; reduce b; unpack

    The urgency of a reduction is its position among the buckets, which are in readiness order; that of a
    broadcast or gather is the position of the first op that needs its result. The dependencies of a
    collective come directly before it, all other ops after the last collective.

    Args:
        ops: The ops of a phase, each after the ops that it depends on.
        levels_apart: Whether later levels of a hierarchy are delayed in favor of the buckets after them:

            scatter a; sum a; gather a; scatter b; sum b; gather b
                -->  scatter a; sum a; scatter b; gather a; sum b; gather b
    """
    uses = DefUse(ops)
    makers = uses.indices
    urgency = [(index, 0) for index in _urgency(uses)]  # the second number orders the levels of `_stagger`
    sends = [index for index, op in enumerate(ops) if isinstance(op, Collective)]
    if levels_apart:
        _stagger(urgency, [_level(index, uses) for index in sends], sends)
    issued: list[Op] = []
    done: set[int] = set()

    def issue(index: int) -> None:
        """Issue op `index` after the ops that it depends on. Uses a stack, since chains may be long."""
        pending = [index]
        while pending:
            top = pending[-1]
            needs = [makers[ref] for ref in (*operands_of(ops[top]), *ops[top].after) if ref in makers]
            missing = [need for need in needs if need not in done and need != top]
            if missing:
                pending += missing[::-1]
                continue
            pending.pop()
            if top not in done:
                done.add(top)
                issued.append(ops[top])

    for index in sorted(sends, key=lambda index: (*urgency[index], index)):
        issue(index)
    for index in range(len(ops)):
        issue(index)
    return issued


def delay_readers(ops: Sequence[Op], values: Mapping[Ref, Value]) -> list[Op]:
    """Move ops that read results in flight behind the ops that do not need them.

        start a; read a; start b; read b  -->  start a; start b; read a; read b

    Split collectives and requests to servers start at their place and complete in the order in which they
    started, one whenever all other ops need a result in flight. Requests keep their order.

    Args:
        ops: The ops of a phase, in order of issue.
        values: The values of the phase and of the schedule's entry.
    """
    makers = {ref: index for index, op in enumerate(ops) for ref in results_of(op)}
    requests = [index for index, op in enumerate(ops) if op.uses_servers(values)]
    next_request = dict(pairwise(requests))
    followers = frozenset(next_request.values())
    readers: list[list[int]] = [[] for _ in ops]  # by op: the ops that wait for its results
    missing = [0] * len(ops)  # by op: the number of ops that must be issued before it
    for index, op in enumerate(ops):
        sources = {makers[ref] for ref in worker_operands(op, values) if ref in makers}
        for source in sources:
            readers[source].append(index)
        missing[index] = len(sources) + (index in followers)
    # Time is counted in completions of split collectives and requests. `start` is, by op, the number of
    # completions after which it may be issued.
    start = [0] * len(ops)
    ready = [(0, index) for index, count in enumerate(missing) if not count]
    completions = 0  # when the last of those that were started completes
    issued: list[Op] = []

    def release(index: int, after: int) -> None:
        """Count one of the ops before op `index` as issued; `after` completions make its result available."""
        start[index] = max(start[index], after)
        missing[index] -= 1
        if not missing[index]:
            heapq.heappush(ready, (start[index], index))

    while ready:
        now, index = heapq.heappop(ready)
        issued.append(ops[index])
        if index in next_request:
            release(next_request[index], now)
        if ops[index].is_split or ops[index].uses_servers(values):
            now = completions = max(now, completions) + 1
        for reader in readers[index]:
            release(reader, now)
    return issued


def _urgency(uses: DefUse[Op]) -> list[int]:
    """For each op, the latest position at which its result is needed.

    It is the position of the first op that computes with the result, for casts, packs and the like, and for
    collectives that are not part of a reduction. All other ops have their own position. This includes
    reductions, for which only the time at which they can start matters.
    """
    ops = uses.ops
    needed = list(range(len(ops)))  # latest position for the result of each op
    first: dict[Ref, int] = {}  # by value: the least such position of its readers
    for index in range(len(ops) - 1, -1, -1):
        op = ops[index]
        if op.CONVERTS or (isinstance(op, Collective) and not _reduces(op, uses)):
            needed[index] = min((first.get(ref, len(ops)) for ref in results_of(op)), default=len(ops))
        for ref in operands_of(op):
            first[ref] = min(first.get(ref, len(ops)), needed[index])
    return needed


def _reduces(op: Op, uses: DefUse[Op]) -> bool:
    """Whether `op` is part of a reduction, such as an all-gather after a local sum or a level of a hierarchy.

    The search ends at a pack, since its operands belong to another stage.
    """
    while isinstance(op, Collective | Cast | Encode | Decode | LocalSum | Scale):
        if isinstance(op, Collective) and (op.op is not None or op.kind == "all_to_all"):
            return True
        maker = uses.maker(op.operand)
        if maker is None:
            return False
        op = maker
    return False


def _level(index: int, uses: DefUse[Op]) -> tuple[int, int]:
    """The first collective of the hierarchy that contains the collective `index`, and its depth.

    The first is an index of an op. The depth is the number of changes of axes between the two, so 0 for the
    first collective.
    """
    op, first, levels = uses.ops[index], index, 0
    while isinstance(op, Collective | Cast | Encode | Decode | LocalSum | Scale):
        axes = op.axes if isinstance(op, Collective) else ()
        source = uses.indices.get(op.operand)
        if source is None:
            break
        op = uses.ops[source]
        if isinstance(op, Collective):
            first = source
            levels += bool(axes) and op.axes != axes
    return first, levels


def _stagger(urgency: list[tuple[int, int]], levels: Sequence[tuple[int, int]], sends: Sequence[int]) -> None:
    """Delay a collective at depth n of a hierarchy until n // 2 further hierarchies have started.

    Args:
        urgency: By op: its position, and a number that orders equal positions. Changed in place.
        levels: The result of `_level` for each entry of `sends`.
        sends: The indices of the collectives.
    """
    heads = sorted({first for first, depth in levels if depth}, key=lambda index: (urgency[index], index))
    for index, (first, depth) in zip(sends, levels, strict=True):
        if depth > 1:
            head = heads[min(heads.index(first) + depth // 2, len(heads) - 1)]
            urgency[index] = max(urgency[index], (urgency[head][0], depth))
