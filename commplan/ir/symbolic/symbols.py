"""Symbols of the places and rows that a term depends on, and their substitution."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

Symbol = tuple[Any, ...]
Symbols = Mapping[Symbol, Symbol]
UNSHARED: Symbol = ("shared", ())


def rank(axis: str) -> Symbol:
    return ("rank", axis)


def row(digit: int) -> Symbol:
    return ("row", digit)


def at(index: int) -> Symbol:
    return ("at", index)


class RowCut(NamedTuple):
    """The selection of one of `ways` equal rows, by the digits of its index, as (count, symbol) pairs."""

    ways: int
    digits: tuple[tuple[int, Symbol], ...]


Chain = tuple[RowCut, ...]  # cuts of cuts, outermost first


def replaced(symbol: Symbol, symbols: Symbols) -> Symbol:
    """`symbol` after a substitution.

    An owner symbol with numeric coordinates becomes its index, or ("at", -1) for a rank that owns nothing.
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
    """The coordinate `by` places before `symbol` among `count`, modulo `count`."""
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
    free: set[Symbol] = set()
    for symbol in symbols:
        if symbol[0] == "before":
            free |= free_of(symbol[1:2])
        elif symbol[0] == "owner":
            free |= free_of(inner for _, _, inner in symbol[1])
        elif symbol[0] in ("rank", "row", "shared"):
            free.add(symbol)
    return frozenset(free)
