"""The op `slice`: keeps this rank's shard."""

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
    """Keep this rank's shard along `axes`.

    Each tree leaf is flattened, zero-padded and split; scalars are kept. An array is split along its leading
    dimension. The split is a single one among all ranks of the axes, as a reduce-scatter makes it, rather
    than one split per axis with its own padding.

    Attributes:
        axes: The axes, the major one first.
        owners: The ranks that keep a shard if not all do, counted row-major over `axes`: rank owners[j] keeps
            shard j, and every other rank the first. Empty if all ranks keep their shards.
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
            yield "CP0734", f"`{self.operand}` is {placement}: only a replicated value can be sliced"

    def transfer(self, types: ValueTypes) -> Results:
        return (types.part(types.values[self.operand], self.result, self.axes, self.owners),)

    def meaning(self, env: Interpretation) -> None:
        row = env.row(self.axes, self.owners)
        env.put(self.result, env.sliced(env.get(self.operand), env.values[self.result], *row))

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return f"along {', '.join(self.axes)}"
