"""fuse_update: runs an update on shards bucket by bucket, as soon as each bucket is reduced.

`bucketed_update_match` finds the updates, and this module splits them.
"""

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
from commplan.passes.base import Pass, PassContext
from commplan.passes.fuse.bucketed_update_match import Gathered, Stream, gathered, stream
from commplan.passes.rewrite import Editor, in_whole, laid_out, unpack


class FuseUpdatePass(Pass, frozen=True):
    """Updates the shard of each bucket as soon as it is reduced, while other buckets are on their way."""

    name: ClassVar[str] = "fuse_update"
    after: ClassVar[tuple[str, ...]] = ("share", "place", "bucket")

    def phases(self, schedule: Schedule, context: PassContext, choices: list[Choice]) -> Iterable[Phase]:
        return [_phase(schedule, phase, choices) for phase in schedule.phases]


def _phase(schedule: Schedule, phase: Phase, choices: list[Choice]) -> Phase:
    """Split the maps of a phase whose gradients arrive in several buckets."""
    editor = Editor(schedule, phase)
    ops = list(phase.ops)
    uses, fused = DefUse(ops), False
    for op in phase.ops:
        # Under JAX only exchanges are split: XLA packs and overlaps the ops of a `map`, and additional ops
        # cost time. Under MPI, pieces are necessary to overlap sums with updates.
        if not isinstance(op, Map) or (op.hints.overlap is None and schedule.backend == "jax"):
            continue
        match = stream(editor, uses, op)
        if isinstance(match, str):
            choices.append(_choice_not_split(op, match))
        elif match is not None:
            ops = _split_map(editor, uses, op, match)
            choices.append(_choice(op, match))
            uses, fused = DefUse(ops), True
    return editor.finish(ops) if fused else phase


def _split_map(editor: Editor, uses: DefUse[Op], op: Map, match: Stream) -> list[Op]:
    """Split a map by the buckets of its gradient, and return the ops of the phase.

        y = map f(w, unpack(r0, r1)); z = unpack(all_gather(pack(y)))
        -->  y0 = map f(part of w, unpack(r0)); z0 = all_gather(pack(y0));
             y1 = map f(part of w, unpack(r1)); z1 = all_gather(pack(y1)); z = unpack(z0, z1)

    The tree of a piece has all leaves; those of other buckets are empty. Independent scalars are replicated
    in all pieces.
    """
    pieces = _Pieces(editor, op, match)
    gathers = {ref: gather_match for ref in op.results if (gather_match := gathered(uses, ref)) is not None}
    pieces.updates()
    removed = {id(op), *(id(gather) for gather_match in gathers.values() for gather in gather_match.ops)}
    for ref, gather_match in gathers.items():
        pieces.gather(ref, gather_match)
    remaining = [other for other in uses.ops if id(other) not in removed]
    # A result is assembled only if an op other than its gather still reads it.
    read = editor.bound.union(*map(operands_of, remaining))
    for ref in op.results:
        if ref in read:
            pieces.join(ref)
    index = sum(id(other) not in removed for other in uses.ops[: uses.indices[op.results[0]]])
    return _alive(editor, [*remaining[:index], *editor.take(), *remaining[index:]], match)


def _alive(editor: Editor, ops: list[Op], match: Stream) -> list[Op]:
    """Remove the ops that assembled the whole gradient, if they have no reader left."""
    bound = editor.bound
    for op in reversed(match.chain):
        (result,) = results_of(op)
        if result not in bound and not DefUse(ops).readers(result):
            ops = [other for other in ops if other is not op]
    return ops


def _choice(op: Map, match: Stream) -> Choice:
    """The remark on a map that is split."""
    text = f"`{name_of(op.results[0])}`: {op.fn} in {len(match.buckets)} pieces, one for each bucket"
    why = "each runs as soon as its bucket is reduced, while other buckets are in flight"
    return Choice("fuse_update", text, why, op.span, ("once, after all reductions",))


def _choice_not_split(op: Map, why: str) -> Choice:
    """The remark on a map that waits for all buckets."""
    text = f"`{name_of(op.results[0])}`: {op.fn} once, after all reductions"
    return Choice("fuse_update", text, why, op.span, ("in pieces, one for each bucket",))


class _Pieces:
    """The pieces of the map `op`, one for each bucket of its gradient. Emits their ops to `editor`.

    `parts` in its methods are the parts of gradient leaves in a bucket, and `number` is that of the bucket.
    """

    def __init__(self, editor: Editor, op: Map, match: Stream) -> None:
        self.editor, self.op, self.stream = editor, op, match
        self.like = editor.values[match.operand]
        self.piece_results: list[dict[Ref, Ref]] = []  # for each piece, its part of every result

    def updates(self) -> None:
        """Emit the map of each bucket, on its scaled gradient and the corresponding parts of other trees."""
        for number, (buffer, parts) in enumerate(self.stream.buckets):
            sizes = {part.leaf: part.size for part in parts}
            operands: list[Ref] = []
            for ref in self.op.operands:
                if ref == self.stream.operand:
                    operands.append(self._gradient(buffer, parts, number))
                elif ref in self.stream.owner:
                    operands.append(self._operand_part(ref, parts, number))
                else:
                    operands.append(ref)
            results = {ref: self._value(ref, sizes, f"{ref}/u{number}") for ref in self.op.results}
            self.piece_results.append(results)
            pieces = tuple(results.values())
            self.editor.ops.append(replace(self.op, results=pieces, operands=tuple(operands), after=()))

    def gather(self, ref: Ref, match: Gathered) -> None:
        """Emit the gather of each piece of result `ref`, and assemble the whole."""
        whole: list[Part] = []
        rows, joint = self.editor.values[ref], self.editor.values[match.end.result]
        for number, (_, parts) in enumerate(self.stream.buckets):
            for dtype, leaf_runs in self._by_dtype(ref, parts, number):
                name = f"{match.end.result}/u{number}_{dtype}"
                arrays = [(leaf, part) for leaf, part in leaf_runs if rows.leaves[leaf].shape]
                scalars = [(leaf, part) for leaf, part in leaf_runs if not rows.leaves[leaf].shape]
                if arrays:
                    buffer = self._pack(self.piece_results[number][ref], arrays, f"{name}/pack")
                    if not match.owners:
                        whole += _runs_in_buffer(self.editor.move(match.like, buffer, name), arrays)
                    for row, broadcast in enumerate(match.owners):
                        moved = self.editor.move(broadcast, buffer, f"{name}_{row}")
                        whole += in_whole(_runs_in_buffer(moved, arrays), row, rows, joint)
                if scalars:
                    buffer = self._pack(
                        self.piece_results[number][ref], scalars, f"{name}/kept", match.end.ways
                    )
                    if match.owners:
                        buffer = self.editor.move(match.owners[0], buffer, f"{name}/scalars")
                    whole += _runs_in_buffer(buffer, scalars)
        self.editor.ops.append(
            unpack(match.end.result, whole, match.end.span, self.piece_results[0][ref], match.end.ways)
        )

    def join(self, ref: Ref) -> None:
        """Assemble the shard of result `ref` from its pieces."""
        whole: list[Part] = []
        for number, (_, parts) in enumerate(self.stream.buckets):
            for dtype, leaf_runs in self._by_dtype(ref, parts, number):
                name = f"{ref}/joined{number}_{dtype}"
                buffer = self._pack(self.piece_results[number][ref], leaf_runs, name)
                whole += _runs_in_buffer(buffer, leaf_runs)
        self.editor.ops.append(unpack(ref, whole, self.op.span, self.piece_results[0][ref]))

    def _gradient(self, buffer: Ref, parts: tuple[Part, ...], number: int) -> Ref:
        """Emit the scaled gradient of one bucket, as a tree."""
        for scale in self.stream.scales:
            scaled = replace(scale, operand=buffer, after=())
            buffer = self.editor.emit(scaled, f"{scale.result}/u{number}")
        sizes = {part.leaf: part.size for part in parts}
        name = self._value(self.stream.operand, sizes, f"{self.stream.operand}/piece{number}")
        piece_parts = tuple(replace(part, value=buffer, start=0) for part in parts)
        return self.editor.emit(Unpack(name, piece_parts, self.op.span, like=self.stream.unpack.like))

    def _operand_part(self, ref: Ref, parts: tuple[Part, ...], number: int) -> Ref:
        """Emit the part of operand `ref` that corresponds to the bucket, as a tree."""
        name = self._value(ref, {part.leaf: part.size for part in parts}, f"{ref}/piece{number}")
        placed: list[Part] = []
        for dtype, leaf_runs in self._by_dtype(ref, parts, None):
            buffer = self._pack(ref, leaf_runs, f"{name}/{dtype}", start=True)
            placed += [replace(part, start=0) for part in _runs_in_buffer(buffer, leaf_runs)]
        return self.editor.emit(Unpack(name, tuple(placed), self.op.span, like=ref))

    def _by_dtype(
        self, ref: Ref, parts: tuple[Part, ...], number: int | None
    ) -> list[tuple[DType, list[tuple[int, Part]]]]:
        """The leaves of `ref` that correspond to `parts`, by dtype, each with its run in the gradient.

        Scalars without a gradient leaf are in the first piece, and in all if `number` is None.
        """
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
        self, ref: Ref, leaf_runs: list[tuple[int, Part]], name: Ref, ways: int = 1, *, start: bool = False
    ) -> Ref:
        """Emit a buffer of the runs `leaf_runs`, of a whole tree if `start` is set, else of a piece."""
        runs = (Part(ref, leaf, run.start if start else 0, run.size, 0) for leaf, run in leaf_runs)
        return self.editor.pack(laid_out(runs), self.op.span, name, ways)

    def _value(self, ref: Ref, sizes: dict[int, int], name: Ref) -> Ref:
        """Declare a tree like `ref` with only the elements of one bucket.

        `sizes` are the numbers of elements of the gradient leaves in the bucket.
        """
        value = self.editor.values[ref]
        owner = self.stream.owner[ref]
        leaves = tuple(_piece(leaf, weight, sizes) for leaf, weight in zip(value.leaves, owner, strict=True))
        piece = Value(self.editor.fresh(name), value.kind, leaves, value.placement)
        return self.editor.add(self.editor.types.with_whole(piece))


def _piece(leaf: Leaf, owner: int | None, sizes: dict[int, int]) -> Leaf:
    """The elements of `leaf` in one bucket as a flat leaf, empty if there are none; scalars stay scalars."""
    if owner is None or (owner in sizes and not leaf.shape):
        return leaf
    return Leaf(leaf.path, (sizes.get(owner, 0),), leaf.dtype)


def _runs_in_buffer(buffer: Ref, leaf_runs: list[tuple[int, Part]]) -> list[Part]:
    """The runs as consecutive parts of `buffer`."""
    return laid_out(Part(buffer, leaf, run.start, run.size, 0) for leaf, run in leaf_runs)
