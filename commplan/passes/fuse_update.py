"""fuse_update: an update on shards runs bucket by bucket, as soon as the bucket's sum is there."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from commplan.ir.choice import Choice
from commplan.ir.def_use import DefUse
from commplan.ir.plan import Ref, name_of
from commplan.ir.schedule import Map, Op, Phase, Schedule
from commplan.ir.schedule import operands as operands_of
from commplan.ir.schedule import results as results_of
from commplan.passes.base import Context, Pass
from commplan.passes.piecewise import Pieces
from commplan.passes.rewrite import Editor
from commplan.passes.streams import Gathered, Refusal, Stream, gathered, stream


class FuseUpdatePass(Pass, frozen=True):
    """Updates the shard of each bucket as soon as it is reduced, while other buckets are on their way."""

    name: ClassVar[str] = "fuse_update"
    after: ClassVar[tuple[str, ...]] = ("share", "place", "bucket")

    def run(self, schedule: Schedule, context: Context) -> Schedule:
        choices: list[Choice] = []
        phases = tuple(_phase(schedule, phase, choices) for phase in schedule.phases)
        return msgspec.structs.replace(schedule, phases=phases, choices=(*schedule.choices, *choices))


def _phase(schedule: Schedule, phase: Phase, choices: list[Choice]) -> Phase:
    editor, ops = Editor(schedule, phase), list(phase.ops)
    uses, fused = DefUse(ops), False
    for op in phase.ops:
        if not isinstance(op, Map) or (_written(op) and schedule.backend == "jax"):
            continue
        found = stream(editor, uses, op)
        if isinstance(found, Refusal):
            choices.append(_kept(op, found))
        elif found is not None:
            ops = _fused(editor, uses, op, found)
            choices.append(_choice(op, found))
            uses, fused = DefUse(ops), True
    return editor.finish(ops) if fused else phase


def _written(op: Map) -> bool:
    """Whether the plan itself says `map`, and not `exchange`: `place` asks updates to run beside their sums.

    Under JAX such a step stays the one that its text describes: XLA packs and overlaps as it sees fit, and
    more operations are a tax. Under MPI pieces are what lets sums be on their way while others are used.
    """
    return op.hints.overlap is None


def _fused(editor: Editor, uses: DefUse[Op], op: Map, found: Stream) -> list[Op]:
    """y = map f(w, unpack(r0, r1)); z = unpack(all_gather(pack(y)))

    -->  y0 = map f(part of w, unpack(r0)); z0 = all_gather(pack(y0));
         y1 = map f(part of w, unpack(r1)); z1 = all_gather(pack(y1)); z = unpack(z0, z1)

    A tree of a piece has all leaves, empty where they are in other buckets; a scalar that is no weight's is
    in all of them, and the same.
    """
    pieces = Pieces(editor, op, found)
    own: dict[Ref, Gathered] = {}
    for ref in op.results:
        joined = gathered(uses, ref)
        if joined is not None:
            own[ref] = joined
    made = pieces.updates()
    gone = {id(op), *(id(each) for joined in own.values() for each in joined.ops)}
    for ref, joined in own.items():
        made += pieces.gather(ref, joined)
    rest = [each for each in uses.ops if id(each) not in gone]
    read = {ref for each in rest for ref in operands_of(each)}
    read |= {binding.value for binding in (*editor.phase.outputs, *editor.phase.updates)}
    for ref in op.results:
        if ref in read:
            made += pieces.join(ref)
    place = uses.places[op.results[0]]
    before = [each for each in uses.ops[:place] if id(each) not in gone]
    after = [each for each in uses.ops[place + 1 :] if id(each) not in gone]
    return _alive(editor, [*before, *made, *after], found)


def _alive(editor: Editor, ops: list[Op], found: Stream) -> list[Op]:
    """`ops` without what the whole gradient was put together with, where nothing reads it any more."""
    bound = {binding.value for binding in (*editor.phase.outputs, *editor.phase.updates)}
    for op in reversed(found.chain):
        (made,) = results_of(op)
        if made not in bound and not DefUse(ops).readers(made):
            ops = [each for each in ops if each is not op]
    return ops


def _choice(op: Map, found: Stream) -> Choice:
    what = f"`{name_of(op.results[0])}`: {op.fn} in {len(found.buckets)} pieces, one for each bucket"
    why = "each runs as soon as the sum of its bucket is there, while others are on their way"
    return Choice("fuse_update", what, why, op.span, ("once, when all sums are there",))


def _kept(op: Map, why: Refusal) -> Choice:
    what = f"`{name_of(op.results[0])}`: {op.fn} once, when all sums are there"
    return Choice("fuse_update", what, why.why, op.span, ("in pieces, one for each bucket",))
