"""What of a phase depends on sources alone: made ahead by `batches`, outside the training step."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from commplan.ir.ops import AnyOp, operands, results
from commplan.ir.refs import Ref, name_of
from commplan.ir.schedule import Binding, Phase


def source_only(phase: Phase) -> frozenset[str]:
    """Values of `phase` that are read, or mapped per record (or on the host) from such values only."""
    known: set[str] = set()
    for op in phase.ops:
        if op.runs_ahead(known):
            known.update(results(op))
    return frozenset(known)


def connected(ops: Sequence[AnyOp]) -> list[list[AnyOp]]:
    """`ops` in sets that hang together through their values, each set and the sets in the order of `ops`."""
    parents = list(range(len(ops)))  # by place: one of the same set that stands no later

    def first(place: int) -> int:
        while parents[place] != place:
            parents[place] = place = parents[parents[place]]
        return place

    seen: dict[Ref, int] = {}
    for place, op in enumerate(ops):
        for ref in (*operands(op), *results(op)):
            root, own = first(place), first(seen.setdefault(ref, place))
            parents[max(root, own)] = min(root, own)
    groups: dict[int, list[AnyOp]] = {}
    for place, op in enumerate(ops):
        groups.setdefault(first(place), []).append(op)
    return list(groups.values())


def bind_sources(phase: Phase) -> Phase:
    """`phase` with its bindings marked and `takes` filled in.

    `takes` holds source-only values that the phase's own ops (or its states) need, called as the
    output of the same value, else as the plan calls it; a name that is taken gets the version too.
    """
    known = source_only(phase)
    outputs = tuple(msgspec.structs.replace(b, source_only=b.value in known) for b in phase.outputs)
    updates = tuple(msgspec.structs.replace(b, source_only=b.value in known) for b in phase.updates)
    rest = [op for op in phase.ops if not op.runs_ahead(known)]
    needed = {ref for op in rest for ref in operands(op)} & known
    needed |= {binding.value for binding in updates if binding.source_only}
    names = {b.name for b in outputs} | {name_of(ref) for ref in (*phase.inputs, *phase.states)}
    called = {b.value: b.name for b in reversed(outputs)}
    takes: list[Binding] = []
    for ref in sorted(needed):  # by name: passes may change the order of ops
        plain = name_of(ref)
        name = called.get(ref) or (plain if plain not in names else ref.replace(".", "_"))
        names.add(name)
        takes.append(Binding(name, ref, source_only=True))
    return msgspec.structs.replace(phase, outputs=outputs, updates=updates, takes=tuple(takes))
