"""share: what is the same for all members of an ensemble is made once, then moved."""

from __future__ import annotations

from typing import ClassVar, Literal

import msgspec

from commplan.ir.plan import AxisKind, Ref, name_of
from commplan.ir.schedule import Choice, Design, FnType, Map, Op, Phase, Read, Schedule, Share, Value
from commplan.ir.schedule import operands as operands_of
from commplan.ir.schedule import results as results_of
from commplan.ir.sources import runs_ahead
from commplan.ir.types import ArrayType, sized
from commplan.passes.base import Context, Pass
from commplan.passes.rewrite import Editor

Independent = dict[Ref, tuple[str, ...]]


class SharePass(Pass, frozen=True):
    """Computes what is the same over members once: the longest prefix of the input work.

    design: how, where the plan does not say; `none` leaves every member to itself.
    widening: whether a host function that only widens is moved behind the move (`push`) or not.
    """

    name: ClassVar[str] = "share"
    design: Literal["all_shared", "duplicate", "none"] = "all_shared"
    widening: Literal["push", "keep"] = "push"

    def run(self, schedule: Schedule, context: Context) -> Schedule:
        choices: list[Choice] = []
        phases = tuple(self._phase(schedule, phase, choices) for phase in schedule.phases)
        return msgspec.structs.replace(schedule, phases=phases, choices=(*schedule.choices, *choices))

    def _phase(self, schedule: Schedule, phase: Phase, choices: list[Choice]) -> Phase:
        members = tuple(a.name for a in schedule.axes if a.kind is AxisKind.ENSEMBLE and a.size > 1)
        if not members or not any(isinstance(op, Read) for op in phase.ops):
            return phase
        editor = Editor(schedule, phase)
        ops = list(phase.ops)
        choices += [_pinned(op) for op in ops if isinstance(op, Share)]
        choices += [_own_clock(op) for op in ops if isinstance(op, Read) and op.clock in members]
        independent = member_independent(editor, phase, members)
        for ref in frontier(phase, independent):
            self._share(editor, ops, ref, independent, choices)
        if self.widening == "push":
            ops = push_widening(editor, ops, choices)
        return editor.finish(ops)

    def _share(
        self, editor: Editor, ops: list[Op], ref: Ref, independent: Independent, choices: list[Choice]
    ) -> None:
        """pixels = map decode(raw)  -->  own = map decode(raw); pixels = share own

        Work that goes on alike for all members goes on from `own`.
        """
        axes = independent[ref]
        place = next(i for i, op in enumerate(ops) if ref in results_of(op))
        maker, value = ops[place], editor.values[ref]
        what = f"`{name_of(ref)}` of {editor.phase.name} over {', '.join(axes)}"
        if not value.leaves:
            why = "only reading is the same for all members, and records of variable length have no slot"
            choices.append(Choice("share", f"{what}: duplicate", why, maker.span))
            return
        if self.design == "none":
            choices.append(Choice("share", f"{what}: not shared", "the pass was told so", maker.span))
            return
        own = editor.add(msgspec.structs.replace(value, id=editor.fresh(f"{ref}/own")))
        ops[place] = _renamed(maker, ref, own)
        design: Design = self.design
        for index, op in enumerate(ops):
            if isinstance(op, Map) and all(independent.get(r) == axes for r in op.results):
                operands = tuple(own if operand == ref else operand for operand in op.operands)
                ops[index] = msgspec.structs.replace(op, operands=operands)
        ops.insert(place + 1, Share(ref, own, axes, design, maker.span))
        why = (
            f"the work that is the same for all members ends here ({sized(value.nbytes)} a step); each "
            "process of a host makes its part and all see all; members in one process share without a copy"
        )
        others = "few readers would do all the work, and the costs that could speak for that are not measured"
        rejected = (
            f"duplicate: each of {editor.size(axes)} members would do all the work",
            f"single_broadcast, multi_broadcast: {others}",
        )
        if design == "duplicate":
            why, rejected = "the pass was told so", ()
        choices.append(Choice("share", f"{what}: {design}", why, maker.span, rejected))


def member_independent(editor: Editor, phase: Phase, members: tuple[str, ...]) -> Independent:
    """Values that reads and host maps make alike for all members, with the ensembles concerned.

    What lies behind a `share` of the plan is not among them: there the plan has said where to share.
    """
    known: Independent = {}
    for op in phase.ops:
        if isinstance(op, Read) and op.clock:
            continue
        for ref in _alike(op, known):
            placement = editor.values[ref].placement
            axes = tuple(axis for axis in members if not placement.varies(axis))
            if axes:
                known[ref] = axes
    return known


def frontier(phase: Phase, independent: Independent) -> list[Ref]:
    """Where such work ends: values of it that something else reads, or that leave the phase."""
    bound = {binding.value for binding in (*phase.outputs, *phase.updates)}
    found: list[Ref] = []
    for ref, axes in independent.items():
        readers = [op for op in phase.ops if ref in operands_of(op)]
        if any(isinstance(op, Share) for op in readers):
            continue
        ends = [op for op in readers if any(independent.get(r) != axes for r in results_of(op))]
        if ends or ref in bound:
            found.append(ref)
    return found


def _alike(op: Op, known: Independent) -> tuple[Ref, ...]:
    """What `op` makes alike for all members: reads (not their counts, which cost nothing), host maps."""
    if isinstance(op, Read):
        return (op.result,)
    if isinstance(op, Map) and op.lane == "host_compute" and all(ref in known for ref in op.operands):
        return op.results
    return ()


def push_widening(editor: Editor, ops: list[Op], choices: list[Choice]) -> list[Op]:
    """Ship the narrow type: widening host functions go behind the share.

    wide = map widen(x); y = share wide  -->  narrow = share x; y = map widen(narrow)

    It applies where the function is elementwise, not random, has one operand and one result of the
    same shape and a wider dtype, and nothing else reads the wide value; then every record has the
    same bits either way. Device functions run behind the share anyhow.
    """
    fns = {fn.name: fn for fn in editor.schedule.fns}
    changed = True
    while changed:
        changed = False
        for place, op in enumerate(ops):
            if not isinstance(op, Share) or op.design == "duplicate":
                continue
            maker = next((o for o in ops if op.operand in results_of(o)), None)
            if not isinstance(maker, Map) or not widens(fns[maker.fn]) or maker.per:
                continue
            others = [o for o in ops if o is not op and op.operand in operands_of(o)]
            bound = [b.value for b in (*editor.phase.outputs, *editor.phase.updates)]
            if others or op.operand in bound or not runs_ahead(maker, set(maker.operands)):
                continue
            narrow = _moved_like(editor, maker.operands[0], op.result)
            ops[place] = msgspec.structs.replace(op, operand=maker.operands[0], result=narrow)
            ops[ops.index(maker)] = msgspec.structs.replace(maker, operands=(narrow,), results=(op.result,))
            before, after = editor.values[op.operand].nbytes, editor.values[narrow].nbytes
            what = f"`{name_of(op.result)}`: shared before `{maker.fn}`"
            why = f"{maker.fn} only widens: {sized(after)} a step are moved, not {sized(before)}"
            choices.append(Choice("share", what, why, op.span, (f"after `{maker.fn}`: {sized(before)}",)))
            changed = True
            break
    return ops


def widens(fn: FnType) -> bool:
    """Whether `fn` provably keeps every element apart and only makes it wider."""
    if not fn.elementwise or fn.random or len(fn.operands) != 1 or len(fn.results) != 1:
        return False
    before, after = fn.operands[0], fn.results[0]
    if not isinstance(before, ArrayType) or not isinstance(after, ArrayType):
        return False
    return before.shape == after.shape and before.dtype.nbytes < after.dtype.nbytes


def _moved_like(editor: Editor, operand: Ref, result: Ref) -> Ref:
    value: Value = editor.values[operand]
    return editor.add(msgspec.structs.replace(value, id=editor.fresh(f"{result}/narrow")))


def _renamed(op: Op, ref: Ref, name: Ref) -> Op:
    """`op` with its result `ref` called `name`."""
    if isinstance(op, Map):
        return msgspec.structs.replace(op, results=tuple(name if r == ref else r for r in op.results))
    return msgspec.structs.replace(op, result=name)


def _pinned(op: Share) -> Choice:
    return Choice("share", f"`{name_of(op.result)}`: {op.design}", "the plan says so", op.span)


def _own_clock(op: Read) -> Choice:
    why = f"members of `{op.clock}` read by their own clocks, so no two want a batch at the same time"
    return Choice("share", f"`{name_of(op.result)}`: not shared", why, op.span)
