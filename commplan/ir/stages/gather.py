from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Algorithm, Hints
from commplan.ir.roles import Ref
from commplan.ir.stages.base import BaseStage


class Gather(BaseStage, frozen=True, tag="gather"):
    """split -> same: all-gather."""

    result: Ref
    operand: Ref
    axes: tuple[str, ...]
    span: Span
    via: Algorithm | None = None
    hints: Hints = NO_HINTS
