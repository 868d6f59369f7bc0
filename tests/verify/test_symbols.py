"""Symbols: numbers that are not known, in the arithmetic of the visitation contract."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from commplan.verify.programs.polynomial import UndecidedError, symbol


def test_symbols_are_numbers_that_are_zero_or_more() -> None:
    n, m = symbol("n"), symbol("m")
    assert n + 1 > n
    assert (n + 2) * (n + 3) == n * n + 5 * n + 6
    assert ((n + 1) * (m + 1) + n) // (n + 1) == m + 1
    assert -(-((n + 2) * m + 1) // (n + 2)) == m + 1
    assert max(0, min(n + 4, n + 4 + m)) == n + 4
    assert not n - n
    for question in (lambda: n > m, lambda: n == 3, lambda: n // m, lambda: bool(n)):
        with pytest.raises(UndecidedError):
            question()


@pytest.mark.parametrize("values", list(itertools.product((0, 1, 2, 5), repeat=3)))
def test_what_is_decided_of_symbols_holds_for_numbers(values: tuple[int, int, int]) -> None:
    """The same expressions over symbols and over numbers."""
    named = dict(zip(map(symbol, "abc"), values, strict=True))

    def over(a: Any, b: Any, c: Any) -> list[Any]:
        questions = (
            lambda: (a + b + 1) * (c + 2) // (c + 2) - a,
            lambda: ((a + 1) * (b + 2) + c) >= b + 2,
            lambda: (a * (b + c + 1) + c) // (b + c + 1),
            lambda: -(a * (b + 1)) // (b + 1),
            lambda: (a + b) * c < a * c,
            lambda: (a * b + c) // (c + 1) <= (a * b + 2 * c + 1) // (c + 1),
        )
        return [ask() for ask in questions]

    for by_symbols, by_numbers in zip(over(*named), over(*values), strict=True):
        if isinstance(by_symbols, bool):
            assert by_symbols == by_numbers
        else:
            assert _value(by_symbols, dict(zip("abc", values, strict=True))) == by_numbers


def _value(term: Any, values: dict[str, int]) -> int:
    return int(eval(str(term).replace("[", "(").replace("]", ")"), {}, values))
