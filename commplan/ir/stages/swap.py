"""The stage `swap`: block j of each rank, on rank j."""

from collections.abc import Sequence

from commplan.diagnostics import Span, listed, plural
from commplan.ir.hints import NO_HINTS, Algorithm, Hints
from commplan.ir.roles import Execution, Meaning, Presentation
from commplan.ir.stages.base import StageOverAxes
from commplan.ir.stages.rules import Ranks, Violation
from commplan.ir.symbolic.deferred import Interpretation, steps
from commplan.ir.values import Leaf


class Swap(StageOverAxes, frozen=True, tag="swap"):
    """per -> per: all-to-all. Block j of the leading dimension goes to rank j, as the block of its sender."""

    FORM = "y = swap x over AXIS [via ALGORITHM] [{ OPTIONS }]"
    TAKES = ("per",)
    MAKES = "kept"
    WHOLE = True
    COLLECTIVE = "swap"

    span: Presentation[Span]
    via: Execution[Algorithm | None] = None
    hints: Meaning[Hints] = NO_HINTS

    def leaf_violation(self, leaves: Sequence[tuple[str, Leaf]], ranks: Ranks) -> Violation | None:
        """The leading dimension of every leaf must be a multiple of the number of ranks."""
        ways = ranks(self.axes) or 1
        for name, leaf in leaves:
            rows = leaf.shape[0] if leaf.shape else None
            if rows is None or rows % ways:
                has = "no leading dimension" if rows is None else f"a leading dimension of {rows}"
                into = f"{plural(ways, 'rank')} of {listed(self.axes)}"
                note = "each rank gets a block of the same size, and nothing is padded: pad it to a multiple"
                return Violation(f"{name} has {has}, which is no {ways} equal blocks for the {into}", (note,))
        return None

    def meaning(self, env: Interpretation) -> None:
        moved = steps.moved(env, env.get(self.operand), self.hints, self.axes)
        env.put(self.result, env.swapped(moved, env.values[self.result], self.axes))
