"""The op `scale`: multiplies a value by a number, a scalar or a ratio of scalars, or divides it."""

import math
from collections.abc import Mapping
from typing import Literal

from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.refs import Ref, name_of
from commplan.ir.roles import Cost, Execution, Meaning, Presentation
from commplan.ir.symbolic.deferred import Interpretation, steps
from commplan.ir.transfer import Results, ValueTypes, Violations, value_like
from commplan.ir.values import Value


class Scale(BaseOp, frozen=True, tag="scale", gc=False):
    """Scale every leaf by a number, a scalar value, or a ratio `by / over` of two scalars.

    Factors are converted to f32, or to the leaf's dtype if that is wider or represents a divisor exactly. The
    result is rounded once; a ratio is first computed in the type of its scalars. A factor of 1 and a ratio
    leave integers unchanged. A scalar of zero gives zero, even for NaN, so that a term of weight zero does
    not count. A ratio with a denominator of zero gives zero too, so that a weighted mean over no records is
    zero.

    Attributes:
        how: Whether a number multiplies or divides; `mul` for scalars and ratios.
        by: A finite number other than 0, or a scalar value.
        over: The denominator of a ratio, a scalar value; None without one.
    """

    READS = ("operand", "by", "over")

    result: Meaning[Ref]
    operand: Meaning[Ref]
    how: Meaning[Literal["mul", "div"]]
    by: Meaning[float | Ref]
    span: Presentation[Span]
    over: Meaning[Ref | None] = None
    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "device"

    def check(self, types: ValueTypes) -> Violations:
        yield from types.check_scalar(self.by)
        yield from types.check_scalar(self.over)
        if isinstance(self.by, str) and self.how == "div":
            yield "CP0735", f"`{self.operand}` is divided by a scalar"
        if self.over is not None and not isinstance(self.by, str):
            yield "CP0735", f"`{self.operand}` is scaled by the share of {self.by} in a scalar"
        if not isinstance(self.by, str) and (self.by == 0 or not math.isfinite(self.by)):
            yield "CP0735", f"`{self.operand}` is scaled by {self.by}"

    def transfer(self, types: ValueTypes) -> Results:
        """The result is `per` the axes along which only a scalar varies.

        A term of a sum remains one when ranks scale their terms by different numbers.
        """
        operand = types.values[self.operand]
        scalars = [ref for ref in (self.by, self.over) if isinstance(ref, str)]
        varying = dict.fromkeys(axis for ref in scalars for axis in types.values[ref].placement.varying)
        differing = [axis for axis in varying if not operand.placement.varies(axis)]
        return (value_like(operand, self.result, types.per(operand.placement, differing)),)

    def meaning(self, env: Interpretation) -> None:
        by = env.scalar(self.by) if isinstance(self.by, str) else self.by
        operand, value = env.get(self.operand), env.values[self.result]
        if self.over is not None and not isinstance(by, float | int):
            env.put(self.result, steps.scaled_by_ratio(env, operand, value, by, env.scalar(self.over)))
        else:
            env.put(self.result, steps.scaled(env, operand, value, self.how, by))

    def detail(self, values: Mapping[Ref, Value]) -> str:
        if self.over is not None and isinstance(self.by, str):
            return f"times {name_of(self.by)} over its sum"
        by = f"{self.by:g}" if not isinstance(self.by, str) else name_of(self.by)
        if isinstance(self.by, str) and "/" in self.by:  # a sum of weights, computed by the schedule
            by += self.by[self.by.index("/") :]
        return f"{'times' if self.how == 'mul' else 'divided by'} {by}"
