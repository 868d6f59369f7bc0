"""The op `put`: stores a value in a state on a server."""

from collections.abc import Mapping

from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.refs import Ref, name_of
from commplan.ir.roles import Cost, Execution, Meaning, Presentation
from commplan.ir.symbolic.deferred import Interpretation
from commplan.ir.transfer import Results, ValueTypes, value_like
from commplan.ir.values import Value


class Put(BaseOp, frozen=True, tag="put", gc=False):
    """Store a value in a state on servers.

    The first worker of each group sends its `operand` to the servers of the state and does not wait. Later
    requests for the state wait on the server for the new value. `result` exists on servers only.
    """

    RETURNED = 0

    result: Meaning[Ref]
    operand: Meaning[Ref]
    span: Presentation[Span]
    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "network"

    def transfer(self, types: ValueTypes) -> Results:
        return (value_like(types.values[self.operand], self.result, types.values[self.result].placement),)

    def meaning(self, env: Interpretation) -> None:
        env.set_current(self.result)
        placement = env.values[self.result].placement
        same = [axis for axis in env.algebra.sizes if not placement.varies(axis)]
        env.rename(self.result, env.get(self.operand), env.root(same, 0))

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return f"{name_of(self.result)} on {values[self.result].placement.server}"

    def uses_servers(self, values: Mapping[Ref, Value]) -> bool:
        return True
