"""The stage `slice`: this rank's shard of a value that all ranks have."""

from commplan.diagnostics import Span
from commplan.ir.roles import Presentation
from commplan.ir.stages.base import StageOverAxes
from commplan.ir.symbolic.deferred import Interpretation


class SliceStage(StageOverAxes, frozen=True, tag="slice"):
    """same -> split, without communication."""

    FORM = "y = slice x over AXIS"
    TAKES = ("same",)
    MAKES = "split"

    span: Presentation[Span]

    def meaning(self, env: Interpretation) -> None:
        ways, digits = env.row(self.axes)
        env.put(self.result, env.sliced(env.get(self.operand), env.values[self.result], ways, digits))
