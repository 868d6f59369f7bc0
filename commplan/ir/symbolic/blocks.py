"""Blocks: which elements a leaf or a flat buffer holds, in which order, and the term of each.

A block is `rows` by `columns` elements, row-major; the number of a row has digits, and no digits mean one row.
Its columns are runs: `size` of them from `at` on hold the elements of `leaf` from `column` on, cut as the
run's slot says. A slot is (chain, term): the cuts that lead to the row of the leaf that is meant, in which a
digit of a row number may be a rank's coordinate, a number, or a digit of this block's own rows; and the term
of those elements. What no run covers is zero. `leaf` is the index of a leaf of a value, or a block itself
(`Frozen`) where a buffer was cut without regard to what lies in it.

Nothing here grows with the number of ranks. Operations that would put together what the notation cannot say
raise `Unsayable`: no schedule that is compiled from a plan contains one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from commplan.ir.symbolic.terms import (
    Algebra,
    Chain,
    Cut,
    Symbol,
    Symbols,
    Term,
    at,
    free_in,
    rank,
    row,
    substituted,
)


class Unsayable(Exception):
    """Elements are put together that do not belong together."""


class Run(NamedTuple):
    at: int
    size: int
    leaf: Any  # int | Frozen
    column: int
    slot: int


Slot = tuple[Chain, Term | None]  # no term of a frozen leaf: its own slots have them


class Block(NamedTuple):
    rows: tuple[tuple[int, str | None], ...]  # (count, the axis along which such rows were gathered)
    columns: int
    runs: tuple[Run, ...]
    slots: tuple[Slot, ...]

    @property
    def size(self) -> int:
        return math.prod(count for count, _ in self.rows) * self.columns


class Frozen:
    """A block of one row that stands where a leaf does. Row digits in its slots are those of the block around it."""

    __slots__ = ("block",)

    def __init__(self, block: Block) -> None:
        self.block = block

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Frozen) and self.block == other.block

    def __hash__(self) -> int:
        return hash(self.block)


EMPTY = Block((), 0, (), ())


def whole(leaf: int, size: int, chain: Chain, term: Term) -> Block:
    """A leaf of `size` elements, of which each is itself."""
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
    return Block(
        block.rows,
        block.columns,
        _inside(block.runs, lambda inner: renamed(algebra, inner, symbols)),
        tuple(slots),
    )


def _inside(runs: tuple[Run, ...], function: Callable[[Block], Block]) -> tuple[Run, ...]:
    if not any(isinstance(run.leaf, Frozen) for run in runs):
        return runs
    known: dict[int, Frozen] = {}
    made: list[Run] = []
    for run in runs:
        if isinstance(run.leaf, Frozen):
            known.setdefault(id(run.leaf), Frozen(function(run.leaf.block)))
            made.append(run._replace(leaf=known[id(run.leaf)]))
        else:
            made.append(run)
    return tuple(made)


class Builder:
    """Collects runs and their slots."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.slots: dict[Slot, int] = {}

    def slot(self, slot: Slot) -> int:
        return self.slots.setdefault(slot, len(self.slots))

    def block(self, rows: tuple[tuple[int, str | None], ...], columns: int) -> Block:
        """The runs so far as a block; those that continue each other become one."""
        self.runs.sort(key=lambda run: run.at)
        made: list[Run] = []
        for run in self.runs:
            last = made[-1] if made else None
            if last is not None and last.at + last.size > run.at:
                raise Unsayable("two runs of elements are put in one place")
            if (
                last is not None
                and last.slot == run.slot
                and last.at + last.size == run.at
                and last.column + last.size == run.column
                and (last.leaf is run.leaf or last.leaf == run.leaf)
            ):
                made[-1] = last._replace(size=last.size + run.size)
            elif run.size:
                made.append(run)
        return Block(rows, columns, tuple(made), tuple(self.slots))

    def take(
        self, source: Block, start: int, size: int, offset: int, chains: Mapping[int, Slot] | None = None
    ) -> None:
        """Columns `start` to `start + size` of `source`, from `offset` on."""
        known: dict[int, int] = {}
        for run in _within(source.runs, start, start + size):
            low, high = max(run.at, start), min(run.at + run.size, start + size)
            if low >= high:
                continue
            if run.slot not in known:
                known[run.slot] = self.slot(source.slots[run.slot] if chains is None else chains[run.slot])
            self.runs.append(
                Run(low - start + offset, high - low, run.leaf, run.column + low - run.at, known[run.slot])
            )


def _within(runs: Sequence[Run], start: int, stop: int) -> Sequence[Run]:
    """Those of `runs`, which are in order, that may overlap with columns `start` to `stop`."""
    if len(runs) < 8:
        return runs
    low, high = 0, len(runs)
    while low < high:
        middle = (low + high) // 2
        if runs[middle].at + runs[middle].size <= start:
            low = middle + 1
        else:
            high = middle
    end = low
    while end < len(runs) and runs[end].at < stop:
        end += 1
    return runs[low:end]


# Rows


def in_rows(block: Block, ways: int, width: int, *, leaf: bool = False) -> Block:
    """`block`, of one row, padded and seen as `ways` rows of `width`. `leaf`: it is all that a rank holds of a leaf."""
    if ways == 1:
        return block
    if block.rows:
        if _count(block.rows) == ways and block.columns == width:
            return block
        raise Unsayable(f"{_count(block.rows)} rows are seen as {ways}")
    digits = ((ways, row(0)),)
    only = _only_run(block, leaf=leaf)
    if only is not None:
        chain, term = block.slots[only.slot]
        return Block(
            ((ways, None),), width, (Run(0, width, only.leaf, 0, 0),), ((cut(chain, ways, digits), term),)
        )
    if not block.runs:
        return Block(((ways, None),), width, (), ())
    return Block(
        ((ways, None),), width, (Run(0, width, Frozen(block), 0, 0),), ((cut((), ways, digits), None),)
    )


def _only_run(block: Block, *, leaf: bool) -> Run | None:
    """The one run of a block that is all of a leaf's row, or of a frozen block's."""
    only = block.runs[0] if len(block.runs) == 1 else None
    if only is None or (only.at, only.column, only.size) != (0, 0, block.columns):
        return None
    if isinstance(only.leaf, Frozen):
        ways = math.prod(cut.ways for cut in block.slots[only.slot][0])
        return only if only.size * ways == only.leaf.block.columns else None
    return only if leaf else None


def leading(block: Block, counts: Sequence[int]) -> Block:
    """`block` with row digits that begin with `counts`: a digit is split where it is a product of them."""
    wanted = [count for count in counts if count > 1]
    ways = math.prod(wanted)
    if ways == 1:
        return block
    if not block.rows:
        if block.columns % ways:
            raise Unsayable(f"{block.columns} elements are cut into {ways} rows")
        block = in_rows(block, ways, block.columns // ways)
    have = [count for count, _ in block.rows]
    if have[: len(wanted)] == wanted:
        return block
    if have[0] % ways or block.rows[0][1] is not None:
        raise Unsayable(f"rows of {have} are dealt out to {wanted} ranks")
    rest = have[0] // ways
    parts = [*wanted, *([rest] if rest > 1 else [])]
    extra = len(parts) - 1
    digits = tuple((count, row(index)) for index, count in enumerate(parts))

    def split(symbol: Symbol, count: int) -> tuple[tuple[int, Symbol], ...]:
        if symbol == row(0):
            return digits
        return ((count, row(symbol[1] + extra)),) if symbol[0] == "row" else ((count, symbol),)

    slots: list[Slot] = []
    if any(symbol[0] == "row" for symbol in _in_terms(block)):
        raise Unsayable("rows of ranks are dealt out otherwise than they were gathered")
    for chain, term in block.slots:
        cuts = tuple(Cut(c.ways, tuple(d for n, s in c.digits for d in split(s, n))) for c in chain)
        slots.append((cuts, term))
    rows = (*((count, None) for count in parts), *block.rows[1:])
    return Block(rows, block.columns, block.runs, tuple(slots))


def _in_terms(block: Block) -> set[Symbol]:
    """The symbols in the terms of `block`, and, of a frozen one, in its positions too."""
    found: set[Symbol] = set()
    for _, term in block.slots:
        found |= term.free if term is not None else frozenset()
    for inner in {
        id(run.leaf): run.leaf.block for run in block.runs if isinstance(run.leaf, Frozen)
    }.values():
        found |= _in_terms(inner).union(*(free_in(chain) for chain, _ in inner.slots))
    return found


def _count(rows: Sequence[tuple[int, str | None]]) -> int:
    return math.prod(count for count, _ in rows)


def collapsed(block: Block, size: int, *, leaf: bool = False) -> Block:
    """`block` with its rows put one after another, `size` elements of them; rows stay where they are not the rows of
    one leaf in their order. `leaf`: a row is a row of a leaf."""
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
        or any(symbol[0] == "row" for symbol in free_in(chain[:-1]) | _in_terms(block))
    ):
        return block
    if isinstance(only.leaf, Frozen) and not chain[:-1]:
        return _shortened(only.leaf.block, size)
    return Block((), size, (Run(0, size, only.leaf, 0, 0),), ((chain[:-1], term),))


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
        raise Unsayable("a run of elements crosses rows")
    symbols: dict[Symbol, Symbol] = {}
    for digit in range(len(block.rows) - 1, -1, -1):
        number, place = divmod(number, block.rows[digit][0])
        symbols[row(digit)] = at(place)
    return renamed(algebra, block, symbols)._replace(rows=()), column


# What ops do


def scattered(algebra: Algebra, block: Block, axes: Sequence[str]) -> Block:
    """Each rank along `axes` keeps its row."""
    axes = [axis for axis in axes if algebra.sizes[axis] > 1]
    block = leading(block, [algebra.sizes[axis] for axis in axes])
    _no_other_rows(block, axes)
    symbols = {row(index): rank(axis) for index, axis in enumerate(axes)}
    symbols |= {row(index): row(index - len(axes)) for index in range(len(axes), len(block.rows))}
    return renamed(algebra, block, symbols)._replace(rows=block.rows[len(axes) :])


def summed(algebra: Algebra, block: Block, axes: Sequence[str], term: Callable[[Term], Term]) -> Block:
    """What ranks along `axes` hold at the same place is put together by `term`."""
    _no_other_rows(block, [axis for axis in axes if algebra.sizes[axis] > 1])
    return with_terms(block, term)


def _no_other_rows(block: Block, axes: Sequence[str]) -> None:
    _check(_positions(block), axes)


def check_rows(chains: Iterable[Chain], axes: Sequence[str]) -> None:
    """Refuse to put together what ranks along `axes` hold where positions differ between them."""
    _check(map(free_in, chains), axes)


def _check(positions: Iterable[frozenset[Symbol]], axes: Sequence[str]) -> None:
    wrong = {rank(axis) for axis in axes}
    for free in positions:
        if not wrong.isdisjoint(free):
            names = ", ".join(sorted(symbol[1] for symbol in wrong & free))
            raise Unsayable(f"ranks along {names} hold different elements, which are added to one another")


def _positions(block: Block) -> list[frozenset[Symbol]]:
    """The symbols in every position of `block`."""
    found = [free_in(chain) for chain, _ in block.slots]
    for inner in {
        id(run.leaf): run.leaf.block for run in block.runs if isinstance(run.leaf, Frozen)
    }.values():
        found += _positions(inner)
    return found


def gathered(algebra: Algebra, block: Block, axes: Sequence[str], size: int, *, leaf: bool = False) -> Block:
    """The rows of all ranks along `axes`, in their order: `size` elements without padding."""
    axes = [axis for axis in axes if algebra.sizes[axis] > 1]
    symbols = {rank(axis): row(index) for index, axis in enumerate(axes)}
    symbols |= {row(index): row(index + len(axes)) for index in range(len(block.rows))}
    made = renamed(algebra, block, symbols)
    return collapsed(
        made._replace(rows=(*((algebra.sizes[axis], axis) for axis in axes), *block.rows)), size, leaf=leaf
    )


def exchanged(algebra: Algebra, block: Block, axes: Sequence[str]) -> Block:
    """All-to-all: row i goes to rank i along `axes`, and becomes its row of the rank that it comes from."""
    axes = [axis for axis in axes if algebra.sizes[axis] > 1]
    block = leading(block, [algebra.sizes[axis] for axis in axes])
    symbols: dict[Symbol, Symbol] = {}
    for index, axis in enumerate(axes):
        symbols |= {row(index): rank(axis), rank(axis): row(index)}
    rows = tuple(
        (count, axes[index] if index < len(axes) else axis) for index, (count, axis) in enumerate(block.rows)
    )
    return renamed(algebra, block, symbols)._replace(rows=rows)


def rows_summed(algebra: Algebra, block: Block, ways: int) -> Block:
    """The sum of the `ways` leading rows."""
    if ways == 1:
        return block
    if not block.rows:
        return added(algebra, _explicit_rows(block, ways))
    count, taken = 1, 0
    while taken < len(block.rows) and count < ways:
        count *= block.rows[taken][0]
        taken += 1
    if count != ways:
        raise Unsayable(f"{ways} of {_count(block.rows)} rows are added")
    digits = dict(enumerate(block.rows[:taken]))
    if any(row(digit) in free for free in _positions(block) for digit in digits):
        raise Unsayable("rows of one rank, which hold different elements, are added")
    made = with_terms(block, algebra.mapped(lambda term: algebra.summed_rows(term, digits)))
    symbols = {row(index): row(index - taken) for index in range(taken, len(block.rows))}
    return renamed(algebra, made, symbols)._replace(rows=block.rows[taken:])


def _explicit_rows(block: Block, ways: int) -> list[Block]:
    width = block.columns // ways
    found: list[Block] = []
    for index in range(ways):
        builder = Builder()
        builder.take(block, index * width, width, 0)
        found.append(builder.block((), width))
    return found


def added(algebra: Algebra, blocks: Sequence[Block]) -> Block:
    """Blocks added element by element. Where each is zero but on a rank of its own, and holds there another row
    of the same cut, the sum is each of these ranks' row."""
    owned = _owned_rows(algebra, blocks)
    if owned is not None:
        return owned
    return combined(algebra, blocks, algebra.add)


def combined(algebra: Algebra, blocks: Sequence[Block], function: Callable[[Sequence[Term]], Term]) -> Block:
    """Blocks put together element by element; each must hold the same elements in the same order."""
    builder = Builder()
    for begin, end, runs in aligned(blocks):
        slots = [
            None if run is None else block.slots[run.slot] for block, run in zip(blocks, runs, strict=True)
        ]
        places = {
            (run.leaf, run.column + begin - run.at, slot[0])
            for run, slot in zip(runs, slots, strict=True)
            if run is not None and slot is not None
        }
        if len(places) > 1 or any(slot is not None and slot[1] is None for slot in slots):
            raise Unsayable("different elements are added to one another")
        if places:
            leaf, column, chain = places.pop()
            term = function(
                [slot[1] if slot is not None and slot[1] is not None else algebra.zero for slot in slots]
            )
            builder.runs.append(Run(begin, end - begin, leaf, column, builder.slot((chain, term))))
    return builder.block(blocks[0].rows, blocks[0].columns)


def _owned_rows(algebra: Algebra, blocks: Sequence[Block]) -> Block | None:
    if len(blocks) < 2 or not all(block.runs and len(block.runs) == len(blocks[0].runs) for block in blocks):
        return None
    builder = Builder()
    for runs in zip(*(block.runs for block in blocks), strict=True):
        slots = [block.slots[run.slot] for block, run in zip(blocks, runs, strict=True)]
        if len({(run.at, run.size, run.leaf, run.column) for run in runs}) > 1:
            return None
        terms = [_alone(term) for _, term in slots]
        cuts = [chain[-1] if chain else None for chain, _ in slots]
        heads = {chain[:-1] for chain, _ in slots}
        if len(heads) > 1 or any(term is None for term in terms):
            return None
        conditions = [term[0] for term in terms if term is not None]
        if (
            len({term[1] for term in terms if term is not None}) > 1
            or len({tuple(s for s, _ in c) for c in conditions}) > 1
        ):
            return None
        places = [c is not None and c.digits == ((len(blocks), at(i)),) for i, c in enumerate(cuts)]
        if not all(places):
            return None
        symbol = _owners(algebra, conditions)
        chain = (*next(iter(heads)), Cut(len(blocks), ((len(blocks), symbol),)))
        first = runs[0]
        builder.runs.append(
            Run(
                first.at,
                first.size,
                first.leaf,
                first.column,
                builder.slot((chain, next(t[1] for t in terms if t))),
            )
        )
    return builder.block((), blocks[0].columns)


def _alone(term: Term | None) -> tuple[Any, Term] | None:
    """The conditions and the term of a term that is zero but on one rank."""
    if term is None or len(term.parts) != 1:
        return None
    atom, sums, trace, coefficient = term.parts[0]
    if atom.kind != "only" or sums or trace or coefficient != 1:
        return None
    return atom.content


def _owners(algebra: Algebra, conditions: Sequence[Sequence[tuple[Symbol, int]]]) -> Symbol:
    axes = [symbol[1] for symbol, _ in conditions[0]]
    numbers: list[int] = []
    for condition in conditions:
        number = 0
        for symbol, place in condition:
            number = number * algebra.sizes[symbol[1]] + place
        numbers.append(number)
    return algebra.owner(axes, numbers)


def aligned(blocks: Sequence[Block]) -> Iterable[tuple[int, int, list[Run | None]]]:
    """Columns in which no block changes its run: first, one behind the last, and the run of each block."""
    edges = sorted({edge for block in blocks for run in block.runs for edge in (run.at, run.at + run.size)})
    places = [0] * len(blocks)
    for begin, end in zip(edges, edges[1:], strict=False):
        runs: list[Run | None] = []
        for index, block in enumerate(blocks):
            while (
                places[index] < len(block.runs)
                and block.runs[places[index]].at + block.runs[places[index]].size <= begin
            ):
                places[index] += 1
            here = block.runs[places[index]] if places[index] < len(block.runs) else None
            runs.append(here if here is not None and here.at <= begin else None)
        yield begin, end, runs
