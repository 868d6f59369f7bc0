from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.roles import Ref
from commplan.ir.symbolic.interpretation import Interpretation


class Update(BaseOp, frozen=True, tag="update", gc=False):
    """`result` = operand + delta, leaf by leaf: the new centre."""

    READS = ("operand", "delta")

    result: Ref
    operand: Ref
    delta: Ref
    span: Span
    after: tuple[Ref, ...] = ()
    lane: str = "device"

    def meaning(self, env: Interpretation) -> None:
        operands = (env.of(self.operand), env.of(self.delta))
        env.put(self.result, env.combined(operands, env.values[self.result], env.algebra.add))
