from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Hints
from commplan.ir.roles import Ref, name_of
from commplan.ir.stages.base import BaseStage
from commplan.ir.symbolic.deferred import Interpretation, steps
from commplan.ir.types import Refs


class Map(BaseStage, frozen=True, tag="map"):
    """`results = map fn(operands) [per MEMBER]`."""

    FORM = "y, ... = map FN(x, ...) [per MEMBER]"
    READS = ("operands",)
    WRITES = ("results",)
    AXES = ("per",)

    results: Refs
    fn: str
    operands: tuple[Ref, ...]
    span: Span
    per: tuple[str, ...] = ()
    per_record: bool = False  # applied record by record: on the host, or vmapped on the device
    hints: Hints = NO_HINTS

    def alike(self) -> tuple[tuple[Ref, ...], ...]:
        return ()

    def called(self) -> tuple[str, tuple[Ref, ...], tuple[Ref, ...]]:
        return self.fn, self.operands, self.results

    def meaning(self, env: Interpretation) -> None:
        steps.called(env, self.fn, self.operands, self.results, self.per, by_record=self.per_record)

    def written(self) -> tuple[str, ...]:
        operands = ", ".join(map(name_of, self.operands))
        return (f"map {self.fn}({operands})", f"per {', '.join(self.per)}" if self.per else "")

    def said(self) -> tuple[str, ...]:
        per = f"per {', '.join(self.per)}" if self.per else ""
        return (f"map {self.fn}", "record by record" if self.per_record else "", per)
