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
        divisor: int = 1,
    ) -> None:
        """Append a collective on whole values, with what the stage says of it."""
        value = self.of[operand]
        widest = sched.widest(value.leaves)
        self.emit(
            sched.Collective(
                kind, result, operand, over, widest, value.nbytes, stage.span,
                op, root, stage.via or graph.Algorithm("native"), stage.hints,
                lane=sched.network_lane(self.axes, over), divisor=divisor, pinned=stage.via is not None,
            )
        )  # fmt: skip


def reduction(building: Builder, kind: sched.CollectiveKind, stage: graph.Reduce | graph.Scatter) -> None:
    """Lower a reduce or scatter.

    max, min, sum      -->  one collective
    mean               -->  the sum, divided by the number of ranks
    mean, in another type than the values have
                       -->  one collective, which divides before its sum travels on
    mean(weight = n)   -->  the sum of x n / (sum of n)
    """
    op, over = stage.op, stage.axes
    if op.name != "mean":
        building.collective(kind, stage.result, stage.operand, over, stage, op=op.name)
        return
    dtypes = {leaf.dtype for leaf in building.of[stage.operand].leaves}
    stage = replace(stage, hints=stage.hints.for_mean(dtypes, stage.via))
    if op.weight is not None:
        whole = total_weight(building, op.weight, stage)
        scaled = sched.Scale(
            f"{stage.result}/weighted", stage.operand, "mul", op.weight, stage.span, over=whole
        )
        building.collective(kind, stage.result, building.emit(scaled), over, stage, op="sum")
        return
    ranks = building.types.ranks(over)
    narrow = any(map(stage.hints.changes, dtypes))
    if narrow or stage.hints.integers is not None or any(map(stage.hints.divides_first, dtypes)):
        building.collective(kind, stage.result, stage.operand, over, stage, op="sum", divisor=ranks)
        return
    total = f"{stage.result}/sum"
    building.collective(kind, total, stage.operand, over, stage, op="sum")
    building.emit(sched.Scale(stage.result, total, "div", float(ranks), stage.span))


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
        hints = replace(stage.hints, wire=None, accumulate=None, integers=None)
        via = scalar_algorithm(stage.via) if stage.via is not None and varying == over else None
        bare = replace(stage, hints=hints, via=via)
        building.collective("all_reduce", total, weight, varying, bare, op="sum")
    if same > 1:
        scaled = sched.Scale(f"{stage.result}/all_weights", total, "mul", float(same), stage.span)
        total = building.emit(scaled)
    building.weights[weight, over] = total
    return total
