"""States that owners keep: cut where they are set whole, gathered where they are read whole."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from commplan.diagnostics import Span
from commplan.ir.layout import cut
from commplan.ir.plan import Ref, name_of
from commplan.ir.schedule import Binding, Collective, Map, Op, Schedule, Slice, Value, widest
from commplan.ir.schedule import operands as operands_of
from commplan.ir.schedule import results as results_of
from commplan.passes.renaming import reading
from commplan.passes.rewrite import Editor, network_lane


def split_value(value: Value, axes: tuple[str, ...], ways: int) -> Value:
    """`value`, which is the same along `axes`, cut among their `ways` ranks: one cut, first axis major."""
    leaves = tuple(cut(value.kind, leaf, ways) for leaf in value.leaves)
    placement = msgspec.structs.replace(value.placement, split=axes)
    return msgspec.structs.replace(value, leaves=leaves, placement=placement, whole=value.leaves)


def split_entry(schedule: Schedule, moved: Mapping[str, tuple[str, ...]]) -> Schedule:
    """`schedule` whose states in `moved`, by name, lie split over the axes given there."""
    entry = tuple(
        split_value(value, moved[name_of(value.id)], schedule.size(moved[name_of(value.id)]))
        if value.id in schedule.states and name_of(value.id) in moved
        else value
        for value in schedule.entry
    )
    return msgspec.structs.replace(schedule, entry=entry)


class Relocation:
    """One phase in which states have moved to their owners.

    editor: the phase, its entry values split already. own: values that are split, and who may read them so.
    """

    def __init__(self, editor: Editor, moved: Mapping[str, tuple[str, ...]]) -> None:
        self.editor, self.moved = editor, moved
        self.split = {ref for ref in editor.schedule.states if name_of(ref) in moved}
        self._whole: dict[Ref, Ref] = {}

    def rewrite(self, ops: list[Op], own: set[Ref]) -> list[Op]:
        """`ops`, and the bindings of the phase, with moves where they are needed.

        own: results of the maps that work on shards.

        y = map f(m)     -->  whole = all_gather(m); y = map f(whole)
        m = map f(x)     -->  m = map f(slice(x))        where f is elementwise and nothing else reads m
        m = y            -->  m = slice(y)
        """
        done: list[Op] = []
        for op in ops:
            if own.isdisjoint(results_of(op)):
                done.append(self._read_whole(done, op))
            else:
                done.append(op)
        phase = self.editor.phase
        outputs = tuple(
            msgspec.structs.replace(b, value=self._gathered(done, b.value, phase.span))
            for b in phase.outputs
        )
        updates = tuple(self._update(done, binding) for binding in phase.updates)
        self.editor.phase = msgspec.structs.replace(phase, outputs=outputs, updates=updates)
        return done

    def _read_whole(self, ops: list[Op], op: Op) -> Op:
        for ref in operands_of(op):
            if ref in self.split:
                op = reading(op, {ref: self._gathered(ops, ref, op.span)})
        return op

    def _gathered(self, ops: list[Op], ref: Ref, span: Span) -> Ref:
        if ref not in self.split:
            return ref
        if ref not in self._whole:
            value = self.editor.values[ref]
            axes = value.placement.split
            placement = msgspec.structs.replace(value.placement, split=())
            whole = msgspec.structs.replace(
                value, id=self.editor.fresh(f"{ref}/whole"), leaves=value.whole, placement=placement, whole=()
            )
            self._whole[ref] = self.editor.add(whole)
            lane = network_lane(self.editor.schedule.axes, axes)
            ops.append(
                Collective(
                    "all_gather", whole.id, ref, axes, widest(value.leaves), value.nbytes, span, lane=lane
                )
            )
        return self._whole[ref]

    def _update(self, ops: list[Op], binding: Binding) -> Binding:
        if binding.name not in self.moved:
            whole = self._gathered(ops, binding.value, self.editor.phase.span)
            return msgspec.structs.replace(binding, value=whole)
        if binding.value in self.split:
            return binding
        axes = self.moved[binding.name]
        maker = next((op for op in ops if binding.value in results_of(op)), None)
        if isinstance(maker, Map) and self._may_cut_first(ops, maker, binding, axes):
            value = split_value(self.editor.values[binding.value], axes, self.editor.size(axes))
            self.editor.add(value)
            at = ops.index(maker)
            cuts: list[Op] = []
            for ref in dict.fromkeys(maker.operands):
                if _is_cut(self.editor.values[ref]):
                    maker = reading(maker, {ref: self.cut(cuts, ref, axes, maker.span)})
            ops[at : at + 1] = [*cuts, maker]
            self.split.add(binding.value)
            return binding
        span = maker.span if maker is not None else self.editor.phase.span
        return msgspec.structs.replace(binding, value=self.cut(ops, binding.value, axes, span))

    def _may_cut_first(self, ops: list[Op], maker: Map, binding: Binding, axes: tuple[str, ...]) -> bool:
        """Whether `maker` may work on shards: it is elementwise, and its result is read nowhere else."""
        phase, fn = self.editor.phase, self.editor.schedule.fn(maker.fn)
        if not fn.elementwise or maker.random or maker.per_record or len(maker.results) != 1:
            return False
        if any(binding.value in operands_of(op) for op in ops):
            return False
        if [b.value for b in (*phase.outputs, *phase.updates)].count(binding.value) != 1:
            return False
        given = [self.editor.values[ref].placement for ref in maker.operands]
        return not any(place.split or any(place.varies(axis) for axis in axes) for place in given)

    def cut(self, ops: list[Op], ref: Ref, axes: tuple[str, ...], span: Span) -> Ref:
        """This rank's part of `ref`, a slice."""
        value = split_value(self.editor.values[ref], axes, self.editor.size(axes))
        name = self.editor.add(msgspec.structs.replace(value, id=self.editor.fresh(f"{ref}/shard")))
        ops.append(Slice(name, ref, axes[0], span, minor=axes[1:]))
        return name


def _is_cut(value: Value) -> bool:
    """Whether a cut changes anything of `value`: it is no scalar."""
    return any(leaf.shape for leaf in value.leaves)
