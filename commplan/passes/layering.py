"""Flat or hierarchical, for each collective of which the plan does not say."""

from __future__ import annotations

import msgspec

from commplan.collectives.hierarchical import NATIVE_KINDS
from commplan.ir.choice import Alternative, Choice
from commplan.ir.plan import Algorithm, Arg
from commplan.ir.schedule import Collective, Phase
from commplan.passes import candidates
from commplan.passes.choosing import Chooser, rounded
from commplan.passes.ways import EVENLY, Way, saves


def layered(chooser: Chooser, phase: Phase, choices: list[Choice]) -> Phase:
    """`phase` with hierarchies written where they are predicted to be faster.

    all_reduce(node, gpu)  -->  all_reduce(node, gpu) via hierarchical(gpu, node)

    Which algorithm each level takes is left open, where the backend has one of its own. Under JAX a hierarchy
    must save 5%: it is several operations where there was one.
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
    left_open = Algorithm("hierarchical", keys)
    # No backend's own does a level of a sum for one rank: its algorithms are named at once.
    written = left_open if op.kind in NATIVE_KINDS else many.algorithm
    if candidates.travels_narrow(op) and any(arg.value not in op.axes for arg in keys):
        return op.algorithm  # what travels narrower than it is added goes axis by axis
    enough = many.seconds < one.seconds * (1 - EVENLY) if chooser.jax else saves(many, one)
    if not enough:
        return op.algorithm  # `select` lists what was not taken
    choices.append(_choice(op, one, many, written))
    return written


def _choice(op: Collective, one: Way, many: Way, written: Algorithm) -> Choice:
    levels = ", ".join(key for key, _ in written.levels)
    what = f"`{op.result}`: level by level ({levels})"
    why = "each level moves only what the one inside has not settled"
    other = f"one {op.kind} over {', '.join(op.axes)}, via {one.algorithm}"
    alternative = Alternative(other, rounded(one.seconds))
    return Choice("decompose", what, why, op.span, (), rounded(many.seconds), one.source, (alternative,))
