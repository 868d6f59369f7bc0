"""The stage `shift`: each value, on the rank a number of places further."""

from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Hints
from commplan.ir.roles import Meaning, Presentation
from commplan.ir.stages.base import NumericArgument, StageOverAxes
from commplan.ir.stages.rules import Ranks
from commplan.ir.symbolic.deferred import Interpretation, steps

# The syntax of `by K`. A distance may be negative.
DISTANCE = NumericArgument(
    "by", "a distance", -(1 << 63), ("the shift does not say how far", "add `by 1`: to the next rank")
)


class Shift(StageOverAxes, frozen=True, tag="shift"):
    """per -> per: each rank sends its value `by` places along the axis, modulo the number of ranks.

    Attributes:
        by: The distance, of any sign and size.
        via: Always None, because no algorithm can be chosen.
    """

    FORM = "y = shift x over AXIS by K [{ OPTIONS }]"
    TAKES = ("per",)
    MAKES = "kept"
    NUMBER = ("by", DISTANCE)
    COLLECTIVE = "shift"
    via = None

    by: Meaning[int]
    span: Presentation[Span]
    hints: Meaning[Hints] = NO_HINTS

    def rank(self, ranks: Ranks) -> int:
        """The rank that receives the value of rank 0."""
        return self.by % (ranks(self.axes) or 1)

    def meaning(self, env: Interpretation) -> None:
        moved = steps.moved(env, env.get(self.operand), self.hints, self.axes)
        env.rename(self.result, moved, env.algebra.shift(self.axes, self.by))

    def argument_text(self) -> str:
        return f"by {self.by}"
