"""What one rank holds of a value, said for any rank: a block for every leaf, or one term for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from commplan.ir.layout import row_size
from commplan.ir.symbolic import blocks
from commplan.ir.symbolic.blocks import Block, Builder, Frozen, UnsayableError
from commplan.ir.symbolic.terms import Algebra, Argument, Chain, Symbols, Term, substituted
from commplan.ir.types import DType
from commplan.ir.values import Leaf, Value


class SymbolicValue:
    """What one rank, any one, holds of `value`.

    Either the same for every leaf, `chain` and `term` (a scalar is never cut), or a block for each leaf.
    """

    __slots__ = ("_blocks", "uniform", "value")

    def __init__(
        self, value: Value, uniform: tuple[Chain, Term] | None = None, found: Sequence[Block] = ()
    ) -> None:
        self.value = value
        cut = value.kind == "records" or any(leaf.shape and leaf.size for leaf in value.leaves)
        if uniform is not None and not cut:
            uniform = ((), uniform[1])
        self.uniform = uniform
        self._blocks: tuple[Block, ...] | None = tuple(found) if uniform is None else None

    @property
    def blocks(self) -> tuple[Block, ...]:
        if self._blocks is None:
            assert self.uniform is not None
            chain, term = self.uniform
            self._blocks = tuple(
                blocks.whole(index, leaf.size, chain if leaf.shape else (), term)
                for index, leaf in enumerate(self.value.leaves)
            )
        return self._blocks

    def like(self, value: Value, function: Callable[[Term, DType], Term]) -> SymbolicValue:
        """`value`, of whose elements each is `function` of this one's term and type."""
        dtypes = {leaf.dtype for leaf in self.value.leaves} or {DType.F32}
        if self.uniform is not None:
            chain, term = self.uniform
            made = {function(term, dtype) for dtype in dtypes}
            if len(made) == 1:
                return SymbolicValue(value, (chain, made.pop()))
        found = [
            blocks.with_terms(block, lambda term, dtype=leaf.dtype: function(term, dtype))
            for block, leaf in zip(self.blocks, self.value.leaves, strict=True)
        ]
        return uniform_if_whole(value, found)

    def each(self, value: Value, function: Callable[[Block], Block]) -> SymbolicValue:
        """`value`, of whose leaves each is `function` of this one's block."""
        return uniform_if_whole(value, [function(block) for block in self.blocks])

    def renamed(self, algebra: Algebra, value: Value, symbols: Symbols) -> SymbolicValue:
        """`value` with symbols replaced."""
        if self.uniform is None:
            return self.each(value, lambda block: blocks.renamed(algebra, block, symbols))
        chain, term = self.uniform
        positions = substituted(chain, symbols)
        if positions is None:
            return SymbolicValue(value, ((), algebra.undefined("the part of a rank that owns none")))
        return SymbolicValue(value, (positions, algebra.substitute(term, symbols)))


def uniform_if_whole(value: Value, found: Sequence[Block]) -> SymbolicValue:
    """`value` with these blocks, said once where they are all alike."""
    chains: set[Chain] = set()
    terms: set[Term] = set()
    for index, (block, leaf) in enumerate(zip(found, value.leaves, strict=True)):
        if not leaf.size:
            continue
        run = block.runs[0] if len(block.runs) == 1 else None
        if run is None or block.rows or isinstance(run.leaf, Frozen) or run[:4] != (0, leaf.size, index, 0):
            return SymbolicValue(value, None, found)
        chain, term = block.slots[run.slot]
        if term is None or (chain and not leaf.shape):
            return SymbolicValue(value, None, found)
        terms.add(term)
        if leaf.shape:
            chains.add(chain)
        if len(terms) > 1 or len(chains) > 1:
            return SymbolicValue(value, None, found)
    return (
        SymbolicValue(value, (chains.pop() if chains else (), terms.pop()))
        if terms
        else SymbolicValue(value, None, found)
    )


class Place(NamedTuple):
    """Elements of a block: `size` of `leaf` from `column` on, in row `chain`; and where they stand, in every
    one of `rows`."""

    at: int
    size: int
    leaf: object
    chain: Chain
    column: int
    term: Term
    rows: tuple[tuple[int, str | None], ...] = ()

    def from_element(self, begin: int) -> Place:
        """The elements from the one that stands at `begin` on."""
        gone = begin - self.at
        return self._replace(at=begin, size=self.size - gone, column=self.column + gone)

    def argument(self, operand: int, leaf: tuple[int, tuple[int, ...]]) -> Argument:
        of = (*leaf, self.rows)
        return Argument(self.term, operand, (of, self.at, self.leaf), self.chain, self.column, self.size)


def whole_runs(block: Block) -> list[Place]:
    """The runs of a block, in order; of one with several rows, which are not those of one leaf, those of a
    row."""
    found: list[Place] = []
    for run in block.runs:
        chain, term = block.slots[run.slot]
        if term is None:
            raise UnsayableError("a part of a buffer is used as a value")
        found.append(Place(run.at, run.size, run.leaf, chain, run.column, term, block.rows))
    return found


def placed(value: Value, block: Block, leaf: Leaf) -> Block:
    """`block`, a leaf, with rows whose number is known counted as elements of the whole leaf."""
    if not any(_number(chain) is not None for chain, _ in block.slots):
        return block
    builder = Builder()
    for run in block.runs:
        chain, term = block.slots[run.slot]
        number = _number(chain)
        if number is None:
            builder.put(run.at, run.size, run.leaf, run.column, (chain, term))
            continue
        column = number * row_size(value.kind, leaf, chain[0].ways) + run.column
        builder.put(run.at, run.size, run.leaf, column, ((), term))
    return builder.block(block.rows, block.columns)


def _number(chain: Chain) -> int | None:
    """The number of the row that a single cut leads to, where it is known."""
    if len(chain) != 1 or any(symbol[0] != "at" for _, symbol in chain[0].digits):
        return None
    number = 0
    for count, symbol in chain[0].digits:
        number = number * count + symbol[1]
    return number


def arguments_of(number: int, held: SymbolicValue) -> list[Argument]:
    """All elements of operand `number` of a call."""
    if held.uniform is not None and held.value.kind == "records":  # records of bytes have no leaves
        return [Argument(held.uniform[1], number, None, held.uniform[0])]
    return [
        place.argument(number, (index, leaf.shape))
        for index, (block, leaf) in enumerate(zip(held.blocks, held.value.leaves, strict=True))
        for place in whole_runs(block)
    ]


def scalar_of(held: SymbolicValue, index: int) -> Term:
    """The term of a leaf that is a scalar."""
    if held.uniform is not None:
        return held.uniform[1]
    block = held.blocks[index]
    chain, term = block.slots[block.runs[0].slot] if block.runs else ((), None)
    if block.rows or chain or term is None or block.runs[0].leaf != index:
        raise UnsayableError(
            f"leaf `{held.value.leaves[index].path}` of `{held.value.id}` is no whole scalar"
        )
    return term


def has_arrays(held: SymbolicValue) -> bool:
    return any(leaf.shape for leaf in held.value.leaves)
