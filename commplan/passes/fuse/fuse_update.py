"""fuse_update: an update on shards runs bucket by bucket, as soon as the bucket's sum is there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from msgspec.structs import replace

from commplan.ir.analysis.def_use import DefUse
from commplan.ir.plan import Ref, name_of
from commplan.ir.remark import Choice
from commplan.ir.schedule import Leaf, Map, Op, Part, Phase, Schedule, Unpack, Value
from commplan.ir.schedule import operands as operands_of
from commplan.ir.schedule import results as results_of
from commplan.ir.types import DType
from commplan.passes.fuse.bucketed_update_match import Gathered, Stream, gathered, stream
from commplan.passes.pipeline.base import Context, Pass
from commplan.passes.rewrite import Editor, in_whole, laid_out, unpack


class FuseUpdatePass(Pass, frozen=True):
    """Updates the shard of each bucket as soon as it is reduced, while other buckets are on their way."""

    name: ClassVar[str] = "fuse_update"
    after: ClassVar[tuple[str, ...]] = ("share", "place", "bucket")

    def phases(self, schedule: Schedule, context: Context, choices: list[Choice]) -> Iterable[Phase]:
        return [_phase(schedule, phase, choices) for phase in schedule.phases]


def _phase(schedule: Schedule, phase: Phase, choices: list[Choice]) -> Phase:
    editor, ops = Editor(schedule, phase), list(phase.ops)
    uses, fused = DefUse(ops), False
    for op in phase.ops:
        # Where the plan itself says `map`, and not `exchange`, a step under JAX stays the one that its text
        # describes: XLA packs and overlaps as it sees fit, and more operations are a tax. Under MPI pieces
        # are what lets sums be on their way while others are used.
        if not isinstance(op, Map) or (op.hints.overlap is None and schedule.backend == "jax"):
            continue
        match = stream(editor, uses, op)
        if isinstance(match, str):
            choices.append(_kept(op, match))
        elif match is not None:
            ops = _fused(editor, uses, op, match)
            choices.append(_choice(op, match))
            uses, fused = DefUse(ops), True
    return editor.finish(ops) if fused else phase


def _fused(editor: Editor, uses: DefUse[Op], op: Map, match: Stream) -> list[Op]:
    """y = map f(w, unpack(r0, r1)); z = unpack(all_gather(pack(y)))

    -->  y0 = map f(part of w, unpack(r0)); z0 = all_gather(pack(y0));
         y1 = map f(part of w, unpack(r1)); z1 = all_gather(pack(y1)); z = unpack(z0, z1)

    A tree of a piece has all leaves, empty where they are in other buckets; a scalar that is no weight's is
    in all of them, and the same.
    """
    pieces = _Pieces(editor, op, match)
    own = {ref: joined for ref in op.results if (joined := gathered(uses, ref)) is not None}
    pieces.updates()
    gone = {id(op), *(id(each) for joined in own.values() for each in joined.ops)}
    for ref, joined in own.items():
        pieces.gather(ref, joined)
    rest = [each for each in uses.ops if id(each) not in gone]
    read = editor.bound.union(*map(operands_of, rest))
    for ref in op.results:
        if ref in read:
            pieces.join(ref)
    place = sum(id(each) not in gone for each in uses.ops[: uses.indices[op.results[0]]])
    return _alive(editor, [*rest[:place], *editor.take(), *rest[place:]], match)


def _alive(editor: Editor, ops: list[Op], match: Stream) -> list[Op]:
    """`ops` without what the whole gradient was put together with, where nothing reads it any more."""
    bound = editor.bound
    for op in reversed(match.chain):
        (result,) = results_of(op)
        if result not in bound and not DefUse(ops).readers(result):
            ops = [each for each in ops if each is not op]
    return ops


def _choice(op: Map, match: Stream) -> Choice:
    text = f"`{name_of(op.results[0])}`: {op.fn} in {len(match.buckets)} pieces, one for each bucket"
    why = "each runs as soon as the sum of its bucket is there, while others are on their way"
    return Choice("fuse_update", text, why, op.span, ("once, when all sums are there",))


def _kept(op: Map, why: str) -> Choice:
    text = f"`{name_of(op.results[0])}`: {op.fn} once, when all sums are there"
    return Choice("fuse_update", text, why, op.span, ("in pieces, one for each bucket",))


class _Pieces:
    """The pieces of the map `op`, one for each bucket of its gradient."""

    def __init__(self, editor: Editor, op: Map, stream: Stream) -> None:
        self.editor, self.op, self.stream = editor, op, stream
        self.like = editor.values[stream.operand]
        self.made: list[dict[Ref, Ref]] = []  # of each piece, its part of every result

    def updates(self) -> None:
        """The gradient of each bucket scaled, what goes with it taken from the other trees, and the map."""
        for number, (buffer, parts) in enumerate(self.stream.buckets):
            sizes = {part.leaf: part.size for part in parts}
            operands: list[Ref] = []
            for ref in self.op.operands:
                if ref == self.stream.operand:
                    operands.append(self._gradient(buffer, parts, number))
                elif ref in self.stream.owner:
                    operands.append(self._taken(ref, parts, number))
                else:
                    operands.append(ref)
            results = {ref: self._value(ref, sizes, f"{ref}/u{number}") for ref in self.op.results}
            self.made.append(results)
            pieces = tuple(results.values())
            self.editor.ops.append(replace(self.op, results=pieces, operands=tuple(operands), after=()))

    def gather(self, ref: Ref, joined: Gathered) -> None:
        """The parts of result `ref` gathered, each as soon as it is made, and put together."""
        whole: list[Part] = []
        rows, joint = self.editor.values[ref], self.editor.values[joined.end.result]
        for number, (_, parts) in enumerate(self.stream.buckets):
            for dtype, own in self._by_dtype(ref, parts, number):
                name = f"{joined.end.result}/u{number}_{dtype}"
                cut = [(leaf, part) for leaf, part in own if rows.leaves[leaf].shape]
                kept = [(leaf, part) for leaf, part in own if not rows.leaves[leaf].shape]
                if cut:
                    buffer = self._pack(self.made[number][ref], cut, f"{name}/pack")
                    if not joined.owners:
                        whole += _placed(self.editor.move(joined.like, buffer, name), cut)
                    for row, broadcast in enumerate(joined.owners):
                        moved = self.editor.move(broadcast, buffer, f"{name}_{row}")
                        whole += in_whole(_placed(moved, cut), row, rows, joint)
                if kept:
                    buffer = self._pack(self.made[number][ref], kept, f"{name}/kept", joined.end.ways)
                    if joined.owners:
                        buffer = self.editor.move(joined.owners[0], buffer, f"{name}/scalars")
                    whole += _placed(buffer, kept)
        self.editor.ops.append(unpack(joined.end.result, whole, joined.end.span, joined.end.ways))

    def join(self, ref: Ref) -> None:
        """The parts of result `ref` put together again, as one shard."""
        whole: list[Part] = []
        for number, (_, parts) in enumerate(self.stream.buckets):
            for dtype, own in self._by_dtype(ref, parts, number):
                name = f"{ref}/joined{number}_{dtype}"
                buffer = self._pack(self.made[number][ref], own, name)
                whole += _placed(buffer, own)
        self.editor.ops.append(unpack(ref, whole, self.op.span))

    def _gradient(self, buffer: Ref, parts: tuple[Part, ...], number: int) -> Ref:
        for scale in self.stream.scales:
            scaled = replace(scale, operand=buffer, after=())
            buffer = self.editor.emit(scaled, f"{scale.result}/u{number}")
        sizes = {part.leaf: part.size for part in parts}
        name = self._value(self.stream.operand, sizes, f"{self.stream.operand}/piece{number}")
        taken = tuple(replace(part, value=buffer, start=0) for part in parts)
        return self.editor.emit(Unpack(name, taken, self.op.span))

    def _taken(self, ref: Ref, parts: tuple[Part, ...], number: int) -> Ref:
        """What of `ref` goes with the bucket."""
        name = self._value(ref, {part.leaf: part.size for part in parts}, f"{ref}/piece{number}")
        placed: list[Part] = []
        for dtype, own in self._by_dtype(ref, parts, None):
            buffer = self._pack(ref, own, f"{name}/{dtype}", start=True)
            placed += [replace(part, start=0) for part in _placed(buffer, own)]
        return self.editor.emit(Unpack(name, tuple(placed), self.op.span))

    def _by_dtype(
        self, ref: Ref, parts: tuple[Part, ...], number: int | None
    ) -> list[tuple[DType, list[tuple[int, Part]]]]:
        """The leaves of `ref` that go with `parts`, each with its run, by element type; of a result its own
        scalars go with the first piece."""
        runs = {part.leaf: part for part in parts}
        groups: dict[DType, list[tuple[int, Part]]] = {}
        for leaf, owner in enumerate(self.stream.owner[ref]):
            shape = self.editor.values[ref].leaves[leaf]
            if owner is None:
                if not number:
                    groups.setdefault(shape.dtype, []).append((leaf, Part(ref, leaf, 0, 1, 0)))
            elif owner in runs:
                groups.setdefault(shape.dtype, []).append((leaf, runs[owner]))
        return list(groups.items())

    def _pack(
        self, ref: Ref, own: list[tuple[int, Part]], name: Ref, ways: int = 1, *, start: bool = False
    ) -> Ref:
        """The runs `own` of leaves of `ref` one after another; of the whole tree (`start`) or of a piece."""
        runs = (Part(ref, leaf, run.start if start else 0, run.size, 0) for leaf, run in own)
        return self.editor.pack(laid_out(runs), self.op.span, name, ways)

    def _value(self, ref: Ref, sizes: dict[int, int], name: Ref) -> Ref:
        """A tree like `ref` of which leaves have only the elements that are in one bucket."""
        value = self.editor.values[ref]
        owner = self.stream.owner[ref]
        leaves = tuple(_piece(leaf, weight, sizes) for leaf, weight in zip(value.leaves, owner, strict=True))
        piece = Value(self.editor.fresh(name), value.kind, leaves, value.placement)
        return self.editor.add(self.editor.types.with_whole(piece))


def _piece(leaf: Leaf, owner: int | None, sizes: dict[int, int]) -> Leaf:
    if owner is None or (owner in sizes and not leaf.shape):
        return leaf
    return Leaf(leaf.path, (sizes.get(owner, 0),), leaf.dtype)


def _placed(buffer: Ref, own: list[tuple[int, Part]]) -> list[Part]:
    """The runs as they lie in `buffer`, one after another."""
    return laid_out(Part(buffer, leaf, run.start, run.size, 0) for leaf, run in own)
