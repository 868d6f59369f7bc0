"""overlap: the order in which collectives are issued, so that communication runs under computation.

Where XLA issues them, the levels of a hierarchy are issued like a pipeline: while one bucket is on its way
between nodes, the next is reduced within them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import ClassVar

from msgspec.structs import replace

from commplan.ir.analysis.def_use import DefUse
from commplan.ir.plan import Ref
from commplan.ir.remark import Choice
from commplan.ir.schedule import Cast, Collective, LocalSum, Op, Phase, Scale, Schedule
from commplan.ir.schedule import operands as operands_of
from commplan.ir.schedule import results as results_of
from commplan.passes.pipeline.base import Context, Pass


class OverlapPass(Pass, frozen=True):
    """Orders collectives, first needed first sent, and chains each to the one before.

    chain: whether the order is fixed by `after`, so that no backend merges or reorders them. Under JAX each
    axis has a chain of its own.
    in_process: leave collectives of leaves that are not packed out of the chain. For ranks that are threads
    of one process, which run one program in one order: XLA may then join the leaves.
    """

    name: ClassVar[str] = "overlap"
    after: ClassVar[tuple[str, ...]] = (
        "share", "place", "bucket", "fuse_update", "decompose", "wire", "select",
    )  # fmt: skip
    chain: bool = True
    in_process: bool = False

    def phases(self, schedule: Schedule, context: Context, choices: list[Choice]) -> Iterable[Phase]:
        return [self._phase(phase, schedule.backend == "jax", choices) for phase in schedule.phases]

    def _phase(self, phase: Phase, levels_apart: bool, choices: list[Choice]) -> Phase:
        written = [op.result for op in phase.ops if isinstance(op, Collective)]
        count = len(written)
        if not written:
            return phase
        issued = issue_order(phase.ops, levels_apart=levels_apart)
        moved = written != [op.result for op in issued if isinstance(op, Collective)]
        values_of = {value.id: value for value in phase.values}
        free = {ref for ref in written if self.in_process and values_of[ref].kind != "flat"}
        if self.chain:
            issued = chained(issued, by_axis=levels_apart, free=free)
        values = tuple(values_of[ref] for op in issued for ref in results_of(op))
        why = "reductions as their buckets become ready, the rest as their results are needed"
        text = f"phase {phase.name}: {count} collective{'s' * (count != 1)}"
        text += ", reordered" if moved else ", in the order written"
        text += ", each after the one before" if self.chain and len(free) < count else ""
        if self.chain and free:
            which = "those" if len(free) == count else f"{len(free)}"
            text += f"; XLA may join and reorder {which} of leaves that are not packed"
        choices.append(Choice("overlap", text, why, phase.span))
        return replace(phase, ops=tuple(issued), values=values)


def issue_order(ops: Sequence[Op], *, levels_apart: bool = False) -> list[Op]:
    """`ops` so that collectives come as early as they can, in order of urgency.

    pack a; pack b; reduce a; reduce b; unpack  -->  pack a; reduce a; pack b; reduce b; unpack

    A reduction is as urgent as its place among the buckets (they are in readiness order); a
    broadcast or gather as the first op that needs its result. What a collective needs comes just
    before it, everything else after the last one. levels_apart: levels that come back to an axis give way to
    the buckets behind them.

    scatter a; sum a; gather a; scatter b; sum b; gather b
        -->  scatter a; sum a; scatter b; gather a; sum b; gather b
    """
    uses = DefUse(ops)
    makers, urgency = uses.indices, [(place, 0) for place in _urgency(uses)]
    sends = [index for index, op in enumerate(ops) if isinstance(op, Collective)]
    if levels_apart:
        _stagger(urgency, [_level(index, uses) for index in sends], sends)
    issued: list[Op] = []
    done: set[int] = set()

    def issue(index: int) -> None:
        pending = [index]
        while pending:
            top = pending[-1]
            needs = [makers[r] for r in (*operands_of(ops[top]), *ops[top].after) if r in makers]
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


def _urgency(uses: DefUse[Op]) -> list[int]:
    """For each collective the place that it should be issued by, for other ops their own.

    A reduction, and the moves that finish one, keep their place: when they can start is what
    counts. Any other collective goes by the first op that works with its result.
    """
    ops = uses.ops
    needed = list(range(len(ops)))  # by when the result of an op is needed
    first: dict[Ref, int] = {}  # of each value: the least of those who read it
    for index in range(len(ops) - 1, -1, -1):
        op = ops[index]
        if op.CONVERTS or (isinstance(op, Collective) and not _reduces(op, uses)):
            needed[index] = min((first.get(ref, len(ops)) for ref in results_of(op)), default=len(ops))
        for ref in operands_of(op):
            first[ref] = min(first.get(ref, len(ops)), needed[index])
    return needed


def _reduces(op: Op, uses: DefUse[Op]) -> bool:
    """Whether `op` reduces, or moves a part of what is being reduced: an all-gather after a local
    sum, a level of a hierarchy. Packing ends the search: what is behind it is another stage."""
    while isinstance(op, Collective | Cast | LocalSum | Scale):
        if isinstance(op, Collective) and (op.op is not None or op.kind == "all_to_all"):
            return True
        maker = uses.maker(op.operand)
        if maker is None:
            return False
        op = maker
    return False


def _level(index: int, uses: DefUse[Op]) -> tuple[int, int]:
    """Of the collective at `index` the first of its hierarchy, and how many levels lie between the two."""
    op, first, levels = uses.ops[index], index, 0
    while isinstance(op, Collective | Cast | LocalSum | Scale):
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
    """Let the level that is n levels behind the first wait until n // 2 more buckets have begun."""
    heads = sorted({first for first, depth in levels if depth}, key=lambda index: (urgency[index], index))
    for index, (first, depth) in zip(sends, levels, strict=True):
        if depth > 1:
            place = min(heads.index(first) + depth // 2, len(heads) - 1)
            urgency[index] = max(urgency[index], (urgency[heads[place]][0], depth))


def chained(ops: Sequence[Op], *, by_axis: bool = False, free: Container[Ref] = ()) -> list[Op]:
    """Each collective `after` the one before it: one chain for the whole phase, or one for each axis.

    reduce a; reduce b  -->  reduce a; reduce b after a

    free: results of the collectives that are left out.
    """
    result: list[Op] = []
    before: dict[str, Ref] = {}
    for op in ops:
        if not isinstance(op, Collective) or op.result in free:
            result.append(op)
            continue
        links = op.axes if by_axis else ("",)
        result.append(replace(op, after=tuple(dict.fromkeys(before[key] for key in links if key in before))))
        before |= dict.fromkeys(links, op.result)
    return result
