"""Blocks: the elements of a leaf or a flat buffer, in order, with the term of each.

A block has `rows` by `columns` elements, row-major. A row index consists of digits; no digits mean one row.
The columns are covered by runs: `size` columns from `at` on hold the elements of `leaf` from `column` on,
within the part selected by the run's slot. A slot is a pair (chain, term). The chain is the sequence of cuts
that leads to the row of the leaf; a digit of a row index is a rank's coordinate, a number, or a digit of the
block's own row index. The term is that of the elements. Columns without a run are zero. `leaf` is a leaf of a
value before any cut (`LeafShape`), or a block (`Frozen`) if a buffer was cut regardless of its content.

For example, on one of 4 ranks along `data`, a buffer of 6 elements holds this rank's row of leaf 0, which has
4 elements, then 2 zeros:

    rows = (), columns = 6, runs = (at 0, size 4, leaf 0, column 0, slot 0),
    slots = ((cut into 4, row ("rank", "data")), the term of leaf 0)

No structure here grows with the number of ranks. Operations whose result the notation cannot express raise
`InexpressibleError`; schedules compiled from plans do not contain such operations.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from commplan.ir.symbolic.symbols import Chain, RowCut, Symbol, Symbols, at, free_of, row, substituted
from commplan.ir.symbolic.terms import Algebra, InexpressibleError, Term


class LeafShape(NamedTuple):
    """The shape of a leaf before any cut: rows, between which it is cut.

    Attributes:
        number: The index of the leaf in its value.
        lead: The number of rows.
        tail: The number of elements in a row. In a leaf that is not cut, it is 1: only the order of the
            elements matters.
    """

    number: int
    lead: int
    tail: int

    def width(self, chain: Chain) -> int:
        """The number of elements in the part that the cuts of `chain` select, including padding."""
        lead = self.lead
        for each in chain:
            lead = -(-lead // each.ways)
        return lead * self.tail

    def uncut(self) -> LeafShape:
        """The shape of the leaf if it is not cut."""
        return LeafShape(self.number, self.lead * self.tail, 1)


class ColumnRun(NamedTuple):
    """Adjacent columns of a block that hold adjacent elements of a leaf, the same columns in each row.

    Attributes:
        at: The first column of the block.
        size: The number of columns, at least 1.
        leaf: The leaf, a `LeafShape` or `Frozen`.
        column: The first element, within the part of the leaf that the slot selects.
        slot: The index of the slot in the block.
    """

    at: int
    size: int
    leaf: Any
    column: int
    slot: int


# The cuts that select a part of a leaf, and the term of its elements. A frozen leaf has no term here, since
# the slots of its block have terms.
Slot = tuple[Chain, Term | None]
# The digits of a row index, the most significant first: the count of each, and the axis along which the rows
# were gathered, or None for rows of one rank.
Rows = tuple[tuple[int, str | None], ...]


class Block(NamedTuple):
    """The elements of a leaf or a flat buffer; see the module.

    Attributes:
        rows: The digits of the row index; empty for one row.
        columns: The number of elements in a row.
        runs: The runs, in the order of columns, without overlap.
        slots: The slots that runs refer to.
    """

    rows: Rows
    columns: int
    runs: tuple[ColumnRun, ...]
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        """The number of elements in all rows."""
        return _count(self.rows) * self.columns


class Frozen(NamedTuple):
    """A one-row block in place of a leaf, after a cut regardless of its content.

    Attributes:
        block: The block. Row digits in its slots are those of the enclosing block.
    """

    block: Block


# The block of a leaf without elements.
EMPTY = Block((), 0, (), ())


def whole(leaf: LeafShape, size: int, chain: Chain, term: Term) -> Block:
    """The block of the first `size` elements in the part of `leaf` that `chain` selects, in order."""
    return Block((), size, (ColumnRun(0, size, leaf, 0, 0),), ((chain, term),)) if size else EMPTY


def cut(chain: Chain, ways: int, digits: Iterable[tuple[int, Symbol]]) -> Chain:
    """`chain` with one more cut into `ways` rows, unless `ways` is 1; `digits` select the row."""
    used = tuple((count, symbol) for count, symbol in digits if count > 1)
    return chain if ways == 1 else (*chain, RowCut(ways, used))


def with_terms(block: Block, function: Callable[[Term], Term]) -> Block:
    """`block` with `function` applied to every term, also in frozen blocks."""
    slots = tuple((chain, None if term is None else function(term)) for chain, term in block.slots)
    if slots == block.slots and not any(isinstance(run.leaf, Frozen) for run in block.runs):
        return block
    return block._replace(runs=_inside(block.runs, lambda inner: with_terms(inner, function)), slots=slots)


def renamed(algebra: Algebra, block: Block, symbols: Symbols) -> Block:
    """`block` with symbols replaced in chains and terms.

    The elements in a part of a rank that owns none become undefined.
    """
    slots: list[Slot] = []
    for chain, term in block.slots:
        positions = substituted(chain, symbols)
        if positions is None:
            slots.append(((), algebra.undefined("the part of a rank that owns none")))
        else:
            slots.append((positions, None if term is None else algebra.substitute(term, symbols)))
    runs = _inside(block.runs, lambda inner: renamed(algebra, inner, symbols))
    return Block(block.rows, block.columns, runs, tuple(slots))


def _inside(runs: tuple[ColumnRun, ...], function: Callable[[Block], Block]) -> tuple[ColumnRun, ...]:
    """`runs` with `function` applied to their frozen blocks."""
    frozen: dict[int, Frozen] = {}
    for run in runs:
        if isinstance(run.leaf, Frozen) and id(run.leaf) not in frozen:
            frozen[id(run.leaf)] = Frozen(function(run.leaf.block))
    return tuple(run._replace(leaf=frozen.get(id(run.leaf), run.leaf)) for run in runs) if frozen else runs


class BlockBuilder:
    """Collects runs and slots of a block.

    Attributes:
        runs: The runs so far, in any order.
        slots: The index of each slot.
    """

    def __init__(self) -> None:
        self.runs: list[ColumnRun] = []
        self.slots: dict[Slot, int] = {}

    def block(self, rows: Rows, columns: int) -> Block:
        """The runs so far as a block, with adjacent runs merged.

        Raises:
            InexpressibleError: If two runs overlap.
        """
        self.runs.sort(key=lambda run: run.at)
        runs: list[ColumnRun] = []
        for run in self.runs:
            last = runs[-1] if runs else None
            if last is not None and last.at + last.size > run.at:
                raise InexpressibleError("two runs of elements overlap")
            if (
                last is not None
                and last.slot == run.slot
                and last.at + last.size == run.at
                and last.column + last.size == run.column
                and (last.leaf is run.leaf or last.leaf == run.leaf)
            ):
                runs[-1] = last._replace(size=last.size + run.size)
            elif run.size:
                runs.append(run)
        return Block(rows, columns, tuple(runs), tuple(self.slots))

    def put(self, offset: int, size: int, leaf: Any, column: int, chain: Chain, term: Term | None) -> None:
        """Add a run from column `offset` on; the other arguments are those of `ColumnRun` and `Slot`."""
        slot = self.slots.setdefault((chain, term), len(self.slots))
        self.runs.append(ColumnRun(offset, size, leaf, column, slot))

    def take(self, source: Block, start: int, size: int, offset: int) -> None:
        """Add columns `start` to `start + size - 1` of `source`, from column `offset` on."""
        slot_of: dict[int, int] = {}
        for run in _within(source.runs, start, start + size):
            low = max(run.at, start)
            high = min(run.at + run.size, start + size)
            if low >= high:
                continue
            if run.slot not in slot_of:
                slot_of[run.slot] = self.slots.setdefault(source.slots[run.slot], len(self.slots))
            column = run.column + low - run.at
            self.runs.append(ColumnRun(low - start + offset, high - low, run.leaf, column, slot_of[run.slot]))


def _within(runs: Sequence[ColumnRun], start: int, stop: int) -> Sequence[ColumnRun]:
    """Those of `runs`, which are sorted, that overlap with columns `start` to `stop - 1`."""
    first = bisect.bisect_right(runs, start, key=lambda run: run.at + run.size)
    return runs[first : bisect.bisect_left(runs, stop, key=lambda run: run.at)]


# Rows


def in_rows(block: Block, ways: int, width: int, leaf: LeafShape | None = None) -> Block:
    """View a block as `ways` rows of `width` elements, with padding at the end.

    Args:
        block: The block, which has one row, or `ways` rows of `width` elements already.
        ways: The number of rows.
        width: The number of elements in a row.
        leaf: The shape of the leaf that the block holds; None if it is a buffer. A block that does not
            consist of one whole leaf is frozen.
    """
    if ways == 1:
        return block
    if block.rows:
        if _count(block.rows) == ways and block.columns == width:
            return block
        raise InexpressibleError(f"{_count(block.rows)} rows are viewed as {ways}")
    builder = BlockBuilder()
    run = _only_run(block, leaf=leaf is not None)
    digits = ((ways, row(0)),)
    if run is not None:
        chain, term = block.slots[run.slot]
        parts, source = cut(chain, ways, digits), run.leaf
        if isinstance(source, LeafShape) and leaf is not None:
            source = source if chain else leaf._replace(number=source.number)
            if source.width(parts) != width:
                raise InexpressibleError(f"rows of {width} elements are no rows of leaf {source.number}")
        builder.put(0, width, source, 0, parts, term)
    elif block.runs:
        builder.put(0, width, Frozen(block), 0, cut((), ways, digits), None)
    return builder.block(((ways, None),), width)


def _only_run(block: Block, *, leaf: bool) -> ColumnRun | None:
    """The single run of a block, if it covers a whole row of a leaf or of a frozen block; else None.

    `leaf` is whether the block may hold a leaf.
    """
    run = block.runs[0] if len(block.runs) == 1 else None
    if run is None or (run.at, run.column, run.size) != (0, 0, block.columns):
        return None
    if isinstance(run.leaf, Frozen):
        ways = math.prod(cut.ways for cut in block.slots[run.slot][0])
        return run if run.size * ways == run.leaf.block.columns else None
    return run if leaf and run.size == run.leaf.width(block.slots[run.slot][0]) else None


def leading(block: Block, counts: Sequence[int]) -> Block:
    """`block` with row digits that begin with `counts`, without those of 1.

    If the first digit is a multiple of their product, it is split. A block of one row is cut into rows.
    """
    required = [count for count in counts if count > 1]
    ways = math.prod(required)
    if ways == 1:
        return block
    if not block.rows:
        if block.columns % ways:
            raise InexpressibleError(f"{block.columns} elements are cut into {ways} rows")
        block = in_rows(block, ways, block.columns // ways)
    have = [count for count, _ in block.rows]
    if have[: len(required)] == required:
        return block
    if have[0] % ways or block.rows[0][1] is not None:
        raise InexpressibleError(f"rows of {have} are distributed to {required} ranks")
    # Digit 0 is split into `parts`: the required counts, and the rows of each rank if there are several.
    remainder = have[0] // ways
    parts = [*required, *([remainder] if remainder > 1 else [])]
    extra = len(parts) - 1
    digits = tuple((count, row(index)) for index, count in enumerate(parts))

    def split(symbol: Symbol, count: int) -> tuple[tuple[int, Symbol], ...]:
        """The digits in place of one: the first becomes several, and later ones are renumbered."""
        if symbol == row(0):
            return digits
        return ((count, row(symbol[1] + extra)),) if symbol[0] == "row" else ((count, symbol),)

    slots: list[Slot] = []
    if _depends_on_row(block):
        raise InexpressibleError("rows of ranks are distributed differently than they were gathered")
    for chain, term in block.slots:
        cuts = tuple(RowCut(c.ways, tuple(d for n, s in c.digits for d in split(s, n))) for c in chain)
        slots.append((cuts, term))
    rows = (*((count, None) for count in parts), *block.rows[1:])
    return Block(rows, block.columns, block.runs, tuple(slots))


def inner(block: Block) -> Iterator[Block]:
    """The frozen blocks in `block`, and those within them."""
    for frozen in {id(run.leaf): run.leaf for run in block.runs if isinstance(run.leaf, Frozen)}.values():
        yield frozen.block
        yield from inner(frozen.block)


def free_in(chain: Chain) -> frozenset[Symbol]:
    """The symbols of ranks and rows that the position of elements depends on."""
    return free_of(symbol for cut in chain for _, symbol in cut.digits)


def _depends_on_row(block: Block) -> bool:
    """Whether rows differ in more than the row of the leaf that they hold."""
    free = [term.free for each in (block, *inner(block)) for _, term in each.slots if term is not None]
    free += [free_in(chain) for each in inner(block) for chain, _ in each.slots]
    return any(symbol[0] == "row" for symbols in free for symbol in symbols)


def _count(rows: Rows) -> int:
    """The number of rows."""
    return math.prod(count for count, _ in rows)


def collapsed(block: Block, size: int, *, leaf: bool = False) -> Block:
    """Flatten the rows of `block`, and drop the padding.

    If they are not the consecutive rows of one leaf or buffer, the block is returned with its rows.

    Args:
        block: The block.
        size: The number of elements without padding.
        leaf: Whether a row of the block may be a row of a leaf.
    """
    if not block.rows:
        return _shortened(block, size)
    if not block.runs:
        return Block((), size, (), ())
    run = _only_run(block, leaf=leaf)
    chain, term = block.slots[block.runs[0].slot]
    # Row i of the block is row i of the last cut.
    identity = tuple((count, row(index)) for index, (count, _) in enumerate(block.rows))
    if (
        run is None
        or not chain
        or chain[-1].digits != identity
        or any(symbol[0] == "row" for symbol in free_in(chain[:-1]))
        or _depends_on_row(block)
    ):
        return block
    if isinstance(run.leaf, Frozen) and not chain[:-1]:
        return _shortened(run.leaf.block, size)
    source = run.leaf if chain[:-1] or isinstance(run.leaf, Frozen) else run.leaf.uncut()
    return Block((), size, (ColumnRun(0, size, source, 0, 0),), ((chain[:-1], term),))


def _shortened(block: Block, size: int) -> Block:
    """The first `size` elements of a one-row block, or as many zeros more; other blocks are unchanged."""
    if block.rows or block.columns == size:
        return block
    builder = BlockBuilder()
    builder.take(block, 0, min(size, block.columns), 0)
    return builder.block((), size)


def row_of(algebra: Algebra, block: Block, start: int, size: int) -> tuple[Block, int]:
    """The row of `block` that contains elements `start` to `start + size - 1`, and the column of the first.

    Raises:
        InexpressibleError: If the elements are in several rows.
    """
    if not block.rows:
        return block, start
    number, column = divmod(start, block.columns)
    if column + size > block.columns:
        raise InexpressibleError("a run of elements crosses rows")
    symbols: dict[Symbol, Symbol] = {}
    for digit in range(len(block.rows) - 1, -1, -1):
        number, place = divmod(number, block.rows[digit][0])
        symbols[row(digit)] = at(place)
    return renamed(algebra, block, symbols)._replace(rows=()), column


# Several blocks


def combined(algebra: Algebra, blocks: Sequence[Block], function: Callable[[Sequence[Term]], Term]) -> Block:
    """Combine the terms of blocks elementwise, with zero for columns without a run.

    Raises:
        InexpressibleError: If the blocks hold different elements in one place, or frozen ones.
    """
    builder = BlockBuilder()
    for begin, end, runs in aligned(blocks):
        places: set[tuple[Any, int, Chain]] = set()
        terms: list[Term | None] = []
        for block, run in zip(blocks, runs, strict=True):
            chain, term = ((), algebra.zero) if run is None else block.slots[run.slot]
            terms.append(term)
            if run is not None:
                places.add((run.leaf, run.column + begin - run.at, chain))
        defined = [term for term in terms if term is not None]
        if len(places) > 1 or len(defined) < len(terms):
            raise InexpressibleError("different elements are combined")
        if places:
            builder.put(begin, end - begin, *places.pop(), function(defined))
    return builder.block(blocks[0].rows, blocks[0].columns)


def aligned(blocks: Sequence[Block]) -> Iterable[tuple[int, int, list[ColumnRun | None]]]:
    """Yield the largest ranges of columns such that no block changes its run within a range.

    Yields:
        The first column, the column after the last one, and the run of each block; None for a block without
        a run there.
    """
    edges = sorted({edge for block in blocks for run in block.runs for edge in (run.at, run.at + run.size)})
    places = [0] * len(blocks)
    for begin, end in itertools.pairwise(edges):
        current: list[ColumnRun | None] = []
        for index, block in enumerate(blocks):
            runs = block.runs
            while places[index] < len(runs) and runs[places[index]].at + runs[places[index]].size <= begin:
                places[index] += 1
            run = runs[places[index]] if places[index] < len(runs) else None
            current.append(run if run is not None and run.at <= begin else None)
        yield begin, end, current
