"""The stage `gather`: the shards of all ranks, joined."""

from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Algorithm, Hints
from commplan.ir.roles import Execution, Meaning, Presentation
from commplan.ir.stages.base import StageOverAxes
from commplan.ir.symbolic.deferred import Interpretation, steps


class Gather(StageOverAxes, frozen=True, tag="gather"):
    """split -> same: all-gather."""

    FORM = "y = gather x over AXIS [via ALGORITHM] [{ OPTIONS }]"
    TAKES = ("split",)
    COLLECTIVE = "all_gather"

    span: Presentation[Span]
    via: Execution[Algorithm | None] = None
    hints: Meaning[Hints] = NO_HINTS

    def meaning(self, env: Interpretation) -> None:
        operand = env.get(self.operand)
        moved = steps.moved(env, operand, self.hints, self.axes, sends_scalars=False)
        env.put(self.result, env.gathered(moved, env.values[self.result], self.axes))
