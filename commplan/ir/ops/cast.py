"""The op `cast`: converts the leaves of a value to a dtype."""

from collections.abc import Mapping, Sequence

from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.refs import Ref
from commplan.ir.roles import Cost, Execution, Meaning, Presentation
from commplan.ir.symbolic.deferred import Interpretation, steps
from commplan.ir.transfer import Results, ValueTypes, Violations, value_like
from commplan.ir.types import DType
from commplan.ir.values import Leaf, Value


class Cast(BaseOp, frozen=True, tag="cast", gc=False):
    """Convert every leaf to another type.

    Attributes:
        dtype: The type of all leaves, or a tuple of one type per leaf. A tuple means that the conversion is
            part of the plan, as in weighted means, and not a rounding by the compiler.
    """

    CONVERTS = True

    result: Meaning[Ref]
    operand: Meaning[Ref]
    dtype: Meaning[DType | tuple[DType, ...]]
    span: Presentation[Span]
    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "device"

    def types(self, leaves: Sequence[Leaf]) -> tuple[DType, ...]:
        """The type that each of `leaves` is converted to."""
        return self.dtype if isinstance(self.dtype, tuple) else (self.dtype,) * len(leaves)

    def check(self, types: ValueTypes) -> Violations:
        leaves = types.values[self.operand].leaves
        if len(self.types(leaves)) != len(leaves):
            yield "CP0731", f"`{self.operand}` has {len(leaves)} leaves, not {len(self.dtype)}"

    def transfer(self, types: ValueTypes) -> Results:
        value = types.values[self.operand]
        return (value_like(value.of_types(self.types(value.leaves)), self.result, value.placement),)

    def meaning(self, env: Interpretation) -> None:
        operand, value = env.get(self.operand), env.values[self.result]
        if isinstance(self.dtype, tuple):
            env.put(self.result, steps.converted(env, operand, value))
            return
        after = self.dtype
        env.put(self.result, operand.like(value, lambda term, dtype: env.algebra.cast(term, dtype, after)))

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return f"to {' and '.join(dict.fromkeys(self.types(values[self.operand].leaves)))}"
