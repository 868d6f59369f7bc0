"""Symbols of the ranks and rows that a term depends on, and their substitution.

A symbol is a tuple whose first item is its kind; `terms` lists the kinds. It stands for a coordinate of a
rank along an axis, or for a digit of a row index.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Symbol = tuple[Any, ...]
# A simultaneous substitution of symbols. Symbols without an entry are kept.
Symbols = Mapping[Symbol, Symbol]
# The mark of the records of a load that no share of the plan has distributed.
UNSHARED: Symbol = ("shared", ())


def rank(axis: str) -> Symbol:
    """The coordinate of the current rank along `axis`."""
    return ("rank", axis)


def row(digit: int) -> Symbol:
    """The digit with index `digit` of the row index of a block."""
    return ("row", digit)


def at(index: int) -> Symbol:
    """The number `index`."""
    return ("at", index)


class RowCut(NamedTuple):
    """A cut into equal rows, and the selection of one of them.

    Attributes:
        ways: The number of rows.
        digits: The digits of the index of the selected row, the most significant first, as pairs of a count
            and a symbol from 0 to count - 1. Digits with a count of 1 are left out.
    """

    ways: int
    digits: tuple[tuple[int, Symbol], ...]


# Cuts of the rows of cuts, outermost first. Without a cut, it selects the whole.
Chain = tuple[RowCut, ...]


def replaced(symbol: Symbol, symbols: Symbols) -> Symbol:
    """`symbol` after a substitution.

    An owner symbol whose coordinates are all numbers becomes the index of that owner, or at(-1) for a rank
    that owns nothing.
    """
    if symbol[0] == "before":
        return before(replaced(symbol[1], symbols), *symbol[2:])
    if symbol[0] != "owner":
        return symbols.get(symbol, symbol)
    where = tuple((axis, size, replaced(inner, symbols)) for axis, size, inner in symbol[1])
    if any(inner[0] != "at" for _, _, inner in where):
        return ("owner", where, symbol[2])
    number = 0
    for _, size, inner in where:
        number = number * size + inner[1]
    return at(symbol[2].index(number) if number in symbol[2] else -1)


def before(symbol: Symbol, by: int, count: int) -> Symbol:
    """The coordinate `by` places before `symbol`, modulo `count`, the number of ranks along its axis."""
    if symbol[0] == "before" and symbol[3] == count:
        symbol, by = symbol[1], by + symbol[2]
    if symbol[0] == "at":
        return at((symbol[1] - by) % count)
    return ("before", symbol, by % count, count) if by % count else symbol


def substituted(chain: Chain, symbols: Symbols) -> Chain | None:
    """`chain` with symbols replaced, or None if it selects the part of a rank that owns none."""
    if not chain:
        return chain
    cuts = tuple(RowCut(c.ways, tuple((n, replaced(s, symbols)) for n, s in c.digits)) for c in chain)
    return None if any(symbol == ("at", -1) for cut in cuts for _, symbol in cut.digits) else cuts


def free_of(symbols: Iterable[Symbol]) -> frozenset[Symbol]:
    """The symbols of ranks, rows and shares in `symbols`, also within owners and shifted coordinates."""
    free: set[Symbol] = set()
    for symbol in symbols:
        if symbol[0] == "before":
            free |= free_of(symbol[1:2])
        elif symbol[0] == "owner":
            free |= free_of(inner for _, _, inner in symbol[1])
        elif symbol[0] in ("rank", "row", "shared"):
            free.add(symbol)
    return frozenset(free)
