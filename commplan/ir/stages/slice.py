from commplan.diagnostics import Span
from commplan.ir.roles import Ref
from commplan.ir.stages.base import BaseStage


class Slice(BaseStage, frozen=True, tag="slice"):
    """same -> split, without communication."""

    result: Ref
    operand: Ref
    axes: tuple[str, ...]
    span: Span
