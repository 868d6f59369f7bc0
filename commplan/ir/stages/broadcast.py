from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Algorithm, Hints
from commplan.ir.roles import Ref
from commplan.ir.stages.base import BaseStage


class Broadcast(BaseStage, frozen=True, tag="broadcast"):
    """per -> same. `root` counts the `over` axes row-major, first named major."""

    result: Ref
    operand: Ref
    axes: tuple[str, ...]
    root: int
    span: Span
    via: Algorithm | None = None
    hints: Hints = NO_HINTS
