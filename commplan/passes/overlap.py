"""overlap: orders collectives so that communication overlaps computation.

If XLA issues them, the levels of hierarchies form a pipeline: while one bucket is sent between nodes, the
next is reduced within them.
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
from commplan.passes.pipeline.base import Pass, PassContext


class OverlapPass(Pass, frozen=True):
    """Orders collectives, first needed first sent, and chains each to the one before.

    Attributes:
        chain: whether the order is fixed by `after`, so that no backend merges or reorders collectives. Under
            JAX each axis has a separate chain.
        in_process: exclude collectives of unpacked leaves from the chain. For ranks that are threads of one
            process and execute one program in one order, so that XLA may merge the leaves.
    """

    name: ClassVar[str] = "overlap"
    after: ClassVar[tuple[str, ...]] = (
        "share", "place", "bucket", "fuse_update", "decompose", "wire", "select",
    )  # fmt: skip
    chain: bool = True
    in_process: bool = False

    def phases(self, schedule: Schedule, context: PassContext, choices: list[Choice]) -> Iterable[Phase]:
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
            selection = "those" if len(free) == count else f"{len(free)}"
            text += f"; XLA may join and reorder {selection} of leaves that are not packed"
        choices.append(Choice("overlap", text, why, phase.span))
        return replace(phase, ops=tuple(issued), values=values)


def issue_order(ops: Sequence[Op], *, levels_apart: bool = False) -> list[Op]:
    """Reorder ops so that each collective is issued as early as possible, most urgent first.

        pack a; pack b; reduce a; reduce b; unpack  -->  pack a; reduce a; pack b; reduce b; unpack

    The urgency of a reduction is its position among the buckets, which are in readiness order; that of a
    broadcast or gather is the position of the first op that needs its result. The dependencies of a
    collective come directly before it, all other ops after the last collective.

    Args:
        ops: the ops of a phase.
        levels_apart: whether later levels of a hierarchy are delayed in favour of the buckets after them:

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
    """For each collective the latest position for issuing it; other ops keep their position.

    A reduction, and the transfers that complete it, keep their position, since the time at which they can
    start matters. Other collectives use the position of the first op that computes with their result.
    """
    ops = uses.ops
    needed = list(range(len(ops)))  # latest position for the result of each op
    first: dict[Ref, int] = {}  # least such position of the readers of each value
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
    while isinstance(op, Collective | Cast | LocalSum | Scale):
        if isinstance(op, Collective) and (op.op is not None or op.kind == "all_to_all"):
            return True
        maker = uses.maker(op.operand)
        if maker is None:
            return False
        op = maker
    return False


def _level(index: int, uses: DefUse[Op]) -> tuple[int, int]:
    """The index of the first collective of the hierarchy at `index`, and the number of levels between
    them."""
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
    """Delay the level n levels after the first until n // 2 further buckets have started."""
    heads = sorted({first for first, depth in levels if depth}, key=lambda index: (urgency[index], index))
    for index, (first, depth) in zip(sends, levels, strict=True):
        if depth > 1:
            place = min(heads.index(first) + depth // 2, len(heads) - 1)
            urgency[index] = max(urgency[index], (urgency[heads[place]][0], depth))


def chained(ops: Sequence[Op], *, by_axis: bool = False, free: Container[Ref] = ()) -> list[Op]:
    """Order collectives by `after`: one chain for the phase, or one for each axis.

        reduce a; reduce b  -->  reduce a; reduce b after a

    `free` contains the results of collectives to exclude.
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
