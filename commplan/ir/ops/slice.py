from collections.abc import Mapping

from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.refs import Ref
from commplan.ir.roles import Cost, Execution, Meaning, Presentation
from commplan.ir.symbolic.deferred import Interpretation
from commplan.ir.transfer import Results, ValueTypes, Violations
from commplan.ir.types import Over
from commplan.ir.values import Value


class Slice(BaseOp, frozen=True, tag="slice", gc=False):
    """Keep this rank's cut along `axes`. Each tree leaf is flattened, zero-padded and cut; scalars
    stay. An array is cut along its leading dimension.

    axes: major first: one cut among the ranks of all of them, as a reduce-scatter over them makes it, and not
    one cut after another, each with its own padding.
    owners: the ranks that keep a part where not all do, counted over all axes: of len(owners) parts rank
    owners[j] keeps the j-th, and all others the first.
    """

    result: Meaning[Ref]
    operand: Meaning[Ref]
    axes: Meaning[Over]
    span: Presentation[Span]
    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "device"
    owners: Meaning[tuple[int, ...]] = ()

    def check(self, types: ValueTypes) -> Violations:
        yield from types.check_cut(self.operand, self.axes, self.owners)
        placement = types.values[self.operand].placement
        if any(placement.varies(axis) for axis in self.axes):
            yield "CP0734", f"`{self.operand}` is {placement}: only what is the same is sliced"

    def transfer(self, types: ValueTypes) -> Results:
        return (types.part(types.values[self.operand], self.result, self.axes, self.owners),)

    def meaning(self, env: Interpretation) -> None:
        row = env.row(self.axes, self.owners)
        env.put(self.result, env.sliced(env.of(self.operand), env.values[self.result], *row))

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return f"along {', '.join(self.axes)}"
