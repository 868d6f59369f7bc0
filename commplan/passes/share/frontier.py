"""Find the values at which the work of ensemble members starts to differ, and move this frontier back."""

from __future__ import annotations

from collections.abc import Collection

from msgspec.structs import replace

from commplan.ir.analysis.def_use import DefUse
from commplan.ir.analysis.input_slice import connected
from commplan.ir.plan import Ref, name_of
from commplan.ir.remark import Choice
from commplan.ir.schedule import FnType, Map, Op, Phase, Read, Share, Value
from commplan.ir.schedule import results as results_of
from commplan.ir.types import ArrayType, sized
from commplan.passes.rewrite import Editor

Independent = dict[Ref, tuple[str, ...]]


def member_independent(editor: Editor, members: tuple[str, ...]) -> Independent:
    """Values that loads and host maps compute equally for all members, with the ensembles concerned.

    Values after a `share` of the plan are excluded, since the plan decides how to share there.
    """
    independent: Independent = {}
    for op in editor.phase.ops:
        if isinstance(op, Read) and op.clock:
            continue
        for ref in _equal_results(op, independent):
            placement = editor.values[ref].placement
            axes = tuple(axis for axis in members if not placement.varies(axis))
            if axes:
                independent[ref] = axes
    return independent


def frontier(editor: Editor, independent: Independent) -> list[Ref]:
    """The member-independent values that have other readers or leave the phase."""
    uses = editor.uses
    bound = editor.bound
    refs: list[Ref] = []
    for ref, axes in independent.items():
        readers = uses.readers(ref)
        if any(isinstance(op, Share) for op in readers):
            continue
        ends = [op for op in readers if any(independent.get(r) != axes for r in results_of(op))]
        if ends or ref in bound:
            refs.append(ref)
    return refs


def _equal_results(op: Op, independent: Independent) -> tuple[Ref, ...]:
    """The results of `op` that are equal for all members: loads (without record counts) and host maps."""
    if isinstance(op, Read):
        return (op.result,)
    if isinstance(op, Map) and op.lane == "host_compute" and all(ref in independent for ref in op.operands):
        return op.results
    return ()


def candidate_cuts(editor: Editor, independent: Independent, ref: Ref, *, past_widening: bool) -> list[Ref]:
    """`ref` and the earlier values at which sharing could end instead, latest first.

    A cut can move back over a deterministic host map with one operand and one result, if the operand has a
    fixed size and no other reader. Each member then runs this map on the same data.

    Args:
        past_widening: Whether the cut may move over a map that only widens the dtype.
    """
    uses, bound = editor.uses, editor.bound
    cuts = [ref]
    while True:
        cut = cuts[-1]
        maker = uses.maker(cut)
        if not isinstance(maker, Map) or not _moves_back(maker):
            return cuts
        if not past_widening and widens(editor.schedule.fn(maker.fn)):
            return cuts
        before, axes = maker.operands[0], independent[cut]
        has_one_reader = uses.readers(before) == [maker] and before not in bound
        goes_on = any(
            independent.get(result) == axes for op in uses.readers(cut) for result in results_of(op)
        )
        if (
            not has_one_reader
            or goes_on
            or not editor.values[before].leaves
            or independent.get(before) != axes
        ):
            return cuts
        cuts.append(before)


def _moves_back(maker: Map) -> bool:
    return (
        maker.lane == "host_compute"
        and not (maker.per or maker.random)
        and len(maker.operands) == 1
        and len(maker.results) == 1
    )


def move_back(editor: Editor, ops: list[Op], share: Share, maker: Map) -> Share:
    """Move a share before the map that computes its operand.

    wide = map widen(x); y = share wide  -->  narrow = share x; y = map widen(narrow)
    """
    value: Value = editor.values[maker.operands[0]]
    narrow = editor.add(replace(value, id=editor.fresh(f"{share.result}/narrow")))
    moved = replace(share, operand=maker.operands[0], result=narrow)
    ops[ops.index(share)] = moved
    ops[ops.index(maker)] = replace(maker, operands=(narrow,), results=(share.result,))
    return moved


def push_widening(editor: Editor, ops: list[Op], choices: list[Choice], settled: Collection[Ref]) -> None:
    """Share the narrow dtype: move widening host functions after the share.

    Applies if the function is elementwise and deterministic, has one operand and one result of the same shape
    and a wider dtype, and the wide value has no other reader. Records are then bitwise equal either way.
    Device functions always run after the share. Results in `settled` are skipped, since their cut was chosen
    by cost.
    """
    for first in [op for op in ops if isinstance(op, Share) and op.result not in settled]:
        share = first
        while share.design != "duplicate":
            uses = DefUse(ops)
            maker = uses.maker(share.operand)
            if (
                not isinstance(maker, Map)
                or not widens(editor.schedule.fn(maker.fn))
                or not _moves_back(maker)
            ):
                break
            has_one_reader = share.operand not in editor.bound and uses.readers(share.operand) == [share]
            if not has_one_reader:
                break
            before, name = editor.values[share.operand].nbytes, name_of(share.result)
            share = move_back(editor, ops, share, maker)
            after = editor.values[share.result].nbytes
            why = f"{maker.fn} only widens: {sized(after)} a step are moved, not {sized(before)}"
            rejected = (f"after `{maker.fn}`: {sized(before)}",)
            text = f"`{name}`: shared before `{maker.fn}`"
            choices.append(Choice("share", text, why, share.span, rejected))


def widens(fn: FnType) -> bool:
    """Whether `fn` is elementwise and only converts to a wider dtype."""
    if not fn.elementwise or fn.random or len(fn.operands) != 1 or len(fn.results) != 1:
        return False
    before, after = fn.operands[0], fn.results[0]
    if not isinstance(before, ArrayType) or not isinstance(after, ArrayType):
        return False
    return before.shape == after.shape and before.dtype.nbytes < after.dtype.nbytes


def flows(phase: Phase) -> list[list[Op]]:
    """The host ops, grouped into sets connected through their values."""
    produced: set[Ref] = set()
    members: list[Op] = []
    for op in phase.ops:
        host = isinstance(op, Read) or (isinstance(op, Map) and op.lane == "host_compute")
        if host or (isinstance(op, Share) and op.operand in produced):
            produced.update(results_of(op))
            members.append(op)
    return connected(members)
