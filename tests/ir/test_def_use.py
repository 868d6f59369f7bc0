"""Makers and readers of values."""

from __future__ import annotations

from commplan.diagnostics import Span
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.schedule import Map

AT = Span(1, 1, 1, 1)


def op(results: str, operands: str) -> Map:
    return Map(tuple(results.split()), "f", tuple(operands.split()), AT)


A, B, C, D = op("a", "x"), op("b c", "a a"), op("d", "b x"), op("e", "c")
USES = DefUse([A, B, C, D])


def test_makers_and_readers() -> None:
    assert USES.maker("c") is B and USES.maker("x") is None and USES.indices["d"] == 2
    assert USES.readers("a") == [B] and USES.readers("x") == [A, C] and USES.readers("e") == []


def test_what_a_value_is_made_from() -> None:
    assert USES.ancestors(["d"]) == (A, B, C)
    assert USES.ancestors(["d"], {"b"}) == (C,)
    assert USES.sources(["d", "e"], {"x", "b", "a"}) == ["b", "x", "a"]
