"""select: chooses the algorithm, the message size and the form of each collective.

`commplan.select` makes the decisions, and this pass writes them into the ops.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from msgspec.structs import replace

from commplan.collectives.program import KINDS
from commplan.ir.remark import Choice
from commplan.ir.schedule import Collective, Op, Phase, Schedule
from commplan.ir.types import sized
from commplan.passes.base import Choices, Pass, PassContext, key_of
from commplan.select.algorithm_search import WRITTEN, Chooser, Decision
from commplan.select.options import NATIVE


class SelectPass(Pass, frozen=True):
    """Chooses the algorithm and message size of each collective with the least predicted time.

    Pinned choices are kept. Without a topology, JAX's collectives are used, and under MPI a table decides by
    size (`commplan.select.size_thresholds`).

    Attributes:
        split: Whether collectives that may overlap computation are started early under MPI, and completed at
            their readers. Without effect under JAX.
    """

    name: ClassVar[str] = "select"
    after: ClassVar[tuple[str, ...]] = ("share", "place", "bucket", "fuse_update", "decompose", "wire")
    split: bool = True

    def phases(self, schedule: Schedule, context: PassContext, choices: list[Choice]) -> Iterable[Phase]:
        chooser = Chooser(
            schedule, context.costs, context.topology, context.candidates, explains=context.explains
        )
        return [self._phase(chooser, phase, context.choices or {}, choices) for phase in schedule.phases]

    def _phase(self, chooser: Chooser, phase: Phase, searched: Choices, choices: list[Choice]) -> Phase:
        """Select algorithms and message sizes for one phase.

        Equal collectives share a decision. Collectives of a stage with the same outcome share a remark.
        """
        searched_stages = {key.stage for key in searched if key.phase == phase.name}
        decided: dict[tuple[object, ...], Decision] = {}
        # The collectives of each remark.
        remark_groups: dict[tuple[object, ...], list[tuple[Collective, Decision]]] = {}
        ops: list[Op] = []
        for op in phase.ops:
            if not isinstance(op, Collective):
                ops.append(op)
                continue
            stage = (op.stages, op.kind, op.op, op.axes)
            key = (*stage, op.nbytes, op.root, op.algorithm, op.hints, op.pinned)
            decision = decided[key] if key in decided else chooser.decide(op)
            if decision.why == WRITTEN and key_of(phase, op).stage in searched_stages:
                decision = decision._replace(why="chosen with the buckets of its stage")
            decided[key] = decision
            chosen = self._chosen(op, decision, chooser, is_hidden=phase.hidden > 0)
            ops.append(chosen)
            remark_key = (*stage, chosen.algorithm, chosen.hints.chunk, decision.why)
            remark_groups.setdefault(remark_key, []).append((chosen, decision))
        for group in remark_groups.values():
            is_timed = group[0][1].seconds is not None or chooser.schedule.backend == "mpi"
            if is_timed and group[0][0].kind in KINDS:
                choices.append(_choice(group))
        return replace(phase, ops=tuple(ops))

    def _chosen(self, op: Collective, decision: Decision, chooser: Chooser, *, is_hidden: bool) -> Collective:
        """Write a decision into `op`.

        y = all_reduce(x)  -->  y = all_reduce(x) via ring, in messages of 32 KiB, split
        """
        hints = op.hints
        if decision.chunk is not None and hints.chunk is None:
            hints = replace(hints, chunk=decision.chunk)
        form = op.form if chooser.schedule.backend == "mpi" else None
        if chooser.schedule.backend == "mpi" and form is None and op.kind in KINDS:
            # A collective that may overlap computation is split in a start and a finish.
            overlaps = is_hidden or op.hints.overlap is not None
            form = "split" if self.split and overlaps else "call"
        return replace(op, algorithm=decision.algorithm, hints=hints, form=form)


def _choice(group: list[tuple[Collective, Decision]]) -> Choice:
    """The common choice for several collectives of a stage; the times are those of the largest."""
    op, decision = max(group, key=lambda pair: pair[0].nbytes)
    sizes = {member.nbytes for member, _ in group}
    count = f"{len(group)} x " if len(group) > 1 else ""
    up_to = "up to " if len(sizes) > 1 else ""
    timed_op = "" if len(group) == 1 else f"each of {len(group)}" if len(sizes) == 1 else "the largest"
    source = ", ".join(filter(None, (timed_op, decision.source)))
    text = f"{op.algorithm} for {count}{op.kind} of {up_to}{sized(op.nbytes)} over {', '.join(op.axes)}"
    if op.hints.chunk is not None and op.algorithm != NATIVE:
        text += f", in messages of {sized(op.hints.chunk)}"
    if op.form == "split":
        text += ", started and finished separately"
    return Choice(
        "select", text, decision.why, op.span, (), decision.seconds, source, decision.alternatives
    )  # fmt: skip
