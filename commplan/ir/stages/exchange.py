from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Algorithm, Hints, Reduction
from commplan.ir.roles import Ref
from commplan.ir.stages.base import BaseStage


class Exchange(BaseStage, frozen=True, tag="exchange"):
    """A parameter server: `results = fn(states, reduced gradient)`, one result per state."""

    READS = ("gradient", "states", "op")
    WRITES = ("results",)

    results: tuple[Ref, ...]
    gradient: Ref
    states: tuple[Ref, ...]
    fn: str
    axes: tuple[str, ...]
    op: Reduction
    span: Span
    via: Algorithm | None = None
    hints: Hints = NO_HINTS
