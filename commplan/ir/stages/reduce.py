from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Algorithm, Hints, Reduction
from commplan.ir.roles import Ref
from commplan.ir.stages.base import BaseStage


class Reduce(BaseStage, frozen=True, tag="reduce"):
    """partial or per -> same. `across` is set where the axes are ensembles."""

    READS = ("operand", "op")

    result: Ref
    operand: Ref
    axes: tuple[str, ...]
    op: Reduction
    span: Span
    across: bool = False
    via: Algorithm | None = None
    hints: Hints = NO_HINTS
