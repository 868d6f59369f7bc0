from collections.abc import Mapping

from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.refs import Ref
from commplan.ir.roles import Cost, Execution, Meaning, Presentation
from commplan.ir.symbolic.deferred import Interpretation, Term
from commplan.ir.transfer import Results, ValueTypes
from commplan.ir.types import DType
from commplan.ir.values import Leaf, Value


class Cast(BaseOp, frozen=True, tag="cast", gc=False):
    """Convert every leaf to `dtype`."""

    CONVERTS = True

    result: Meaning[Ref]
    operand: Meaning[Ref]
    dtype: Meaning[DType]
    span: Presentation[Span]
    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "device"

    def transfer(self, types: ValueTypes) -> Results:
        def converted(leaves: tuple[Leaf, ...]) -> tuple[Leaf, ...]:
            return tuple(Leaf(leaf.path, leaf.shape, self.dtype) for leaf in leaves)

        value = types.values[self.operand]
        leaves, whole = converted(value.leaves), converted(value.whole)
        return (Value(self.result, value.kind, leaves, value.placement, whole),)

    def meaning(self, env: Interpretation) -> None:
        def cast(term: Term, dtype: DType) -> Term:
            return env.algebra.cast(term, dtype, self.dtype)

        env.put(self.result, env.of(self.operand).like(env.values[self.result], cast))

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return f"to {self.dtype}"
