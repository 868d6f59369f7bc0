from collections.abc import Mapping

from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.roles import Ref
from commplan.ir.symbolic.interpretation import Interpretation
from commplan.ir.types import DType
from commplan.ir.values import Value


class Cast(BaseOp, frozen=True, tag="cast", gc=False):
    """Convert every leaf to `dtype`."""

    CONVERTS = True

    result: Ref
    operand: Ref
    dtype: DType
    span: Span
    after: tuple[Ref, ...] = ()
    lane: str = "device"

    def meaning(self, env: Interpretation) -> None:
        made = env.of(self.operand).like(
            env.values[self.result], lambda term, dtype: env.algebra.cast(term, dtype, self.dtype)
        )
        env.put(self.result, made)

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return f"to {self.dtype}"
