"""Expects the collectives of `run.tap`, if they differ from those of calls of phases, mainly on GPUs.

Taps on GPUs use one collective for each large leaf, and one for all others. Reductions of taps within the
backward pass are unordered, so their order is not checked.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from commplan.ir.analysis.def_use import DefUse
from commplan.ir.schedule import Collective, Encode, Leaf, LocalSum, Schedule
from commplan.lowering.audit.expect import Expected, LeafLowering, MeshLike, computed
from commplan.lowering.hlo.step import CompiledCollective, CompiledStep, Platform
from commplan.lowering.programs import spreads
from commplan.lowering.taps import TAP, chains, reduction_groups, scattered_axes

_TAP = re.compile(rf"\b{TAP}\)*/commplan\b")  # JAX writes `transpose(jvp(tap))/commplan`


def expected_of_taps(
    traced: CompiledStep,
    schedule: Schedule,
    called: Mapping[str, Sequence[Expected]],
    mesh: MeshLike,
    platform: Platform,
) -> tuple[Expected, ...]:
    """The collectives of the plan lines that a step executes by taps instead of calls of phases.

    A line is executed by taps if the step requests exactly the collectives of a tap for it. On CPUs, a tap
    may request the same collectives as a call, in the same order. Then the line counts as called.

    Args:
        traced: The step as JAX passes it to XLA.
        schedule: The schedule.
        called: The collectives of each phase when it is called, by the name of the phase.
        mesh: The mesh.
        platform: The platform that the step is compiled for.
    """
    result: list[Expected] = []
    for phase, called_items in called.items():
        tap_items = list(_tap_collectives(schedule, phase, mesh, platform))
        for scope in dict.fromkeys(item.scope for item in tap_items):
            of_tap = [item for item in tap_items if item.scope == scope]
            of_call = [item for item in called_items if item.scope == scope]
            requested = [item for item in traced.collectives if scope in item.scopes]
            if _signatures(of_tap) != _signatures(requested) or not all(map(_is_tapped, requested)):
                continue
            if platform == "gpu" or _signatures(of_tap) != _signatures(of_call):
                result += of_tap
    return tuple(result)


def _is_tapped(collective: CompiledCollective) -> bool:
    """Whether all arrays of the collective come from taps."""
    return all(_TAP.search(origin.op_name) for origin in collective.origins)


def _signatures(items: Iterable[Expected | CompiledCollective]) -> set[tuple[object, ...]]:
    """The distinct kinds, reductions and numbers of elements of collectives."""
    return {(item.kind, item.op, item.count) for item in items}


def _tap_collectives(
    schedule: Schedule, phase: str, mesh: MeshLike, platform: Platform
) -> Iterator[Expected]:
    """The collectives of `phase` if taps reduce all its partial inputs on an asynchronous backend."""
    body = schedule.phase(phase)
    uses = DefUse(computed(body))
    values = {value.id: value for value in (*schedule.entry, *body.values)}
    for value in schedule.entry:
        flat, tree, is_unsharded = chains(value.id, uses, values)
        in_blocks = any(isinstance(op, Encode) for chain in flat.values() for op in chain)
        if not value.placement.partial or not is_unsharded or in_blocks:
            continue
        leaves = [(leaf.dtype, leaf.nbytes) for leaf in value.leaves]
        for dtype, indices in reduction_groups(leaves, asynchronous=True):
            size = sum(value.leaves[index].size for index in indices)
            chain = (*flat.get(dtype, ()), *tree) if dtype.is_float else ()  # integers have no gradient
            multiple = math.prod(mesh.shape[axis] for axis in scattered_axes(chain))
            size = -(-size // multiple) * multiple
            for op in chain:
                if isinstance(op, LocalSum):
                    size //= op.ways
                if not isinstance(op, Collective):
                    continue
                operand = values[op.operand]
                first = 0 if operand.kind == "flat" else indices[0]
                leaf = Leaf("", (size,), operand.leaves[first].dtype)
                lowering = LeafLowering(op, leaf, mesh, spreads(schedule), platform)
                items = lowering.collectives(is_array=False)
                yield from (replace(item, phase=phase) for item in items if len(item.groups[0]) > 1)
                if op.kind == "reduce_scatter":
                    size //= lowering.ways
                elif op.kind == "all_gather":
                    size *= lowering.ways
