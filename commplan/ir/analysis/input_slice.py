"""The part of a phase that depends on sources alone: `batches` computes it before the training step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from commplan.ir.ops import AnyOp, operands, results
from commplan.ir.refs import Ref, name_of
from commplan.ir.schedule import Binding, Phase


def source_only(phase: Phase) -> frozenset[str]:
    """The values of `phase` that are loaded, or computed per record or on the host from such values only."""
    available: set[str] = set()
    for op in phase.ops:
        if op.runs_ahead(available):
            available.update(results(op))
    return frozenset(available)


def connected(ops: Sequence[AnyOp]) -> list[list[AnyOp]]:
    """Partition `ops` into connected components of the value graph, in the order of `ops`."""
    parents = list(range(len(ops)))  # union-find: for each op, an earlier op of the same component

    def first(place: int) -> int:
        while parents[place] != place:
            parents[place] = place = parents[parents[place]]
        return place

    first_use: dict[Ref, int] = {}
    for place, op in enumerate(ops):
        for ref in (*operands(op), *results(op)):
            root, op_root = first(place), first(first_use.setdefault(ref, place))
            parents[max(root, op_root)] = min(root, op_root)
    groups: dict[int, list[AnyOp]] = {}
    for place, op in enumerate(ops):
        groups.setdefault(first(place), []).append(op)
    return list(groups.values())


def bind_sources(phase: Phase) -> Phase:
    """Mark the source-only bindings of `phase` and compute its `takes`.

    `takes` holds the source-only values that the other ops, or the states, need. A value has the name under
    which it is an output, or else its own name, with the version appended if that name is already used.
    """
    available = source_only(phase)
    outputs = tuple(msgspec.structs.replace(b, source_only=b.value in available) for b in phase.outputs)
    updates = tuple(msgspec.structs.replace(b, source_only=b.value in available) for b in phase.updates)
    step_ops = [op for op in phase.ops if not op.runs_ahead(available)]
    needed = {ref for op in step_ops for ref in operands(op)} & available
    needed |= {binding.value for binding in updates if binding.source_only}
    names = {b.name for b in outputs} | {name_of(ref) for ref in (*phase.inputs, *phase.states)}
    output_names = {b.value: b.name for b in reversed(outputs)}
    takes: list[Binding] = []
    for ref in sorted(needed):  # by name, because passes may reorder ops
        plain = name_of(ref)
        name = output_names.get(ref) or (plain if plain not in names else ref.replace(".", "_"))
        names.add(name)
        takes.append(Binding(name, ref, source_only=True))
    return msgspec.structs.replace(phase, outputs=outputs, updates=updates, takes=tuple(takes))
