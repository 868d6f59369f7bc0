from commplan.diagnostics import Span
from commplan.ir.choice import Design
from commplan.ir.hints import Hints
from commplan.ir.ops.base import BaseOp
from commplan.ir.roles import Ref
from commplan.ir.symbolic.interpretation import Interpretation
from commplan.ir.transfer import Results, ValueTypes, Violations, placed
from commplan.ir.types import AxisKind


class Share(BaseOp, frozen=True, tag="share", gc=False):
    """How a loaded value that is the same over ensembles is made so, between processes.

    design: duplicate (each computes it), all_shared (each computes 1/n and all see all),
    single_broadcast or multi_broadcast (`readers` compute).
    """

    result: Ref
    operand: Ref
    axes: tuple[str, ...]
    design: Design
    span: Span
    readers: int | None = None
    hints: Hints = Hints()
    after: tuple[Ref, ...] = ()
    lane: str = "host_compute"

    def check(self, types: ValueTypes) -> Violations:
        operand = types.values[self.operand]
        if operand.kind != "records":
            yield "CP0731", f"`{self.operand}` is shared, but is no batch of records"
        wrong = [*types.check_axes(self.axes, AxisKind.ENSEMBLE)]
        yield from wrong
        for axis in self.axes:
            if operand.placement.varies(axis):
                yield "CP0734", f"`{self.operand}` differs over `{axis}` and cannot be shared"
        if self.readers is not None and not wrong and not 1 <= self.readers <= types.ranks(self.axes):
            yield "CP0735", f"{self.readers} of {types.ranks(self.axes)} members cannot read"

    def transfer(self, types: ValueTypes) -> Results:
        return (placed(types.values[self.operand], self.result),)

    def meaning(self, env: Interpretation) -> None:
        held = env.of(self.operand)
        env.put(self.result, held.renamed(env.algebra, env.values[self.result], {}))
