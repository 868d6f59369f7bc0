from typing import Literal

from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Algorithm, Hints
from commplan.ir.roles import Ref
from commplan.ir.stages.base import BaseStage


class Elastic(BaseStage, frozen=True, tag="elastic"):
    """Elastic averaging of `operand` with `center`. `eta` and `rho` are numbers or scalar values."""

    READS = ("operand", "center", "eta", "rho")
    WRITES = ("pull", "result")

    pull: Ref
    result: Ref
    operand: Ref
    center: Ref
    axes: tuple[str, ...]
    mode: Literal["sync", "round_robin", "async", "hogwild"]
    eta: float | Ref
    rho: float | Ref
    span: Span
    via: Algorithm | None = None
    hints: Hints = NO_HINTS
