"""share: computes values that are equal for all members of an ensemble once, and then distributes them.

`frontier` finds these values, and `cost` compares designs of their distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec.structs import replace

from commplan.input.costs import Prefer
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.plan import AxisKind, Ref, name_of
from commplan.ir.remark import Choice, Design
from commplan.ir.schedule import Map, Op, Phase, Read, Schedule, Share, rename_results, substitute
from commplan.ir.schedule import results as results_of
from commplan.ir.types import sized
from commplan.passes.base import Pass, PassContext
from commplan.passes.rewrite import Editor
from commplan.passes.share.cost import SharingChoice, SharingCostModel
from commplan.passes.share.frontier import (
    Independent,
    candidate_cuts,
    flows,
    frontier,
    member_independent,
    move_back,
    push_widening,
)
from commplan.passes.share.machine import InputFlow


class SharePass(Pass, frozen=True):
    """Computes values that are the same for all members once: the longest prefix of the input work.

    Attributes:
        design: The design if the plan has none. `auto` decides by measured costs, including not sharing, or
            uses `all_shared` without measurements; `none` does not share.
        widening: `push` moves a host function that only widens the dtype after the share; `keep` does not.
        prefer: With `time`, members share only if that shortens a step. With `cpu`, they also share if that
            saves CPU time and a step gets no longer.
        readers: The number of readers of `single_broadcast` and `multi_broadcast`, if the pass option has one
            of these designs. At most the number of members.
    """

    name: ClassVar[str] = "share"
    design: Literal["auto", "all_shared", "single_broadcast", "multi_broadcast", "duplicate", "none"] = "auto"
    widening: Literal["push", "keep"] = "push"
    prefer: Prefer = "time"
    readers: Annotated[int, msgspec.Meta(ge=1)] = 1

    def phases(self, schedule: Schedule, context: PassContext, choices: list[Choice]) -> Iterable[Phase]:
        return [self._phase(schedule, phase, context, choices) for phase in schedule.phases]

    def _phase(self, schedule: Schedule, phase: Phase, context: PassContext, choices: list[Choice]) -> Phase:
        """Choose the values that members share in a phase, and insert the shares."""
        members = tuple(a.name for a in schedule.axes if a.kind is AxisKind.ENSEMBLE and a.size > 1)
        if not members or not any(isinstance(op, Read) for op in phase.ops):
            return phase
        editor = Editor(schedule, phase)
        cost_model = SharingCostModel(editor, phase, context)
        ops, uses = list(phase.ops), editor.uses
        choices += [_own_clock(op) for op in ops if isinstance(op, Read) and op.clock in members]
        independent = member_independent(editor, members)
        ends = frontier(editor, independent)
        settled: list[Ref] = []  # values whose cut was chosen by cost
        for flow in flows(phase):
            produced = {ref for op in flow for ref in results_of(op)}
            flow_ends = [ref for ref in ends if ref in produced]
            pinned = [op for op in flow if isinstance(op, Share)]
            choices += [
                _choice_pinned(op, cost_model, flow if len(pinned) == 1 and not flow_ends else [])
                for op in pinned
            ]
            chosen = None if pinned else self._chosen(cost_model, flow, flow_ends, independent)
            for number, ref in enumerate(flow_ends):
                if self.design == "auto" and chosen is not None and chosen.declines:
                    span = uses.ops[uses.indices[ref]].span
                    text = f"`{name_of(ref)}` of {phase.name} over {', '.join(independent[ref])}: not shared"
                    choices.append(chosen.choice(text, span, first=number == 0))
                    continue  # members in one process still use one value at no cost
                self._share(editor, ops, ref, independent, choices, chosen, first=number == 0)
                if chosen is not None:
                    settled.append(ref)
                    _move_to(editor, ops, ref, chosen)
        if self.widening == "push":
            push_widening(editor, ops, choices, settled)
        return editor.finish(ops)

    def _chosen(
        self, cost_model: SharingCostModel, flow: list[Op], ends: list[Ref], independent: Independent
    ) -> SharingChoice | None:
        """The decision by cost for a flow whose shared work ends at `ends`.

        None if costs are unknown, the pass does not share, the ends are equal along different axes, or a
        value at an end has records of variable length.
        """
        axes = {independent[ref] for ref in ends}
        if self.design == "none" or len(axes) != 1 or not all(map(cost_model.record_size, ends)):
            return None
        (over,) = axes
        editor, push = cost_model.editor, self.widening == "push"
        cuts = {ref: candidate_cuts(editor, independent, ref, past_widening=push) for ref in ends}
        requested = None if self.design == "auto" else (self.design, self._readers(editor.size(over)))
        return cost_model.choose(InputFlow(flow, cuts, over), self.prefer, requested)

    def _readers(self, members: int) -> int | None:
        """The number of reading processes; None if the design has no designated readers."""
        return min(self.readers, members) if self.design.endswith("broadcast") else None

    def _share(
        self, editor: Editor, ops: list[Op], ref: Ref, independent: Independent, choices: list[Choice],
        chosen: SharingChoice | None, *, first: bool,
    ) -> None:  # fmt: skip
        """Insert a share of `ref` into `ops`, and append the remark.

            pixels = map decode(raw)  -->  own = map decode(raw); pixels = share own

        Later work that is equal for all members uses `own`. Only the remark is appended for records of
        variable length, and if the pass does not share.
        """
        axes = independent[ref]
        maker_index = DefUse(ops).indices[ref]
        maker, value = ops[maker_index], editor.values[ref]
        text = f"`{name_of(ref)}` of {editor.phase.name} over {', '.join(axes)}"
        if not value.leaves:
            why = "only reading is the same for all members, and records of variable length have no slot"
            choices.append(Choice("share", f"{text}: duplicate", why, maker.span))
            return
        if self.design == "none":
            choices.append(Choice("share", f"{text}: not shared", "set by an option of the pass", maker.span))
            return
        unshared = editor.add(replace(value, id=editor.fresh(f"{ref}/own")))
        ops[maker_index] = rename_results(maker, {ref: unshared})
        design: Design = "all_shared" if self.design == "auto" else self.design
        readers = self._readers(editor.size(axes))
        if chosen is not None:
            design, readers = chosen.prediction.design, chosen.prediction.readers
        for index, op in enumerate(ops):
            if (
                isinstance(op, Map)
                and ref in op.operands
                and all(independent.get(r) == axes for r in op.results)
            ):
                ops[index] = substitute(op, {ref: unshared})
        share = Share(ref, unshared, axes, design, maker.span, readers)
        ops.insert(maker_index + 1, share)
        choices.append(_choice(editor, text, share, chosen, by_option=self.design != "auto", first=first))


def _choice(
    editor: Editor, text: str, op: Share, chosen: SharingChoice | None, *, by_option: bool, first: bool
) -> Choice:
    """The remark on one shared value.

    Args:
        editor: The phase.
        text: The value and its axes, in words.
        op: The share.
        chosen: The decision by cost; None without measurements.
        by_option: Whether an option of the pass specifies the design.
        first: Whether it is the first value of its flow.
    """
    text = f"{text}: {op.design}" + (f"(readers = {op.readers})" if op.readers else "")
    if chosen is not None:
        return chosen.choice(
            text, op.span, first=first, why="set by an option of the pass" if by_option else ""
        )
    nbytes = sized(editor.values[op.result].nbytes)
    why = (
        f"the work that is the same for all members ends here ({nbytes} a step); each process of a host "
        "makes its part and all see all; members in one process share without a copy"
    )
    few_readers = "few readers would do all the work, and the costs that could justify it are not measured"
    rejected = (
        f"duplicate: each of {editor.size(op.axes)} members would do all the work",
        f"single_broadcast, multi_broadcast: {few_readers}",
    )
    if by_option and op.design != "all_shared":
        why, rejected = "set by an option of the pass", ()
    return Choice("share", text, why, op.span, rejected)


def _move_to(editor: Editor, ops: list[Op], ref: Ref, chosen: SharingChoice) -> None:
    """Move the share of `ref` back to the cut chosen by cost."""
    share = DefUse(ops).maker(ref)
    while isinstance(share, Share) and share.design != "duplicate":
        maker = DefUse(ops).maker(share.operand)
        # Before the first move the operand is the renamed value at the frontier.
        current = ref if share.result == ref else share.operand
        if current == chosen.cuts[ref] or not isinstance(maker, Map):
            return
        share = move_back(editor, ops, share, maker)


def _choice_pinned(op: Share, cost_model: SharingCostModel, flow: list[Op]) -> Choice:
    """The remark on a share of the plan, with costs unless `flow` is empty."""
    input_flow = InputFlow(flow, {op.operand: [op.operand]}, op.axes)
    chosen = cost_model.choose(input_flow, "cpu", (op.design, op.readers)) if flow else None
    text = f"`{name_of(op.result)}`: {op.design}"
    if chosen is None:
        return Choice("share", text, "set in the plan", op.span)
    return chosen.choice(text, op.span, first=True, why="set in the plan")


def _own_clock(op: Read) -> Choice:
    """The remark on a load whose members have independent clocks."""
    unit = math.gcd(*op.batch)
    why = (
        f"members of `{op.clock}` have independent clocks: shared values are made once, {unit} "
        "records at a time, which divide every batch, and each member takes it at its own pace"
    )
    return Choice("share", f"`{name_of(op.result)}`: shared in units of {unit} records", why, op.span)
