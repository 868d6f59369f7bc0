from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Algorithm, Hints, Reduction
from commplan.ir.roles import Ref
from commplan.ir.stages.base import BaseStage


class Scatter(BaseStage, frozen=True, tag="scatter"):
    """partial -> split: reduce-scatter."""

    READS = ("operand", "op")

    result: Ref
    operand: Ref
    axes: tuple[str, ...]
    op: Reduction
    span: Span
    via: Algorithm | None = None
    hints: Hints = NO_HINTS
