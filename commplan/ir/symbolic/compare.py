"""Whether the term of a schedule is that of its plan, rounding included."""

from __future__ import annotations

from collections.abc import Sequence

from commplan.ir.symbolic.rounding import accepts
from commplan.ir.symbolic.terms import Algebra, Argument, Atom, Contribution, Term


class Comparison:
    """`comparison(found, expected)`: the same contributions, and each rounded as the plan allows, no
    further."""

    def __init__(self, algebra: Algebra) -> None:
        self.algebra = algebra
        self._known: dict[tuple[int, int], bool] = {}

    def __call__(self, found: Term, expected: Term) -> bool:
        if not found.defined:
            return False
        if found is expected:
            return True
        if found.skeleton is not expected.skeleton:
            return False
        key = (found.number, expected.number)
        if key not in self._known:
            self._known[key] = all(self._allowed(part, expected.parts) for part in found.parts)
        return self._known[key]

    def _allowed(self, part: Contribution, expected: Sequence[Contribution]) -> bool:
        return any(
            accepts(part.trace, other.trace) and self._atoms(part.atom, other.atom)
            for other in expected
            if other.sums == part.sums and other.atom.skeleton is part.atom.skeleton
        )

    def _atoms(self, found: Atom, expected: Atom) -> bool:
        if found is expected:
            return True
        match found.kind:
            case "call":
                return self._arguments(found.content[1], expected.content[1])
            case "extreme":
                return self(found.content[2], expected.content[2])
            case "only":
                return self(found.content[1], expected.content[1])
            case _:
                return False

    def _arguments(self, found: Sequence[Argument], expected: Sequence[Argument]) -> bool:
        """Runs of whole values may be cut otherwise; that they cover the same is known of the skeletons."""
        place = 0
        for argument in found:
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


def _overlap(one: Argument, other: Argument) -> bool:
    if one.operand != other.operand or one.size is None or other.size is None or one.leaf[0] != other.leaf[0]:
        return False
    return one.leaf[1] < other.leaf[1] + other.size and other.leaf[1] < one.leaf[1] + one.size
