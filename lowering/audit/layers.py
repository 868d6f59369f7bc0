"""The collectives of `run.layers`: those of schedules that are made for the leaves of each layer.

How often such a schedule runs, and between what, is the program's affair, as calls of phases are: the step as
JAX hands it to XLA says how often, and the order is not judged.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec.structs import replace

from commplan.ir.schedule import Schedule
from commplan.lowering.audit.compare import Report, match, same_ranks
from commplan.lowering.audit.expect import Expected, MeshLike, expected
from commplan.lowering.audit.step import CompiledCollective, CompiledStep


def of_layers(
    traced: CompiledStep,
    layers: Iterable[Schedule],
    called: Sequence[Expected],
    mesh: MeshLike,
    platform: Literal["cpu", "gpu"],
) -> tuple[Expected, ...]:
    """What the plan lines that `layers` carry out become, once for each time that the step asks for it.

    traced: the step as JAX hands it to XLA. called: what the phases become that the step may call beside its
    layers; lines that it asks for just as often as a call does are left to the phase.
    """
    own = [item for layer in layers for item in expected(layer, layer.phases[0].name, mesh, platform)]
    scopes = {item.scope for item in own}
    candidates = [*own, *(item for item in called if item.scope in scopes)]
    asked = [collective for collective in traced.collectives if scopes.intersection(collective.scopes)]
    items = [item for collective in asked for item in _asked_for(collective, candidates)]
    counts, once = _counts(items), _counts(called)
    layered = {scope for scope, signatures in counts.items() if signatures != once.get(scope)}
    return tuple(item for item in items if item.scope in layered)


def _asked_for(traced: CompiledCollective, candidates: Sequence[Expected]) -> list[Expected]:
    """The one of `candidates` that `traced` is before XLA has seen it; CPUs may move another type."""
    fitting = [
        item
        for item in candidates
        if item.scope in traced.scopes
        and (item.kind, item.op, item.count) == (traced.kind, traced.op, traced.count)
        and same_ranks(item, traced)
    ]
    fitting.sort(key=lambda item: (item.dtype,) != traced.dtypes)
    return [replace(item) for item in fitting[:1]]  # a copy: differences tell items apart by identity


def _counts(items: Iterable[Expected]) -> dict[tuple[str, int], Counter[tuple[object, ...]]]:
    counts: dict[tuple[str, int], Counter[tuple[object, ...]]] = {}
    for item in items:
        counts.setdefault(item.scope, Counter())[item.kind, item.op, item.dtype, item.count] += 1
    return counts


def matched(items: Sequence[Expected], actual: Sequence[CompiledCollective]) -> Report:
    """`items` against the collectives of their lines, whatever the order of either."""

    def by_line(kind: object, count: int, dtypes: object, line: int) -> tuple[object, ...]:
        return (line, str(kind), count, str(dtypes))

    wanted = sorted(items, key=lambda i: by_line(i.kind, i.count, (i.dtype,), i.span.line))
    compiled = sorted(actual, key=lambda f: by_line(f.kind, f.count, f.dtypes, f.scopes[0][1]))
    return match(wanted, compiled)
