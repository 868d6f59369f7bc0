"""An exchange between workers as ordinary operations: who updates what, and what that moves."""

from __future__ import annotations

import msgspec

from commplan.ir import plan as graph
from commplan.ir.plan import Ref, name_of
from commplan.ir.schedule import Exchange, Map, Op, Schedule, Value
from commplan.passes.building import Building
from commplan.passes.means import reduction
from commplan.passes.owning import Owners, hints_of
from commplan.passes.relocation import Relocation, split_value
from commplan.passes.rewrite import Editor


class Exchanging:
    """Writes out the exchanges of one phase."""

    def __init__(self, editor: Editor, relocation: Relocation) -> None:
        self.editor, self.relocation = editor, relocation
        self.own: set[Ref] = set()  # what maps on shards, or on whole values, make of states

    def write(self, ops: list[Op], op: Exchange, owners: Owners) -> None:
        """Append to `ops` what `op` becomes."""
        if owners.how == "sharded":
            self._sharded(ops, op, owners)
        else:
            self._replicated(ops, op, owners)

    def _sharded(self, ops: list[Op], op: Exchange, owners: Owners) -> None:
        """w, m = exchange g into w, m with f

        -->  gs = reduce_scatter(g); ws = slice(w); ms = slice(m), or m itself where owners keep it;
             ws', m' = map f(ws, ms, gs); w' = all_gather(ws')
        """
        editor, axes = self.editor, owners.axes
        ways = editor.size(axes)
        weights, result = op.states[0], op.results[0]
        gradient = self._reduced(ops, op, owners)
        states = [self.relocation.cut(ops, weights, axes, op.span)]
        updated = [self._add(split_value(editor.values[result], axes, ways), f"{result}/shard")]
        for ref, new in zip(op.states[1:], op.results[1:], strict=True):
            kept = ref in self.relocation.split
            states.append(ref if kept else self.relocation.cut(ops, ref, axes, op.span))
            value = split_value(editor.values[new], axes, ways)
            updated.append(self._add(value, new if owners.moved else f"{new}/shard"))
        made = Map(tuple(updated), op.fn, (*states, gradient), op.span)
        self.own.update(made.results)
        ops.append(made)
        for shard, new in zip(updated, op.results, strict=True):
            if shard == new:
                self.relocation.split.add(new)
            else:
                self._gather(ops, op, shard, new, owners)

    def _replicated(self, ops: list[Op], op: Exchange, owners: Owners) -> None:
        """w, m = exchange g into w, m with f  -->  s = all_reduce(g); w, m = map f(w, m, s)"""
        made = Map(op.results, op.fn, (*op.states, self._reduced(ops, op, owners)), op.span)
        self.own.update(made.results)
        ops.append(made)

    def _reduced(self, ops: list[Op], op: Exchange, owners: Owners) -> Ref:
        """The gradient, summed or averaged: this rank's part of it, or all of it."""
        editor, sharded = self.editor, owners.how == "sharded"
        value = editor.values[op.gradient]
        whole = msgspec.structs.replace(value, placement=value.placement.same_over(owners.axes))
        name = f"{op.results[0]}/gradient"
        reduced = split_value(whole, owners.axes, editor.size(owners.axes)) if sharded else whole
        ref = self._add(reduced, name)
        building = self._building()
        stage = graph.Reduce(
            ref, op.gradient, owners.axes, graph.Op(op.op, op.weight), op.span, via=owners.via,
            hints=hints_of(op),
        )  # fmt: skip
        reduction(building, "reduce_scatter" if sharded else "all_reduce", stage, owners.axes)
        ops += building.ops
        editor.values.update(building.of)
        return ref

    def _gather(self, ops: list[Op], op: Exchange, shard: Ref, result: Ref, owners: Owners) -> None:
        building = self._building()
        # What is sent narrow is the gradient: weights that were rounded could not move by less than that.
        hints = msgspec.structs.replace(hints_of(op), wire=None, accumulate=None)
        stage = graph.Reduce(
            result, shard, owners.axes, graph.Op("sum"), op.span, via=owners.via, hints=hints
        )  # fmt: skip
        building.collective("all_gather", result, shard, owners.axes, stage)
        ops += building.ops

    def _building(self) -> Building:
        return Building(self.editor.schedule.axes, self.editor.values)

    def _add(self, value: Value, name: Ref) -> Ref:
        fresh = name if name == value.id else self.editor.fresh(name)
        return self.editor.add(msgspec.structs.replace(value, id=fresh))


def colocated(schedule: Schedule, op: Op) -> bool:
    """Whether `op` is an exchange whose states live with the workers."""
    if not isinstance(op, Exchange):
        return False
    names = set(map(name_of, op.states))
    return not any(value.placement.server for value in schedule.entry if name_of(value.id) in names)
