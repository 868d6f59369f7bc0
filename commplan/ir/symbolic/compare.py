"""Whether the term of a schedule is that of its plan, rounding included."""

from __future__ import annotations

from collections.abc import Sequence

from commplan.ir.symbolic.rounding import accepts
from commplan.ir.symbolic.terms import Algebra, Argument, Atom, Contribution, Term


class Comparison:
    """`comparison(actual, expected)`: the same contributions, and each rounded as the plan allows, no
    further."""

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra
        self._known: dict[tuple[int, int], bool] = {}

    def __call__(self, actual: Term, expected: Term) -> bool:
        if not actual.defined:
            return False
        if actual is expected:
            return True
        if actual.skeleton is not expected.skeleton:
            return False
        key = (actual.number, expected.number)
        if key not in self._known:
            self._known[key] = all(self._allowed(part, expected.parts) for part in actual.parts)
        return self._known[key]

    def _allowed(self, part: Contribution, expected: Sequence[Contribution]) -> bool:
        return any(
            self._alike(part, other)
            for other in expected
            if other.sums == part.sums and other.atom.skeleton is part.atom.skeleton
        )

    def _alike(self, part: Contribution, expected: Contribution) -> bool:
        """Whether two contributions of one skeleton are rounded alike.

        Rounding is monotone, so an extreme may be taken before or after it. The traces of its members count
        inside and outside together.
        """
        if part.atom.kind == "extreme":
            inside = expected.rounded_members
            return all(self._allowed(member, inside) for member in part.rounded_members)
        return accepts(part.trace, expected.trace, self.algebra.sizes) and self._atoms(
            part.atom, expected.atom
        )

    def _atoms(self, actual: Atom, expected: Atom) -> bool:
        if actual is expected:
            return True
        match actual.kind:
            case "call":
                return self._arguments(actual.content[1], expected.content[1])
            case "only":
                return self(actual.content[1], expected.content[1])
            case _:
                return False

    def _arguments(self, actual: Sequence[Argument], expected: Sequence[Argument]) -> bool:
        """Runs of whole values may be cut otherwise; that they cover the same is known of the skeletons."""
        place = 0
        for argument in actual:
            if argument.size is None:
                if not self(argument.term, expected[place].term):
                    return False
                place += 1
                continue
            while not _overlap(argument, expected[place]):
                place += 1
            following = place
            while following < len(expected) and _overlap(argument, expected[following]):
                if not self(argument.term, expected[following].term):
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
