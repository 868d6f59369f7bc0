"""The op `local_sum`: adds the rows of a buffer, without communication."""

from collections.abc import Mapping

import msgspec

from commplan.diagnostics import Span
from commplan.ir.ops.base import BaseOp
from commplan.ir.refs import Ref
from commplan.ir.roles import Cost, Execution, Meaning, Presentation
from commplan.ir.symbolic.deferred import Block, Interpretation, moves
from commplan.ir.transfer import Results, ValueTypes, Violations, flat
from commplan.ir.values import Value


class LocalSum(BaseOp, frozen=True, tag="local_sum", gc=False):
    """Sum the `ways` rows of a flat buffer, [ways*k] -> [k], in the operand's dtype.

    After an all_to_all of a buffer with a row for each rank, it completes a reduce_scatter.

    Attributes:
        ways: The number of rows, at least 1.
    """

    result: Meaning[Ref]
    operand: Meaning[Ref]
    ways: Meaning[int]
    span: Presentation[Span]
    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "device"

    def check(self, types: ValueTypes) -> Violations:
        return types.check_rows(self.operand, self.ways)

    def transfer(self, types: ValueTypes) -> Results:
        """If the rows are those of all ranks along the stacked axes, the sum is split over these axes.

        Otherwise it is `per` them.
        """
        operand = types.values[self.operand]
        leaf, placement = operand.leaves[0], operand.placement
        stacked, unstacked = placement.stacked, placement.without(placement.stacked)
        if stacked and types.ranks(stacked) == self.ways:
            placement = msgspec.structs.replace(unstacked, split=(*unstacked.split, *stacked))
        else:
            placement = types.per(placement, stacked)
        return (flat(self.result, leaf.size // self.ways, leaf.dtype, placement),)

    def meaning(self, env: Interpretation) -> None:
        def summed(block: Block) -> Block:
            return moves.rows_summed(env.algebra, block, self.ways)

        env.put(self.result, env.get(self.operand).each(env.values[self.result], summed))

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return f"{self.ways} rows in {values[self.operand].leaves[0].dtype}"
