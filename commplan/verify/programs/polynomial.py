"""Unknown nonnegative integers, as polynomials over symbols.

The functions of `commplan.input` accept these in place of `int`, and the results hold for all values of the
symbols. A comparison is decided if all terms of the difference have the same sign; otherwise `UndecidedError`
is raised. A quotient is a polynomial if the division has one, and otherwise an opaque `Floor` factor.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from operator import attrgetter
from typing import NamedTuple

Monomial = tuple["Unknown | Floor", ...]  # factors, sorted by name; a power is written out; empty is 1
_name = attrgetter("name")  # the name of a factor


class UndecidedError(Exception):
    """A comparison cannot be decided for all values of the symbols."""


class Unknown(NamedTuple):
    """An unknown integer that is at least 0. Equal names are equal unknowns."""

    name: str


class Floor(NamedTuple):
    """A quotient of two polynomials, rounded down, that is no polynomial.

    Attributes:
        name: the quotient in words; equal names are equal quotients.
        of: the dividend, at least 0.
        by: the divisor, at least 1.
    """

    name: str
    of: Polynomial
    by: Polynomial


class Polynomial:
    """An immutable polynomial with integer coefficients, which supports arithmetic with `int`.

    Args:
        terms: the coefficient of each monomial. A polynomial without terms is 0.
    """

    def __init__(self, terms: Mapping[Monomial, int]) -> None:
        self._terms = {monomial: count for monomial, count in terms.items() if count}

    # --- arithmetic ---

    def __add__(self, other: Polynomial | int) -> Polynomial:
        total = Counter(self._terms)
        total.update(term(other)._terms)
        return Polynomial(total)

    __radd__ = __add__

    def __neg__(self) -> Polynomial:
        return Polynomial({monomial: -count for monomial, count in self._terms.items()})

    def __sub__(self, other: Polynomial | int) -> Polynomial:
        return self + -term(other)

    def __mul__(self, other: Polynomial | int) -> Polynomial:
        total: Counter[Monomial] = Counter()
        for factor, coefficient in self._terms.items():
            for other_factor, other_coefficient in term(other)._terms.items():
                total[tuple(sorted((*factor, *other_factor), key=_name))] += coefficient * other_coefficient
        return Polynomial(total)

    __rmul__ = __mul__

    def __rsub__(self, other: int) -> Polynomial:
        return term(other) - self

    def __floordiv__(self, other: Polynomial | int) -> Polynomial:
        divisor = term(other)
        if not divisor.positive():
            raise UndecidedError(f"{divisor} may be 0")
        quotient, remainder = self._divide(divisor)
        # The remainder may be outside of [0, divisor): also try quotients that differ by 1.
        for correction in (0, -1, 1):
            reduced = remainder - divisor * correction
            if reduced.natural() and (divisor - reduced).positive():
                return quotient + correction
        if not self.natural():
            raise UndecidedError(f"({self}) // ({divisor})")
        return Polynomial({(Floor(f"[({self}) // ({divisor})]", self, divisor),): 1})

    def __rfloordiv__(self, other: int) -> Polynomial:
        return term(other) // self

    def __mod__(self, other: Polynomial | int) -> Polynomial:
        return self - self // other * other

    def _divide(self, divisor: Polynomial) -> tuple[Polynomial, Polynomial]:
        """Polynomial division by the leading term of `divisor`; returns quotient and remainder."""
        lead = max(divisor._terms, key=lambda monomial: (len(monomial), tuple(map(_name, monomial))))
        count = divisor._terms[lead]
        quotient, remainder = Polynomial({}), self
        while (part := remainder._part(lead, count)) is not None:
            quotient, remainder = quotient + part, remainder - divisor * part
        return quotient, remainder

    def _part(self, lead: Monomial, count: int) -> Polynomial | None:
        """Divide the first term that is a multiple of `count * lead` by `count * lead`."""
        for monomial, coefficient in self._terms.items():
            quotient = _without(monomial, lead)
            if coefficient % count == 0 and quotient is not None:
                return Polynomial({quotient: coefficient // count})
        return None

    # --- comparing ---

    def same(self, other: Polynomial | int) -> bool:
        """Whether both are equal for all symbol values; False if this cannot be shown."""
        return not (self - other)._terms

    def natural(self) -> bool:
        """Whether the polynomial is at least 0 for all symbol values; False if this cannot be shown."""
        return all(count >= 0 for count in self._terms.values()) or self._between_floors()

    def positive(self) -> bool:
        """Whether the polynomial is at least 1 for all symbol values; False if this cannot be shown."""
        return (self - 1).natural()

    def _between_floors(self) -> bool:
        """Use that x // d - y // d is at least 0 if x - y is."""
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

    def __lt__(self, other: Polynomial | int) -> bool:
        return _decided(term(other) - self - 1)

    def __gt__(self, other: Polynomial | int) -> bool:
        return _decided(self - term(other) - 1)

    def __le__(self, other: Polynomial | int) -> bool:
        return _decided(term(other) - self)

    def __ge__(self, other: Polynomial | int) -> bool:
        return _decided(self - term(other))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Polynomial | int):
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


def symbol(name: str) -> Polynomial:
    """The unknown integer `name`, which is at least 0."""
    return Polynomial({(Unknown(name),): 1})


def term(value: Polynomial | int) -> Polynomial:
    """Convert an integer to a polynomial."""
    return value if isinstance(value, Polynomial) else Polynomial({(): value})


def _decided(difference: Polynomial) -> bool:
    """Whether `difference` is at least 0 for all symbol values, or negative for all; else UndecidedError."""
    if difference.natural():
        return True
    if (-difference).positive():
        return False
    raise UndecidedError(f"{difference} >= 0")


def _without(monomial: Monomial, part: Monomial) -> Monomial | None:
    """Divide `monomial` by `part`, or return None if it is not a multiple."""
    factors = list(monomial)
    for factor in part:
        if factor not in factors:
            return None
        factors.remove(factor)
    return tuple(factors)
