"""The part of a phase that the input pipeline computes before the step, and the results that it may cache."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from commplan.ir.analysis.def_use import DefUse
from commplan.ir.hints import Cache
from commplan.ir.ops import AnyOp, operands, results
from commplan.ir.refs import Ref, name_of
from commplan.ir.schedule import Binding, Map, Op, Phase, Read, Schedule
from commplan.ir.stages.rules import Violation, cacheable


def source_only(phase: Phase) -> frozenset[str]:
    """The values of `phase` that are loaded, or that the input pipeline computes from loaded values.

    It runs `share`, host functions, and per-record functions on the device (`BaseOp.runs_ahead`).
    """
    available: set[str] = set()
    for op in phase.ops:
        if op.runs_ahead(available):
            available.update(results(op))
    return frozenset(available)


def connected(ops: Sequence[AnyOp]) -> list[list[AnyOp]]:
    """Partition `ops` into connected components: ops that share an operand or result are in the same one.

    Components are in the order of their first op, and each is in the order of `ops`.
    """
    parents = list(range(len(ops)))  # union-find: for each op, an earlier op of the same component

    def find_root(index: int) -> int:
        while parents[index] != index:
            parents[index] = index = parents[parents[index]]
        return index

    first_use: dict[Ref, int] = {}
    for index, op in enumerate(ops):
        for ref in (*operands(op), *results(op)):
            op_root = find_root(index)
            ref_root = find_root(first_use.setdefault(ref, index))
            parents[max(op_root, ref_root)] = min(op_root, ref_root)
    groups: dict[int, list[AnyOp]] = {}
    for index, op in enumerate(ops):
        groups.setdefault(find_root(index), []).append(op)
    return list(groups.values())


def bind_sources(phase: Phase) -> Phase:
    """Mark the source-only bindings of `phase` and compute its `takes`.

    `takes` holds the source-only values that the other ops, or the states, need, sorted by reference. A value
    has the name under which it is an output. Otherwise it has its own name, or if that is in use, its
    reference with `_` for dots, followed by as many underscores as make the name unique.
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
    for ref in sorted(needed):  # not in the order of ops, which passes may change
        name = output_names.get(ref) or name_of(ref)
        if ref not in output_names and name in names:
            name = ref.replace(".", "_")
            while name in names:
                name += "_"
        names.add(name)
        takes.append(Binding(name, ref, source_only=True))
    return msgspec.structs.replace(phase, outputs=outputs, updates=updates, takes=tuple(takes))


def cache_violation(schedule: Schedule, uses: DefUse[Op], op: Map, cache: Cache) -> Violation | None:
    """The rule that `cache` on `op` violates; None if it violates none.

    Args:
        schedule: The schedule, for the result types of the function.
        uses: The definitions and uses in the phase of `op`, or in the part that `op` depends on.
        op: The op.
        cache: The cache.
    """
    if op.lane != "host_compute":
        return Violation(f"`{op.fn}` runs on the device, and a cache keeps results of the host")
    before = uses.ancestors(op.results)
    random = [earlier.fn for earlier in before if isinstance(earlier, Map) and earlier.random]
    sources = [earlier.source for earlier in before if isinstance(earlier, Read)]
    # The nearest random function is first, since the message names it.
    return cacheable(op.fn, random[::-1], sources, schedule.fn(op.fn).results, cache)
