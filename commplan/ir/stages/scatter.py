"""The stage `scatter`: a reduction of which each rank receives a shard."""

from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Algorithm, Hints, Reduction
from commplan.ir.roles import Execution, Meaning, Presentation
from commplan.ir.stages.base import StageOverAxes
from commplan.ir.symbolic.deferred import Interpretation, steps


class Scatter(StageOverAxes, frozen=True, tag="scatter"):
    """partial or per -> split: reduce-scatter.

    Attributes:
        op: The operator.
    """

    FORM = "y = scatter x over AXIS by OP [via ALGORITHM] [{ OPTIONS }]"
    TAKES = ("partial", "per")
    MAKES = "split"
    COLLECTIVE = "reduce_scatter"
    READS = ("operand", "op")
    SCALARS = ("op",)

    op: Meaning[Reduction]
    span: Presentation[Span]
    via: Execution[Algorithm | None] = None
    hints: Meaning[Hints] = NO_HINTS

    def meaning(self, env: Interpretation) -> None:
        operand = env.get(self.operand)
        how = steps.ReductionSpec(
            self.op.name, self.axes, self.hints, self.op.weight, self.via, sends_sum=False
        )
        reduced = steps.averaged(env, operand, operand.value, how)
        env.put(self.result, env.sliced(reduced, env.values[self.result], *env.row(self.axes)))

    def argument_text(self) -> str:
        return f"by {self.op.text()}"
