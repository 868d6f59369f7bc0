"""The ops `pick` and `merge`: cut the current fragment out of a tree, and put it back."""

from collections.abc import Mapping

from commplan.ir.fragments import FragmentLayout, is_divisible
from commplan.ir.ops.base import BaseOp, Ranks, Work
from commplan.ir.refs import Ref
from commplan.ir.roles import Cost, Execution
from commplan.ir.stages.fragment import MergeFields, PickFields
from commplan.ir.transfer import Results, ValueTypes, Violations, value_like
from commplan.ir.values import Leaf, Value


class Pick(PickFields, BaseOp, frozen=True, tag="pick", gc=False):
    """Cut the current fragment out of a tree: a tree with a flat piece of every leaf; see `ir.fragments`.

    The number of the fragment is that of the calls of the phase so far, modulo `fragments`. If `fragments` is
    1, the result is the operand, which may be read at the end of the call (`late`).
    """

    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "device"

    def check(self, types: ValueTypes) -> Violations:
        yield from _check(self, self.operand, types)

    def transfer(self, types: ValueTypes) -> Results:
        operand = types.values[self.operand]
        leaves = _pieces(self, operand, operand.leaves, types)
        uncut = FragmentLayout(self.fragments, types.ranks(self.rows))
        whole = tuple(map(uncut.piece, operand.whole))
        return (Value(self.result, operand.kind, leaves, operand.placement, whole),)

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return self.text(self.operand)


class Merge(MergeFields, BaseOp, frozen=True, tag="merge", gc=False):
    """Replace the current fragment of the tree `whole` by `piece`."""

    after: Execution[tuple[Ref, ...]] = ()
    lane: Cost[str] = "device"

    def check(self, types: ValueTypes) -> Violations:
        wrong = [*_check(self, self.whole, types)]
        yield from wrong
        if wrong:
            return
        whole, piece = types.values[self.whole], types.values[self.piece].placement
        varies = not set(piece.per) <= set(whole.placement.per)
        if varies or piece.split != whole.placement.split or piece.partial or piece.stacked:
            yield "CP0734", f"`{self.piece}` is {piece} and is merged into a value that is {whole.placement}"
        yield from types.check_leaves(self.piece, _pieces(self, whole, whole.leaves, types))

    def transfer(self, types: ValueTypes) -> Results:
        return (value_like(types.values[self.whole], self.result),)

    def work(self, nbytes: Mapping[Ref, int], ranks: Ranks) -> Work:
        """The elements of the piece are written in place."""
        return Work("copy", self.title, nbytes.get(self.piece, 0))

    def detail(self, values: Mapping[Ref, Value]) -> str:
        return self.text(self.whole)


def layout_of(op: Pick | Merge, value: Value, ranks: Ranks) -> FragmentLayout:
    """The layout of the leaves of `value` on one rank.

    Args:
        op: The op that cuts or merges `value`.
        value: A whole value. If it is split over `op.rows`, a rank holds a single row of each leaf.
        ranks: The number of ranks along axes.
    """
    is_row = bool(op.rows) and value.placement.split == op.rows
    return FragmentLayout(op.fragments, 1 if is_row else ranks(op.rows))


def _pieces(op: Pick | Merge, value: Value, leaves: tuple[Leaf, ...], types: ValueTypes) -> tuple[Leaf, ...]:
    """The pieces of `leaves`, those of `value` on one rank."""
    return tuple(map(layout_of(op, value, types.ranks).piece, leaves))


def _check(op: Pick | Merge, ref: Ref, types: ValueTypes) -> Violations:
    """Check that the whole value `ref` can be cut as `op` does."""
    value = types.values[ref]
    yield from types.check_axes(op.rows)
    if op.fragments < 1:
        yield "CP0735", f"`{ref}` has {op.fragments} fragments"
    if op.fragments == 1:
        return
    if value.kind != "tree" or not all(is_divisible(leaf, op.rows) for leaf in value.leaves):
        yield "CP0731", f"`{ref}` is not a tree whose leaves can be cut into fragments"
    if value.placement.split not in ((), op.rows):
        yield "CP0734", f"`{ref}` is {value.placement}, and its fragments have rows over {list(op.rows)}"
    if value.placement.partial or value.placement.stacked or value.placement.server is not None:
        yield "CP0734", f"`{ref}` is {value.placement} and has no fragments"
