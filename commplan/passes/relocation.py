"""States that owners keep: cut where they are set whole, gathered where they are read whole."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from commplan.diagnostics import Span
from commplan.ir.def_use import DefUse
from commplan.ir.plan import Ref, name_of
from commplan.ir.schedule import (
    Binding,
    Collective,
    Map,
    Op,
    Ownership,
    Schedule,
    Slice,
    StateShard,
    Value,
    substitute,
    widest,
)
from commplan.ir.schedule import operands as operands_of
from commplan.ir.schedule import results as results_of
from commplan.passes.rewrite import Editor, network_lane
from commplan.passes.rows import join_rows


def kept_entry(schedule: Schedule, moved: Mapping[str, Ownership]) -> Schedule:
    """`schedule` whose states in `moved`, by name, lie in parts with their owners."""
    shards = tuple(StateShard(ref, moved[name_of(ref)]) for ref in schedule.states if name_of(ref) in moved)
    parts = {shard.state: shard.ownership for shard in shards}
    entry = tuple(
        parts[value.id].part_of(value, schedule.axes) if value.id in parts else value
        for value in schedule.entry
    )
    return msgspec.structs.replace(schedule, entry=entry, state_shards=shards)


class Relocation:
    """One phase in which states have moved to their owners.

    editor: the phase, its entry values in parts already. wholes: the moved states as they were. parts: the
    values that are in parts, and the whole that they are parts of.
    """

    def __init__(self, editor: Editor, moved: Mapping[str, Ownership], wholes: Mapping[str, Value]) -> None:
        self.editor, self.moved, self.wholes = editor, moved, wholes
        self.parts = {ref for ref in editor.schedule.states if name_of(ref) in moved}
        self._whole: dict[Ref, Ref] = {}

    def rewrite(self, ops: list[Op], own: set[Ref]) -> list[Op]:
        """`ops`, and the bindings of the phase, with moves where they are needed.

        own: results of the maps that work on parts.

        y = map f(m)     -->  whole = all_gather(m); y = map f(whole)
        m = map f(x)     -->  m = map f(slice(x))        where f is elementwise and nothing else reads m
        m = y            -->  m = slice(y)
        """
        done: list[Op] = []
        for op in ops:
            done.append(self._read_whole(done, op) if own.isdisjoint(results_of(op)) else op)
        phase = self.editor.phase
        outputs = tuple(
            msgspec.structs.replace(b, value=self._gathered(done, b.value, phase.span)) for b in phase.outputs
        )
        updates = tuple(self._update(done, binding) for binding in phase.updates)
        self.editor.phase = msgspec.structs.replace(phase, outputs=outputs, updates=updates)
        return done

    def cut(self, ops: list[Op], ref: Ref, kept: Ownership, span: Span) -> Ref:
        """This rank's part of `ref`, a slice."""
        return self.editor.emit(ops, Slice(ref, ref, kept.axes, span, owners=kept.owners), f"{ref}/shard")

    def part_of(self, value: Value, kept: Ownership) -> Value:
        """What one rank holds of `value`."""
        return kept.part_of(value, self.editor.schedule.axes)

    def _read_whole(self, ops: list[Op], op: Op) -> Op:
        for ref in operands_of(op):
            if ref in self.parts:
                op = substitute(op, {ref: self._gathered(ops, ref, op.span)})
        return op

    def _gathered(self, ops: list[Op], ref: Ref, span: Span) -> Ref:
        if ref not in self.parts or ref in self._whole:
            return self._whole.get(ref, ref)
        value, kept = self.editor.values[ref], self.moved[name_of(ref)]
        name = f"{ref}/whole"
        if kept.owners:
            name = self.editor.fresh(name)
            self.editor.add(msgspec.structs.replace(self.wholes[name_of(ref)], id=name))
            join_rows(self.editor, ops, ref, name, kept.axes, kept.owners, span)
        else:
            lane, dtype = network_lane(self.editor.schedule.axes, kept.axes), widest(value.leaves)
            gather = Collective("all_gather", ref, ref, kept.axes, dtype, value.nbytes, span, lane=lane)
            name = self.editor.emit(ops, gather, name)
        self._whole[ref] = name
        return name

    def _update(self, ops: list[Op], binding: Binding) -> Binding:
        span = self.editor.phase.span
        if binding.name not in self.moved:
            return msgspec.structs.replace(binding, value=self._gathered(ops, binding.value, span))
        if binding.value in self.parts:
            return binding
        kept = self.moved[binding.name]
        maker = DefUse(ops).maker(binding.value)
        if not isinstance(maker, Map) or not self._may_cut_first(ops, maker, binding, kept):
            where = maker.span if maker is not None else span
            return msgspec.structs.replace(binding, value=self.cut(ops, binding.value, kept, where))
        self.editor.add(self.part_of(self.editor.values[binding.value], kept))
        at, cuts = ops.index(maker), list[Op]()
        for ref in dict.fromkeys(maker.operands):
            if any(leaf.shape for leaf in self.editor.values[ref].leaves):
                maker = substitute(maker, {ref: self.cut(cuts, ref, kept, maker.span)})
        ops[at : at + 1] = [*cuts, maker]
        self.parts.add(binding.value)
        return binding

    def _may_cut_first(self, ops: list[Op], maker: Map, binding: Binding, kept: Ownership) -> bool:
        """Whether `maker` may work on parts: it is elementwise, and its result is read nowhere else."""
        phase, fn = self.editor.phase, self.editor.schedule.fn(maker.fn)
        if not fn.elementwise or maker.random or maker.per_record or len(maker.results) != 1:
            return False
        if DefUse(ops).readers(binding.value):
            return False
        if [b.value for b in (*phase.outputs, *phase.updates)].count(binding.value) != 1:
            return False
        given = [self.editor.values[ref].placement for ref in maker.operands]
        return not any(place.split or any(place.varies(axis) for axis in kept.axes) for place in given)
