from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.roles import Ref


class LocalSum(BaseOp, frozen=True, tag="local_sum", gc=False):
    """Sum the `ways` rows of a flat buffer [ways*k] -> [k], in the operand's dtype."""

    result: Ref
    operand: Ref
    ways: int
    span: Span
    after: tuple[Ref, ...] = ()
    lane: str = "device"
