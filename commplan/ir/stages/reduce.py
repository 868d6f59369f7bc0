"""The stage `reduce`: the sum, mean, maximum or minimum over ranks."""

from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Algorithm, Hints, Reduction
from commplan.ir.roles import Execution, Meaning, Presentation
from commplan.ir.stages.base import StageOverAxes, over
from commplan.ir.symbolic.deferred import Interpretation, steps


class Reduce(StageOverAxes, frozen=True, tag="reduce"):
    """partial or per -> same: the reduction of the values of all ranks.

    Attributes:
        op: The operator.
        across: Whether the plan says `across` instead of `over`, which means that the axes are ensembles.
    """

    FORM = "y = reduce x over AXES by OP [via ALGORITHM] [{ OPTIONS }]"
    TAKES = ("partial", "per")
    COLLECTIVE = "all_reduce"
    READS = ("operand", "op")
    SCALARS = ("op",)

    op: Meaning[Reduction]
    span: Presentation[Span]
    across: Meaning[bool] = False
    via: Execution[Algorithm | None] = None
    hints: Meaning[Hints] = NO_HINTS

    def meaning(self, env: Interpretation) -> None:
        how = steps.ReductionSpec(self.op.name, self.axes, self.hints, self.op.weight, self.via)
        env.put(self.result, steps.averaged(env, env.get(self.operand), env.values[self.result], how))

    def argument_text(self) -> str:
        return f"by {self.op.text()}"

    def axes_text(self) -> str:
        return over(self.axes, "across" if self.across else "over")
