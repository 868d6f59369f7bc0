"""The content of a value on one symbolic rank: a block for every leaf, or one term for all.

`interpretation` computes these contents; `verify.equivalence` compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from commplan.ir.symbolic import blocks
from commplan.ir.symbolic.blocks import Block, BlockBuilder, ColumnRun, LeafShape, Rows
from commplan.ir.symbolic.symbols import Chain, Symbol, Symbols, substituted
from commplan.ir.symbolic.terms import Algebra, Argument, InexpressibleError, Term
from commplan.ir.types import DType
from commplan.ir.values import Value


class SymbolicValue:
    """The content of a value on any rank.

    Args:
        value: The value, with its leaves and placement.
        uniform: The chain and the term of all leaves, if they are the same (scalars are not cut); else None.
        leaves: The block of each leaf; ignored if the value is uniform.

    Attributes:
        value: As passed in.
        uniform: As passed in, without cuts if no leaf can be cut.
    """

    __slots__ = ("_blocks", "uniform", "value")

    def __init__(
        self, value: Value, uniform: tuple[Chain, Term] | None = None, leaves: Sequence[Block] = ()
    ) -> None:
        self.value = value
        has_cuts = value.kind == "records" or any(leaf.shape and leaf.size for leaf in value.leaves)
        if uniform is not None and not has_cuts:
            uniform = ((), uniform[1])
        self.uniform = uniform
        self._blocks: tuple[Block, ...] | None = tuple(leaves) if uniform is None else None

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The block of each leaf. Those of a uniform value are made when they are first used."""
        if self._blocks is None:
            assert self.uniform is not None
            chain, term = self.uniform
            shapes = (leaf_shape(self.value, index, chain) for index in range(len(self.value.leaves)))
            self._blocks = tuple(
                blocks.whole(shape, leaf.size, chain if leaf.shape else (), term)
                for shape, leaf in zip(shapes, self.value.leaves, strict=True)
            )
        return self._blocks

    @property
    def free(self) -> frozenset[Symbol]:
        """The symbols of ranks, rows and shares in its terms."""
        if self.uniform is not None:
            return self.uniform[1].free
        free: set[Symbol] = set()
        for each in (each for block in self.blocks for each in (block, *blocks.inner(block))):
            for _, term in each.slots:
                free |= term.free if term is not None else set[Symbol]()
        return frozenset(free)

    @property
    def is_exact(self) -> bool:
        """Whether no term is rounded."""
        if self.uniform is not None:
            return self.uniform[1].exact
        every = (each for block in self.blocks for each in (block, *blocks.inner(block)))
        return all(term is None or term.exact for block in every for _, term in block.slots)

    def leaf(self, index: int) -> tuple[Chain, Term]:
        """The chain of leaf `index`, which must have elements, and the term of all its elements.

        Raises:
            InexpressibleError: If its elements do not have one term.
        """
        single = self.uniform or _single_term(self.value, index, self.blocks[index])
        if single is None:
            path = self.value.leaves[index].path
            raise InexpressibleError(f"leaf `{path}` of `{self.value.id}` consists of several values")
        return single

    def like(self, value: Value, function: Callable[[Term, DType], Term]) -> SymbolicValue:
        """`value`, whose elements are `function` of the terms and types of the elements of this one.

        Both have corresponding leaves; the types are those of this one.
        """
        dtypes = {leaf.dtype for leaf in self.value.leaves} or {DType.F32}
        if self.uniform is not None:
            chain, term = self.uniform
            terms = {function(term, dtype) for dtype in dtypes}
            if len(terms) == 1:
                return SymbolicValue(value, (chain, terms.pop()))
        leaves = [
            blocks.with_terms(block, lambda term, dtype=leaf.dtype: function(term, dtype))
            for block, leaf in zip(self.blocks, self.value.leaves, strict=True)
        ]
        return uniform_if_whole(value, leaves)

    def each(self, value: Value, function: Callable[[Block], Block]) -> SymbolicValue:
        """`value`, whose leaves are `function` of the blocks of this one."""
        return uniform_if_whole(value, [function(block) for block in self.blocks])

    def renamed(self, algebra: Algebra, value: Value, symbols: Symbols) -> SymbolicValue:
        """`value`, with the content of this one after a substitution of symbols."""
        if self.uniform is None:
            return self.each(value, lambda block: blocks.renamed(algebra, block, symbols))
        chain, term = self.uniform
        positions = substituted(chain, symbols)
        if positions is None:
            return SymbolicValue(value, ((), algebra.undefined("the part of a rank that owns none")))
        return SymbolicValue(value, (positions, algebra.substitute(term, symbols)))


def uniform_if_whole(value: Value, leaves: Sequence[Block]) -> SymbolicValue:
    """`value` with the blocks `leaves`, in uniform form if all consist of one term with the same cuts."""
    return SymbolicValue(value, _uniform(value, leaves), leaves)


def _uniform(value: Value, leaves: Sequence[Block]) -> tuple[Chain, Term] | None:
    """The chain and term of all leaves; None if they differ, or if no leaf has elements."""
    chains: set[Chain] = set()
    terms: set[Term] = set()
    for index, (block, leaf) in enumerate(zip(leaves, value.leaves, strict=True)):
        if not leaf.size:
            continue
        single = _single_term(value, index, block)
        if single is None:
            return None
        chain, term = single
        terms.add(term)
        if leaf.shape:
            chains.add(chain)
        if len(terms) > 1 or len(chains) > 1:
            return None
    return (chains.pop() if chains else (), terms.pop()) if terms else None


def _single_term(value: Value, index: int, block: Block) -> tuple[Chain, Term] | None:
    """The chain of leaf `index` and the term of its elements, if the block is that leaf as a whole.

    None if it has elements of another leaf, in another order, or with several terms.
    """
    leaf = value.leaves[index]
    if len(block.runs) != 1 or block.rows:
        return None
    run = block.runs[0]
    chain, term = block.slots[run.slot]
    if term is None or (chain and not leaf.shape):
        return None
    is_whole = run[:4] == (0, leaf.size, leaf_shape(value, index, chain), 0)
    return (chain, term) if is_whole else None


def leaf_shape(value: Value, index: int, chain: Chain) -> LeafShape:
    """The shape of leaf `index` of `value` before the cuts of `chain`.

    Values without `whole`, such as batches, are cut into equal parts.
    """
    if not chain or not value.leaves[index].shape:  # scalars are not cut
        return LeafShape(index, value.leaves[index].size, 1)
    shape = rows_of(value, index, whole=bool(value.whole))
    ways = 1 if value.whole else math.prod(cut.ways for cut in chain)
    return shape._replace(lead=shape.lead * ways)


def rows_of(value: Value, index: int, *, whole: bool = False) -> LeafShape:
    """The rows between which leaf `index` of `value` is cut: single elements for trees and flat buffers.

    With `whole`, this is the leaf before any cut (`Value.whole`) rather than the shard on a rank.
    """
    leaf = (value.whole if whole else value.leaves)[index]
    if value.kind in ("tree", "flat") or not leaf.shape:
        return LeafShape(index, leaf.size, 1)
    return LeafShape(index, leaf.shape[0], math.prod(leaf.shape[1:]))


class ElementRun(NamedTuple):
    """A run of elements of a block, with the slot that it refers to.

    Attributes:
        at: The first column of the block.
        size: The number of elements in each row of the block.
        leaf: The leaf that the elements belong to, a `LeafShape` or `Frozen`.
        chain: The cuts that select the part of the leaf.
        column: The first element in that part.
        term: The term of the elements.
        rows: The rows of the block; empty for one row.
    """

    at: int
    size: int
    leaf: object
    chain: Chain
    column: int
    term: Term
    rows: Rows = ()

    def same_source(self, other: ElementRun) -> bool:
        """Whether both runs begin at the same element of the same leaf."""
        return (self.leaf, self.chain, self.column) == (other.leaf, other.chain, other.column)

    def argument(self, operand: int, leaf: tuple[int, tuple[int, ...]]) -> Argument:
        """The run as an argument of a call: of operand `operand`, at the index and shape `leaf`."""
        leaf_key = (*leaf, self.rows)
        return Argument(
            self.term, operand, (leaf_key, self.at, self.leaf), self.chain, self.column, self.size
        )


def element_run(block: Block, run: ColumnRun, begin: int) -> ElementRun:
    """The elements of `run`, a run of `block`, from column `begin` on.

    Raises:
        InexpressibleError: If the run is a part of a frozen block.
    """
    chain, term = block.slots[run.slot]
    if term is None:
        raise InexpressibleError("a part of a buffer is used as a value")
    skipped = begin - run.at
    return ElementRun(begin, run.size - skipped, run.leaf, chain, run.column + skipped, term, block.rows)


def whole_runs(block: Block) -> list[ElementRun]:
    """The runs of a block in order; for a block with rows of several leaves, the runs of one row."""
    return [element_run(block, run, run.at) for run in block.runs]


def uncut_constant_rows(block: Block) -> Block:
    """`block`, the content of a leaf, with elements of constant rows as elements of the uncut leaf."""
    if not any(_number(chain) is not None for chain, _ in block.slots):
        return block
    builder = BlockBuilder()
    for run in block.runs:
        chain, term = block.slots[run.slot]
        number = _number(chain)
        if number is None or not isinstance(run.leaf, LeafShape):
            builder.put(run.at, run.size, run.leaf, run.column, chain, term)
            continue
        column = number * run.leaf.width(chain) + run.column
        builder.put(run.at, run.size, run.leaf.uncut(), column, (), term)
    return builder.block(block.rows, block.columns)


def _number(chain: Chain) -> int | None:
    """The index of the row that a single cut selects; None if it is not constant, or there are more cuts."""
    if len(chain) != 1 or any(symbol[0] != "at" for _, symbol in chain[0].digits):
        return None
    number = 0
    for count, symbol in chain[0].digits:
        number = number * count + symbol[1]
    return number


def arguments_of(number: int, operand: SymbolicValue) -> list[Argument]:
    """All elements of `operand`, the operand of a call with index `number`, as arguments of the call."""
    if operand.uniform is not None and operand.value.kind == "records":  # records of bytes have no leaves
        return [Argument(operand.uniform[1], number, None, operand.uniform[0])]
    return [
        run.argument(number, (index, leaf.shape))
        for index, (block, leaf) in enumerate(zip(operand.blocks, operand.value.leaves, strict=True))
        for run in whole_runs(block)
    ]


def scalar_of(operand: SymbolicValue, index: int) -> Term:
    """The term of leaf `index`, which is a scalar.

    Raises:
        InexpressibleError: If it does not hold that scalar as a whole.
    """
    if operand.uniform is not None:
        return operand.uniform[1]
    block = operand.blocks[index]
    chain, term = block.slots[block.runs[0].slot] if block.runs else ((), None)
    if block.rows or chain or term is None or block.runs[0].leaf != LeafShape(index, 1, 1):
        path = operand.value.leaves[index].path
        raise InexpressibleError(f"leaf `{path}` of `{operand.value.id}` is no whole scalar")
    return term


def has_arrays(operand: SymbolicValue) -> bool:
    """Whether any leaf has a dimension."""
    return any(leaf.shape for leaf in operand.value.leaves)
