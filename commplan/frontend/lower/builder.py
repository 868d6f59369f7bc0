"""The ops and values of a phase during lowering, and the lowering of reductions."""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from commplan.collectives.registry import scalar_algorithm
from commplan.diagnostics import Span
from commplan.ir import plan as graph
from commplan.ir import schedule as sched
from commplan.ir.ops import add_results
from commplan.ir.transfer import ValueTypes
from commplan.ir.types import DType


class Sending(Protocol):
    """A stage that becomes collectives: its place in the plan, algorithm and hints."""

    @property
    def span(self) -> Span: ...
    @property
    def via(self) -> graph.Algorithm | None: ...
    @property
    def hints(self) -> graph.Hints: ...


class PhaseBuilder:
    """The ops so far, and all values by name.

    `weights` holds the weights and their sums that the phase has already computed, by weight, axes and type.
    """

    def __init__(self, axes: tuple[sched.Axis, ...], values: dict[graph.Ref, sched.Value]) -> None:
        self.axes, self.values = axes, values
        self.types = ValueTypes(axes, values)
        self.ops: list[sched.Op] = []
        self.weights: dict[tuple[graph.Ref, tuple[str, ...], DType], tuple[graph.Ref, graph.Ref]] = {}

    def dtype(self, scalar: graph.Ref) -> DType:
        """The type of a scalar value."""
        return self.values[scalar].leaves[0].dtype

    def emit(self, op: sched.Op) -> graph.Ref:
        """Append `op`, and add its results if they are not declared. Returns the name of the first result."""
        add_results(op, self.types, self.values, self.values)
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
        """Append a collective on whole values, with the algorithm and hints of `stage`."""
        value = self.values[operand]
        widest = sched.widest(value.leaves)
        self.emit(
            sched.Collective(
                kind, result, operand, over, widest, value.nbytes, stage.span,
                op, root, stage.via or graph.Algorithm("native"), stage.hints,
                lane=sched.network_lane(self.axes, over), divisor=divisor, pinned=stage.via is not None,
            )
        )  # fmt: skip


def reduction(
    building: PhaseBuilder, kind: sched.CollectiveKind, stage: graph.Reduce | graph.Scatter
) -> None:
    """Lower a reduce or scatter.

    max, min, sum      -->  one collective
    mean               -->  the sum, divided by the number of ranks
    mean, in another type than the values have
                       -->  one collective, which divides before its sum is sent on
    mean(weight = n)   -->  the sum of x n / (sum of n), in its accumulation type
    """
    op, over = stage.op, stage.axes
    if op.name != "mean":
        building.collective(kind, stage.result, stage.operand, over, stage, op=op.name)
        return
    dtypes = {leaf.dtype for leaf in building.values[stage.operand].leaves}
    hints = stage.hints.for_mean(dtypes, stage.via, is_weighted=op.weight is not None)
    stage = replace(stage, hints=hints)
    if op.weight is not None:
        _weighted_mean(building, kind, stage, op.weight)
        return
    ranks = building.types.ranks(over)
    narrow = any(map(hints.changes, dtypes))
    if narrow or hints.integers is not None or any(map(hints.divides_first, dtypes)):
        building.collective(kind, stage.result, stage.operand, over, stage, op="sum", divisor=ranks)
        return
    total = f"{stage.result}/sum"
    building.collective(kind, total, stage.operand, over, stage, op="sum")
    building.emit(sched.Scale(stage.result, total, "div", float(ranks), stage.span))


def _weighted_mean(
    building: PhaseBuilder, kind: sched.CollectiveKind, stage: graph.Reduce | graph.Scatter, weight: graph.Ref
) -> None:
    """y = mean(x, weight = n)  -->  N = sum(n); y = sum(x n / N)

    y = mean(x of 16 bits)  -->  y = cast(sum(cast(x, f32) n / N), the types of x)
    """
    dtypes = tuple(leaf.dtype for leaf in building.values[stage.operand].leaves)
    products = tuple(map(stage.hints.product, dtypes))
    operand, total = stage.operand, stage.result
    if not any(map(stage.hints.changes, products)):  # terms are sent in their accumulation type
        stage = replace(stage, hints=replace(stage.hints, wire=None, accumulate=None))
    if products != dtypes:
        total = f"{stage.result}/sum"
        operand = building.emit(sched.Cast(f"{stage.result}/terms", operand, products, stage.span))
    count, whole = total_weight(building, weight, stage, graph.weight_type(building.dtype(weight), dtypes))
    scaled = sched.Scale(f"{stage.result}/weighted", operand, "mul", count, stage.span, over=whole)
    building.collective(kind, total, building.emit(scaled), stage.axes, stage, op="sum")
    if products != dtypes:
        building.emit(sched.Cast(stage.result, total, dtypes, stage.span))


def total_weight(
    building: PhaseBuilder, weight: graph.Ref, stage: graph.Reduce | graph.Scatter, dtype: DType
) -> tuple[graph.Ref, graph.Ref]:
    """`weight` in `dtype`, and its sum over the axes of `stage`, computed once per phase.

    Along axes over which the weight is the same, the sum is a product.
    """
    over, key = stage.axes, (weight, stage.axes, dtype)
    if key in building.weights:
        return building.weights[key]
    placement = building.values[weight].placement
    varying = tuple(axis for axis in over if placement.varies(axis))
    same = building.types.ranks(tuple(axis for axis in over if axis not in varying))
    if building.dtype(weight) != dtype:
        weight = building.emit(sched.Cast(f"{stage.result}/weight", weight, (dtype,), stage.span))
    total = weight
    if varying:
        total = f"{stage.result}/weights"
        # A count is not a gradient: it is neither sent nor added in a narrower type.
        hints = replace(stage.hints, wire=None, accumulate=None, integers=None)
        via = scalar_algorithm(stage.via) if stage.via is not None and varying == over else None
        bare = replace(stage, hints=hints, via=via)
        building.collective("all_reduce", total, weight, varying, bare, op="sum")
    if same > 1:
        scaled = sched.Scale(f"{stage.result}/all_weights", total, "mul", float(same), stage.span)
        total = building.emit(scaled)
    building.weights[key] = weight, total
    return weight, total
