"""The collectives of `run.tap`, on GPUs: those of each large leaf by itself, and of the others together.

What a tap reduces within the backward pass nothing orders, and its order is not judged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

from msgspec.structs import replace

from commplan.ir.analysis.def_use import DefUse
from commplan.ir.schedule import Collective, Leaf, Schedule
from commplan.lowering.audit.expect import Expected, MeshLike, Moved, computed
from commplan.lowering.audit.step import CompiledCollective, CompiledStep
from commplan.lowering.programs import spreads
from commplan.lowering.taps import TAP, chains, joined

_TAP = re.compile(rf"\b{TAP}\)*/commplan\b")  # JAX writes `transpose(jvp(tap))/commplan`


def of_taps(
    traced: CompiledStep,
    schedule: Schedule,
    called: Mapping[str, Sequence[Expected]],
    mesh: MeshLike,
    platform: Literal["cpu", "gpu"],
) -> tuple[Expected, ...]:
    """What the plan lines that the step carries out by taps become, once each.

    traced: the step as JAX hands it to XLA. called: what each phase becomes where it is called. Lines of
    which the step asks for something else are left to the phase, and so are those of which a tap makes the
    same in the same order, as on CPUs.
    """
    result: list[Expected] = []
    for phase, items in called.items():
        own = list(_tapped(schedule, phase, mesh, platform))
        for scope in dict.fromkeys(item.scope for item in own):
            mine = [item for item in own if item.scope == scope]
            asked = [item for item in traced.collectives if scope in item.scopes]
            same = _forms(mine) == _forms(item for item in items if item.scope == scope)
            ordered = same and platform != "gpu"
            if _forms(mine) == _forms(asked) and all(map(_is_tapped, asked)) and not ordered:
                result += mine
    return tuple(result)


def _is_tapped(collective: CompiledCollective) -> bool:
    return all(_TAP.search(origin.op_name) for origin in collective.origins)


def _forms(items: Iterable[Expected | CompiledCollective]) -> set[tuple[object, ...]]:
    return {(item.kind, item.op, item.count) for item in items}


def _tapped(
    schedule: Schedule, phase: str, mesh: MeshLike, platform: Literal["cpu", "gpu"]
) -> Iterator[Expected]:
    """What the partial inputs of `phase` become where they are tapped."""
    body = schedule.phase(phase)
    uses, values = DefUse(computed(body)), {value.id: value for value in (*schedule.entry, *body.values)}
    for value in schedule.entry:
        flat, tree, whole = chains(value.id, uses, values)
        if not value.placement.partial or not whole:
            continue
        for dtype, places in joined([(leaf.dtype, leaf.nbytes) for leaf in value.leaves], asynchronous=True):
            size = sum(value.leaves[place].size for place in places)
            chain = (*flat.get(dtype, ()), *tree) if dtype.is_float else ()  # integers have no gradient
            for op in (op for op in chain if isinstance(op, Collective)):
                operand = values[op.operand]
                place = 0 if operand.kind == "flat" else places[0]
                leaf = Leaf("", (size,), operand.leaves[place].dtype)
                moved = Moved(op, leaf, mesh, spreads(schedule), platform)
                items = moved.whole(array=False)
                yield from (replace(item, phase=phase) for item in items if len(item.groups[0]) > 1)
                if op.kind == "reduce_scatter":
                    size = -(-size // moved.ways)
                elif op.kind == "all_gather":
                    size *= moved.ways
