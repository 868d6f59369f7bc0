"""The op `elastic`: the pull of elastic averaging."""

from collections.abc import Mapping

from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Hints
from commplan.ir.ops.base import BaseOp
from commplan.ir.refs import Ref
from commplan.ir.roles import Cost, Execution, Meaning, Presentation
from commplan.ir.symbolic.deferred import Interpretation, steps
from commplan.ir.transfer import Results, ValueTypes, Violations, value_like
from commplan.ir.types import ElasticMode, Over
from commplan.ir.values import Value


class Elastic(BaseOp, frozen=True, tag="elastic", gc=False):
    """Compute `pull` = eta * rho * (operand - center) for each leaf.

    In mode `sync` this is local arithmetic; an all-reduce of `pull` and an `Update` follow. In other modes it
    is the whole exchange with a server: it also makes `result`, and the runtime of servers runs it.

    Attributes:
        pull: The result: the difference that the worker and the center move by.
        operand: The weights of the worker.
        center: The center.
        mode: `sync`, or how a server orders the workers.
        eta: The first coefficient, a number or a scalar value.
        rho: The second coefficient, a number or a scalar value.
        axes: The axes of the workers.
        result: The new center, on the server; None in mode `sync`.
        hints: The options; none in mode `sync`.

    References:
        Zhang, Choromanska and LeCun, Deep learning with elastic averaging SGD, 2015.
    """

    READS = ("operand", "center", "eta", "rho")
    WRITES = ("pull", "result")
    SERVER_OPERANDS = ("center",)
    APPLIED_HINTS = ("wire", "accumulate", "staleness")

    pull: Meaning[Ref]
    operand: Meaning[Ref]
    center: Meaning[Ref]
    mode: Meaning[ElasticMode]
    eta: Meaning[float | Ref]
    rho: Meaning[float | Ref]
    axes: Meaning[Over]
    span: Presentation[Span]
    result: Meaning[Ref | None] = None
    hints: Meaning[Hints] = NO_HINTS
    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "device"

    def check(self, types: ValueTypes) -> Violations:
        yield from types.check_axes(self.axes)
        yield from types.check_leaves(self.center, types.values[self.operand].leaves)
        yield from types.check_scalar(self.eta)
        yield from types.check_scalar(self.rho)
        if self.operand == self.center:
            yield "CP0735", f"`{self.center}` is pulled towards itself"
        if (self.mode == "sync") != (self.result is None):
            yield "CP0735", f"an elastic op in mode {self.mode} has the wrong results"
        if self.mode == "sync" and self.hints != NO_HINTS:
            yield "CP0735", "an elastic op in mode sync sends nothing, and has no options"

    def transfer(self, types: ValueTypes) -> Results:
        pull = value_like(types.values[self.operand], self.pull)
        return (pull,) if self.result is None else (pull, value_like(types.values[self.center], self.result))

    def meaning(self, env: Interpretation) -> None:
        operands, factors = (self.operand, self.center), (self.eta, self.rho)
        how = steps.ElasticSpec(operands, factors, self.mode, self.axes, self.hints)
        steps.elastic(env, self.pull, self.result, how)

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return self.mode

    def uses_servers(self, values: Mapping[Ref, Value]) -> bool:
        return self.mode != "sync"
