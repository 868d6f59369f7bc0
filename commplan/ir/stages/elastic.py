"""The stage `elastic`: elastic averaging of the workers with a center."""

from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Algorithm, Hints
from commplan.ir.refs import Ref, name_of
from commplan.ir.roles import Execution, Meaning, Presentation
from commplan.ir.stages.base import BaseStage, over
from commplan.ir.stages.rules import Ranks, Violation, coefficients, stability
from commplan.ir.symbolic.deferred import Interpretation, steps
from commplan.ir.types import ElasticMode, Over


class ElasticStage(BaseStage, frozen=True, tag="elastic"):
    """Elastic averaging: pull = eta rho (operand - center), and center + the sum of all pulls.

    Attributes:
        pull: The difference that each worker moves by, a result.
        result: The new center.
        operand: The weights of each worker.
        center: The center.
        mode: `sync`, or how a server orders the workers.
        eta: The first coefficient, a number or a scalar value.
        rho: The second coefficient, a number or a scalar value.

    References:
        Zhang, Choromanska and LeCun, Deep learning with elastic averaging SGD, 2015.
    """

    FORM = "d, c = elastic w with c over AXES by MODE(eta = .., rho = ..)"
    READS = ("operand", "center", "eta", "rho")
    WRITES = ("pull", "result")
    SCALARS = ("eta", "rho")

    pull: Meaning[Ref]
    result: Meaning[Ref]
    operand: Meaning[Ref]
    center: Meaning[Ref]
    axes: Meaning[Over]
    mode: Meaning[ElasticMode]
    eta: Meaning[float | Ref]
    rho: Meaning[float | Ref]
    span: Presentation[Span]
    via: Execution[Algorithm | None] = None
    hints: Meaning[Hints] = NO_HINTS

    def same_leaves(self) -> tuple[tuple[Ref, ...], ...]:
        return ((self.operand, self.center, self.pull, self.result),)

    def sends(self) -> tuple[Ref, str | None]:
        return self.operand, "sum"

    def violation(self, ranks: Ranks) -> Violation | None:
        return coefficients(self.eta, self.rho) or stability(self.mode, self.eta, self.rho, self.axes, ranks)

    def meaning(self, env: Interpretation) -> None:
        operands, factors = (self.operand, self.center), (self.eta, self.rho)
        how = steps.ElasticSpec(operands, factors, self.mode, self.axes, self.hints)
        steps.elastic(env, self.pull, self.result, how)

    def source_parts(self) -> tuple[str, ...]:
        both = f"elastic {name_of(self.operand)} with {name_of(self.center)}"
        return (both, over(self.axes), f"by {self._mode()}")

    def summary(self) -> tuple[str, ...]:
        return (f"elastic by {self._mode()}", over(self.axes))

    def _mode(self) -> str:
        eta, rho = (name_of(x) if isinstance(x, str) else f"{x:g}" for x in (self.eta, self.rho))
        return f"{self.mode}(eta = {eta}, rho = {rho})"
