"""Reorders exchanges and buckets that share links, in the module that JAX passes to XLA.

XLA schedules a step backwards, and starts a collective as soon as the links are free. Its order of an
exchange (all-to-all) and a bucket's all-reduce is often not the one in which both overlap with computation.
List scheduling of the compiled step (`audit.orders`) finds a better order. Barriers, which change no value,
then enforce it.
"""

from __future__ import annotations

import heapq
import io
import itertools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from commplan.lowering.audit.estimate import Machine
from commplan.lowering.audit.orders import best_order, reordered
from commplan.lowering.audit.step import CompiledStep
from commplan.lowering.audit.walk import audit_text
from commplan.lowering.jax._jit import mlir

_KEY = re.compile(r'combiner_key = "([^"]*)"')
_INSIDE = frozenset({"builtin.module", "func.func", "sdy.manual_computation"})


class SharedLink(NamedTuple):
    """A collective on shared links: the exchange with this `number`, or the bucket with this key."""

    bucket: str = ""
    number: int = 0


def link_order(compiled: str, machine: Machine) -> tuple[SharedLink, ...]:
    """The best order found for the exchanges and buckets of a compiled step, outside of its loops.

    Empty if the step does not have both, or already has this order.
    """
    step = audit_text(compiled)
    current = _links(step, step)
    if not any(link.bucket for link in current) or all(link.bucket for link in current):
        return ()
    best = _links(step, reordered(step, best_order(compiled, machine, tries=0).places))
    return best if best != current else ()


def _links(step: CompiledStep, moved: CompiledStep) -> tuple[SharedLink, ...]:
    """The exchanges and buckets of `moved`, a reordering of `step`, in the order in which they start.

    Exchanges are numbered in the order of `step`.
    """
    outside = [c for c in moved.collectives if c.computation == step.entry]
    exchanges = [c for c in step.collectives if c.kind == "all_to_all" and c.computation == step.entry]
    numbers = {c.name: n for n, c in enumerate(sorted(exchanges, key=lambda c: c.start))}
    return tuple(
        SharedLink(number=numbers[c.name]) if c.name in numbers else SharedLink(c.bucket)
        for c in sorted(outside, key=lambda c: c.start)
        if c.name in numbers or (c.kind == "all_reduce" and c.bucket)
    )


def in_order(module: Any, order: Sequence[SharedLink]) -> Any:
    """A copy of a StableHLO `module` whose exchanges and buckets are in this `order`.

    Only pairs of an exchange and a bucket are ordered explicitly, since each kind is in order already. None
    if no block contains exactly these collectives, or if the order contradicts their dependencies.
    """
    copied = io.BytesIO()
    module.operation.write_bytecode(copied)
    with module.context, mlir.Location.unknown():
        result = mlir.Module.parse(copied.getvalue())
        for block in _blocks(result.operation):
            ops = _by_link([view.operation for view in block.operations])
            if set(ops) == set(order):
                for before, after in itertools.pairwise(order):
                    if bool(before.bucket) != bool(after.bucket):
                        _order_after(ops[before][0], ops[after], block)
                return result if _sort(block) else None
    return None


def _blocks(operation: Any) -> Iterator[Any]:
    if operation.name not in _INSIDE:
        return
    for region in operation.regions:
        for block in region.blocks:
            yield block
            for view in block.operations:
                yield from _blocks(view.operation)


def _by_link(ops: Sequence[Any]) -> Mapping[SharedLink, list[Any]]:
    """The exchanges and buckets among `ops`. A bucket has one op for each of its arrays."""
    result = defaultdict[SharedLink, list[Any]](list)
    numbers = itertools.count()
    for op in ops:
        if op.name == "stablehlo.all_to_all":
            result[SharedLink(number=next(numbers))].append(op)
        elif op.name == "stablehlo.all_reduce" and "mhlo.frontend_attributes" in op.attributes:
            key = _KEY.search(str(op.attributes["mhlo.frontend_attributes"]))
            if key:
                result[SharedLink(key[1])].append(op)
    return result


def _order_after(before: Any, later: Sequence[Any], block: Any) -> None:
    """Make the ops `later` depend on `before`, unless they do already.

    XLA removes unused results from a barrier, so users of `before` use its result from the barrier.
    """
    ops, needs = _graph(block)
    waited, result = ops.index(before), before.results[0]
    reachable, stack = set[int](), [place for place, op in enumerate(ops) if op in later]
    while stack:
        place = stack.pop()
        if place not in reachable:
            reachable.add(place)
            stack += needs[place]
    if waited in reachable:
        return
    values = [*(op.operands[0] for op in later), result]
    with mlir.InsertionPoint.at_block_terminator(block):
        types = [value.type for value in values]
        barrier = mlir.Operation.create("stablehlo.optimization_barrier", results=types, operands=values)
    for op, value in zip(later, barrier.results, strict=False):
        op.operands[0] = value
    result.replace_all_uses_except(barrier.results[len(later)], [barrier])


def _graph(block: Any) -> tuple[list[Any], list[set[int]]]:
    """The operations of `block`, and for each of them the indices of the operations that it reads."""
    ops = [view.operation for view in block.operations]
    maker = {result: place for place, op in enumerate(ops) for result in op.results}
    return ops, [{maker[value] for value in _read(op) if value in maker} - {n} for n, op in enumerate(ops)]


def _sort(block: Any) -> bool:
    """Sort the operations of `block` topologically and stably. Returns whether that is possible."""
    ops, needs = _graph(block)
    users = defaultdict[int, list[int]](list)
    for place, need in enumerate(needs):
        for each in need:
            users[each].append(place)
    last = len(ops) - 1  # the terminator of the block
    missing = [len(need) for need in needs]
    ready = [place for place in range(last) if not missing[place]]
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        for user in users[order[-1]]:
            missing[user] -= 1
            if not missing[user] and user != last:
                heapq.heappush(ready, user)
    if len(order) < last:
        return False
    for before, after in itertools.pairwise([*order, last]):
        ops[after].move_after(ops[before])
    return True


def _read(op: Any) -> Iterator[Any]:
    """The operands of `op`, including those in its regions."""
    yield from op.operands
    for region in op.regions:
        for block in region.blocks:
            for view in block.operations:
                yield from _read(view.operation)
