from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.roles import Ref
from commplan.ir.symbolic.interpretation import Interpretation
from commplan.ir.transfer import Results, ValueTypes, placed


class Get(BaseOp, frozen=True, tag="get", gc=False):
    """`result` is the state `operand` on a server, as it is when its owners are asked."""

    KEPT = ("operand",)

    result: Ref
    operand: Ref
    span: Span
    after: tuple[Ref, ...] = ()
    lane: str = "network"

    def transfer(self, types: ValueTypes) -> Results:
        return (placed(types.values[self.operand], self.result),)

    def meaning(self, env: Interpretation) -> None:
        held = env.of(self.operand)
        env.put(self.result, held.renamed(env.algebra, env.values[self.result], {}))
