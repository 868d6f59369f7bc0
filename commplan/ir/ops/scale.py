from collections.abc import Mapping
from typing import Literal

from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.roles import Ref, name_of
from commplan.ir.symbolic import steps
from commplan.ir.symbolic.interpretation import Interpretation
from commplan.ir.values import Value


class Scale(BaseOp, frozen=True, tag="scale", gc=False):
    """Multiply or divide every leaf by a number or by a scalar value. Integers are left alone by 1.

    A scalar value is converted to each leaf's dtype; a division by a zero scalar gives zero
    (a weighted mean over no records is zero, not NaN).
    """

    READS = ("operand", "by")

    result: Ref
    operand: Ref
    how: Literal["mul", "div"]
    by: float | Ref
    span: Span
    after: tuple[Ref, ...] = ()
    lane: str = "device"

    def meaning(self, env: Interpretation) -> None:
        by = env.scalar(self.by) if isinstance(self.by, str) else self.by
        env.put(self.result, steps.scaled(env, env.of(self.operand), env.values[self.result], self.how, by))

    def detail(self, values: Mapping[Ref, Value]) -> str:
        by = name_of(self.by) if isinstance(self.by, str) else f"{self.by:g}"
        return f"{'times' if self.how == 'mul' else 'divided by'} {by}"
