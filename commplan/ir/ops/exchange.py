from typing import Literal

from commplan.diagnostics import Span
from commplan.ir.hints import Algorithm, Hints
from commplan.ir.ops.base import BaseOp
from commplan.ir.roles import Ref
from commplan.ir.symbolic import steps
from commplan.ir.symbolic.interpretation import Interpretation
from commplan.ir.transfer import Results, ValueTypes, Violations, placed


class Exchange(BaseOp, frozen=True, tag="exchange", gc=False):
    """A parameter-server step, run by the exchange runtime: results = fn(states, mean gradient)."""

    READS = ("gradient", "states", "weight")
    WRITES = ("results",)
    KEPT = ("states",)

    results: tuple[Ref, ...]
    gradient: Ref
    states: tuple[Ref, ...]
    fn: str
    axes: tuple[str, ...]
    op: Literal["sum", "mean"]
    span: Span
    weight: Ref | None = None
    algorithm: Algorithm | None = None
    hints: Hints = Hints()
    after: tuple[Ref, ...] = ()
    lane: str = "network"

    def check(self, types: ValueTypes) -> Violations:
        yield from types.check_axes(self.axes)
        if self.fn not in types.fns:
            yield "CP0730", f"there is no function `{self.fn}`"
        if len(self.results) != len(self.states):
            yield "CP0731", f"{len(self.states)} states are exchanged for {len(self.results)} results"
        yield from types.check_scalar(self.weight)

    def transfer(self, types: ValueTypes) -> Results:
        pairs = zip(self.states, self.results, strict=True)
        return tuple(placed(types.values[state], result) for state, result in pairs)

    def meaning(self, env: Interpretation) -> None:
        steps.exchange(
            env,
            self.gradient,
            self.states,
            self.results,
            self.fn,
            self.axes,
            self.op,
            self.weight,
            self.hints,
        )
