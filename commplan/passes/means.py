"""Reductions as sums: how `mean` and `mean(weight = n)` are lowered."""

from __future__ import annotations

import msgspec

from commplan.collectives.scalars import scalar_algorithm
from commplan.ir import plan as graph
from commplan.ir import schedule as sched
from commplan.passes.building import Building

Reducing = graph.Reduce | graph.Scatter


def reduction(building: Building, kind: sched.CollectiveKind, stage: Reducing, over: tuple[str, ...]) -> None:
    """Lower a reduce or scatter over `over`.

    max, min, sum      -->  one collective
    mean               -->  the sum, divided by the number of ranks
    mean(weight = n)   -->  n x; its sum, divided by the sum of n
    """
    op = stage.op
    if op.name != "mean":
        building.collective(kind, stage.result, stage.operand, over, stage, op=op.name)
        return
    total = f"{stage.result}/sum"
    if op.weight is None:
        building.collective(kind, total, stage.operand, over, stage, op="sum")
        divisor: float | graph.Ref = float(building.ranks(over))
    else:
        weighted = f"{stage.result}/weighted"
        operand = building.emit(sched.Scale(weighted, stage.operand, "mul", op.weight, stage.span))
        building.collective(kind, total, operand, over, stage, op="sum")
        divisor = total_weight(building, op.weight, over, stage)
    building.emit(sched.Scale(stage.result, total, "div", divisor, stage.span))


def total_weight(building: Building, weight: graph.Ref, over: tuple[str, ...], stage: Reducing) -> graph.Ref:
    """The sum of `weight` over `over`, made once a phase; along axes where it is the same, a product."""
    if (weight, over) in building.weights:
        return building.weights[weight, over]
    placement = building.of[weight].placement
    varying = tuple(axis for axis in over if placement.varies(axis))
    same = building.ranks(tuple(axis for axis in over if axis not in varying))
    total = weight
    if varying:
        total = f"{stage.result}/weights"
        # A count is no gradient: it is neither sent nor added in a narrower type.
        hints = msgspec.structs.replace(stage.hints, wire=None, accumulate=None)
        via = scalar_algorithm(stage.via) if stage.via is not None and varying == over else None
        bare = msgspec.structs.replace(stage, hints=hints, via=via)
        building.collective("all_reduce", total, weight, varying, bare, op="sum")
    if same > 1:
        scaled = sched.Scale(f"{stage.result}/all_weights", total, "mul", float(same), stage.span)
        total = building.emit(scaled)
    building.weights[weight, over] = total
    return total
