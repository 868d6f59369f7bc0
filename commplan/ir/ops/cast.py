from collections.abc import Mapping

from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.roles import Ref
from commplan.ir.symbolic.interpretation import Interpretation
from commplan.ir.transfer import Results, ValueTypes
from commplan.ir.types import DType
from commplan.ir.values import Leaf, Value


class Cast(BaseOp, frozen=True, tag="cast", gc=False):
    """Convert every leaf to `dtype`."""

    CONVERTS = True

    result: Ref
    operand: Ref
    dtype: DType
    span: Span
    after: tuple[Ref, ...] = ()
    lane: str = "device"

    def transfer(self, types: ValueTypes) -> Results:
        value = types.values[self.operand]
        leaves, whole = (
            tuple(Leaf(leaf.path, leaf.shape, self.dtype) for leaf in found)
            for found in (value.leaves, value.whole)
        )
        return (Value(self.result, value.kind, leaves, value.placement, whole),)

    def meaning(self, env: Interpretation) -> None:
        made = env.of(self.operand).like(
            env.values[self.result], lambda term, dtype: env.algebra.cast(term, dtype, self.dtype)
        )
        env.put(self.result, made)

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return f"to {self.dtype}"
