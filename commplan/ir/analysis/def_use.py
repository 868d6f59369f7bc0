"""Which op makes a value, which ops read it, and what it is made from."""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import cached_property
from typing import Generic

from commplan.ir.ops import AnyOp, operands, results
from commplan.ir.refs import Ref


class DefUse(Generic[AnyOp]):
    """The makers and readers of the values of `ops`, found in one pass over them.

    places: of the op that makes each value, its number among `ops`.
    """

    def __init__(self, ops: Iterable[AnyOp]) -> None:
        self.ops = tuple(ops)
        self.places = {ref: place for place, op in enumerate(self.ops) for ref in results(op)}

    @cached_property
    def _readers(self) -> dict[Ref, list[AnyOp]]:
        readers: dict[Ref, list[AnyOp]] = {}
        for op in self.ops:
            for ref in dict.fromkeys(operands(op)):
                readers.setdefault(ref, []).append(op)
        return readers

    def maker(self, ref: Ref) -> AnyOp | None:
        """The op that makes `ref`; None where none of them does."""
        place = self.places.get(ref)
        return None if place is None else self.ops[place]

    def readers(self, ref: Ref) -> list[AnyOp]:
        """The ops that read `ref`, in order."""
        return self._readers.get(ref, [])

    def behind(self, refs: Iterable[Ref], known: Container[Ref] = ()) -> tuple[AnyOp, ...]:
        """The ops that `refs` depend on, in order, without what makes only values that are `known`."""
        missing = {ref for ref in refs if ref not in known}
        chosen: list[AnyOp] = []
        for op in reversed(self.ops):
            if not missing.isdisjoint(results(op)):
                chosen.append(op)
                missing.update(ref for ref in operands(op) if ref not in known)
        return tuple(reversed(chosen))

    def sources(self, refs: Iterable[Ref], ends: Container[Ref]) -> list[Ref]:
        """The first values in `ends` on all ways back from `refs`, in the order of these."""
        sources: dict[Ref, None] = {}
        pending, seen = list(refs)[::-1], set[Ref]()
        while pending:
            ref = pending.pop()
            if ref in ends:
                sources[ref] = None
            elif ref in self.places and ref not in seen:
                seen.add(ref)
                pending += reversed(operands(self.ops[self.places[ref]]))
        return list(sources)
