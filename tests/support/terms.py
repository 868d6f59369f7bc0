"""Symbolic numbers: exact polynomials over the elements of inputs, with their roundings.

An array whose elements are `Term`s is an object array. Two terms are equal if they are the same object. An
expression that is not a polynomial (a maximum, an inverse, a user function, the bits of a float) is an atom,
identified by its operands. `marks` lists the roundings of an element: `sum float32` for additions in that
type, `scale` for multiplications, `cast` for conversions to a narrower type. Divisors are assumed to be
nonzero.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np

Array = Any
Number = int | Fraction
Mono = tuple[tuple[int, int], ...]  # (atom, power), by atom
Key = frozenset[tuple[Mono, Number]]

EXACT = ""  # the type without rounding

_atoms: dict[Any, int] = {}
_words: list[str] = []
_terms: dict[tuple[Key, str, frozenset[str]], Term] = {}


class Term:
    """A polynomial, the type it is held in and the roundings behind it. Made by `_term` alone."""

    __slots__ = ("dtype", "key", "marks", "poly")

    def __init__(self, poly: dict[Mono, Number], key: Key, dtype: str, marks: frozenset[str]) -> None:
        self.poly, self.key, self.dtype, self.marks = poly, key, dtype, marks

    @property
    def constant(self) -> Number | None:
        """Its value, if known."""
        if not self.poly:
            return 0
        return self.poly.get(()) if len(self.poly) == 1 else None

    def __add__(self, other: Any) -> Any:
        return self._with(other, add)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._with(other, subtract)

    def __rsub__(self, other: Any) -> Any:
        return self._with(other, lambda a, b: subtract(b, a))

    def __mul__(self, other: Any) -> Any:
        return self._with(other, multiply)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> Any:
        return self._with(other, divide)

    def _with(self, other: Any, how: Callable[[Term, Term], Term]) -> Any:
        if isinstance(other, np.ndarray):  # which goes through its elements itself
            return NotImplemented
        return how(self, other if isinstance(other, Term) else constant(other, self.dtype))

    def __eq__(self, other: object) -> bool:
        return self is other if isinstance(other, Term) else self.constant == other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        text = _text(self.key)
        return f"{text} ({', '.join((self.dtype, *sorted(self.marks)))})" if self.dtype else text


def _text(key: Key) -> str:
    def product(mono: Mono) -> str:
        return " ".join(_words[atom] + (f"^{power}" if power != 1 else "") for atom, power in mono)

    parts = sorted(f"{'' if c == 1 and mono else f'{c} '}{product(mono)}".strip() for mono, c in key)
    shown = " + ".join(parts) or "0"
    return shown if len(shown) <= 400 else f"{shown[:400]}..."


def _term(poly: dict[Mono, Number], dtype: str, marks: frozenset[str]) -> Term:
    key = frozenset(poly.items())
    term = _terms.get((key, dtype, marks))
    if term is None:
        term = _terms[key, dtype, marks] = Term(poly, key, dtype, marks)
    return term


_NONE: frozenset[str] = frozenset()


@functools.cache
def simplest(value: float, epsilon: float) -> Number:
    """The simplest fraction that a number of that precision may stand for: 1/3 for 0.33333334."""
    if value == int(value):
        return int(value)
    if value < 0:
        return -simplest(-value, epsilon)
    exact = Fraction(value)
    low, high = exact * (1 - Fraction(epsilon)), exact * (1 + Fraction(epsilon))
    return _between(low, high)


def _between(low: Fraction, high: Fraction) -> Fraction:
    whole = low.numerator // low.denominator
    if low == whole:
        return Fraction(whole)
    if whole + 1 <= high:
        return Fraction(whole + 1)
    return whole + 1 / _between(1 / (high - whole), 1 / (low - whole))


@functools.cache
def _epsilon(dtype: Any) -> float:
    return float(ml_dtypes.finfo(dtype).eps) if dtype.kind in "fV" else 0.0


def constant(value: Any, dtype: str) -> Term:
    """A known number, as a term."""
    if isinstance(value, int | Fraction | bool):
        number: Number = int(value) if isinstance(value, bool) else value
    else:
        array = np.asarray(value)
        is_known = array.dtype.kind in "fV"
        number = simplest(float(array), _epsilon(array.dtype)) if is_known else int(array)
    return _term({(): number} if number else {}, dtype, _NONE)


def _atom(key: Any, word: str) -> Mono:
    number = _atoms.get(key)
    if number is None:
        number = _atoms[key] = len(_words)
        _words.append(word)
    return ((number, 1),)


def atom(
    word: str, operands: Sequence[Term], dtype: str, detail: Any = None, marks: frozenset[str] = _NONE
) -> Term:
    """The result of `word` for `operands`; an unknown without operands."""
    key = (word, detail, *(each.key for each in operands))
    text = f"{word}({', '.join(_text(each.key) for each in operands)})" if operands else word
    return _term({_atom(key, text): 1}, dtype, marks.union(*(each.marks for each in operands)))


def _type(a: Term, b: Term) -> str:
    if a.dtype != b.dtype:
        raise AssertionError(f"{a} and {b} are of two types")
    return a.dtype


def add(a: Term, b: Term) -> Term:
    """The sum, rounded to the type of both."""
    dtype = _type(a, b)
    if not a.poly:
        return b
    if not b.poly:
        return a
    poly = dict(a.poly)
    for mono, c in b.poly.items():
        total = poly.get(mono, 0) + c
        if total:
            poly[mono] = total
        else:
            del poly[mono]
    is_constant = a.constant is not None or b.constant is not None
    return _term(poly, dtype, (a.marks | b.marks) if is_constant else a.marks | b.marks | {f"sum {dtype}"})


def subtract(a: Term, b: Term) -> Term:
    """The difference, rounded to the type of both."""
    return add(a, _times(b, -1))


def divide(a: Term, b: Term) -> Term:
    """The quotient, rounded to the type of both; `b` is not zero."""
    return multiply(a, inverse(b))


def _times(a: Term, number: Number) -> Term:
    return _term({mono: c * number for mono, c in a.poly.items()}, a.dtype, a.marks)


def multiply(a: Term, b: Term) -> Term:
    """The product, rounded to the type of both."""
    dtype = _type(a, b)
    for first, second in ((a, b), (b, a)):
        factor = first.constant
        if factor is None:
            continue
        if factor == 0:
            return constant(0, dtype)
        if factor == 1:
            return second
        if second.constant is None:
            product = _times(second, factor)
            return _term(product.poly, dtype, product.marks | {f"scale {dtype}"})
    poly: dict[Mono, Number] = {}
    for monomial, c in a.poly.items():
        for right, d in b.poly.items():
            powers = dict(monomial)
            for number, power in right:
                powers[number] = powers.get(number, 0) + power
            mono = tuple(sorted((n, p) for n, p in powers.items() if p))
            poly[mono] = poly.get(mono, 0) + c * d
    return _term({m: c for m, c in poly.items() if c}, dtype, a.marks | b.marks | {f"scale {dtype}"})


def times_unknown(word: str, a: Term) -> Term:
    """The result of a linear function of `a`: the same extent, and no known rounding."""
    product = multiply(atom(word, (), a.dtype), a)
    return _term(product.poly, a.dtype, a.marks)


def inverse(a: Term) -> Term:
    """1 / a, where `a` is not zero."""
    value = a.constant
    if value is not None:
        return constant(1 / Fraction(value), a.dtype)
    if len(a.poly) == 1:
        ((mono, c),) = a.poly.items()
        return _term({tuple((n, -p) for n, p in mono): 1 / Fraction(c)}, a.dtype, a.marks)
    first = min(a.poly.items(), key=lambda item: item[0])[1]
    scaled = _times(a, 1 / Fraction(first))
    return _times(atom("1/", [scaled], a.dtype), 1 / Fraction(first))


def extreme(word: str, a: Term, b: Term) -> Term:
    """The maximum or the minimum: of all that either is one of."""
    dtype = _type(a, b)
    if a.key == b.key:
        return _term(a.poly, dtype, a.marks | b.marks)
    members = _members(word, a) | _members(word, b)
    mono = _atom((word, members), f"{word}({', '.join(sorted(map(_text, members)))})")
    _lattice[mono[0][0]] = word, members
    return _term({mono: 1}, dtype, a.marks | b.marks)


def _members(word: str, a: Term) -> frozenset[Key]:
    if len(a.poly) == 1:
        ((mono, c),) = a.poly.items()
        if c == 1 and len(mono) == 1 and mono[0][1] == 1:
            kind, members = _lattice.get(mono[0][0], ("", _NONE))
            if kind == word:
                return members
    return frozenset([a.key])


_lattice: dict[int, tuple[str, frozenset[Any]]] = {}


_FLOATS = ("float16", "bfloat16", "float32", "float64")


def cast(a: Term, dtype: str) -> Term:
    """`a` in another type, marked if that type has fewer digits."""
    if dtype == a.dtype:
        return a
    narrow = a.constant is None and dtype in ("float16", "bfloat16") and a.dtype != EXACT
    lost = a.dtype in _FLOATS and dtype not in _FLOATS and dtype != EXACT and a.constant is None
    if lost:
        return atom(f"whole {dtype}", [a], dtype)
    return _term(a.poly, dtype, a.marks | {f"cast {dtype}"} if narrow else a.marks)


def bits(a: Term, dtype: str) -> Term:
    """The bits of `a` as another type, and the way back."""
    if not a.poly:
        return constant(0, dtype)
    if len(a.poly) == 1:
        ((mono, c),) = a.poly.items()
        if c == 1 and len(mono) == 1 and mono[0][1] == 1 and mono[0][0] in _held:
            poly, number = _held[mono[0][0]]
            if number == dtype:
                return _term(poly, dtype, a.marks)
    term = atom(f"bits {a.dtype}", [a], dtype)
    _held[next(iter(term.poly))[0][0]] = (a.poly, a.dtype)
    return term


_held: dict[int, tuple[dict[Mono, Number], str]] = {}

# Arrays


def is_known(array: Array) -> bool:
    """Whether an array holds plain numbers."""
    return array.dtype != object


def each(function: Callable[..., Any], *arrays: Array) -> Array:
    """`function` of the elements of arrays, which have one shape."""
    results = np.empty(arrays[0].shape, object)
    flat = results.reshape(-1)
    for i, row in enumerate(zip(*(array.reshape(-1) for array in arrays), strict=True)):
        flat[i] = function(*row)
    return flat.reshape(results.shape)


def lift(array: Array, dtype: str | None = None) -> Array:
    """An array of terms from any array; numbers get type `dtype`, if given."""
    if is_known(array):
        name = array.dtype.name if dtype is None else dtype
        return each(lambda x: constant(x, name), array)
    if all(type(x) is Term for x in array.flat):
        return array
    inside = [
        x.item() if isinstance(x, np.ndarray) else x for x in array.flat
    ]  # NumPy nests those of no axes
    name = next((x.dtype for x in inside if isinstance(x, Term)), EXACT) if dtype is None else dtype
    terms_of = np.empty(len(inside), object)
    terms_of[:] = [x if isinstance(x, Term) else constant(x, name) for x in inside]
    return terms_of.reshape(array.shape)


def symbols(name: str, shape: tuple[int, ...], dtype: str) -> Array:
    """An array of unknowns."""
    array = np.empty(shape, object)
    for place in np.ndindex(*shape):
        array[place] = atom(f"{name}{list(place)}", (), dtype)
    return array


def retyped(array: Array, dtype: str) -> Array:
    """The same terms with another type, without rounding."""
    return each(lambda x: _term(x.poly, dtype, _NONE), array)


def fold(word: str, arrays: Sequence[Array]) -> Array:
    """Arrays of terms combined in their order: sum, max or min."""
    how = add if word == "sum" else functools.partial(extreme, word)
    return functools.reduce(lambda a, b: each(how, a, b), arrays)


def fold_along(word: str, array: Array, dims: Sequence[int]) -> Array:
    """An array of terms combined along some of its dimensions, in their order."""
    moved = np.moveaxis(array, dims, range(len(dims)))
    count = int(np.prod(moved.shape[: len(dims)], dtype=int))
    rows = moved.reshape(count, *moved.shape[len(dims) :])
    return fold(word, [np.asarray(row) for row in rows])


def forget() -> None:
    """Clear the table of terms, between two unrelated plans."""
    for table in (_atoms, _terms, _held, _lattice):
        table.clear()
    _words.clear()
