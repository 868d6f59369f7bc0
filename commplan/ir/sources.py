"""What of a phase depends on sources alone: made ahead by `batches`, outside the training step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import msgspec

from commplan.ir.plan import Ref, name_of
from commplan.ir.schedule import Binding, Map, Op, Phase, Read, Share, operands, results

AnyOp = TypeVar("AnyOp", bound=Op)


def source_only(phase: Phase) -> frozenset[str]:
    """Values of `phase` that are read, or mapped per record (or on the host) from such values only."""
    found: set[str] = set()
    for op in phase.ops:
        if runs_ahead(op, found):
            found.update(results(op))
    return frozenset(found)


def runs_ahead(op: Op, known: set[str] | frozenset[str]) -> bool:
    """Whether `op` belongs to the input pipeline, where `known` are the source-only values so far."""
    match op:
        case Read():
            return True
        case Map():
            eligible = op.lane == "host_compute" or op.per_record
            return eligible and known.issuperset(operands(op))
        case Share():
            return known.issuperset(operands(op))
        case _:
            return False


def connected(ops: Sequence[AnyOp]) -> list[list[AnyOp]]:
    """`ops` in sets that hang together through their values, each set and the sets in the order of `ops`."""
    groups: list[tuple[set[Ref], list[int]]] = []
    for place, op in enumerate(ops):
        refs, places = {*operands(op), *results(op)}, [place]
        apart: list[tuple[set[Ref], list[int]]] = []
        for group in groups:
            if group[0] & refs:
                refs, places = refs | group[0], group[1] + places
            else:
                apart.append(group)
        groups = [*apart, (refs, places)]
    return [[ops[place] for place in sorted(places)] for _, places in sorted(groups, key=lambda g: min(g[1]))]


def bind_sources(phase: Phase) -> Phase:
    """`phase` with its bindings marked and `takes` filled in.

    `takes` holds source-only values that the phase's own ops (or its states) need, called as the
    output of the same value, else as the plan calls it; a name that is taken gets the version too.
    """
    known = source_only(phase)
    outputs = tuple(msgspec.structs.replace(b, source_only=b.value in known) for b in phase.outputs)
    updates = tuple(msgspec.structs.replace(b, source_only=b.value in known) for b in phase.updates)
    rest = [op for op in phase.ops if not runs_ahead(op, known)]
    needed = {ref for op in rest for ref in operands(op)} & known | {
        b.value for b in updates if b.source_only
    }
    names = {b.name for b in outputs} | {name_of(ref) for ref in (*phase.inputs, *phase.states)}
    takes: list[Binding] = []
    for ref in sorted(needed):  # by name: passes may change the order of ops
        output = next((b.name for b in outputs if b.value == ref), None)
        plain = name_of(ref)
        name = output or (plain if plain not in names else ref.replace(".", "_"))
        names.add(name)
        takes.append(Binding(name, ref, source_only=True))
    return msgspec.structs.replace(phase, outputs=outputs, updates=updates, takes=tuple(takes))
