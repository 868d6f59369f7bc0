from collections.abc import Mapping

from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.roles import Ref
from commplan.ir.symbolic.interpretation import Interpretation
from commplan.ir.values import Part, Value


class Pack(BaseOp, frozen=True, tag="pack", gc=False):
    """Copy parts of leaves into one flat buffer of `ways` equal rows, zero where no part lies.

    A leaf is flattened, zero-padded to a multiple of `ways`, and seen as `ways` rows; each part
    is a run of columns. With ways = 1 that is plain concatenation. A reduce-scatter of a buffer
    packed `ways` = ranks leaves each rank the row that holds its shard of every leaf.
    For an array (not a tree) that is cut along its leading dimension, the leading dimension is
    padded instead, so that a row is a whole number of its rows.
    """

    READS = ("parts",)
    CONVERTS = True

    result: Ref
    parts: tuple[Part, ...]
    span: Span
    ways: int = 1
    after: tuple[Ref, ...] = ()
    lane: str = "device"

    def meaning(self, env: Interpretation) -> None:
        parts = [(part.value, part.leaf, part.start, part.size, part.offset) for part in self.parts]
        env.put(self.result, env.packed(parts, self.ways, env.values[self.result]))

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return f"into {values[self.result].leaves[0].dtype}" + (
            f", {self.ways} rows" if self.ways > 1 else ""
        )
