"""Blocks: which elements a leaf or a flat buffer holds, in which order, and the term of each.

A block is `rows` by `columns` elements, row-major; the number of a row has digits, and no digits mean one
row. Its columns are runs: `size` of them from `at` on hold the elements of `leaf` from `column` on, cut as
the run's slot says. A slot is (chain, term): the cuts that lead to the row of the leaf that is meant, in
which a digit of a row number may be a rank's coordinate, a number, or a digit of this block's own rows; and
the term of those elements. What no run covers is zero. `leaf` is a leaf of a value before any cut
(`LeafShape`), or a block itself (`Frozen`) where a buffer was cut without regard to what lies in it.

Nothing here grows with the number of ranks. Operations that would put together what the notation cannot say
raise `UnsayableError`: no schedule that is compiled from a plan contains one.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from commplan.ir.symbolic.terms import (
    Algebra,
    Chain,
    Cut,
    Symbol,
    Symbols,
    Term,
    UnsayableError,
    at,
    free_of,
    row,
    substituted,
)


class LeafShape(NamedTuple):
    """Leaf `number` of a value before any cut: `lead` rows of `rest` elements; rows are what is cut. A leaf
    that is not cut has elements for rows: their order is all that counts."""

    number: int
    lead: int
    rest: int

    def width(self, chain: Chain) -> int:
        """Elements of the part that the cuts of `chain` leave, padding included."""
        lead = self.lead
        for each in chain:
            lead = -(-lead // each.ways)
        return lead * self.rest

    def uncut(self) -> LeafShape:
        return LeafShape(self.number, self.lead * self.rest, 1)


class Run(NamedTuple):
    at: int
    size: int
    leaf: Any  # LeafShape | Frozen
    column: int
    slot: int


Slot = tuple[Chain, Term | None]  # no term of a frozen leaf: its own slots have them
Rows = tuple[tuple[int, str | None], ...]  # (count, the axis along which such rows were gathered)


class Block(NamedTuple):
    rows: Rows
    columns: int
    runs: tuple[Run, ...]
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        return _count(self.rows) * self.columns


class Frozen(NamedTuple):
    """A block of one row that stands where a leaf does. Row digits in its slots are those of the block
    around it."""

    block: Block


EMPTY = Block((), 0, (), ())


def whole(leaf: LeafShape, size: int, chain: Chain, term: Term) -> Block:
    """A part of a leaf, `size` elements, of which each is itself."""
    return Block((), size, (Run(0, size, leaf, 0, 0),), ((chain, term),)) if size else EMPTY


def cut(chain: Chain, ways: int, digits: Iterable[tuple[int, Symbol]]) -> Chain:
    """`chain` and one more cut; a cut into one row is none."""
    kept = tuple((count, symbol) for count, symbol in digits if count > 1)
    return chain if ways == 1 else (*chain, Cut(ways, kept))


def with_terms(block: Block, function: Callable[[Term], Term]) -> Block:
    """`block` with `function` applied to every term."""
    slots = tuple((chain, None if term is None else function(term)) for chain, term in block.slots)
    if slots == block.slots and not any(isinstance(run.leaf, Frozen) for run in block.runs):
        return block
    return block._replace(runs=_inside(block.runs, lambda inner: with_terms(inner, function)), slots=slots)


def renamed(algebra: Algebra, block: Block, symbols: Symbols) -> Block:
    """`block` with symbols replaced, in positions and terms."""
    slots: list[Slot] = []
    for chain, term in block.slots:
        positions = substituted(chain, symbols)
        if positions is None:
            slots.append(((), algebra.undefined("the part of a rank that owns none")))
        else:
            slots.append((positions, None if term is None else algebra.substitute(term, symbols)))
    runs = _inside(block.runs, lambda inner: renamed(algebra, inner, symbols))
    return Block(block.rows, block.columns, runs, tuple(slots))


def _inside(runs: tuple[Run, ...], function: Callable[[Block], Block]) -> tuple[Run, ...]:
    """`runs` with `function` applied to the frozen blocks that they are of."""
    known: dict[int, Frozen] = {}
    for run in runs:
        if isinstance(run.leaf, Frozen) and id(run.leaf) not in known:
            known[id(run.leaf)] = Frozen(function(run.leaf.block))
    return tuple(run._replace(leaf=known.get(id(run.leaf), run.leaf)) for run in runs) if known else runs


class Builder:
    """Collects runs and their slots."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.slots: dict[Slot, int] = {}

    def block(self, rows: Rows, columns: int) -> Block:
        """The runs so far as a block; those that continue each other become one."""
        self.runs.sort(key=lambda run: run.at)
        runs: list[Run] = []
        for run in self.runs:
            last = runs[-1] if runs else None
            if last is not None and last.at + last.size > run.at:
                raise UnsayableError("two runs of elements are put in one place")
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

    def put(self, at: int, size: int, leaf: Any, column: int, chain: Chain, term: Term | None) -> None:
        slot = self.slots.setdefault((chain, term), len(self.slots))
        self.runs.append(Run(at, size, leaf, column, slot))

    def take(self, source: Block, start: int, size: int, offset: int) -> None:
        """Columns `start` to `start + size` of `source`, from `offset` on."""
        known: dict[int, int] = {}
        for run in _within(source.runs, start, start + size):
            low, high = max(run.at, start), min(run.at + run.size, start + size)
            if low >= high:
                continue
            if run.slot not in known:
                known[run.slot] = self.slots.setdefault(source.slots[run.slot], len(self.slots))
            column = run.column + low - run.at
            self.runs.append(Run(low - start + offset, high - low, run.leaf, column, known[run.slot]))


def _within(runs: Sequence[Run], start: int, stop: int) -> Sequence[Run]:
    """Those of `runs`, which are in order, that overlap with columns `start` to `stop`."""
    first = bisect.bisect_right(runs, start, key=lambda run: run.at + run.size)
    return runs[first : bisect.bisect_left(runs, stop, key=lambda run: run.at)]


# Rows


def in_rows(block: Block, ways: int, width: int, leaf: LeafShape | None = None) -> Block:
    """`block`, of one row, padded and seen as `ways` rows of `width`. leaf: which one it is, by the rows in
    which it is cut."""
    if ways == 1:
        return block
    if block.rows:
        if _count(block.rows) == ways and block.columns == width:
            return block
        raise UnsayableError(f"{_count(block.rows)} rows are seen as {ways}")
    builder = Builder()
    only, digits = _only_run(block, leaf=leaf is not None), ((ways, row(0)),)
    if only is not None:
        chain, term = block.slots[only.slot]
        parts, of = cut(chain, ways, digits), only.leaf
        if isinstance(of, LeafShape) and leaf is not None:
            of = of if chain else leaf._replace(number=of.number)
            if of.width(parts) != width:
                raise UnsayableError(f"rows of {width} elements are no rows of leaf {of.number}")
        builder.put(0, width, of, 0, parts, term)
    elif block.runs:
        builder.put(0, width, Frozen(block), 0, cut((), ways, digits), None)
    return builder.block(((ways, None),), width)


def _only_run(block: Block, *, leaf: bool) -> Run | None:
    """The one run of a block that is all of a leaf's row, or of a frozen block's."""
    only = block.runs[0] if len(block.runs) == 1 else None
    if only is None or (only.at, only.column, only.size) != (0, 0, block.columns):
        return None
    if isinstance(only.leaf, Frozen):
        ways = math.prod(cut.ways for cut in block.slots[only.slot][0])
        return only if only.size * ways == only.leaf.block.columns else None
    return only if leaf and only.size == only.leaf.width(block.slots[only.slot][0]) else None


def leading(block: Block, counts: Sequence[int]) -> Block:
    """`block` with row digits that begin with `counts`: a digit is split where it is a product of them."""
    wanted = [count for count in counts if count > 1]
    ways = math.prod(wanted)
    if ways == 1:
        return block
    if not block.rows:
        if block.columns % ways:
            raise UnsayableError(f"{block.columns} elements are cut into {ways} rows")
        block = in_rows(block, ways, block.columns // ways)
    have = [count for count, _ in block.rows]
    if have[: len(wanted)] == wanted:
        return block
    if have[0] % ways or block.rows[0][1] is not None:
        raise UnsayableError(f"rows of {have} are dealt out to {wanted} ranks")
    rest = have[0] // ways
    parts = [*wanted, *([rest] if rest > 1 else [])]
    extra = len(parts) - 1
    digits = tuple((count, row(index)) for index, count in enumerate(parts))

    def split(symbol: Symbol, count: int) -> tuple[tuple[int, Symbol], ...]:
        if symbol == row(0):
            return digits
        return ((count, row(symbol[1] + extra)),) if symbol[0] == "row" else ((count, symbol),)

    slots: list[Slot] = []
    if _depends_on_row(block):
        raise UnsayableError("rows of ranks are dealt out otherwise than they were gathered")
    for chain, term in block.slots:
        cuts = tuple(Cut(c.ways, tuple(d for n, s in c.digits for d in split(s, n))) for c in chain)
        slots.append((cuts, term))
    rows = (*((count, None) for count in parts), *block.rows[1:])
    return Block(rows, block.columns, block.runs, tuple(slots))


def inner(block: Block) -> Iterator[Block]:
    """The frozen blocks in `block`, each once, and those in them."""
    for frozen in {id(run.leaf): run.leaf for run in block.runs if isinstance(run.leaf, Frozen)}.values():
        yield frozen.block
        yield from inner(frozen.block)


def free_in(chain: Chain) -> frozenset[Symbol]:
    """The symbols in `chain` that represent ranks and rows."""
    return free_of(symbol for cut in chain for _, symbol in cut.digits)


def _depends_on_row(block: Block) -> bool:
    """Whether what stands at a place differs between rows otherwise than by which row of a leaf it is."""
    free = [term.free for each in (block, *inner(block)) for _, term in each.slots if term is not None]
    free += [free_in(chain) for each in inner(block) for chain, _ in each.slots]
    return any(symbol[0] == "row" for symbols in free for symbol in symbols)


def _count(rows: Rows) -> int:
    return math.prod(count for count, _ in rows)


def collapsed(block: Block, size: int, *, leaf: bool = False) -> Block:
    """`block` with its rows put one after another, `size` elements of them; rows stay where they are not the
    rows of one leaf in their order. `leaf`: a row is a row of a leaf."""
    if not block.rows:
        return _shortened(block, size)
    if not block.runs:
        return Block((), size, (), ())
    only = _only_run(block, leaf=leaf)
    chain, term = block.slots[block.runs[0].slot]
    identity = tuple((count, row(index)) for index, (count, _) in enumerate(block.rows))
    if (
        only is None
        or not chain
        or chain[-1].digits != identity
        or any(symbol[0] == "row" for symbol in free_in(chain[:-1]))
        or _depends_on_row(block)
    ):
        return block
    if isinstance(only.leaf, Frozen) and not chain[:-1]:
        return _shortened(only.leaf.block, size)
    of = only.leaf if chain[:-1] or isinstance(only.leaf, Frozen) else only.leaf.uncut()
    return Block((), size, (Run(0, size, of, 0, 0),), ((chain[:-1], term),))


def _shortened(block: Block, size: int) -> Block:
    if block.rows or block.columns == size:
        return block
    builder = Builder()
    builder.take(block, 0, min(size, block.columns), 0)
    return builder.block((), size)


def row_of(algebra: Algebra, block: Block, start: int, size: int) -> tuple[Block, int]:
    """The row in which elements `start` to `start + size` of `block`, row by row, lie, and where in it."""
    if not block.rows:
        return block, start
    number, column = divmod(start, block.columns)
    if column + size > block.columns:
        raise UnsayableError("a run of elements crosses rows")
    symbols: dict[Symbol, Symbol] = {}
    for digit in range(len(block.rows) - 1, -1, -1):
        number, place = divmod(number, block.rows[digit][0])
        symbols[row(digit)] = at(place)
    return renamed(algebra, block, symbols)._replace(rows=()), column


# Side by side


def combined(algebra: Algebra, blocks: Sequence[Block], function: Callable[[Sequence[Term]], Term]) -> Block:
    """Blocks put together element by element; each must hold the same elements in the same order."""
    builder = Builder()
    for begin, end, runs in aligned(blocks):
        places: set[tuple[Any, int, Chain]] = set()
        terms: list[Term | None] = []
        for block, run in zip(blocks, runs, strict=True):
            chain, term = ((), algebra.zero) if run is None else block.slots[run.slot]
            terms.append(term)
            if run is not None:
                places.add((run.leaf, run.column + begin - run.at, chain))
        known = [term for term in terms if term is not None]
        if len(places) > 1 or len(known) < len(terms):
            raise UnsayableError("different elements are put together")
        if places:
            builder.put(begin, end - begin, *places.pop(), function(known))
    return builder.block(blocks[0].rows, blocks[0].columns)


def aligned(blocks: Sequence[Block]) -> Iterable[tuple[int, int, list[Run | None]]]:
    """Columns in which no block changes its run: first, one behind the last, and the run of each block."""
    edges = sorted({edge for block in blocks for run in block.runs for edge in (run.at, run.at + run.size)})
    places = [0] * len(blocks)
    for begin, end in itertools.pairwise(edges):
        current: list[Run | None] = []
        for index, block in enumerate(blocks):
            runs = block.runs
            while places[index] < len(runs) and runs[places[index]].at + runs[places[index]].size <= begin:
                places[index] += 1
            run = runs[places[index]] if places[index] < len(runs) else None
            current.append(run if run is not None and run.at <= begin else None)
        yield begin, end, current
