"""The effect of collectives on blocks: rows are scattered, gathered, exchanged and summed.

Blocks and terms describe any rank by symbols, so most moves are substitutions: a gather, for example,
replaces the coordinate of the rank by a digit of the row index. Functions raise `InexpressibleError` for
blocks whose rows do not belong to the ranks in question.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from commplan.ir.axes import position
from commplan.ir.symbolic.blocks import (
    Block,
    BlockBuilder,
    Slot,
    collapsed,
    combined,
    free_in,
    inner,
    leading,
    renamed,
    with_terms,
)
from commplan.ir.symbolic.symbols import Chain, RowCut, Symbol, at, rank, row
from commplan.ir.symbolic.terms import Algebra, InexpressibleError, Term


def scattered(algebra: Algebra, block: Block, axes: Sequence[str]) -> Block:
    """Each rank along `axes` keeps its row of `block`, as after a reduction."""
    axes = [axis for axis in axes if algebra.sizes[axis] > 1]
    block = leading(block, [algebra.sizes[axis] for axis in axes])
    check_rows(_chains(block), axes)
    symbols = {row(index): rank(axis) for index, axis in enumerate(axes)}
    symbols |= {row(index): row(index - len(axes)) for index in range(len(axes), len(block.rows))}
    return renamed(algebra, block, symbols)._replace(rows=block.rows[len(axes) :])


def summed(algebra: Algebra, block: Block, axes: Sequence[str], term: Callable[[Term], Term]) -> Block:
    """Combine the elements that ranks along `axes` hold in the same place.

    `term` returns the combination over these ranks of a term, which describes the element on any of them.
    """
    check_rows(_chains(block), [axis for axis in axes if algebra.sizes[axis] > 1])
    return with_terms(block, term)


def check_rows(chains: Iterable[Chain], axes: Sequence[str]) -> None:
    """Raise `InexpressibleError` unless ranks along `axes` hold the same elements of a leaf in each place."""
    along_axes = {rank(axis) for axis in axes}
    for chain in chains:
        names = ", ".join(sorted(symbol[1] for symbol in along_axes & free_in(chain)))
        if names:
            raise InexpressibleError(f"ranks along {names} hold different elements, which are combined")


def _chains(block: Block) -> list[Chain]:
    """The chains of a block and of its frozen blocks."""
    return [chain for each in (block, *inner(block)) for chain, _ in each.slots]


def gathered(algebra: Algebra, block: Block, axes: Sequence[str], size: int | None) -> Block:
    """Gather the rows of all ranks along `axes` in order.

    Args:
        algebra: The algebra of the terms.
        block: The row of each rank.
        axes: The axes, the first one major.
        size: The number of elements of a leaf without padding; None if the result is a buffer.
    """
    axes = [axis for axis in axes if algebra.sizes[axis] > 1]
    symbols = {rank(axis): row(index) for index, axis in enumerate(axes)}
    symbols |= {row(index): row(index + len(axes)) for index in range(len(block.rows))}
    rows = (*((algebra.sizes[axis], axis) for axis in axes), *block.rows)
    block = renamed(algebra, block, symbols)._replace(rows=rows)
    return collapsed(block, block.size if size is None else size, leaf=size is not None)


def exchanged(algebra: Algebra, block: Block, axes: Sequence[str]) -> Block:
    """All-to-all: row i goes to rank i along `axes`, in the place of the row of the sender."""
    axes = [axis for axis in axes if algebra.sizes[axis] > 1]
    block = leading(block, [algebra.sizes[axis] for axis in axes])
    symbols: dict[Symbol, Symbol] = {}
    for index, axis in enumerate(axes):
        symbols |= {row(index): rank(axis), rank(axis): row(index)}
    counts = (count for count, _ in block.rows)
    rows = (*zip(counts, axes, strict=False), *block.rows[len(axes) :])
    return renamed(algebra, block, symbols)._replace(rows=rows)


def rows_summed(algebra: Algebra, block: Block, ways: int) -> Block:
    """The sum of `ways` rows: of those that the leading digits count, or of equal parts of one row."""
    if ways == 1:
        return block
    if not block.rows:
        return added(algebra, _explicit_rows(block, ways))
    count, leading_digits = 1, 0
    while leading_digits < len(block.rows) and count < ways:
        count *= block.rows[leading_digits][0]
        leading_digits += 1
    if count != ways:
        raise InexpressibleError(f"{ways} of {math.prod(count for count, _ in block.rows)} rows are added")
    digits = dict(enumerate(block.rows[:leading_digits]))
    # If the position of elements depended on a digit, different elements would be added.
    if any(row(digit) in free_in(chain) for chain in _chains(block) for digit in digits):
        raise InexpressibleError("rows of one rank, which hold different elements, are added")
    add = functools.cache(functools.partial(algebra.summed_rows, digits=digits))
    symbols = {row(index): row(index - leading_digits) for index in range(leading_digits, len(block.rows))}
    return renamed(algebra, with_terms(block, add), symbols)._replace(rows=block.rows[leading_digits:])


def _explicit_rows(block: Block, ways: int) -> list[Block]:
    """The `ways` equal parts of a one-row block."""
    width = block.columns // ways
    rows: list[Block] = []
    for index in range(ways):
        builder = BlockBuilder()
        builder.take(block, index * width, width, 0)
        rows.append(builder.block((), width))
    return rows


def added(algebra: Algebra, blocks: Sequence[Block]) -> Block:
    """Add blocks elementwise.

    If each block is zero except on one rank, and these ranks hold different rows of the same cut, the sum
    holds each of these ranks' rows.
    """
    owned = _owned_rows(algebra, blocks)
    if owned is not None:
        return owned
    return combined(algebra, blocks, algebra.add)


def _owned_rows(algebra: Algebra, blocks: Sequence[Block]) -> Block | None:
    """The rows of all owners as one block, if each row is on its owner alone; else None."""
    if len(blocks) < 2 or not all(block.runs and len(block.runs) == len(blocks[0].runs) for block in blocks):
        return None
    builder = BlockBuilder()
    for runs in zip(*(block.runs for block in blocks), strict=True):
        slots: list[Slot] = [block.slots[run.slot] for block, run in zip(blocks, runs, strict=True)]
        # Block i must hold row i of the same cut of the same elements, with the same term on its owner.
        single_rank = [pair for pair in (_single_rank_term(term) for _, term in slots) if pair is not None]
        heads = {chain[:-1] for chain, _ in slots}
        numbered = [
            bool(chain) and chain[-1].digits == ((len(blocks), at(number)),)
            for number, (chain, _) in enumerate(slots)
        ]
        terms = {term for _, term in single_rank}
        are_alike = len({run[:4] for run in runs}) == len(heads) == len(terms) == 1
        if not are_alike or not all(numbered) or len(single_rank) < len(slots):
            return None
        # The owners must be ranks along the same axes. The row of the result is the index of the owner.
        conditions = [condition for condition, _ in single_rank]
        if len({tuple(symbol for symbol, _ in each) for each in conditions}) > 1:
            return None
        symbol = _owners(algebra, conditions)
        chain = (*heads.pop(), RowCut(len(blocks), ((len(blocks), symbol),)))
        first = runs[0]
        builder.put(first.at, first.size, first.leaf, first.column, chain, single_rank[0][1])
    return builder.block((), blocks[0].columns)


def _single_rank_term(term: Term | None) -> tuple[Any, Term] | None:
    """The conditions and the inner term of a term that is zero except on certain ranks (`only`), or None."""
    if term is None or len(term.parts) != 1:
        return None
    atom, sums, trace, coefficient = term.parts[0]
    if atom.kind != "only" or sums or trace or coefficient != 1:
        return None
    return atom.content


def _owners(algebra: Algebra, conditions: Sequence[Sequence[tuple[Symbol, int]]]) -> Symbol:
    """The index of this rank among the ranks that satisfy one of `conditions` each."""
    axes = [symbol[1] for symbol, _ in conditions[0]]
    places = ({symbol[1]: place for symbol, place in condition} for condition in conditions)
    return algebra.owner(axes, [position(place, axes, algebra.sizes) for place in places])
