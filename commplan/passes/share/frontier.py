"""Finds the values at which the work of ensemble members starts to differ, and moves this frontier back.

Sharing earlier values is useful if they have fewer bytes. The pass `share` inserts the shares.
"""

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

# By value: the ensemble axes along which it is equal for all members. Other values are not keys.
Independent = dict[Ref, tuple[str, ...]]


def member_independent(editor: Editor, members: tuple[str, ...]) -> Independent:
    """The values that loads and host maps compute equally for all members of an ensemble.

    Values after a `share` of the plan are excluded, since the plan decides how to share there. Loads with
    independent clocks are excluded, too.

    Args:
        editor: The phase.
        members: The ensemble axes with several members.
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
    """The member-independent values that leave the phase, or that an op reads whose results are not.

    An op also counts if its results are equal along other axes than the value. Values that the plan shares
    are excluded.
    """
    uses = editor.uses
    bound = editor.bound
    refs: list[Ref] = []
    for ref, axes in independent.items():
        readers = uses.readers(ref)
        if any(isinstance(op, Share) for op in readers):
            continue
        ends = [op for op in readers if any(independent.get(result) != axes for result in results_of(op))]
        if ends or ref in bound:
            refs.append(ref)
    return refs


def _equal_results(op: Op, independent: Independent) -> tuple[Ref, ...]:
    """The results of `op` that may be equal for all members: those of loads and of host maps.

    The record counts of a load are excluded, as is a map with an operand that is not in `independent`.
    """
    if isinstance(op, Read):
        return (op.result,)
    if isinstance(op, Map) and op.lane == "host_compute" and all(ref in independent for ref in op.operands):
        return op.results
    return ()


def candidate_cuts(editor: Editor, independent: Independent, ref: Ref, *, past_widening: bool) -> list[Ref]:
    """`ref` and the earlier values at which sharing could end instead, the latest first.

    A cut can move back over a deterministic host map with one operand and one result, if the operand has a
    fixed size and no other reader, and no member-independent op reads the result. Each member then runs this
    map on the same data.

    Args:
        editor: The phase.
        independent: The member-independent values.
        ref: One of them.
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
        operand, axes = maker.operands[0], independent[cut]
        has_one_reader = uses.readers(operand) == [maker] and operand not in bound
        has_shared_reader = any(
            independent.get(result) == axes for op in uses.readers(cut) for result in results_of(op)
        )
        if (
            not has_one_reader
            or has_shared_reader
            or not editor.values[operand].leaves
            or independent.get(operand) != axes
        ):
            return cuts
        cuts.append(operand)


def _moves_back(maker: Map) -> bool:
    """Whether a share can move before `maker`: a deterministic host map of one value to one value."""
    return (
        maker.lane == "host_compute"
        and not (maker.per or maker.random)
        and len(maker.operands) == 1
        and len(maker.results) == 1
    )


def move_back(editor: Editor, ops: list[Op], share: Share, maker: Map) -> Share:
    """Move a share before the map that computes its operand, and return the moved share.

    wide = map widen(x); y = share wide  -->  narrow = share x; y = map widen(narrow)

    Changes `ops`, which contain `share` and `maker`, in place.
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
    Device functions always run after the share.

    Args:
        editor: The phase.
        ops: Its ops, which are changed in place.
        choices: Receives a remark for each move.
        settled: Results of shares to skip, since their cut was chosen by cost.
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
            wide_nbytes, name = editor.values[share.operand].nbytes, name_of(share.result)
            share = move_back(editor, ops, share, maker)
            narrow_nbytes = editor.values[share.result].nbytes
            why = f"{maker.fn} only widens: {sized(narrow_nbytes)} a step are moved, not {sized(wide_nbytes)}"
            rejected = (f"after `{maker.fn}`: {sized(wide_nbytes)}",)
            text = f"`{name}`: shared before `{maker.fn}`"
            choices.append(Choice("share", text, why, share.span, rejected))


def widens(fn: FnType) -> bool:
    """Whether `fn` converts an array to a wider dtype.

    That is assumed of every deterministic elementwise function of one array to one of the same shape in a
    wider dtype.
    """
    if not fn.elementwise or fn.random or len(fn.operands) != 1 or len(fn.results) != 1:
        return False
    operand, result = fn.operands[0], fn.results[0]
    if not isinstance(operand, ArrayType) or not isinstance(result, ArrayType):
        return False
    return operand.shape == result.shape and operand.dtype.nbytes < result.dtype.nbytes


def flows(phase: Phase) -> list[list[Op]]:
    """The flows of a phase: its loads, host maps and shares of their results, connected through values."""
    produced: set[Ref] = set()
    host_ops: list[Op] = []
    for op in phase.ops:
        is_host_work = isinstance(op, Read) or (isinstance(op, Map) and op.lane == "host_compute")
        if is_host_work or (isinstance(op, Share) and op.operand in produced):
            produced.update(results_of(op))
            host_ops.append(op)
    return connected(host_ops)
