import math
from collections.abc import Mapping
from typing import Literal

from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.roles import Ref, name_of
from commplan.ir.symbolic.deferred import Interpretation, steps
from commplan.ir.transfer import Results, ValueTypes, Violations, placed
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

    def check(self, types: ValueTypes) -> Violations:
        yield from types.check_scalar(self.by)
        if not isinstance(self.by, str) and (self.by == 0 or not math.isfinite(self.by)):
            yield "CP0735", f"`{self.operand}` is scaled by {self.by}"

    def transfer(self, types: ValueTypes) -> Results:
        """A term of a sum stays one, whatever number each rank scales its own by."""
        operand = types.values[self.operand]
        by = types.values[self.by].placement.varying if isinstance(self.by, str) else ()
        differing = [axis for axis in by if not operand.placement.varies(axis)]
        return (placed(operand, self.result, types.per(operand.placement, differing)),)

    def meaning(self, env: Interpretation) -> None:
        by = env.scalar(self.by) if isinstance(self.by, str) else self.by
        env.put(self.result, steps.scaled(env, env.of(self.operand), env.values[self.result], self.how, by))

    def detail(self, values: Mapping[Ref, Value]) -> str:
        by = f"{self.by:g}" if not isinstance(self.by, str) else name_of(self.by)
        if isinstance(self.by, str) and "/" in self.by:  # made on the way: the sum of weights
            by += self.by[self.by.index("/") :]
        return f"{'times' if self.how == 'mul' else 'divided by'} {by}"
