"""The op `exchange`: one step of a parameter server."""

from collections.abc import Mapping
from typing import Literal

from commplan.diagnostics import Span
from commplan.ir.hints import Algorithm, Hints
from commplan.ir.ops.base import BaseOp, Ranks, Work
from commplan.ir.refs import Ref
from commplan.ir.roles import Cost, Execution, Meaning, Presentation
from commplan.ir.stages import rules
from commplan.ir.stages.exchange import ExchangeFields
from commplan.ir.symbolic.deferred import Interpretation
from commplan.ir.transfer import Results, ValueTypes, Violations, broken, value_like
from commplan.ir.values import Value


class Exchange(ExchangeFields, BaseOp, frozen=True, tag="exchange", gc=False):
    """A step of a parameter server: results = fn(states, reduced gradient).

    If the states are on servers, the runtime of servers runs it. Otherwise the pass `lower_exchange` replaces
    it by collectives.

    Attributes:
        op: The operator of the reduction.
        weight: The weight of each rank in a mean, a scalar; None if there are no weights.
        algorithm: The algorithm in the plan, such as `parameter_server(owners = 2)`; None if it has none.
        hints: The options.
    """

    READS = ("gradient", "states", "weight")
    SERVER_OPERANDS = ("states",)
    APPLIED_HINTS = ("wire", "accumulate", "staleness")

    op: Meaning[Literal["sum", "mean"]]
    span: Presentation[Span]
    weight: Meaning[Ref | None] = None
    algorithm: Meaning[Algorithm | None] = None
    hints: Meaning[Hints] = Hints()
    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "network"

    def check(self, types: ValueTypes) -> Violations:
        yield from types.check_axes(self.axes)
        if self.gradient in self.states:
            yield "CP0735", f"`{self.gradient}` is exchanged into itself"
        if self.fn not in types.fns:
            yield "CP0730", f"there is no function `{self.fn}`"
        yield from broken("CP0731", rules.result_per_state(self.states, self.results))
        yield from types.check_scalar(self.weight)

    def transfer(self, types: ValueTypes) -> Results:
        pairs = zip(self.states, self.results, strict=True)
        return tuple(value_like(types.values[state], result) for state, result in pairs)

    def meaning(self, env: Interpretation) -> None:
        self.exchanged(env, self.op, self.weight, self.hints, self.algorithm)

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return f"with {self.fn} by {self.op}"

    def uses_servers(self, values: Mapping[Ref, Value]) -> bool:
        return values[self.states[0]].placement.server is not None

    def work(self, nbytes: Mapping[Ref, int], ranks: Ranks) -> Work:
        """An all-reduce of the gradient: gradients go to owners, and as many bytes of weights come back."""
        size = nbytes.get(self.gradient, 0)
        return Work("all_reduce", f"exchange of `{self.gradient}`", size, self.axes)
