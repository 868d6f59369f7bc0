"""Expects the collectives of `run.layers`, whose schedules are created for the leaves of each layer.

The user's program determines how often and where such a schedule runs. The number of its collectives is taken
from the traced step, and their order is not checked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from commplan.ir.schedule import Schedule
from commplan.lowering.audit.compare import StepComparison, match, same_ranks
from commplan.lowering.audit.expect import Expected, MeshLike, expected
from commplan.lowering.hlo.step import CompiledCollective, CompiledStep, Platform


def layer_collectives(
    traced: CompiledStep,
    layers: Iterable[Schedule],
    called: Sequence[Expected],
    mesh: MeshLike,
    platform: Platform,
) -> tuple[Expected, ...]:
    """The collectives of plan lines executed by `layers`, once for each time the step requests them.

    Args:
        traced: The step as JAX passes it to XLA.
        layers: The schedules of layers.
        called: The collectives of phases that the step may also call. A line that is requested exactly as
            often as by one call belongs to the phase.
        mesh: The sizes of the mesh axes, in device order.
        platform: The platform that the step is compiled for.

    Returns:
        One item per request, in the order of `traced`.
    """
    layer_items = [item for layer in layers for item in expected(layer, layer.phases[0].name, mesh, platform)]
    scopes = {item.scope for item in layer_items}
    candidates = [*layer_items, *(item for item in called if item.scope in scopes)]
    requested = [collective for collective in traced.collectives if scopes.intersection(collective.scopes)]
    matches = (_candidate_for(collective, candidates) for collective in requested)
    # Copies, because differences distinguish items by identity.
    items = [replace(item) for item in matches if item is not None]
    counts, counts_of_one_call = _counts(items), _counts(called)
    layered = {scope for scope, signatures in counts.items() if signatures != counts_of_one_call.get(scope)}
    return tuple(item for item in items if item.scope in layered)


def _candidate_for(traced: CompiledCollective, candidates: Sequence[Expected]) -> Expected | None:
    """The first candidate that corresponds to `traced`, preferably of the same dtype; None without one."""
    fitting = [
        item
        for item in candidates
        if item.scope in traced.scopes
        and (item.kind, item.op, item.count) == (traced.kind, traced.op, traced.count)
        and same_ranks(item, traced)
    ]
    # On CPUs the dtype may differ.
    return min(fitting, key=lambda item: (item.dtype,) != traced.dtypes, default=None)


def _counts(items: Iterable[Expected]) -> dict[tuple[str, int], Counter[tuple[object, ...]]]:
    """The number of equal collectives (kind, op, dtype, elements) of each phase and line."""
    counts: dict[tuple[str, int], Counter[tuple[object, ...]]] = {}
    for item in items:
        counts.setdefault(item.scope, Counter())[item.kind, item.op, item.dtype, item.count] += 1
    return counts


def compare_unordered(items: Sequence[Expected], actual: Sequence[CompiledCollective]) -> StepComparison:
    """Compare planned collectives with those of the same plan lines, regardless of order.

    Args:
        items: The planned collectives.
        actual: The compiled collectives; each has a plan line.
    """

    def by_line(kind: object, count: int, dtypes: object, line: int) -> tuple[object, ...]:
        return (line, str(kind), count, str(dtypes))

    planned = sorted(items, key=lambda i: by_line(i.kind, i.count, (i.dtype,), i.span.line))
    compiled = sorted(actual, key=lambda f: by_line(f.kind, f.count, f.dtypes, f.scopes[0][1]))
    return match(planned, compiled)
