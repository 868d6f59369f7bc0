from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.roles import Ref


class Update(BaseOp, frozen=True, tag="update", gc=False):
    """`result` = operand + delta, leaf by leaf: the new centre."""

    READS = ("operand", "delta")

    result: Ref
    operand: Ref
    delta: Ref
    span: Span
    after: tuple[Ref, ...] = ()
    lane: str = "device"
