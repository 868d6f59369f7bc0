"""The ops and values of a phase during lowering, and the lowering of reductions."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from msgspec.structs import replace

from commplan.collectives.registry import scalar_algorithm
from commplan.diagnostics import Span
from commplan.ir import plan as graph
from commplan.ir import schedule as sched
from commplan.ir.ops import add_results
from commplan.ir.refs import base_name
from commplan.ir.transfer import ValueTypes
from commplan.ir.types import DType


class CollectiveStage(Protocol):
    """A stage that becomes collectives.

    Attributes:
        result: The value that the stage makes.
        span: The place of the stage in the plan.
        via: The algorithm in the plan; None if the compiler chooses.
        hints: The options of the stage.
    """

    @property
    def result(self) -> graph.Ref: ...
    @property
    def span(self) -> Span: ...
    @property
    def via(self) -> graph.Algorithm | None: ...
    @property
    def hints(self) -> graph.Hints: ...


class CollectiveAction(NamedTuple):
    """The effect of a collective on its operand; see `ir.ops.collective.Collective`.

    Attributes:
        kind: The kind of collective.
        op: The reduction; None for kinds that do not reduce.
        root: The root, or the distance of a shift; None for other kinds.
        divisor: The number that a sum is divided by; 1 for no division.
    """

    kind: sched.CollectiveKind
    op: sched.ReduceOp | None = None
    root: int | None = None
    divisor: int = 1


class PhaseBuilder:
    """Collects the ops of a phase and the values that they make.

    Args:
        axes: The axes with sizes.
        values: The values of the plan, as held by one rank. Further values are added to this mapping.

    Attributes:
        types: The axes and values, for `transfer` of ops.
        ops: The ops so far, in order.
        weights: The results of `total_weight` so far in this phase, by weight, axes and type.
    """

    def __init__(self, axes: tuple[sched.Axis, ...], values: dict[graph.Ref, sched.Value]) -> None:
        self.axes, self.values = axes, values
        self.types = ValueTypes(axes, values)
        self.ops: list[sched.Op] = []
        self.weights: dict[tuple[graph.Ref, tuple[str, ...], DType], tuple[graph.Ref, graph.Ref]] = {}

    def dtype(self, scalar: graph.Ref) -> DType:
        """The type of the value `scalar`, which has one leaf."""
        return self.values[scalar].leaves[0].dtype

    def emit(self, op: sched.Op) -> graph.Ref:
        """Append `op`, and add its results to `values` if the plan does not declare them.

        Returns:
            The first result of `op`.
        """
        add_results(op, self.types, self.values, self.values)
        self.ops.append(op)
        return sched.results(op)[0]

    def collective(
        self, action: CollectiveAction, result: graph.Ref, operand: graph.Ref, over: tuple[str, ...],
        stage: CollectiveStage,
    ) -> None:  # fmt: skip
        """Append a collective on a whole value.

        Args:
            action: The effect of the collective.
            result: The value that it makes.
            operand: The value that it reads.
            over: The axes.
            stage: The stage that it carries out, whose algorithm and hints it has. Without a `via`, the
                algorithm is `native` until a later pass chooses one.
        """
        value = self.values[operand]
        widest = sched.widest(value.leaves)
        self.emit(
            sched.Collective(
                action.kind, result, operand, over, widest, value.nbytes, stage.span,
                action.op, action.root, stage.via or graph.Algorithm("native"), stage.hints,
                lane=sched.network_lane(self.axes, over), divisor=action.divisor,
                stages=(base_name(stage.result),), pinned=stage.via is not None,
            )
        )  # fmt: skip


def reduction(builder: PhaseBuilder, kind: sched.CollectiveKind, stage: graph.Reduce | graph.Scatter) -> None:
    """Lower a reduce or scatter to a collective of `kind`.

    max, min, sum      -->  one collective
    mean               -->  the sum, divided by the number of ranks
    mean, if the stage has `integers`, or a leaf is sent or added in another type, or added in f16
                       -->  one collective with a divisor, which the pass `wire` expands
    mean(weight = n)   -->  the sum of x n / (sum of n), in its accumulation type
    """
    op, over = stage.op, stage.axes
    if op.name != "mean":
        builder.collective(CollectiveAction(kind, op.name), stage.result, stage.operand, over, stage)
        return
    dtypes = {leaf.dtype for leaf in builder.values[stage.operand].leaves}
    hints = stage.hints.for_mean(dtypes, stage.via, is_weighted=op.weight is not None)
    stage = replace(stage, hints=hints)
    if op.weight is not None:
        _weighted_mean(builder, kind, stage, op.weight)
        return
    ranks = builder.types.ranks(over)
    changes_type = any(map(hints.changes, dtypes))
    if changes_type or hints.integers is not None or any(map(hints.divides_first, dtypes)):
        mean = CollectiveAction(kind, "sum", divisor=ranks)
        builder.collective(mean, stage.result, stage.operand, over, stage)
        return
    total = f"{stage.result}/sum"
    builder.collective(CollectiveAction(kind, "sum"), total, stage.operand, over, stage)
    builder.emit(sched.Scale(stage.result, total, "div", float(ranks), stage.span))


def _weighted_mean(
    builder: PhaseBuilder, kind: sched.CollectiveKind, stage: graph.Reduce | graph.Scatter, weight: graph.Ref
) -> None:
    """Lower a mean with weights.

    y = mean(x, weight = n)  -->  N = sum(n); y = sum(x n / N)
    y = mean(x, weight = n), with an accumulation type wider than x
                             -->  N = sum(n); y = cast(sum(cast(x) n / N), the types of x)
    """
    dtypes = tuple(leaf.dtype for leaf in builder.values[stage.operand].leaves)
    products = tuple(map(stage.hints.term_type, dtypes))
    operand, total = stage.operand, stage.result
    if not any(map(stage.hints.changes, products)):  # terms are sent in their accumulation type
        stage = replace(stage, hints=stage.hints.exact)
    if products != dtypes:
        total = f"{stage.result}/sum"
        operand = builder.emit(sched.Cast(f"{stage.result}/terms", operand, products, stage.span))
    count, whole = total_weight(builder, weight, stage, graph.weight_type(builder.dtype(weight), dtypes))
    scaled = sched.Scale(f"{stage.result}/weighted", operand, "mul", count, stage.span, over=whole)
    builder.collective(CollectiveAction(kind, "sum"), total, builder.emit(scaled), stage.axes, stage)
    if products != dtypes:
        builder.emit(sched.Cast(stage.result, total, dtypes, stage.span))


def total_weight(
    builder: PhaseBuilder, weight: graph.Ref, stage: graph.Reduce | graph.Scatter, dtype: DType
) -> tuple[graph.Ref, graph.Ref]:
    """Emit a weight in `dtype` and its sum over the axes of `stage`, once per phase.

    Along axes over which the weight is the same, the sum is a product with the number of ranks.

    Args:
        builder: The ops of the phase.
        weight: The weight, a scalar.
        stage: The stage that uses the weight. The sum has its options, except those about types.
        dtype: The float type of the weight, when it is sent and added.

    Returns:
        The references to the converted weight and to its sum.
    """
    over, key = stage.axes, (weight, stage.axes, dtype)
    if key in builder.weights:
        return builder.weights[key]
    placement = builder.values[weight].placement
    varying = tuple(axis for axis in over if placement.varies(axis))
    same = builder.types.ranks(tuple(axis for axis in over if axis not in varying))
    if builder.dtype(weight) != dtype:
        weight = builder.emit(sched.Cast(f"{stage.result}/weight", weight, (dtype,), stage.span))
    total = weight
    if varying:
        total = f"{stage.result}/weights"
        # A count is not a gradient: it is neither sent nor added in a narrower type.
        hints = replace(stage.hints.exact, integers=None)
        via = scalar_algorithm(stage.via) if stage.via is not None and varying == over else None
        bare = replace(stage, hints=hints, via=via)
        builder.collective(CollectiveAction("all_reduce", "sum"), total, weight, varying, bare)
    if same > 1:
        scaled = sched.Scale(f"{stage.result}/all_weights", total, "mul", float(same), stage.span)
        total = builder.emit(scaled)
    builder.weights[key] = weight, total
    return weight, total
