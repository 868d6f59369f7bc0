"""share: what is the same for all members of an ensemble is made once, then moved."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec.structs import replace

from commplan.ir.analysis.def_use import DefUse
from commplan.ir.plan import AxisKind, Ref, name_of
from commplan.ir.remark import Choice, Design
from commplan.ir.schedule import Map, Op, Phase, Read, Schedule, Share, rename_results, substitute
from commplan.ir.schedule import results as results_of
from commplan.ir.types import sized
from commplan.passes.pipeline.base import Context, Pass
from commplan.passes.rewrite import Editor
from commplan.passes.share.cost import Chosen, SharingCostModel
from commplan.passes.share.frontier import (
    Independent,
    cuts_back,
    flows,
    frontier,
    member_independent,
    move_back,
    push_widening,
)
from commplan.passes.share.machine import Flow


class SharePass(Pass, frozen=True):
    """Computes what is the same over members once: the longest prefix of the input work.

    design: how, where the plan does not say. `auto`: by measured costs, not sharing among them, else
    `all_shared`; `none` leaves every member to itself. widening: whether a host function that only widens is
    moved behind the move (`push`) or not. prefer: what costs decide by, the `time` of a step, or among
    steps of the same time the `cpu` spent. readers: of `single_broadcast` and `multi_broadcast`.
    """

    name: ClassVar[str] = "share"
    design: Literal["auto", "all_shared", "single_broadcast", "multi_broadcast", "duplicate", "none"] = "auto"
    widening: Literal["push", "keep"] = "push"
    prefer: Literal["time", "cpu"] = "time"
    readers: Annotated[int, msgspec.Meta(ge=1)] = 1

    def phases(self, schedule: Schedule, context: Context, choices: list[Choice]) -> Iterable[Phase]:
        return [self._phase(schedule, phase, context, choices) for phase in schedule.phases]

    def _phase(self, schedule: Schedule, phase: Phase, context: Context, choices: list[Choice]) -> Phase:
        members = tuple(a.name for a in schedule.axes if a.kind is AxisKind.ENSEMBLE and a.size > 1)
        if not members or not any(isinstance(op, Read) for op in phase.ops):
            return phase
        editor = Editor(schedule, phase)
        pricer = SharingCostModel(editor, phase, context)
        ops, uses = list(phase.ops), editor.uses
        choices += [_own_clock(op) for op in ops if isinstance(op, Read) and op.clock in members]
        independent = member_independent(editor, members)
        ends = frontier(editor, independent)
        settled: list[Ref] = []
        for flow in flows(phase):
            produced = {ref for op in flow for ref in results_of(op)}
            own = [ref for ref in ends if ref in produced]
            pinned = [op for op in flow if isinstance(op, Share)]
            choices += [_pinned(op, pricer, flow if len(pinned) == 1 and not own else []) for op in pinned]
            chosen = None if pinned else self._chosen(pricer, flow, own, independent)
            for number, ref in enumerate(own):
                if self.design == "auto" and chosen is not None and chosen.declines:
                    span = uses.ops[uses.indices[ref]].span
                    text = f"`{name_of(ref)}` of {phase.name} over {', '.join(independent[ref])}: not shared"
                    choices.append(chosen.choice(text, span, first=number == 0))
                    continue  # members that one process holds still have one value: that is free
                self._share(editor, ops, ref, independent, choices, chosen, first=number == 0)
                if chosen is not None:
                    settled.append(ref)
                    _move_to(editor, ops, ref, chosen)
        if self.widening == "push":
            push_widening(editor, ops, choices, settled)
        return editor.finish(ops)

    def _chosen(
        self, pricer: SharingCostModel, flow: list[Op], ends: list[Ref], independent: Independent
    ) -> Chosen | None:
        """By costs; None where nothing is known of them, or nothing can be shared."""
        axes = {independent[ref] for ref in ends}
        if self.design == "none" or len(axes) != 1 or not all(map(pricer.record_size, ends)):
            return None
        (over,) = axes
        push = self.widening == "push"
        cuts = {ref: cuts_back(pricer.editor, independent, ref, past_widening=push) for ref in ends}
        settled = None if self.design == "auto" else (self.design, self._readers(pricer.editor.size(over)))
        return pricer.choose(Flow(flow, cuts, over), self.prefer, settled)

    def _readers(self, members: int) -> int | None:
        """How many processes read, where the design has readers of its own."""
        return min(self.readers, members) if self.design.endswith("broadcast") else None

    def _share(
        self, editor: Editor, ops: list[Op], ref: Ref, independent: Independent, choices: list[Choice],
        chosen: Chosen | None, *, first: bool,
    ) -> None:  # fmt: skip
        """pixels = map decode(raw)  -->  own = map decode(raw); pixels = share own

        Work that goes on alike for all members goes on from `own`.
        """
        axes = independent[ref]
        place = DefUse(ops).indices[ref]
        maker, value = ops[place], editor.values[ref]
        text = f"`{name_of(ref)}` of {editor.phase.name} over {', '.join(axes)}"
        if not value.leaves:
            why = "only reading is the same for all members, and records of variable length have no slot"
            choices.append(Choice("share", f"{text}: duplicate", why, maker.span))
            return
        if self.design == "none":
            choices.append(Choice("share", f"{text}: not shared", "the pass was told so", maker.span))
            return
        own = editor.add(replace(value, id=editor.fresh(f"{ref}/own")))
        ops[place] = rename_results(maker, {ref: own})
        design: Design = "all_shared" if self.design == "auto" else self.design
        readers = self._readers(editor.size(axes))
        if chosen is not None:
            design, readers = chosen.taken.design, chosen.taken.readers
        for index, op in enumerate(ops):
            if (
                isinstance(op, Map)
                and ref in op.operands
                and all(independent.get(r) == axes for r in op.results)
            ):
                ops[index] = substitute(op, {ref: own})
        share = Share(ref, own, axes, design, maker.span, readers)
        ops.insert(place + 1, share)
        choices.append(_made(editor, text, share, chosen, by_option=self.design != "auto", first=first))


def _made(
    editor: Editor, text: str, op: Share, chosen: Chosen | None, *, by_option: bool, first: bool
) -> Choice:
    """What was chosen for one value."""
    text = f"{text}: {op.design}" + (f"(readers = {op.readers})" if op.readers else "")
    if chosen is not None:
        return chosen.choice(text, op.span, first=first, why="the pass was told so" if by_option else "")
    nbytes = sized(editor.values[op.result].nbytes)
    why = (
        f"the work that is the same for all members ends here ({nbytes} a step); each process of a host "
        "makes its part and all see all; members in one process share without a copy"
    )
    others = "few readers would do all the work, and the costs that could speak for that are not measured"
    rejected = (
        f"duplicate: each of {editor.size(op.axes)} members would do all the work",
        f"single_broadcast, multi_broadcast: {others}",
    )
    if by_option and op.design != "all_shared":
        why, rejected = "the pass was told so", ()
    return Choice("share", text, why, op.span, rejected)


def _move_to(editor: Editor, ops: list[Op], ref: Ref, chosen: Chosen) -> None:
    """Move the share of `ref` back to where the costs want members to part."""
    share = DefUse(ops).maker(ref)
    while isinstance(share, Share) and share.design != "duplicate":
        maker = DefUse(ops).maker(share.operand)
        # Before the first move the operand is the renamed end itself.
        current = ref if share.result == ref else share.operand
        if current == chosen.cuts[ref] or not isinstance(maker, Map):
            return
        share = move_back(editor, ops, share, maker)


def _pinned(op: Share, pricer: SharingCostModel, flow: list[Op]) -> Choice:
    priced = Flow(flow, {op.operand: [op.operand]}, op.axes)
    chosen = pricer.choose(priced, "cpu", (op.design, op.readers)) if flow else None
    text = f"`{name_of(op.result)}`: {op.design}"
    if chosen is None:
        return Choice("share", text, "the plan says so", op.span)
    return chosen.choice(text, op.span, first=True, why="the plan says so")


def _own_clock(op: Read) -> Choice:
    unit = math.gcd(*op.batch)
    why = (
        f"members of `{op.clock}` read by their own clocks: what is the same for all is made once, {unit} "
        "records at a time, which divide every batch, and each member takes it at its own pace"
    )
    return Choice("share", f"`{name_of(op.result)}`: shared in units of {unit} records", why, op.span)
