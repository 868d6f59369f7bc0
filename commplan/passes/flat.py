"""Rewriting collectives on flat buffers one by one; those on trees are packed first."""

from __future__ import annotations

from collections.abc import Callable

from commplan.ir.choice import Choice
from commplan.ir.schedule import Collective, Op, Phase, Schedule
from commplan.passes.packing import Order, items_of, pack_collectives
from commplan.passes.rewrite import Editor, read_by_parts

# Appends to the ops what the collective becomes; the flag says that its readers name parts of the
# result, so that padding behind it does not show.
Rewrite = Callable[[Editor, list[Op], Collective, bool, list[Choice]], None]


def rewrite_flat(
    schedule: Schedule,
    phase: Phase,
    order: Order,
    wanted: Callable[[Collective], bool],
    rewrite: Rewrite,
    choices: list[Choice],
) -> Phase:
    """`phase` with `rewrite` applied to each collective that is `wanted`.

    y = collective(tree)  -->  y = unpack(rewritten(pack(tree)))     where `bucket` has not packed it
    """
    if not any(isinstance(op, Collective) and wanted(op) for op in phase.ops):
        return phase
    editor, loose = Editor(schedule, phase), read_by_parts(phase.ops)
    ops: list[Op] = []
    for op in phase.ops:
        if not isinstance(op, Collective) or not wanted(op):
            ops.append(op)
        elif editor.values[op.operand].kind == "flat":
            rewrite(editor, ops, op, op.result in loose, choices)
        else:
            made, _ = pack_collectives(editor, [op], items_of(editor, [op], order), None)
            inside = read_by_parts(made)
            for new in made:
                if isinstance(new, Collective) and wanted(new):
                    rewrite(editor, ops, new, new.result in inside, choices)
                else:
                    ops.append(new)
    return editor.finish(ops)
