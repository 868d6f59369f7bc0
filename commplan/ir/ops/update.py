"""The op `update`: adds a difference to the center of an elastic averaging."""

from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.refs import Ref
from commplan.ir.roles import Cost, Execution, Meaning, Presentation
from commplan.ir.symbolic.deferred import Interpretation, steps
from commplan.ir.transfer import Results, ValueTypes, Violations, value_like


class Update(BaseOp, frozen=True, tag="update", gc=False):
    """Compute `result` = operand + delta for each leaf: the new center.

    Attributes:
        operand: The center.
        delta: The sum of the pulls of all workers.
    """

    READS = ("operand", "delta")

    result: Meaning[Ref]
    operand: Meaning[Ref]
    delta: Meaning[Ref]
    span: Presentation[Span]
    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "device"

    def check(self, types: ValueTypes) -> Violations:
        yield from types.check_leaves(self.delta, types.values[self.operand].leaves)
        yield from types.check_terms((self.operand, self.delta))

    def transfer(self, types: ValueTypes) -> Results:
        operand = types.values[self.operand]
        placement = types.join((operand.placement, types.values[self.delta].placement))
        return (value_like(operand, self.result, placement),)

    def meaning(self, env: Interpretation) -> None:
        center, total = env.get(self.operand), env.get(self.delta)
        env.put(self.result, steps.updated(env, center, total, env.values[self.result]))
