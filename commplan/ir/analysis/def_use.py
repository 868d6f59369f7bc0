"""Definitions and uses of values in a list of ops.

Passes, the verifier and the explanations query them.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from functools import cached_property
from typing import Generic

from commplan.ir.ops import AnyOp, operands, results
from commplan.ir.refs import Ref


class DefUse(Generic[AnyOp]):
    """The defining op and the readers of each value in `ops`. `after` of ops counts as neither.

    Attributes:
        ops: The ops, in order.
        indices: For each result of an op, the index of that op in `ops`.
    """

    def __init__(self, ops: Iterable[AnyOp]) -> None:
        self.ops = tuple(ops)
        self.indices = {ref: index for index, op in enumerate(self.ops) for ref in results(op)}

    @cached_property
    def _readers(self) -> dict[Ref, list[AnyOp]]:
        readers: dict[Ref, list[AnyOp]] = {}
        for op in self.ops:
            for ref in dict.fromkeys(operands(op)):
                readers.setdefault(ref, []).append(op)
        return readers

    def maker(self, ref: Ref) -> AnyOp | None:
        """The op that makes `ref`; None for a value that none of the ops makes."""
        index = self.indices.get(ref)
        return None if index is None else self.ops[index]

    def readers(self, ref: Ref) -> list[AnyOp]:
        """The ops that read `ref`, in order, each once."""
        return self._readers.get(ref, [])

    def ancestors(self, refs: Iterable[Ref], available: Container[Ref] = ()) -> tuple[AnyOp, ...]:
        """The ops that `refs` depend on, directly or not, in order.

        Args:
            refs: The values.
            available: Values that are computed already. The ops that only they depend on are left out.
        """
        missing = {ref for ref in refs if ref not in available}
        chosen: list[AnyOp] = []
        for op in reversed(self.ops):
            if not missing.isdisjoint(results(op)):
                chosen.append(op)
                missing.update(ref for ref in operands(op) if ref not in available)
        return tuple(reversed(chosen))

    def sources(self, refs: Iterable[Ref], ends: Container[Ref]) -> list[Ref]:
        """The nearest values in `ends` on all paths back from `refs`.

        Args:
            refs: The values to start from, which may be in `ends` themselves.
            ends: The values at which a path ends. Other paths end at values that no op makes, without result.

        Returns:
            Each value once, in the order of a depth-first traversal of operands.
        """
        sources: dict[Ref, None] = {}
        pending = list(refs)[::-1]
        visited: set[Ref] = set()
        while pending:
            ref = pending.pop()
            if ref in ends:
                sources[ref] = None
            elif ref in self.indices and ref not in visited:
                visited.add(ref)
                pending += reversed(operands(self.ops[self.indices[ref]]))
        return list(sources)
