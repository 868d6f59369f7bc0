from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Algorithm, Hints, Reduction
from commplan.ir.roles import name_of
from commplan.ir.stages.base import StageOverAxes, over
from commplan.ir.symbolic.deferred import Interpretation, steps


class Scatter(StageOverAxes, frozen=True, tag="scatter"):
    """partial -> split: reduce-scatter."""

    FORM = "y = scatter x over AXIS by OP [via ALGORITHM] [{ OPTIONS }]"
    TAKES = ("partial",)
    MAKES = "split"
    COLLECTIVE = "reduce_scatter"
    READS = ("operand", "op")
    SCALARS = ("op",)

    op: Reduction
    span: Span
    via: Algorithm | None = None
    hints: Hints = NO_HINTS

    def meaning(self, env: Interpretation) -> None:
        op, operand, value = self.op, env.of(self.operand), env.values[self.result]
        held = steps.averaged(
            env, operand, operand.value, self.axes, op.name, op.weight, self.hints, again=False
        )
        ways, digits = env.row(self.axes)
        env.put(self.result, env.sliced(held, value, ways, digits))

    def written(self) -> tuple[str, ...]:
        return (f"scatter {name_of(self.operand)}", over(self.axes), f"by {self.op.text()}")

    def said(self) -> tuple[str, ...]:
        return (f"scatter by {self.op.text()}", over(self.axes))
