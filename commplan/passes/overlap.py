"""overlap: orders collectives so that communication overlaps computation.

If XLA issues them, the levels of hierarchies form a pipeline: while one bucket is sent between nodes, the
next is reduced within them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import ClassVar

from msgspec.structs import replace

from commplan.diagnostics import plural
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.plan import Ref
from commplan.ir.remark import Choice
from commplan.ir.schedule import Collective, Elastic, Map, Op, Phase, Schedule, Unpack, Update, Value
from commplan.ir.schedule import operands as operands_of
from commplan.ir.schedule import results as results_of
from commplan.passes.base import Pass, PassContext
from commplan.passes.issue_order import delay_readers, issue_order


class OverlapPass(Pass, frozen=True):
    """Orders collectives, first needed first sent, and chains each to the one before.

    Attributes:
        chain: Whether `after` fixes the order, so that no backend merges or reorders collectives. Under JAX
            each axis has a separate chain.
        in_process: Whether collectives on unpacked leaves are excluded from the chain, so that XLA may merge
            them. This is correct if all ranks are threads of one process, which run one program in one order.
    """

    name: ClassVar[str] = "overlap"
    after: ClassVar[tuple[str, ...]] = (
        "share", "place", "bucket", "fuse_update", "decompose", "wire", "select",
    )  # fmt: skip
    chain: bool = True
    in_process: bool = False

    def phases(self, schedule: Schedule, context: PassContext, choices: list[Choice]) -> Iterable[Phase]:
        return [self._phase(schedule, phase, choices) for phase in schedule.phases]

    def _phase(self, schedule: Schedule, phase: Phase, choices: list[Choice]) -> Phase:
        """Reorder and chain the ops of one phase."""
        by_axis = schedule.backend == "jax"
        written = [op.result for op in phase.ops if isinstance(op, Collective)]
        count = len(written)
        values_of = {value.id: value for value in (*schedule.entry, *phase.values)}
        issued = issue_order(phase.ops, levels_apart=by_axis)
        if any(op.is_split or op.uses_servers(values_of) for op in phase.ops):
            issued = delay_readers(issued, values_of)
        is_reordered = written != [op.result for op in issued if isinstance(op, Collective)]
        free = {ref for ref in written if self.in_process and values_of[ref].kind != "flat"}
        if self.chain:
            issued = chain_collectives(issued, values_of, by_axis=by_axis, free=free)
        values = tuple(values_of[ref] for op in issued for ref in results_of(op))
        if written:
            choices.append(self._choice(phase, count, is_reordered=is_reordered, free=len(free)))
        return replace(phase, ops=tuple(issued), values=values)

    def _choice(self, phase: Phase, count: int, *, is_reordered: bool, free: int) -> Choice:
        """The remark on a phase of `count` collectives, `free` of them outside the chain."""
        why = "reductions as their buckets become ready, the rest as their results are needed"
        text = f"phase {phase.name}: {plural(count, 'collective')}"
        text += ", reordered" if is_reordered else ", in the order written"
        text += ", each after the one before" if self.chain and free < count else ""
        if self.chain and free:
            selection = "those" if free == count else f"{free}"
            text += f"; XLA may join and reorder {selection} of leaves that are not packed"
        return Choice("overlap", text, why, phase.span)


def chain_collectives(
    ops: Sequence[Op], values: Mapping[Ref, Value], *, by_axis: bool = False, free: Container[Ref] = ()
) -> list[Op]:
    """Order collectives by `after`: one chain for the phase, or one for each axis.

        reduce a; reduce b  -->  reduce a; reduce b after a

    A collective on a buffer that is computed from the result of the one before needs no `after`.

    Args:
        ops: The ops of a phase, in order of issue.
        values: The values of the phase and of the schedule's entry.
        by_axis: Whether each axis has a separate chain.
        free: The results of collectives that are excluded.
    """
    result: list[Op] = []
    last: dict[str, Ref] = {}  # by chain, an axis or "": the result of its last collective
    uses = DefUse(ops)
    for op in ops:
        if not isinstance(op, Collective) or op.result in free:
            result.append(op)
            continue
        chains = op.axes if by_axis else ("",)
        sources = set(_source_buffers(op.operand, uses, values))
        previous = dict.fromkeys(last[chain] for chain in chains if chain in last)
        result.append(replace(op, after=tuple(ref for ref in previous if ref not in sources)))
        last |= dict.fromkeys(chains, op.result)
    return result


def _source_buffers(ref: Ref, uses: DefUse[Op], values: Mapping[Ref, Value]) -> Iterator[Ref]:
    """Yield `ref`, then the buffer that it is computed from, and so on.

    Stops at a buffer that is computed from several values, or by a function of the user. Stops at values of
    several leaves, too, because one leaf may depend on only some of the collectives that compute the value.
    """
    while len(values[ref].leaves) == 1:
        yield ref
        maker = uses.maker(ref)
        if maker is None or isinstance(maker, Map | Elastic | Update | Unpack):
            return
        sources = operands_of(maker)
        if len(sources) != 1:
            return
        (ref,) = sources
