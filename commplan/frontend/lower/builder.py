"""The ops and values of a phase while the plan's stages are lowered into it; reductions as sums."""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from commplan.collectives.registry import scalar_algorithm
from commplan.diagnostics import Span
from commplan.ir import plan as graph
from commplan.ir import schedule as sched
from commplan.ir.ops import add_results
from commplan.ir.transfer import ValueTypes


class Sending(Protocol):
    """A stage that becomes collectives: where it is written, and how it is to be carried out."""

    @property
    def span(self) -> Span: ...
    @property
    def via(self) -> graph.Algorithm | None: ...
    @property
    def hints(self) -> graph.Hints: ...


class Builder:
    """Ops so far, and every value by name.

    weights: sums of weights that the phase has made already, by weight and axes.
    """

    def __init__(self, axes: tuple[sched.Axis, ...], values: dict[graph.Ref, sched.Value]) -> None:
        self.axes, self.of = axes, values
        self.types = ValueTypes(axes, values)
        self.ops: list[sched.Op] = []
        self.weights: dict[tuple[graph.Ref, tuple[str, ...]], graph.Ref] = {}

    def emit(self, op: sched.Op) -> graph.Ref:
        """Append `op`, and add a result that is no value yet as the op says it is. Gives back its name."""
        add_results(op, self.types, self.of, self.of)
        self.ops.append(op)
        return sched.results(op)[0]

    def collective(
        self,
        kind: sched.CollectiveKind,
        result: graph.Ref,
        operand: graph.Ref,
        over: tuple[str, ...],
        stage: Sending,
        op: sched.ReduceOp | None = None,
        root: int | None = None,
    ) -> None:
        """Append a collective on whole values, with what the stage says of it."""
        value = self.of[operand]
        widest = sched.widest(value.leaves)
        self.emit(
            sched.Collective(
                kind, result, operand, over, widest, value.nbytes, stage.span,
                op, root, stage.via or graph.Algorithm("native"), stage.hints,
                lane=sched.network_lane(self.axes, over), pinned=stage.via is not None,
            )
        )  # fmt: skip


def reduction(building: Builder, kind: sched.CollectiveKind, stage: graph.Reduce | graph.Scatter) -> None:
    """Lower a reduce or scatter.

    max, min, sum      -->  one collective
    mean               -->  the sum, divided by the number of ranks
    mean(weight = n)   -->  n x; its sum, divided by the sum of n
    """
    op, over = stage.op, stage.axes
    if op.name != "mean":
        building.collective(kind, stage.result, stage.operand, over, stage, op=op.name)
        return
    total = f"{stage.result}/sum"
    if op.weight is None:
        building.collective(kind, total, stage.operand, over, stage, op="sum")
        divisor: float | graph.Ref = float(building.types.ranks(over))
    else:
        weighted = f"{stage.result}/weighted"
        operand = building.emit(sched.Scale(weighted, stage.operand, "mul", op.weight, stage.span))
        building.collective(kind, total, operand, over, stage, op="sum")
        divisor = total_weight(building, op.weight, stage)
    building.emit(sched.Scale(stage.result, total, "div", divisor, stage.span))


def total_weight(building: Builder, weight: graph.Ref, stage: graph.Reduce | graph.Scatter) -> graph.Ref:
    """The sum of `weight` over the axes of `stage`, made once a phase; along axes where it is the same, a
    product."""
    over = stage.axes
    if (weight, over) in building.weights:
        return building.weights[weight, over]
    placement = building.of[weight].placement
    varying = tuple(axis for axis in over if placement.varies(axis))
    same = building.types.ranks(tuple(axis for axis in over if axis not in varying))
    total = weight
    if varying:
        total = f"{stage.result}/weights"
        # A count is no gradient: it is neither sent nor added in a narrower type.
        hints = replace(stage.hints, wire=None, accumulate=None)
        via = scalar_algorithm(stage.via) if stage.via is not None and varying == over else None
        bare = replace(stage, hints=hints, via=via)
        building.collective("all_reduce", total, weight, varying, bare, op="sum")
    if same > 1:
        scaled = sched.Scale(f"{stage.result}/all_weights", total, "mul", float(same), stage.span)
        total = building.emit(scaled)
    building.weights[weight, over] = total
    return total
