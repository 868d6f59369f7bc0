"""The stage `broadcast`: the value of one rank, on all ranks."""

from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Algorithm, Hints
from commplan.ir.roles import Execution, Meaning, Presentation
from commplan.ir.stages.base import NumericArgument, StageOverAxes
from commplan.ir.stages.rules import Ranks, Violation, root_in_range
from commplan.ir.symbolic.deferred import Interpretation, steps

# The syntax of `from ROOT`.
ROOT = NumericArgument(
    "from",
    "a root",
    0,
    ("the broadcast has no root", "add `from 0`: the rank whose value is kept"),
    root_in_range,
)


class Broadcast(StageOverAxes, frozen=True, tag="broadcast"):
    """per -> same: all ranks get the value of one rank.

    Attributes:
        root: The rank whose value is kept, row-major over the axes, the first one major.
    """

    FORM = "y = broadcast x over AXES from ROOT [via ALGORITHM]"
    TAKES = ("per",)
    NUMBER = ("root", ROOT)
    COLLECTIVE = "broadcast"

    root: Meaning[int]
    span: Presentation[Span]
    via: Execution[Algorithm | None] = None
    hints: Meaning[Hints] = NO_HINTS

    def rank(self, ranks: Ranks) -> int:
        return self.root

    def violation(self, ranks: Ranks) -> Violation | None:
        return root_in_range(self.root, self.axes, ranks)

    def meaning(self, env: Interpretation) -> None:
        moved = steps.moved(env, env.get(self.operand), self.hints, self.axes)
        env.rename(self.result, moved, env.root(self.axes, self.root))

    def argument_text(self) -> str:
        return f"from {self.root}"
