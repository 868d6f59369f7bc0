"""Where members part: what is the same for all of them, where that ends, and how the cut moves back."""

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
    """Values that reads and host maps make alike for all members, with the ensembles concerned.

    What lies behind a `share` of the plan is not among them: there the plan has said where to share.
    """
    known: Independent = {}
    for op in editor.phase.ops:
        if isinstance(op, Read) and op.clock:
            continue
        for ref in _alike(op, known):
            placement = editor.values[ref].placement
            axes = tuple(axis for axis in members if not placement.varies(axis))
            if axes:
                known[ref] = axes
    return known


def frontier(editor: Editor, independent: Independent) -> list[Ref]:
    """Where such work ends: values of it that something else reads, or that leave the phase."""
    uses, bound, refs = editor.uses, editor.bound, list[Ref]()
    for ref, axes in independent.items():
        readers = uses.readers(ref)
        if any(isinstance(op, Share) for op in readers):
            continue
        ends = [op for op in readers if any(independent.get(r) != axes for r in results_of(op))]
        if ends or ref in bound:
            refs.append(ref)
    return refs


def _alike(op: Op, known: Independent) -> tuple[Ref, ...]:
    """What `op` makes alike for all members: reads (not their counts, which cost nothing), host maps."""
    if isinstance(op, Read):
        return (op.result,)
    if isinstance(op, Map) and op.lane == "host_compute" and all(ref in known for ref in op.operands):
        return op.results
    return ()


def cuts_back(editor: Editor, independent: Independent, ref: Ref, *, past_widening: bool) -> list[Ref]:
    """`ref`, and the values before it at which members could part as well, the latest first.

    A cut moves back over a host map that is not random, makes one value of one, and whose operand has a size
    and no other reader: then it is done by every member, on the same bits. past_widening: also over one that
    only widens.
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
        alone = uses.readers(before) == [maker] and before not in bound
        goes_on = any(
            independent.get(result) == axes for op in uses.readers(cut) for result in results_of(op)
        )
        if not alone or goes_on or not editor.values[before].leaves or independent.get(before) != axes:
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
    """The share, now before the map that makes its operand.

    wide = map widen(x); y = share wide  -->  narrow = share x; y = map widen(narrow)
    """
    value: Value = editor.values[maker.operands[0]]
    narrow = editor.add(replace(value, id=editor.fresh(f"{share.result}/narrow")))
    moved = replace(share, operand=maker.operands[0], result=narrow)
    ops[ops.index(share)] = moved
    ops[ops.index(maker)] = replace(maker, operands=(narrow,), results=(share.result,))
    return moved


def push_widening(editor: Editor, ops: list[Op], choices: list[Choice], settled: Collection[Ref]) -> None:
    """Ship the narrow type: widening host functions go behind the share.

    It applies where the function is elementwise, not random, has one operand and one result of the
    same shape and a wider dtype, and nothing else reads the wide value; then every record has the
    same bits either way. Device functions run behind the share anyhow. Results in `settled` stay: there the
    cut was chosen by cost.
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
            alone = share.operand not in editor.bound and uses.readers(share.operand) == [share]
            if not alone:
                break
            before, name = editor.values[share.operand].nbytes, name_of(share.result)
            share = move_back(editor, ops, share, maker)
            after = editor.values[share.result].nbytes
            why = f"{maker.fn} only widens: {sized(after)} a step are moved, not {sized(before)}"
            rejected = (f"after `{maker.fn}`: {sized(before)}",)
            text = f"`{name}`: shared before `{maker.fn}`"
            choices.append(Choice("share", text, why, share.span, rejected))


def widens(fn: FnType) -> bool:
    """Whether `fn` provably keeps every element apart and only makes it wider."""
    if not fn.elementwise or fn.random or len(fn.operands) != 1 or len(fn.results) != 1:
        return False
    before, after = fn.operands[0], fn.results[0]
    if not isinstance(before, ArrayType) or not isinstance(after, ArrayType):
        return False
    return before.shape == after.shape and before.dtype.nbytes < after.dtype.nbytes


def flows(phase: Phase) -> list[list[Op]]:
    """What the host does, in sets that hang together through their values."""
    produced: set[Ref] = set()
    members: list[Op] = []
    for op in phase.ops:
        host = isinstance(op, Read) or (isinstance(op, Map) and op.lane == "host_compute")
        if host or (isinstance(op, Share) and op.operand in produced):
            produced.update(results_of(op))
            members.append(op)
    return connected(members)
