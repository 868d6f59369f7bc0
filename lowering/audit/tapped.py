"""The collectives of `run.tap` on GPUs: one for each large leaf, and one for the others together.

Reductions of taps within the backward pass are unordered, so their order is not checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from commplan.ir.analysis.def_use import DefUse
from commplan.ir.schedule import Collective, Leaf, Schedule
from commplan.lowering.audit.expect import Expected, MeshLike, Moved, computed
from commplan.lowering.hlo.step import CompiledCollective, CompiledStep, Platform
from commplan.lowering.programs import spreads
from commplan.lowering.taps import TAP, chains, reduction_groups

_TAP = re.compile(rf"\b{TAP}\)*/commplan\b")  # JAX writes `transpose(jvp(tap))/commplan`


def of_taps(
    traced: CompiledStep,
    schedule: Schedule,
    called: Mapping[str, Sequence[Expected]],
    mesh: MeshLike,
    platform: Platform,
) -> tuple[Expected, ...]:
    """The collectives of plan lines that the step executes by taps.

    Lines are left to the phase if the step requests other collectives for them, or if a tap produces the same
    collectives in the same order, as on CPUs.

    Args:
        traced: The step as JAX passes it to XLA.
        schedule: The schedule.
        called: The collectives of each phase when it is called.
        mesh: The mesh.
        platform: `cpu` or `gpu`.
    """
    result: list[Expected] = []
    for phase, items in called.items():
        tap_items = list(_tapped(schedule, phase, mesh, platform))
        for scope in dict.fromkeys(item.scope for item in tap_items):
            line_items = [item for item in tap_items if item.scope == scope]
            requested = [item for item in traced.collectives if scope in item.scopes]
            same = _forms(line_items) == _forms(item for item in items if item.scope == scope)
            ordered = same and platform != "gpu"
            if _forms(line_items) == _forms(requested) and all(map(_is_tapped, requested)) and not ordered:
                result += line_items
    return tuple(result)


def _is_tapped(collective: CompiledCollective) -> bool:
    return all(_TAP.search(origin.op_name) for origin in collective.origins)


def _forms(items: Iterable[Expected | CompiledCollective]) -> set[tuple[object, ...]]:
    return {(item.kind, item.op, item.count) for item in items}


def _tapped(schedule: Schedule, phase: str, mesh: MeshLike, platform: Platform) -> Iterator[Expected]:
    """The collectives for the tapped partial inputs of `phase`."""
    body = schedule.phase(phase)
    uses, values = DefUse(computed(body)), {value.id: value for value in (*schedule.entry, *body.values)}
    for value in schedule.entry:
        flat, tree, whole = chains(value.id, uses, values)
        if not value.placement.partial or not whole:
            continue
        for dtype, places in reduction_groups(
            [(leaf.dtype, leaf.nbytes) for leaf in value.leaves], asynchronous=True
        ):
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
