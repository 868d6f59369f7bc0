"""Comparison of the symbolic terms of a schedule with those of its plan, including rounding.

`commplan.verify.equivalence` compares all outputs and states of a schedule with it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from commplan.ir.symbolic.rounding import accepts
from commplan.ir.symbolic.terms import Algebra, Argument, Atom, Contribution, Term

# A comparison that yields pairs of inner terms, receives whether they are equal, and returns the result.
Walk = Generator[tuple[Term, Term], Any, bool]


class TermComparison:
    """Compares terms: `comparison(actual, expected)` is whether `actual` has the value that the plan expects.

    Both must have equal contributions, and each contribution of `actual` may be rounded only as `expected`
    allows. Results are cached.

    Args:
        algebra: The algebra of both terms.
    """

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra
        self._results: dict[tuple[int, int], bool] = {}

    def __call__(self, actual: Term, expected: Term) -> bool:
        """Compare with an explicit stack, since terms are nested as deep as a phase is long."""
        equal = self._compare_shallow(actual, expected)
        stack = [self._compare_parts(actual, expected)] if equal is None else []
        while stack:
            try:
                pair = stack[-1].send(equal)
            except StopIteration as stop:
                stack.pop()
                equal = stop.value
                continue
            equal = self._compare_shallow(*pair)
            if equal is None:
                stack.append(self._compare_parts(*pair))
        return bool(equal)

    def _compare_shallow(self, actual: Term, expected: Term) -> bool | None:
        """The result if it does not depend on the parts, else None."""
        if not actual.defined:
            return False
        if actual is expected:
            return True
        if actual.skeleton is not expected.skeleton:
            return False
        return self._results.get((actual.number, expected.number))

    def _compare_parts(self, actual: Term, expected: Term) -> Walk:
        """Compare the rounding of terms with equal skeletons, and store the result."""
        result = True
        for part in actual.parts:
            if not (yield from self._allowed(part, expected.parts)):
                result = False
                break
        self._results[actual.number, expected.number] = result
        return result

    def _allowed(self, part: Contribution, expected: Sequence[Contribution]) -> Walk:
        """Whether one of the contributions `expected` allows the contribution `part`."""
        for other in expected:
            matches = other.sums == part.sums and other.atom.skeleton is part.atom.skeleton
            if matches and (yield from self._contribution_allowed(part, other)):
                return True
        return False

    def _contribution_allowed(self, part: Contribution, expected: Contribution) -> Walk:
        """Whether two contributions with the same skeleton are rounded alike.

        Rounding is monotone, so an extreme may be taken before or after it, and the traces inside and outside
        of an extreme count together.
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
        """Compare the rounding within atoms with equal skeletons, other than extremes."""
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
        """Compare arguments in order.

        Runs of whole values may be split differently; equal skeletons imply that they cover the same
        elements.
        """
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


def _overlap(first: Argument, second: Argument) -> bool:
    """Whether both arguments are runs of the same leaf that have elements in common."""
    if (
        first.operand != second.operand
        or first.size is None
        or second.size is None
        or first.leaf[0] != second.leaf[0]
    ):
        return False
    return first.leaf[1] < second.leaf[1] + second.size and second.leaf[1] < first.leaf[1] + first.size
