"""Elements on their way: what is cut into buckets comes back to its place, updates get what belongs together.

Followed are runs of columns: of a leaf that is packed in rows, one for each rank, elements keep their column
through reductions and gathers, whatever row a rank is left with. Where a buffer is cut otherwise (padding for
a level of a hierarchy, rows of a few owners) nothing is known of it any more, and nothing is said.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from operator import itemgetter
from typing import NamedTuple

from commplan.ir.layout import row_size
from commplan.ir.plan import Ref
from commplan.ir.schedule import (
    Cast,
    Collective,
    Leaf,
    LocalSum,
    Map,
    Pack,
    Scale,
    Slice,
    Unpack,
)
from commplan.verify.scope import Scope


class Run(NamedTuple):
    """Columns `start` to `start + size` of the leaf at `path`."""

    path: str
    start: int
    size: int

    def __str__(self) -> str:
        return f"elements {self.start} to {self.start + self.size} of `{self.path or 'the array'}`"


class Buffer(NamedTuple):
    """A flat buffer of `rows` rows: runs of columns by their offset."""

    rows: int
    runs: tuple[tuple[int, Run], ...]


Known = tuple[Run, ...] | None  # what a leaf holds, in order; None: that is not known


def check_pieces(scope: Scope) -> None:
    """Report elements of a phase that are put where others belong (CP0731), and updates of which the operands
    do not hold the same elements (CP0735)."""
    _Pieces(scope).check()


class _Pieces:
    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.buffers: dict[Ref, Buffer] = {}
        self.trees: dict[Ref, tuple[Known, ...]] = {}

    def check(self) -> None:
        for op in self.scope.phase.ops:
            match op:
                case Pack():
                    self._pack(op)
                case Unpack():
                    self._unpack(op)
                case Collective():
                    self._moved(op.operand, op.result, op.kind, self.scope.ranks(op.axes))
                case LocalSum():
                    self._moved(op.operand, op.result, "reduce_scatter", op.ways)
                case Cast() | Scale():
                    self._moved(op.operand, op.result, "", 1)
                case Slice() if op.owners:
                    self.trees[op.result] = (None,) * len(self.scope.values[op.result].leaves)
                case Map():
                    self._map(op)
                case _:
                    pass

    def _leaf(self, ref: Ref, index: int, ways: int = 1) -> Known:
        value = self.scope.values[ref]
        if ref in self.trees:
            return self.trees[ref][index] if ways == 1 else None
        leaf = value.leaves[index]
        return _joined((Run(leaf.path, 0, row_size(value.kind, leaf, ways)),))

    def _pack(self, op: Pack) -> None:
        found: list[tuple[int, Run]] = []
        for part in op.parts:
            held = self._columns(part.value, part.leaf, part.start, part.size, op.ways)
            if held is None:
                return
            at = part.offset
            for run in held:
                found.append((at, run))
                at += run.size
        self.buffers[op.result] = Buffer(op.ways, tuple(sorted(found)))

    def _columns(self, ref: Ref, leaf: int, start: int, size: int, ways: int) -> Known:
        """Columns of a leaf, or of a buffer, that goes into a buffer of `ways` rows."""
        value = self.scope.values[ref]
        if value.kind != "flat":
            held = self._leaf(ref, leaf, ways)
            return None if held is None else _within(_offsets(held), start, size)
        if ref not in self.buffers or ways != 1 or self.buffers[ref].rows != 1:
            return None
        return _within(self.buffers[ref].runs, start, size)

    def _moved(self, operand: Ref, result: Ref, kind: str, ways: int) -> None:
        if operand in self.trees:
            self.trees[result] = self.trees[operand]
        if operand not in self.buffers:
            return
        rows, runs = self.buffers[operand]
        if kind == "all_gather":
            self.buffers[result] = Buffer(rows * ways, runs)
        elif kind != "reduce_scatter":
            self.buffers[result] = Buffer(rows, runs)
        elif rows % ways == 0:
            self.buffers[result] = Buffer(rows // ways, runs)

    def _unpack(self, op: Unpack) -> None:
        value = self.scope.values[op.result]
        placement = value.placement
        whole = bool(placement.split) or not placement.per  # else it may be a piece, and parts are missing
        held: list[list[tuple[int, Run]] | None] = [[] for _ in value.leaves]
        for part in op.parts:
            buffer, own = self.buffers.get(part.value), held[part.leaf]
            found = None
            if buffer is not None and buffer.rows == op.ways:
                found = _within(buffer.runs, part.offset, part.size)
            if found is None or own is None:
                held[part.leaf] = None
                continue
            own += [(part.start + at, run) for at, run in _offsets(found)]
        for leaf, own in zip(value.leaves, held, strict=True):
            if whole and own is not None:
                self._in_place(op, leaf, own)
        if not whole:
            self.trees[op.result] = tuple(
                None if own is None or op.ways > 1 else _joined(run for _, run in sorted(own)) for own in held
            )

    def _in_place(self, op: Unpack, leaf: Leaf, own: Sequence[tuple[int, Run]]) -> None:
        wrong = next((one for one in own if one[0] != one[1].start or one[1].path != leaf.path), None)
        if wrong is not None:
            at, run = wrong
            message = f"`{op.result}` has {run} where {Run(leaf.path, at, run.size)} belong"
            self.scope.report.add("CP0731", message, op.span)

    def _map(self, op: Map) -> None:
        fn = self.scope.axes.fns.get(op.fn)
        if fn is None or not fn.elementwise:
            return
        splits = {self.scope.values[ref].placement.split: ref for ref in op.operands}
        if len(splits.keys() - {()}) > 1:
            said = " and ".join(f"`{ref}` split {', '.join(axes)}" for axes, ref in splits.items() if axes)
            self.scope.report.add("CP0735", f"`{op.fn}` gets {said}: parts of different ranks", op.span)
        if all(ref not in self.trees for ref in op.operands):
            return
        given = [
            (ref, leaf, self._leaf(ref, index))
            for ref in op.operands
            for index, leaf in enumerate(self.scope.values[ref].leaves)
            if leaf.shape
        ]
        alike = _Alike(given)
        for ref, leaf, held in given:
            for other, _, theirs in alike.to(leaf.path):
                if other == ref or held is None or theirs is None:
                    continue
                if [run[1:] for run in held] != [run[1:] for run in theirs]:
                    message = f"`{op.fn}` gets {_said(held)} of `{ref}` with {_said(theirs)} of `{other}`"
                    self.scope.report.add("CP0735", message, op.span)
                    for made in op.results:
                        self.trees[made] = (None,) * len(self.scope.values[made].leaves)
                    return
        for ref in op.results:
            self.trees[ref] = tuple(_made(leaf, alike) for leaf in self.scope.values[ref].leaves)


def _made(leaf: Leaf, given: _Alike) -> Known:
    """What a leaf of a result holds: what the operands' leaves do that it goes with."""
    if not leaf.shape:
        return (Run(leaf.path, 0, 1),)
    found = [held for _, other, held in given.to(leaf.path) if other.shape == leaf.shape]
    if not found or found[0] is None or any(held is None for held in found):
        return None
    return tuple(Run(leaf.path, run.start, run.size) for run in found[0])


class _Alike:
    """Leaves and what they hold, by their paths and by what these end with."""

    def __init__(self, given: Sequence[tuple[Ref, Leaf, Known]]) -> None:
        self.at: dict[str, list[tuple[Ref, Leaf, Known]]] = {}
        for one in given:
            self.at.setdefault(one[1].path, []).append(one)
        self.longer: dict[str, list[str]] = {}
        for path in self.at:
            for end in _ends(path):
                self.longer.setdefault(end, []).append(path)
        self.found: dict[str, list[tuple[Ref, Leaf, Known]]] = {}

    def to(self, path: str) -> list[tuple[Ref, Leaf, Known]]:
        """Those with whose paths `path` ends, the longest first, and those whose paths end with it."""
        if path not in self.found:
            paths = dict.fromkeys(
                [*(end for end in _ends(path) if end in self.at), *self.longer.get(path, ())]
            )
            self.found[path] = [one for each in paths for one in self.at[each]]
        return self.found[path]


def _ends(path: str) -> tuple[str, ...]:
    keys = path.split("/") if path else []
    return tuple("/".join(keys[first:]) for first in range(len(keys) + 1))


def _offsets(held: Sequence[Run]) -> tuple[tuple[int, Run], ...]:
    found: list[tuple[int, Run]] = []
    at = 0
    for run in held:
        found.append((at, run))
        at += run.size
    return tuple(found)


def _within(runs: Sequence[tuple[int, Run]], start: int, size: int) -> Known:
    """The runs of columns `start` to `start + size`; None where some are padding."""
    found: list[Run] = []
    at = start
    first = max(0, bisect_right(runs, start, key=itemgetter(0)) - 1)
    for index in range(first, len(runs)):
        offset, run = runs[index]
        if offset >= start + size:
            break
        low, high = max(offset, start), min(offset + run.size, start + size)
        if low >= high:
            continue
        if low != at:
            return None
        found.append(Run(run.path, run.start + low - offset, high - low))
        at = high
    return _joined(found) if at == start + size else None


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Runs that continue each other as one."""
    found: list[Run] = []
    for run in runs:
        last = found[-1] if found else None
        if last is not None and (last.path, last.start + last.size) == (run.path, run.start):
            found[-1] = Run(run.path, last.start, last.size + run.size)
        elif run.size:
            found.append(run)
    return tuple(found)


def _said(held: Sequence[Run]) -> str:
    return ", ".join(map(str, held)) or "nothing"
