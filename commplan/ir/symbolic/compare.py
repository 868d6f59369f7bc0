"""Whether the term of a schedule is that of its plan, rounding included."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from commplan.ir.symbolic.rounding import accepts
from commplan.ir.symbolic.terms import Algebra, Argument, Atom, Contribution, Term

Walk = Generator[tuple[Term, Term], Any, bool]  # yields terms, and receives whether they are alike


class Comparison:
    """`comparison(actual, expected)`: the same contributions, and each rounded as the plan allows, no
    further."""

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra
        self._known: dict[tuple[int, int], bool] = {}

    def __call__(self, actual: Term, expected: Term) -> bool:
        """Terms within terms are on a stack of their own: a phase nests them as deep as it is long."""
        known = self._at_once(actual, expected)
        stack = [self._parts(actual, expected)] if known is None else []
        while stack:
            try:
                pair = stack[-1].send(known)
            except StopIteration as stop:
                stack.pop()
                known = stop.value
                continue
            known = self._at_once(*pair)
            if known is None:
                stack.append(self._parts(*pair))
        return bool(known)

    def _at_once(self, actual: Term, expected: Term) -> bool | None:
        """The result where it needs no look at the parts."""
        if not actual.defined:
            return False
        if actual is expected:
            return True
        if actual.skeleton is not expected.skeleton:
            return False
        return self._known.get((actual.number, expected.number))

    def _parts(self, actual: Term, expected: Term) -> Walk:
        result = True
        for part in actual.parts:
            if not (yield from self._allowed(part, expected.parts)):
                result = False
                break
        self._known[actual.number, expected.number] = result
        return result

    def _allowed(self, part: Contribution, expected: Sequence[Contribution]) -> Walk:
        for other in expected:
            alike = other.sums == part.sums and other.atom.skeleton is part.atom.skeleton
            if alike and (yield from self._alike(part, other)):
                return True
        return False

    def _alike(self, part: Contribution, expected: Contribution) -> Walk:
        """Whether two contributions of one skeleton are rounded alike.

        Rounding is monotone, so an extreme may be taken before or after it. The traces of its members count
        inside and outside together.
        """
        if part.atom.kind == "extreme":
            inside = expected.rounded_members
            for member in part.rounded_members:
                if not (yield from self._allowed(member, inside)):
                    return False
            return True
        accepted = accepts(part.trace, expected.trace, self.algebra.sizes)
        return accepted and (yield from self._atoms(part.atom, expected.atom))

    def _atoms(self, actual: Atom, expected: Atom) -> Walk:
        if actual is expected:
            return True
        match actual.kind:
            case "call":
                return (yield from self._arguments(actual.content[1], expected.content[1]))
            case "only":
                return (yield actual.content[1], expected.content[1])
            case _:
                return False

    def _arguments(self, actual: Sequence[Argument], expected: Sequence[Argument]) -> Walk:
        """Runs of whole values may be cut otherwise; that they cover the same is known of the skeletons."""
        place = 0
        for argument in actual:
            if argument.size is None:
                if not (yield argument.term, expected[place].term):
                    return False
                place += 1
                continue
            while not _overlap(argument, expected[place]):
                place += 1
            following = place
            while following < len(expected) and _overlap(argument, expected[following]):
                if not (yield argument.term, expected[following].term):
                    return False
                following += 1
        return True


def _overlap(left: Argument, right: Argument) -> bool:
    if (
        left.operand != right.operand
        or left.size is None
        or right.size is None
        or left.leaf[0] != right.leaf[0]
    ):
        return False
    return left.leaf[1] < right.leaf[1] + right.size and right.leaf[1] < left.leaf[1] + left.size
