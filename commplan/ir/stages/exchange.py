from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Algorithm, Hints, Reduction
from commplan.ir.roles import Ref, name_of
from commplan.ir.stages.base import BaseStage, over
from commplan.ir.stages.rules import Ranks, Violation, chosen, one_each
from commplan.ir.symbolic.deferred import Interpretation, steps
from commplan.ir.types import Over, Refs


class Exchange(BaseStage, frozen=True, tag="exchange"):
    """A parameter server: `results = fn(states, reduced gradient)`, one result per state."""

    FORM = "w [, m] = exchange g into w [, m] with FN over AXES by OP [via ALGORITHM]"
    READS = ("gradient", "states", "op")
    WRITES = ("results",)
    SCALARS = ("op",)

    results: Refs
    gradient: Ref
    states: Refs
    fn: str
    axes: Over
    op: Reduction
    span: Span
    via: Algorithm | None = None
    hints: Hints = NO_HINTS

    def alike(self) -> tuple[tuple[Ref, ...], ...]:
        return ((self.gradient, self.states[0]), *zip(self.states, self.results, strict=True))

    def called(self) -> tuple[str, tuple[Ref, ...], tuple[Ref, ...]]:
        return self.fn, (*self.states, self.gradient), self.results

    def violation(self, ranks: Ranks) -> Violation | None:
        return one_each(self.states, self.results) or chosen(
            "owners", self.via and self.via.get("owners"), self.axes, ranks
        )

    def meaning(self, env: Interpretation) -> None:
        steps.exchange(
            env, self.gradient, self.states, self.results, self.fn, self.axes, self.op.name, self.op.weight,
            self.hints,
        )  # fmt: skip

    def written(self) -> tuple[str, ...]:
        states = ", ".join(map(name_of, self.states))
        into = f"exchange {name_of(self.gradient)} into {states} with {self.fn}"
        return (into, over(self.axes), f"by {self.op.text()}")

    def said(self) -> tuple[str, ...]:
        return (f"exchange with {self.fn} by {self.op.text()}", over(self.axes))
