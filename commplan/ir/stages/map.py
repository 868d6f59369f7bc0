from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Hints
from commplan.ir.roles import Ref
from commplan.ir.stages.base import BaseStage


class Map(BaseStage, frozen=True, tag="map"):
    """`results = map fn(operands) [per MEMBER]`."""

    READS = ("operands",)
    WRITES = ("results",)

    results: tuple[Ref, ...]
    fn: str
    operands: tuple[Ref, ...]
    span: Span
    per: tuple[str, ...] = ()
    per_record: bool = False  # applied record by record: on the host, or vmapped on the device
    hints: Hints = NO_HINTS
