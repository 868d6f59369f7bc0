"""A map on shards written out piece by piece: what `fuse_update` is made of."""

from __future__ import annotations

import msgspec

from commplan.ir.plan import Ref
from commplan.ir.schedule import Leaf, Map, Op, Part, Unpack, Value
from commplan.ir.types import DType
from commplan.passes.rewrite import Editor, laid_out
from commplan.passes.streams import Gathered, Stream


class Pieces:
    """The pieces of the map `op`, one for each bucket of its gradient."""

    def __init__(self, editor: Editor, op: Map, stream: Stream) -> None:
        self.editor, self.op, self.stream = editor, op, stream
        self.like = editor.values[stream.operand]
        self.made: list[dict[Ref, Ref]] = []  # of each piece, its part of every result

    def updates(self) -> list[Op]:
        """The gradient of each bucket scaled, what goes with it taken from the other trees, and the map."""
        ops: list[Op] = []
        for number, (buffer, parts) in enumerate(self.stream.buckets):
            sizes = {part.leaf: part.size for part in parts}
            operands: list[Ref] = []
            for ref in self.op.operands:
                if ref == self.stream.operand:
                    operands.append(self._gradient(ops, buffer, parts, number))
                elif ref in self.stream.owner:
                    operands.append(self._taken(ops, ref, parts, number))
                else:
                    operands.append(ref)
            results = {ref: self._value(ref, sizes, f"{ref}/u{number}") for ref in self.op.results}
            self.made.append(results)
            ops.append(
                msgspec.structs.replace(
                    self.op, results=tuple(results.values()), operands=tuple(operands), after=()
                )
            )
        return ops

    def gather(self, ref: Ref, joined: Gathered) -> list[Op]:
        """The parts of result `ref` gathered, each as soon as it is made, and put together."""
        ops: list[Op] = []
        whole: list[Part] = []
        like, ways = joined.moves[0], joined.end.ways
        for number, (_, parts) in enumerate(self.stream.buckets):
            for dtype, own in self._by_dtype(ref, parts, number):
                name = f"{joined.end.result}/u{number}_{dtype}"
                cut = [(leaf, part) for leaf, part in own if self.editor.values[ref].leaves[leaf].shape]
                kept = [(leaf, part) for leaf, part in own if not self.editor.values[ref].leaves[leaf].shape]
                if cut:
                    buffer = self._pack(ops, self.made[number][ref], cut, f"{name}/pack")
                    for row, one in enumerate(joined.owners or (like,)):
                        called = f"{name}_{row}" if joined.owners else name
                        moved = self.editor.move(ops, one, buffer, called)
                        whole += self._row(ref, joined, _placed(moved, cut), row)
                if kept:
                    buffer = self._pack(ops, self.made[number][ref], kept, f"{name}/kept", ways)
                    if joined.owners:
                        buffer = self.editor.move(ops, joined.owners[0], buffer, f"{name}/scalars")
                    whole += _placed(buffer, kept)
        whole.sort(key=lambda part: (part.leaf, part.start))
        ops.append(msgspec.structs.replace(joined.end, parts=tuple(whole), after=()))
        return ops

    def _row(self, ref: Ref, joined: Gathered, parts: list[Part], row: int) -> list[Part]:
        """Where in the whole the columns `parts` of an owner's row belong, padding left out; all ranks' rows
        come in order."""
        if not joined.owners:
            return parts
        found: list[Part] = []
        for part in parts:
            start = row * self.editor.values[ref].leaves[part.leaf].size + part.start
            size = min(part.size, self.editor.values[joined.end.result].leaves[part.leaf].size - start)
            if size > 0:
                found.append(msgspec.structs.replace(part, start=start, size=size))
        return found

    def join(self, ref: Ref) -> list[Op]:
        """The parts of result `ref` put together again, as one shard."""
        ops: list[Op] = []
        whole: list[Part] = []
        for number, (_, parts) in enumerate(self.stream.buckets):
            for dtype, own in self._by_dtype(ref, parts, number):
                name = f"{ref}/joined{number}_{dtype}"
                buffer = self._pack(ops, self.made[number][ref], own, name)
                whole += _placed(buffer, own)
        whole.sort(key=lambda part: (part.leaf, part.start))
        ops.append(Unpack(ref, tuple(whole), self.op.span))
        return ops

    def _gradient(self, ops: list[Op], buffer: Ref, parts: tuple[Part, ...], number: int) -> Ref:
        for scale in self.stream.scales:
            buffer = self.editor.emit(
                ops, msgspec.structs.replace(scale, operand=buffer, after=()), f"{scale.result}/u{number}"
            )
        sizes = {part.leaf: part.size for part in parts}
        name = self._value(self.stream.operand, sizes, f"{self.stream.operand}/piece{number}")
        taken = tuple(msgspec.structs.replace(part, value=buffer, start=0) for part in parts)
        return self.editor.emit(ops, Unpack(name, taken, self.op.span))

    def _taken(self, ops: list[Op], ref: Ref, parts: tuple[Part, ...], number: int) -> Ref:
        """What of `ref` goes with the bucket."""
        name = self._value(ref, {part.leaf: part.size for part in parts}, f"{ref}/piece{number}")
        found: list[Part] = []
        for dtype, own in self._by_dtype(ref, parts, None):
            buffer = self._pack(ops, ref, own, f"{name}/{dtype}", start=True)
            found += [msgspec.structs.replace(part, start=0) for part in _placed(buffer, own)]
        return self.editor.emit(ops, Unpack(name, tuple(found), self.op.span))

    def _by_dtype(
        self, ref: Ref, parts: tuple[Part, ...], number: int | None
    ) -> list[tuple[DType, list[tuple[int, Part]]]]:
        """The leaves of `ref` that go with `parts`, each with its run, by element type; of a result its own
        scalars go with the first piece."""
        runs = {part.leaf: part for part in parts}
        found: dict[DType, list[tuple[int, Part]]] = {}
        for leaf, owner in enumerate(self.stream.owner[ref]):
            shape = self.editor.values[ref].leaves[leaf]
            if owner is None:
                if not number:
                    found.setdefault(shape.dtype, []).append((leaf, Part(ref, leaf, 0, 1, 0)))
            elif owner in runs:
                found.setdefault(shape.dtype, []).append((leaf, runs[owner]))
        return list(found.items())

    def _pack(
        self,
        ops: list[Op],
        ref: Ref,
        own: list[tuple[int, Part]],
        name: Ref,
        ways: int = 1,
        *,
        start: bool = False,
    ) -> Ref:
        """The runs `own` of leaves of `ref` one after another; of the whole tree (`start`) or of a piece."""
        runs = (Part(ref, leaf, run.start if start else 0, run.size, 0) for leaf, run in own)
        return self.editor.pack(ops, laid_out(runs), self.op.span, name, ways)

    def _value(self, ref: Ref, sizes: dict[int, int], name: Ref) -> Ref:
        """A tree like `ref` of which leaves have only the elements that are in one bucket."""
        value = self.editor.values[ref]
        owner = self.stream.owner[ref]
        leaves = tuple(_piece(leaf, one, sizes) for leaf, one in zip(value.leaves, owner, strict=True))
        piece = Value(self.editor.fresh(name), value.kind, leaves, value.placement)
        return self.editor.add(self.editor.types.with_whole(piece))


def _piece(leaf: Leaf, owner: int | None, sizes: dict[int, int]) -> Leaf:
    if owner is None or (owner in sizes and not leaf.shape):
        return leaf
    return Leaf(leaf.path, (sizes.get(owner, 0),), leaf.dtype)


def _placed(buffer: Ref, own: list[tuple[int, Part]]) -> list[Part]:
    """The runs as they lie in `buffer`, one after another."""
    return laid_out(Part(buffer, leaf, run.start, run.size, 0) for leaf, run in own)
