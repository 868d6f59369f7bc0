"""The op `get`: fetches a state from a server."""

from collections.abc import Mapping

from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.refs import Ref, name_of
from commplan.ir.roles import Cost, Execution, Meaning, Presentation
from commplan.ir.symbolic.deferred import Interpretation
from commplan.ir.transfer import Results, ValueTypes, value_like
from commplan.ir.values import Value


class Get(BaseOp, frozen=True, tag="get", gc=False):
    """Fetch the state `operand` from its servers, with the value that they have when they answer."""

    SERVER_OPERANDS = ("operand",)

    result: Meaning[Ref]
    operand: Meaning[Ref]
    span: Presentation[Span]
    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "network"

    def transfer(self, types: ValueTypes) -> Results:
        return (value_like(types.values[self.operand], self.result),)

    def meaning(self, env: Interpretation) -> None:
        env.check_current(self.operand)
        env.rename(self.result, env.get(self.operand), {})

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return f"{name_of(self.operand)} from {values[self.operand].placement.server}"

    def uses_servers(self, values: Mapping[Ref, Value]) -> bool:
        return True
