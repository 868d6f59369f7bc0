"""Reductions as sums: how `mean` and `mean(weight = n)` are lowered."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from commplan.ir import plan as graph
from commplan.ir import schedule as sched

if TYPE_CHECKING:
    from commplan.passes.lower import Lowering

Reducing = graph.Reduce | graph.Scatter


def reduction(lowering: Lowering, kind: sched.CollectiveKind, stage: Reducing, over: tuple[str, ...]) -> None:
    """Lower a reduce or scatter over `over`.

    max, min, sum      -->  one collective
    mean               -->  the sum, divided by the number of ranks
    mean(weight = n)   -->  n x; its sum, divided by the sum of n
    """
    op = stage.op
    if op.name != "mean":
        lowering.collective(kind, stage.result, stage.operand, over, stage, op=op.name)
        return
    total = lowering.temporary(stage.result, f"{stage.result}/sum")
    if op.weight is None:
        lowering.collective(kind, total, stage.operand, over, stage, op="sum")
        divisor: float | graph.Ref = float(lowering.ranks(over))
    else:
        operand = lowering.temporary(stage.operand, f"{stage.result}/weighted")
        lowering.ops.append(sched.Scale(operand, stage.operand, "mul", op.weight, stage.span))
        lowering.collective(kind, total, operand, over, stage, op="sum")
        divisor = total_weight(lowering, op.weight, over, stage)
    lowering.ops.append(sched.Scale(stage.result, total, "div", divisor, stage.span))


def total_weight(lowering: Lowering, weight: graph.Ref, over: tuple[str, ...], stage: Reducing) -> graph.Ref:
    """The sum of `weight` over `over`, made once a phase; along axes where it is the same, a product."""
    if (weight, over) in lowering.weights:
        return lowering.weights[weight, over]
    placement = lowering.of[weight].placement
    varying = tuple(axis for axis in over if placement.varies(axis))
    same = lowering.ranks(tuple(axis for axis in over if axis not in varying))
    total = weight
    if varying:
        total = lowering.temporary(weight, f"{stage.result}/weights", placement.same_over(varying))
        # A count is no gradient: it is neither sent nor added in a narrower type.
        hints = msgspec.structs.replace(stage.hints, wire=None, accumulate=None)
        via = stage.via if varying == over else None
        bare = msgspec.structs.replace(stage, hints=hints, via=via)
        lowering.collective("all_reduce", total, weight, varying, bare, op="sum")
    if same > 1:
        scaled = lowering.temporary(total, f"{stage.result}/all_weights")
        lowering.ops.append(sched.Scale(scaled, total, "mul", float(same), stage.span))
        total = scaled
    lowering.weights[weight, over] = total
    return total
