"""The ops and values of a phase while the plan's stages are lowered into it."""

from __future__ import annotations

import math

from commplan.ir import plan as graph
from commplan.ir import schedule as sched
from commplan.ir.transfer import ValueTypes
from commplan.passes.rewrite import add_results, network_lane

NATIVE = graph.Algorithm("native")


Stage = graph.Broadcast | graph.Reduce | graph.Scatter | graph.Gather | graph.Elastic


class Building:
    """Ops so far, and every value by name.

    weights: sums of weights that the phase has made already, by weight and axes.
    """

    def __init__(self, axes: tuple[sched.Axis, ...], values: dict[graph.Ref, sched.Value]) -> None:
        self.axes, self.of = axes, values
        self.types = ValueTypes(axes, values)
        self.ops: list[sched.Op] = []
        self.weights: dict[tuple[graph.Ref, tuple[str, ...]], graph.Ref] = {}

    def ranks(self, over: tuple[str, ...]) -> int:
        """The number of ranks along `over`."""
        return math.prod(axis.size for axis in self.axes if axis.name in over)

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
        stage: Stage,
        op: sched.ReduceOp | None = None,
        root: int | None = None,
    ) -> None:
        """Append a collective on whole values, with what the stage says of it."""
        value = self.of[operand]
        widest = sched.widest(value.leaves)
        self.emit(
            sched.Collective(
                kind, result, operand, over, widest, value.nbytes, stage.span,
                op, root, stage.via or NATIVE, stage.hints, lane=network_lane(self.axes, over),
                pinned=stage.via is not None,
            )
        )  # fmt: skip
