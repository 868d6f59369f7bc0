from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.roles import Ref
from commplan.ir.types import DType


class Cast(BaseOp, frozen=True, tag="cast", gc=False):
    """Convert every leaf to `dtype`."""

    result: Ref
    operand: Ref
    dtype: DType
    span: Span
    after: tuple[Ref, ...] = ()
    lane: str = "device"
