"""An exchange between workers as ordinary operations: who updates what, and what that moves."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from commplan.ir import plan as graph
from commplan.ir.plan import Hints, Ref, name_of
from commplan.ir.schedule import Collective, Exchange, Map, Op, Schedule, Value
from commplan.passes.building import Building
from commplan.passes.means import reduction
from commplan.passes.owning import Owners, hints_of, streaming
from commplan.passes.relocation import Relocation
from commplan.passes.rewrite import Editor
from commplan.passes.rows import join_rows, reduce_rows

HALVES = 2 * 1024**2  # bytes from which what owners sum and send back travels in two parts


class _Building(Building):
    """Builds among the values of an editor; a reduce-scatter to some of the ranks goes to each of them."""

    def __init__(self, editor: Editor, owners: Owners) -> None:
        super().__init__(editor.schedule.axes, editor.values)
        self.editor, self.owners = editor, owners

    def emit(self, op: Op) -> Ref:
        if not isinstance(op, Collective) or op.kind != "reduce_scatter" or not self.owners.ranks:
            return super().emit(op)
        if self.owners.via is not None:
            op = msgspec.structs.replace(op, algorithm=self.owners.via, pinned=True)
        return reduce_rows(self.editor, self.ops, op, self.owners.ranks)


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
        editor, kept = self.editor, owners.kept
        weights, result = op.states[0], op.results[0]
        gradient = self._reduced(ops, op, owners)
        states = [self.relocation.cut(ops, weights, kept, op.span)]
        updated = [self._add(self.relocation.part_of(editor.values[result], kept), f"{result}/shard")]
        for ref, new in zip(op.states[1:], op.results[1:], strict=True):
            lives_here = ref in self.relocation.parts
            states.append(ref if lives_here else self.relocation.cut(ops, ref, kept, op.span))
            value = self.relocation.part_of(editor.values[new], kept)
            updated.append(self._add(value, new if owners.moved else f"{new}/shard"))
        # An exchange leaves it open how it is carried out: its update may run beside its sums, in pieces.
        made = Map(tuple(updated), op.fn, (*states, gradient), op.span, hints=Hints(overlap="backward"))
        self.own.update(made.results)
        ops.append(made)
        for shard, new in zip(updated, op.results, strict=True):
            if shard == new:
                self.relocation.parts.add(new)
            else:
                self._gather(ops, op, shard, new, owners)

    def _replicated(self, ops: list[Op], op: Exchange, owners: Owners) -> None:
        """w, m = exchange g into w, m with f  -->  s = all_reduce(g); w, m = map f(w, m, s)"""
        made = Map(op.results, op.fn, (*op.states, self._reduced(ops, op, owners)), op.span)
        self.own.update(made.results)
        ops.append(made)

    def _reduced(self, ops: list[Op], op: Exchange, owners: Owners) -> Ref:
        """The gradient, summed or averaged: this rank's part of it, or all of it."""
        sharded, ref = owners.how == "sharded", self.editor.fresh(f"{op.results[0]}/gradient")
        building = _Building(self.editor, owners)
        stage = graph.Reduce(
            ref, op.gradient, owners.axes, graph.Reduction(op.op, op.weight), op.span,
            via=None if owners.ranks else owners.via, hints=self._hints(op, owners),
        )  # fmt: skip
        reduction(building, "reduce_scatter" if sharded else "all_reduce", stage, owners.axes)
        ops += building.ops
        return ref

    def _gather(self, ops: list[Op], op: Exchange, shard: Ref, result: Ref, owners: Owners) -> None:
        building = _Building(self.editor, owners)
        # What is sent narrow is the gradient: weights that were rounded could not move by less than that.
        hints = msgspec.structs.replace(self._hints(op, owners), wire=None, accumulate=None)
        if owners.ranks:
            join_rows(self.editor, ops, shard, result, owners.axes, owners.ranks, op.span, hints, owners.via)
            return
        stage = graph.Reduce(
            result, shard, owners.axes, graph.Reduction("sum"), op.span, via=owners.via, hints=hints
        )  # fmt: skip
        building.collective("all_gather", result, shard, owners.axes, stage)
        ops += building.ops

    def _hints(self, op: Exchange, owners: Owners) -> Hints:
        """Of the collectives. Over MPI, where links are never idle, a large gradient still travels in two
        halves: one is updated, and on its way back, while the other is summed."""
        schedule, gradient = self.editor.schedule, self.editor.values[op.gradient]
        hints = hints_of(op, streams=streaming(schedule, owners))
        if hints.overlap or owners.how != "sharded" or schedule.backend != "mpi" or gradient.nbytes < HALVES:
            return hints
        return msgspec.structs.replace(hints, overlap="update")

    def _add(self, value: Value, name: Ref) -> Ref:
        fresh = name if name == value.id else self.editor.fresh(name)
        return self.editor.add(msgspec.structs.replace(value, id=fresh))


def colocated(schedule: Schedule, ops: Iterable[Op]) -> list[Exchange]:
    """The exchanges among `ops` whose states live with the workers."""
    away = {name_of(value.id) for value in schedule.entry if value.placement.server}
    return [op for op in ops if isinstance(op, Exchange) and away.isdisjoint(map(name_of, op.states))]
