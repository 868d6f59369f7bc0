from commplan.diagnostics import Span
from commplan.ir.roles import Ref
from commplan.ir.stages.base import BaseStage
from commplan.ir.symbolic.interpretation import Interpretation
from commplan.ir.types import Over


class Slice(BaseStage, frozen=True, tag="slice"):
    """same -> split, without communication."""

    result: Ref
    operand: Ref
    axes: Over
    span: Span

    def meaning(self, env: Interpretation) -> None:
        ways, digits = env.row(self.axes)
        env.put(self.result, env.sliced(env.of(self.operand), env.values[self.result], ways, digits))
