"""Terms: one element of a value as a function of the elements at the start of a phase.

A term is a sum of contributions with exact rational coefficients:

    term          sum of: coefficient * sum over axes of an atom, with a trace of its rounding
    atom          value     an element of an input, a state or a load, at coordinates of its axes
                  call      a function of terms and blocks: uninterpreted, equal for equal arguments
                  extreme   the maximum or minimum of a term over axes
                  only      a term on ranks with certain coordinates, zero on others
                  undefined an element without a defined content

All atoms of a term refer to one position (leaf and element), which is part of a block (`blocks`). Coordinates
are symbols, so no structure depends on the number of ranks:

    ("rank", axis)   the coordinate of the current rank      ("row", n)     the n-th row digit of a buffer
    ("all", axis)    bound by a sum                          ("at", k)      k
    ("owner", ((axis, symbol), ..), ranks)    the index in `ranks` of the rank with these coordinates
    ("before", symbol, k, n)    k places before a coordinate among n, modulo n
    ("shared", (words, ..))     the shares of the plan that the records of a load went through

Sums are sets, so they do not depend on order, buckets, levels or algorithms. Rounding does: a trace lists
casts, the sums between them, and factors, in order (`rounding`). In the term of a plan, it lists the rounding
that the plan allows. A sum binds its axis; binding an axis twice raises `InexpressibleError`. Terms and atoms
are interned by an `Algebra`, so that equal terms are one object.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from commplan.ir.axes import coordinates, position
from commplan.ir.symbolic.rounding import Event, Trace, cast, is_rounded
from commplan.ir.symbolic.symbols import (
    Chain,
    Symbol,
    Symbols,
    at,
    before,
    free_of,
    rank,
    replaced,
    row,
    substituted,
)
from commplan.ir.types import DType


class InexpressibleError(Exception):
    """A result cannot be expressed, usually because elements are combined that do not belong together."""


class Atom:
    """An atom of a term. Only `Algebra.atom` creates atoms, and equal atoms are one object.

    Attributes:
        number: The number of atoms of the algebra before this one; parts have lower numbers.
        kind: The kind; see the module.
        content: For `value`, the name and (axis, coordinate) pairs, with the axis "" for an owner or share;
            for `call`, the name and the arguments; for `extreme`, the operator, the axes and the term; for
            `only`, (symbol, number) conditions and the term; for `undefined`, the reason.
        defined: Whether all its parts are defined.
        exact: Whether all its parts are free of rounding.
        free: The symbols of ranks, rows and shares in it.
        skeleton: The atom without rounding; itself if it is exact.
    """

    __slots__ = ("content", "defined", "exact", "free", "kind", "number", "skeleton")

    def __init__(self, number: int, kind: str, content: tuple[Any, ...]) -> None:
        self.number, self.kind, self.content = number, kind, content
        self.free: frozenset[Symbol] = frozenset()
        self.exact, self.defined = True, kind != "undefined"
        self.skeleton: Atom = self


class Contribution(NamedTuple):
    """A contribution to a term: `coefficient` times a sum of atoms.

    Attributes:
        atom: The atom.
        sums: The axes that it is summed over, sorted; the symbols ("all", axis) in the atom are bound.
        trace: Its rounding, in the order of events (`rounding`); empty if it is exact.
        coefficient: The exact coefficient, not 0.
    """

    atom: Atom
    sums: tuple[str, ...]
    trace: Trace
    coefficient: Fraction

    def traced(self, event: Event | None) -> Contribution:
        """This contribution with `event` appended to its trace, unless that is None."""
        return self if event is None else self._replace(trace=(*self.trace, event))

    @property
    def is_rounded(self) -> bool:
        """Whether it, or a term within its atom, is rounded."""
        inner = self.atom.content[-1].parts if self.atom.kind in ("extreme", "only") else ()
        return is_rounded(self.trace) or any(part.is_rounded for part in inner)

    @property
    def rounded_members(self) -> list[Contribution]:
        """The contributions within an extreme, with the rounding of each followed by that of the extreme."""
        members: Sequence[Contribution] = self.atom.content[2].parts
        return [member._replace(trace=(*member.trace, *self.trace)) for member in members]

    def summed(self, axes: Iterable[str], times: int) -> Contribution:
        """This contribution, summed over `axes` too and multiplied by `times`."""
        return self._replace(sums=_joined(self.sums, axes), coefficient=self.coefficient * times)


class Term:
    """A sum of contributions. Only `Algebra.term` creates terms, and equal terms are one object.

    Attributes:
        number: The number of terms of the algebra before this one; terms within it have lower numbers.
        parts: The contributions, in a fixed order; none for zero.
        free: The symbols of ranks, rows and shares in it.
        exact: Whether it is free of rounding.
        defined: Whether all its parts are defined.
        skeleton: The term without rounding; itself if it is exact.
    """

    __slots__ = ("defined", "exact", "free", "number", "parts", "skeleton")

    def __init__(self, number: int, parts: tuple[Contribution, ...]) -> None:
        self.number, self.parts = number, parts
        self.free: frozenset[Symbol] = frozenset().union(*(part.atom.free for part in parts))
        self.exact = all(part.atom.exact and not part.trace for part in parts)
        self.defined = all(part.atom.defined for part in parts)
        self.skeleton: Term = self

    def varies(self, axis: str) -> bool:
        """Whether it depends on the coordinate of the current rank along `axis`."""
        return rank(axis) in self.free


class Argument(NamedTuple):
    """An argument of a call: one element of an operand, or a run of elements.

    Attributes:
        term: The term of the element, or of each element of the run.
        operand: The index of the operand; -1 for random numbers.
        leaf: For an element, the index of its leaf; None for the leaf of the result. For a run, a key of its
            leaf, its position there, and the leaf that its elements belong to.
        chain: For a run, or for records of bytes, the row that the elements belong to.
        column: For a run, the first element in that row.
        size: The number of elements of a run; None for an element.
    """

    term: Term
    operand: int
    leaf: Any = None
    chain: Chain = ()
    column: int = 0
    size: int | None = None


class Algebra:
    """Makes and interns terms. Terms of different algebras must not be mixed.

    Args:
        sizes: The number of ranks along each axis. No value varies along an axis of one rank.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self._atoms: dict[tuple[Any, ...], Atom] = {}
        self._terms: dict[tuple[Contribution, ...], Term] = {}
        self._substituted: dict[tuple[int, bool, Any], Any] = {}
        self.zero = self.term(())

    # Making

    def value(self, name: str, axes: Iterable[str], owner: Symbol | None = None) -> Term:
        """An element of the value `name`, which varies along `axes`.

        `owner` is the index of this rank among the owners if not all ranks own it, `UNSHARED` for records of
        a load, and None otherwise.
        """
        where = sorted((axis, rank(axis)) for axis in axes if self.sizes.get(axis, 1) > 1)
        owners = [("", owner)] if owner is not None and owner[0] in ("owner", "shared") else []
        return self.single(self.atom("value", name, (*owners, *where)))

    def call(self, name: str, arguments: Iterable[Argument]) -> Term:
        """The result of an uninterpreted function, which is equal for equal arguments."""
        return self.single(self.atom("call", name, tuple(arguments)))

    def undefined(self, why: str) -> Term:
        """An element without a defined content. It equals no expected term."""
        return self.single(self.atom("undefined", why))

    def single(self, atom: Atom) -> Term:
        """The term that consists of `atom`."""
        return self.term((Contribution(atom, (), (), Fraction(1)),))

    def term(self, parts: Iterable[Contribution]) -> Term:
        """The sum of `parts`, with those merged that differ only in their coefficient."""
        total: dict[tuple[Atom, tuple[str, ...], Trace], Fraction] = {}
        for atom, sums, trace, coefficient in parts:
            key = (atom, sums, trace)
            coefficient_so_far = total.get(key)
            total[key] = coefficient if coefficient_so_far is None else coefficient_so_far + coefficient
        merged = [Contribution(*key, coefficient) for key, coefficient in total.items() if coefficient]
        if len(merged) > 1:
            merged.sort(key=lambda part: (part.atom.number, part.sums, part.trace))
        contributions = tuple(merged)
        term = self._terms.get(contributions)
        if term is None:
            term = self._terms[contributions] = Term(len(self._terms), contributions)
            if not term.exact:
                bare = (part._replace(atom=part.atom.skeleton, trace=()) for part in contributions)
                term.skeleton = self.term(bare)
        return term

    def atom(self, kind: str, *content: Any) -> Atom:
        """The atom of this kind and content; see `Atom`."""
        key = (kind, *content)
        atom = self._atoms.get(key)
        if atom is None:
            atom = self._atoms[key] = Atom(len(self._atoms), kind, content)
            self._describe(atom)
        return atom

    def _describe(self, atom: Atom) -> None:
        """Set the properties of a new atom that follow from its content."""
        content = atom.content
        match atom.kind:
            case "value":
                atom.free = free_of(symbol for _, symbol in content[1])
            case "call":
                name, arguments = content
                atom.exact = all(argument.term.exact for argument in arguments)
                atom.defined = all(argument.term.defined for argument in arguments)
                free = [argument.term.free for argument in arguments]
                symbols = (s for argument in arguments for cut in argument.chain for _, s in cut.digits)
                atom.free = frozenset().union(*free, free_of(symbols))
                if not atom.exact:
                    atom.skeleton = self.atom("call", name, _merged(arguments))
            case "extreme":
                op, axes, term = content
                atom.exact, atom.defined, atom.free = term.exact, term.defined, term.free
                atom.skeleton = atom if term.exact else self.atom("extreme", op, axes, term.skeleton)
            case "only":
                conditions, term = content
                atom.exact, atom.defined = term.exact, term.defined
                atom.free = term.free | free_of(symbol for symbol, _ in conditions)
                atom.skeleton = atom if term.exact else self.atom("only", conditions, term.skeleton)
            case _:
                pass

    def owner(self, axes: Sequence[str], owners: Sequence[int]) -> Symbol:
        """The index of this rank among `owners`, ranks that are row-major over `axes`."""
        several = sorted(axis for axis in axes if self.sizes[axis] > 1)
        places = (coordinates(number, axes, self.sizes) for number in owners)
        numbers = tuple(position(place, several, self.sizes) for place in places)
        where = tuple((axis, self.sizes[axis], rank(axis)) for axis in several)
        return replaced(("owner", where, numbers), {})

    def shift(self, axes: Sequence[str], by: int) -> Symbols:
        """The substitution for values from the rank `by` places before along `axes`, a single axis."""
        (axis,) = axes
        return {rank(axis): before(rank(axis), by, self.sizes[axis])} if self.sizes[axis] > 1 else {}

    # Arithmetic

    def add(self, terms: Sequence[Term]) -> Term:
        """The exact sum of `terms`."""
        if len(terms) == 1:
            return terms[0]
        return self.term(part for term in terms for part in term.parts)

    def scaled(self, term: Term, factor: Fraction) -> Term:
        """`term` times `factor`, exactly."""
        if factor == 1:
            return term
        return self.term(part._replace(coefficient=part.coefficient * factor) for part in term.parts)

    def times(self, term: Term, factor: Fraction, dtype: DType) -> Term:
        """`term` times `factor`, rounded to `dtype`, with the factor in each trace."""
        events = ((part, ("scale", factor, dtype, _summed(part))) for part in term.parts)
        return self.scaled(self.term(part.traced(event) for part, event in events), factor)

    def traced(self, term: Term, event: Event) -> Term:
        """`term` with `event` appended to every trace."""
        return self.term(part.traced(event) for part in term.parts)

    def cast(self, term: Term, before: DType, after: DType) -> Term:
        """`term` converted from the type `before` to the type `after`."""
        return self.term(part._replace(trace=cast(part.trace, before, after)) for part in term.parts)

    def only(self, term: Term, conditions: Iterable[tuple[Symbol, int]]) -> Term:
        """`term` on ranks whose symbols have the numbers in `conditions`, zero on others."""
        required = dict(conditions)
        inner = self.substitute(term, {symbol: at(place) for symbol, place in required.items()})
        if not required or not inner.parts:
            return inner
        if len(inner.parts) == 1 and inner.parts[0].atom.kind == "only":
            (part,) = inner.parts
            if not part.sums and not part.trace:
                inner_conditions, whole = part.atom.content
                required = dict((*inner_conditions, *required.items()))
                inner = self.scaled(whole, part.coefficient)
        return self.single(self.atom("only", tuple(sorted(required.items())), inner))

    def total(self, term: Term, axes: Sequence[str], allowed: Event | None = None) -> Term:
        """The sum over `axes`. A contribution that does not vary along an axis counts once per rank.

        `allowed` is the event of `rounding.allowed_event`. If it is None, rounded contributions get a `sum`
        event instead.
        """
        several = sorted(axis for axis in axes if self.sizes.get(axis, 1) > 1)
        parts: list[Contribution] = []
        for part in term.parts:
            # Along the axes of an `only`, all other ranks add zeros, which is exact.
            zero = [symbol for symbol, _ in part.atom.content[0]] if part.atom.kind == "only" else []
            added = tuple(axis for axis in several if rank(axis) not in zero)
            event = allowed or (("sum", added) if part.is_rounded and added else None)
            parts += self._total(part.traced(event), axes)
        return self.term(parts)

    def _total(self, part: Contribution, axes: Sequence[str]) -> Iterator[Contribution]:
        """The contributions of the sum of `part` over `axes`."""
        atom, inside = part.atom, {rank(axis) for axis in axes}
        if atom.kind == "only" and any(symbol in inside for symbol, _ in atom.content[0]):
            # The sum over an axis of a value on a single rank is that value.
            conditions, inner = atom.content
            other_conditions = [pair for pair in conditions if pair[0] not in inside]
            single_axes = {symbol[1] for symbol, _ in conditions if symbol in inside}
            other_axes = [axis for axis in axes if axis not in single_axes]
            for whole in _within(part, inner):
                yield from self.only(self.term(self._total(whole, other_axes)), other_conditions).parts
            return
        varying = [axis for axis in axes if rank(axis) in atom.free]
        same = math.prod(self.sizes.get(axis, 1) for axis in axes if axis not in varying)
        symbols: Symbols = {rank(axis): ("all", axis) for axis in varying}
        _check_unbound(part.sums, atom.free, symbols)
        yield from _within(part.summed(varying, same), self.substitute_atom(atom, symbols))

    def extreme(self, op: Literal["max", "min"], term: Term, axes: Sequence[str]) -> Term:
        """The maximum or minimum over `axes`. Rounding is monotone, so it may happen afterwards."""
        varying = tuple(sorted(axis for axis in axes if term.varies(axis)))
        if not varying:
            return term
        inner = self.substitute(term, {rank(axis): ("all", axis) for axis in varying})
        trace: Trace = ()
        if len(inner.parts) == 1 and inner.parts[0].coefficient == 1:
            (part,) = inner.parts
            trace, inner = part.trace, self.term((part._replace(trace=()),))
            if part.atom.kind == "extreme" and not part.sums and part.atom.content[0] == op:
                varying, inner = tuple(sorted({*varying, *part.atom.content[1]})), part.atom.content[2]
        return self.term((Contribution(self.atom("extreme", op, varying, inner), (), trace, Fraction(1)),))

    def summed_rows(self, term: Term, digits: Mapping[int, tuple[int, str | None]]) -> Term:
        """The sum over some digits of the row index.

        `digits` has the count of each digit, and the axis along which its rows were gathered, or None.
        """
        axes = tuple(sorted(axis for _, axis in digits.values() if axis))
        parts: list[Contribution] = []
        for part in term.parts:
            free = part.atom.free
            varying = {digit: axis for digit, (_, axis) in digits.items() if row(digit) in free}
            if None in varying.values() or len(set(varying.values())) < len(varying):
                raise InexpressibleError("rows of unknown ranks are added")
            same = math.prod(count for digit, (count, _) in digits.items() if digit not in varying)
            event = ("sum", axes) if part.is_rounded and axes else None
            symbols: Symbols = {row(digit): ("all", axis) for digit, axis in varying.items()}
            _check_unbound(part.sums, free, symbols)
            bound = self.substitute_atom(part.atom, symbols)
            parts += _within(part.traced(event).summed(map(str, varying.values()), same), bound)
        return self.term(parts)

    # Substitution

    def substitute(self, term: Term, symbols: Symbols) -> Term:
        """`term` with symbols replaced simultaneously, inner terms first to avoid deep recursion."""
        if term.free.isdisjoint(symbols):
            return term
        key = (term.number, True, tuple(symbols.items()))
        if key not in self._substituted:
            for inner in self._nested(term, symbols):
                with contextlib.suppress(InexpressibleError):  # raised again if the term is needed
                    self._substitute(inner, symbols)
            self._substitute(term, symbols)
        return self._substituted[key]

    def _substitute(self, term: Term, symbols: Symbols) -> None:
        for part in term.parts:
            _check_unbound(part.sums, part.atom.free, symbols)
        parts = (_within(part, self.substitute_atom(part.atom, symbols)) for part in term.parts)
        result = self.term(itertools.chain.from_iterable(parts))
        self._substituted[term.number, True, tuple(symbols.items())] = result

    def _nested(self, term: Term, symbols: Symbols) -> list[Term]:
        """The terms within `term` in which symbols must be replaced, innermost first.

        A term has a higher number than its parts.
        """
        pending: dict[int, Term] = {}
        stack = [term]
        while stack:
            for part in stack.pop().parts:
                content = part.atom.content
                inside = [argument.term for argument in content[1]] if part.atom.kind == "call" else content
                for inner in (item for item in inside if isinstance(item, Term)):
                    is_done = (inner.number, True, tuple(symbols.items())) in self._substituted
                    if inner.number not in pending and not is_done and not inner.free.isdisjoint(symbols):
                        pending[inner.number] = inner
                        stack.append(inner)
        return [pending[number] for number in sorted(pending)]

    def substitute_atom(self, atom: Atom, symbols: Symbols) -> Term:
        """The term of `atom` with symbols replaced."""
        if atom.free.isdisjoint(symbols):
            return self.single(atom)
        key = (atom.number, False, tuple(symbols.items()))
        result = self._substituted.get(key)
        if result is None:
            result = self._substituted[key] = self._renamed(atom, symbols)
        return result

    def _renamed(self, atom: Atom, symbols: Symbols) -> Term:
        """As `substitute_atom`, without the cache."""
        content = atom.content
        match atom.kind:
            case "value":
                where = tuple((axis, replaced(symbol, symbols)) for axis, symbol in content[1])
                if ("", at(-1)) in where:
                    return self.undefined("the part of a rank that owns none")
                where = tuple(pair for pair in where if pair != ("", at(0)))
                return self.single(self.atom("value", content[0], where))
            case "call":
                arguments: list[Argument] = []
                for argument in content[1]:
                    chain = substituted(argument.chain, symbols)
                    if chain is None:
                        return self.undefined("the part of a rank that owns none")
                    term = self.substitute(argument.term, symbols)
                    arguments.append(argument._replace(term=term, chain=chain))
                return self.call(content[0], arguments)
            case "extreme":
                op, axes, inner = content
                _check_unbound(axes, inner.free, symbols)
                return self.single(self.atom("extreme", op, axes, self.substitute(inner, symbols)))
            case "only":
                conditions: list[tuple[Symbol, int]] = []
                for symbol, place in content[0]:
                    new = replaced(symbol, symbols)
                    if new[0] != "at":
                        conditions.append((new, place))
                    elif new[1] != place:
                        return self.zero
                return self.only(self.substitute(content[1], symbols), conditions)
            case _:
                return self.single(atom)


def _merged(arguments: Iterable[Argument]) -> tuple[Argument, ...]:
    """`arguments` without rounding; adjacent runs of elements that differ only in rounding become one."""
    merged: list[Argument] = []
    for argument in (each._replace(term=each.term.skeleton) for each in arguments):
        last = merged[-1] if merged else None
        if last is not None and argument.size is not None and last.size is not None:
            leaf, begin, source = last.leaf
            following = last._replace(leaf=(leaf, begin + last.size, source), column=last.column + last.size)
            if following._replace(size=argument.size) == argument:
                merged[-1] = last._replace(size=last.size + argument.size)
                continue
        merged.append(argument)
    return tuple(merged)


def _summed(part: Contribution) -> tuple[str, ...]:
    """The axes that `part` is summed over, also within a term on certain ranks (`only`)."""
    inside = part.atom.content[1].parts if part.atom.kind == "only" else ()
    return _joined(part.sums, (axis for each in inside for axis in _summed(each)))


def _check_unbound(sums: Sequence[str], free: frozenset[Symbol], symbols: Symbols) -> None:
    """Raise if substituting `symbols` for `free` ones would bind an axis that is in `sums` already."""
    for symbol, bound in symbols.items():
        if bound[0] == "all" and bound[1] in sums and symbol in free:
            raise InexpressibleError(f"a sum over {bound[1]} depends on that axis again")


def _joined(first: Iterable[str], second: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({*first, *second}))


def _within(outer: Contribution, inner: Term) -> Iterator[Contribution]:
    """`outer` with `inner` in place of its atom."""
    for atom, sums, trace, coefficient in inner.parts:
        axes = _joined(outer.sums, sums)
        yield Contribution(atom, axes, trace + outer.trace, coefficient * outer.coefficient)
