"""The op `pack`: copies parts of leaves into a buffer."""

import itertools
from collections.abc import Mapping

from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.refs import Ref
from commplan.ir.roles import Cost, Execution, Meaning, Presentation
from commplan.ir.symbolic.deferred import Interpretation
from commplan.ir.transfer import Results, ValueTypes, Violations, value_like
from commplan.ir.types import Placement
from commplan.ir.values import Part, Value


class Pack(BaseOp, frozen=True, tag="pack", gc=False):
    """Copy parts of leaves into one flat buffer of `ways` equal rows, with zeros in the gaps.

    Each tree leaf is flattened, zero-padded to a multiple of `ways`, and viewed as `ways` rows. The leading
    dimension of an array, or of records, is padded instead, so that a row holds whole slices. A part is a
    range of columns. With one row this is concatenation. After a reduce-scatter of a buffer with one row per
    rank, each rank has its shard of every leaf.

    Attributes:
        parts: The parts, which do not overlap in the buffer.
        ways: The number of rows, at least 1.
    """

    READS = ("parts",)
    CONVERTS = True

    result: Meaning[Ref]
    parts: Meaning[tuple[Part, ...]]
    span: Presentation[Span]
    ways: Meaning[int] = 1
    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "device"

    def check(self, types: ValueTypes) -> Violations:
        result = types.values[self.result]
        if result.kind != "flat":
            yield "CP0731", f"`{self.result}` is packed, but is not flat"
            return
        leaf = result.leaves[0]
        if self.ways < 1 or leaf.size % self.ways:
            yield "CP0735", f"{leaf.size} elements have no {self.ways} equal rows"
            return
        for part in self.parts:
            wrong = [*types.check_part(part, part.value, self.ways, leaf.size // self.ways)]
            yield from wrong
            dtype = types.values[part.value].leaves[part.leaf].dtype if not wrong else leaf.dtype
            if dtype != leaf.dtype:
                yield "CP0732", f"a leaf of {dtype} is packed into a buffer of {leaf.dtype}"
        ranges = sorted((part.offset, part.offset + part.size) for part in self.parts)
        if any(before[1] > after[0] for before, after in itertools.pairwise(ranges)):
            yield "CP0731", f"two parts overlap in `{self.result}`"
        yield from types.check_terms(part.value for part in self.parts)

    def transfer(self, types: ValueTypes) -> Results:
        """The placement of the buffer is that of all leaves; its size is declared.

        Scalars of a tree are the same on all ranks among which the tree is split. There may be padding after
        the last part, so the size does not follow from the parts.
        """
        placements = dict[Placement, None]()
        for part in self.parts:
            value = types.values[part.value]
            is_cut = value.leaves[part.leaf].shape != ()
            placements[value.placement if is_cut else value.placement.without(value.placement.split)] = None
        return (value_like(types.values[self.result], self.result, types.join(placements)),)

    def meaning(self, env: Interpretation) -> None:
        env.put(self.result, env.packed(self.parts, self.ways, env.values[self.result]))

    def detail(self, values: Mapping[Ref, Value]) -> str:
        rows = f", {self.ways} rows" if self.ways > 1 else ""
        return f"into {values[self.result].leaves[0].dtype}{rows}"
