"""The order in which exchanges and buckets go over the same links, put into what JAX hands to XLA.

XLA's scheduler goes from the end of a step to its beginning, and takes a collective as soon as the links are
free; which one of an exchange (all-to-all) and a bucket's all-reduce goes first is then often not what lets
both run under computation. List scheduling of the compiled step (`audit.orders`) finds a better order. Here
barriers hold the collectives to it, which change no value.
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


class Link(NamedTuple):
    """A collective that others share links with: the `number`th exchange, or the bucket with this key."""

    bucket: str = ""
    number: int = 0


def link_order(compiled: str, machine: Machine) -> tuple[Link, ...]:
    """The best order that is found for the exchanges and buckets of a compiled step, outside its loops.

    Empty where it has not both, or has them in this order already.
    """
    step = audit_text(compiled)
    own = _links(step, step)
    if not any(link.bucket for link in own) or all(link.bucket for link in own):
        return ()
    best = _links(step, reordered(step, best_order(compiled, machine, tries=0).places))
    return best if best != own else ()


def _links(step: CompiledStep, moved: CompiledStep) -> tuple[Link, ...]:
    """The exchanges and buckets of `moved`, which is `step` in another order, as they start.

    Exchanges are counted in the order of `step`.
    """
    outside = [c for c in moved.collectives if c.computation == step.entry]
    exchanges = [c for c in step.collectives if c.kind == "all_to_all" and c.computation == step.entry]
    numbers = {c.name: n for n, c in enumerate(sorted(exchanges, key=lambda c: c.start))}
    return tuple(
        Link(number=numbers[c.name]) if c.name in numbers else Link(c.bucket)
        for c in sorted(outside, key=lambda c: c.start)
        if c.name in numbers or (c.kind == "all_reduce" and c.bucket)
    )


def in_order(module: Any, order: Sequence[Link]) -> Any:
    """A copy of a StableHLO `module` in which exchanges and buckets come in this `order`, each not before the
    one before it where that is of the other kind: those of one kind are in order already.

    None where the module does not have just these in one block, or an order contradicts what they need of
    each other.
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
                        _hold(ops[before][0], ops[after], block)
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


def _by_link(ops: Sequence[Any]) -> Mapping[Link, list[Any]]:
    """The exchanges and buckets among `ops`; of a bucket each of its arrays, which XLA reduces as one."""
    result = defaultdict[Link, list[Any]](list)
    numbers = itertools.count()
    for op in ops:
        if op.name == "stablehlo.all_to_all":
            result[Link(number=next(numbers))].append(op)
        elif op.name == "stablehlo.all_reduce" and "mhlo.frontend_attributes" in op.attributes:
            key = _KEY.search(str(op.attributes["mhlo.frontend_attributes"]))
            if key:
                result[Link(key[1])].append(op)
    return result


def _hold(before: Any, later: Sequence[Any], block: Any) -> None:
    """Let `later` begin when `before` is done, if they do not wait for it anyway.

    XLA takes out of a barrier what nobody uses: what uses the result of `before` gets it from there.
    """
    ops, needs = _graph(block)
    waited, result = ops.index(before), before.results[0]
    known, stack = set[int](), [place for place, op in enumerate(ops) if op in later]
    while stack:
        place = stack.pop()
        if place not in known:
            known.add(place)
            stack += needs[place]
    if waited in known:
        return
    values = [*(op.operands[0] for op in later), result]
    with mlir.InsertionPoint.at_block_terminator(block):
        types = [value.type for value in values]
        barrier = mlir.Operation.create("stablehlo.optimization_barrier", results=types, operands=values)
    for op, value in zip(later, barrier.results, strict=False):
        op.operands[0] = value
    result.replace_all_uses_except(barrier.results[len(later)], [barrier])


def _graph(block: Any) -> tuple[list[Any], list[set[int]]]:
    """The operations of `block`, and the places of those that each of them reads."""
    ops = [view.operation for view in block.operations]
    maker = {result: place for place, op in enumerate(ops) for result in op.results}
    return ops, [{maker[value] for value in _read(op) if value in maker} - {n} for n, op in enumerate(ops)]


def _sort(block: Any) -> bool:
    """Put the operations of `block` behind what they need, else as they are; whether that can be done."""
    ops, needs = _graph(block)
    users = defaultdict[int, list[int]](list)
    for place, need in enumerate(needs):
        for each in need:
            users[each].append(place)
    last = len(ops) - 1  # what ends the block
    left = [len(need) for need in needs]
    ready = [place for place in range(last) if not left[place]]
    order: list[int] = []
    while ready:
        order.append(heapq.heappop(ready))
        for user in users[order[-1]]:
            left[user] -= 1
            if not left[user] and user != last:
                heapq.heappush(ready, user)
    if len(order) < last:
        return False
    for before, after in itertools.pairwise([*order, last]):
        ops[after].move_after(ops[before])
    return True


def _read(op: Any) -> Iterator[Any]:
    """What `op` reads, within its regions too."""
    yield from op.operands
    for region in op.regions:
        for block in region.blocks:
            for view in block.operations:
                yield from _read(view.operation)
