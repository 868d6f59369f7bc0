"""The stage `share`: how processes obtain a loaded value that is the same for all members."""

from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Algorithm, Hints
from commplan.ir.roles import Meaning, Presentation
from commplan.ir.stages.base import StageOverAxes
from commplan.ir.stages.rules import Ranks, Violation, reader_or_owner_count
from commplan.ir.symbolic.deferred import Interpretation, steps


class ShareStage(StageOverAxes, frozen=True, tag="share"):
    """same -> same: chooses how processes obtain a value that is the same over the axes."""

    FORM = "y = share x over MEMBER via DESIGN"
    TAKES = ("same",)
    MAKES = "kept"

    via: Meaning[Algorithm]
    span: Presentation[Span]
    hints: Meaning[Hints] = NO_HINTS

    def violation(self, ranks: Ranks) -> Violation | None:
        return reader_or_owner_count("readers", self.via.get("readers"), self.axes, ranks)

    def meaning(self, env: Interpretation) -> None:
        readers = self.via.get("readers")
        steps.mark_shared(env, self.result, self.operand, self.axes, self.via.name, readers, self.hints)
