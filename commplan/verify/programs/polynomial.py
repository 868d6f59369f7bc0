"""Whole numbers that are not known: polynomials over symbols that stand for 0, 1, 2, ...

The functions of `commplan.input` are run on them as they are on numbers, and what comes out holds whatever
the symbols stand for. A comparison is decided where all terms of the difference have one sign, else
`UndecidedError` is raised; a quotient is a polynomial where one fits, else an unknown of its own, which is
known by what it divides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from operator import attrgetter
from typing import NamedTuple

Monomial = tuple["Symbol | Floor", ...]  # sorted by name; a power is written out
_name = attrgetter("name")


class UndecidedError(Exception):
    """A comparison holds for some values of the symbols and not for others, as far as can be seen."""


class Symbol(NamedTuple):
    """0, 1, 2, ..."""

    name: str


class Floor(NamedTuple):
    """The quotient of two terms, rounded down. Both are 0 or more, and the divisor is not 0."""

    name: str
    of: Term
    by: Term


class Term:
    """A polynomial with whole coefficients. Immutable; works with `int` on either side."""

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self._terms = {monomial: count for monomial, count in terms.items() if count}

    # --- arithmetic ---

    def __add__(self, other: Term | int) -> Term:
        total = Counter(self._terms)
        total.update(term(other)._terms)
        return Term(total)

    __radd__ = __add__

    def __neg__(self) -> Term:
        return Term({monomial: -count for monomial, count in self._terms.items()})

    def __sub__(self, other: Term | int) -> Term:
        return self + -term(other)

    def __mul__(self, other: Term | int) -> Term:
        total: Counter[Monomial] = Counter()
        for left, many in self._terms.items():
            for right, more in term(other)._terms.items():
                total[tuple(sorted((*left, *right), key=_name))] += many * more
        return Term(total)

    __rmul__ = __mul__

    def __rsub__(self, other: int) -> Term:
        return term(other) - self

    def __floordiv__(self, other: Term | int) -> Term:
        divisor = term(other)
        if not divisor.positive():
            raise UndecidedError(f"{divisor} may be 0")
        quotient, rest = self._divided(divisor)
        for least in (0, -1, 1):
            inside = rest - divisor * least
            if inside.natural() and (divisor - inside).positive():
                return quotient + least
        if not self.natural():
            raise UndecidedError(f"({self}) // ({divisor})")
        return Term({(Floor(f"[({self}) // ({divisor})]", self, divisor),): 1})

    def __rfloordiv__(self, other: int) -> Term:
        return term(other) // self

    def __mod__(self, other: Term | int) -> Term:
        return self - self // other * other

    def _divided(self, divisor: Term) -> tuple[Term, Term]:
        """Quotient and rest of a division by the leading term, as for polynomials."""
        lead = max(divisor._terms, key=lambda monomial: (len(monomial), tuple(map(_name, monomial))))
        count = divisor._terms[lead]
        quotient, rest = Term({}), self
        while (part := rest._part(lead, count)) is not None:
            quotient, rest = quotient + part, rest - divisor * part
        return quotient, rest

    def _part(self, lead: Monomial, count: int) -> Term | None:
        """The first term that `count` times `lead` divides, over that."""
        for monomial, many in self._terms.items():
            left = _without(monomial, lead)
            if many % count == 0 and left is not None:
                return Term({left: many // count})
        return None

    # --- comparing ---

    def same(self, other: Term | int) -> bool:
        """Whether it is `other`, whatever the symbols stand for (False: not as far as can be seen)."""
        return not (self - other)._terms

    def natural(self) -> bool:
        """Whether it is 0 or more, whatever the symbols stand for (False: not as far as can be seen)."""
        return all(count >= 0 for count in self._terms.values()) or self._between_floors()

    def positive(self) -> bool:
        """Whether it is 1 or more, likewise."""
        return (self - 1).natural()

    def _between_floors(self) -> bool:
        """x // d - y // d is 0 or more where x - y is."""
        floors = sorted(self._terms.items(), key=lambda item: item[1])
        if len(floors) != 2 or [count for _, count in floors] != [-1, 1]:
            return False
        (less, _), (more, _) = floors
        if len(less) != 1 or len(more) != 1:
            return False
        first, second = less[0], more[0]
        if not isinstance(first, Floor) or not isinstance(second, Floor):
            return False
        return first.by.same(second.by) and (second.of - first.of).natural()

    def __lt__(self, other: Term | int) -> bool:
        return _decided(term(other) - self - 1)

    def __gt__(self, other: Term | int) -> bool:
        return _decided(self - term(other) - 1)

    def __le__(self, other: Term | int) -> bool:
        return _decided(term(other) - self)

    def __ge__(self, other: Term | int) -> bool:
        return _decided(self - term(other))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Term | int):
            return NotImplemented
        difference = self - other
        if not difference._terms:
            return True
        if difference.positive() or (-difference).positive():
            return False
        raise UndecidedError(f"{self} == {other}")

    def __bool__(self) -> bool:
        return self != 0

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        parts = [
            "*".join([*([str(count)] if count != 1 or not monomial else []), *map(_name, monomial)])
            for monomial, count in sorted(self._terms.items(), key=lambda item: tuple(map(_name, item[0])))
        ]
        return " + ".join(parts) or "0"

    __repr__ = __str__


def symbol(name: str) -> Term:
    """A number that is 0 or more."""
    return Term({(Symbol(name),): 1})


def term(value: Term | int) -> Term:
    return value if isinstance(value, Term) else Term({(): value})


def _decided(difference: Term) -> bool:
    """Whether `difference` is 0 or more."""
    if difference.natural():
        return True
    if (-difference).positive():
        return False
    raise UndecidedError(f"{difference} >= 0")


def _without(monomial: Monomial, part: Monomial) -> Monomial | None:
    """`monomial` divided by `part`; None where it is no multiple."""
    left = list(monomial)
    for factor in part:
        if factor not in left:
            return None
        left.remove(factor)
    return tuple(left)
