"""Flat or hierarchical, for each collective of which the plan does not say."""

from __future__ import annotations

import msgspec

from commplan.ir.plan import Algorithm, Arg
from commplan.ir.schedule import Alternative, Choice, Collective, Phase
from commplan.passes import candidates
from commplan.passes.choosing import Chooser, rounded
from commplan.passes.ways import EVENLY, TIE, Way


def layered(chooser: Chooser, phase: Phase, choices: list[Choice]) -> Phase:
    """`phase` with hierarchies written where they are predicted to be faster.

    all_reduce(node, gpu)  -->  all_reduce(node, gpu) via hierarchical(gpu, node)

    Which algorithm each level takes is left open. Under JAX a hierarchy must save 5%: it is several
    operations where there was one.
    """
    if chooser.costs is None:
        return phase
    seen: dict[tuple[object, ...], Algorithm] = {}
    ops = tuple(
        _layered(chooser, op, seen, choices) if isinstance(op, Collective) else op for op in phase.ops
    )
    return msgspec.structs.replace(phase, ops=ops)


def _layered(
    chooser: Chooser, op: Collective, seen: dict[tuple[object, ...], Algorithm], choices: list[Choice]
) -> Collective:
    if op.pinned or op.algorithm.levels or op.kind == "all_to_all":
        return op
    key = (op.kind, op.axes, op.nbytes, op.op, op.hints, op.root, op.span)
    if key not in seen:
        seen[key] = _best(chooser, op, choices)
    return msgspec.structs.replace(op, algorithm=seen[key])


def _best(chooser: Chooser, op: Collective, choices: list[Choice]) -> Algorithm:
    ways, levels = chooser.flat(op), chooser.hierarchies(op)
    if not ways or not levels:
        return op.algorithm
    one, many = chooser.fastest(ways), chooser.fastest(levels)
    keys = tuple(Arg(key) for key, _ in many.algorithm.levels)
    written = Algorithm("hierarchical", keys)
    if candidates.narrow(op) and any(arg.value not in op.axes for arg in keys):
        return op.algorithm  # what travels narrower than it is added goes axis by axis
    needed = EVENLY if chooser.jax else TIE
    wins = many.seconds < one.seconds * (1 - needed)
    choices.append(_choice(op, one, many, written, needed, wins=wins))
    return written if wins else op.algorithm


def _choice(op: Collective, one: Way, many: Way, written: Algorithm, needed: float, *, wins: bool) -> Choice:
    levels = ", ".join(key for key, _ in written.levels)
    shown = f"one {op.kind} over {', '.join(op.axes)}"
    if wins:
        what, seconds = f"`{op.result}`: level by level ({levels})", many.seconds
        why = "each level moves only what the one inside has not settled"
        other = Alternative(f"{shown}, via {one.algorithm}", rounded(one.seconds))
    else:
        what, seconds = f"`{op.result}`: {shown}", one.seconds
        why = "going level by level would not be faster"
        if many.seconds < one.seconds:
            why = f"going level by level would save less than {needed:.0%}"
        other = Alternative(f"level by level, {many.algorithm}", rounded(many.seconds))
    return Choice("decompose", what, why, op.span, (), rounded(seconds), one.source, (other,))
