"""Lowers exchanges between workers to ordinary ops, for the pass `place`.

States that are sharded among owners are gathered before a whole value is read. A whole value is sliced before
it is assigned to such a state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from commplan.diagnostics import Span
from commplan.frontend.lower.builder import PhaseBuilder, reduction
from commplan.ir import plan as graph
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.plan import Hints, Ref, name_of
from commplan.ir.refs import base_name
from commplan.ir.schedule import (
    Binding,
    Collective,
    Exchange,
    Map,
    Op,
    Ownership,
    Phase,
    Schedule,
    Slice,
    StateShard,
    Value,
    substitute,
)
from commplan.ir.schedule import operands as operands_of
from commplan.ir.schedule import results as results_of
from commplan.ir.stages.exchange import few_owners
from commplan.ir.types import DType
from commplan.passes.exchange.owner_selection import Owners, hints_of, streaming
from commplan.passes.exchange.owner_shards import StageOrigin, join_parts, reduce_rows
from commplan.passes.rewrite import Editor

HALVES = 2 * 1024**2  # bytes; a smaller gradient is not split in two parts under MPI


class _ShardBuilder(PhaseBuilder):
    """A builder on an editor's values, for the reduction of a gradient.

    If only a few ranks are owners, it lowers the reduce-scatter to one reduce for each owner.
    """

    def __init__(self, editor: Editor, owners: Owners) -> None:
        super().__init__(editor.schedule.axes, editor.values)
        self.ops = editor.ops
        self.editor, self.owners = editor, owners

    def emit(self, op: Op) -> Ref:
        """Append `op`, or its reductions to the owners; returns the first result."""
        if not isinstance(op, Collective) or op.kind != "reduce_scatter" or not self.owners.ranks:
            return super().emit(op)
        if self.owners.via is not None:
            op = replace(op, algorithm=self.owners.via, pinned=True)
        return reduce_rows(self.editor, op, self.owners.ranks)


def shard_entry(schedule: Schedule, ownerships: Mapping[str, Ownership]) -> Schedule:
    """Shard states among their owners at the entry of `schedule`.

    Args:
        schedule: The schedule.
        ownerships: The owners of the states to shard, by the name of the state.

    Returns:
        The schedule with sharded entry values; its phases are unchanged.
    """
    shards = tuple(
        StateShard(ref, ownerships[name_of(ref)]) for ref in schedule.states if name_of(ref) in ownerships
    )
    parts = {shard.state: shard.ownership for shard in shards}
    entry = tuple(
        parts[value.id].part_of(value, schedule.axes) if value.id in parts else value
        for value in schedule.entry
    )
    return replace(schedule, entry=entry, state_shards=shards)


class StateSharding:
    """Rewrites one phase so that exchanges are lowered and states are sharded among their owners.

    Attributes:
        editor: The phase, with sharded entry values.
        ownerships: The owners of the sharded states, by the name of the state.
        whole_values: The states before sharding, by name.
        parts: The values that are shards of a state.
        updated_shards: The results of the maps that update shards.
    """

    def __init__(
        self, editor: Editor, ownerships: Mapping[str, Ownership], whole_values: Mapping[str, Value]
    ) -> None:
        self.editor, self.ownerships, self.whole_values = editor, ownerships, whole_values
        self.parts = {ref for ref in editor.schedule.states if name_of(ref) in ownerships}
        self.updated_shards: set[Ref] = set()
        self._whole: dict[Ref, Ref] = {}

    def finish(self) -> Phase:
        """Return the rewritten phase, with gathers and slices added as needed.

        The ops of the phase must have been emitted to the editor.

        y = map f(m)  -->  whole = all_gather(m); y = map f(whole)
        m = map f(x)  -->  m = map f(slice(x)), if f is elementwise and nothing else reads m
        m = y         -->  m = slice(y)
        """
        for op in self.editor.take():
            updates_shards = not self.updated_shards.isdisjoint(results_of(op))
            self.editor.ops.append(op if updates_shards else self._read_whole(op))
        phase = self.editor.phase
        outputs = tuple(replace(b, value=self._gather(b.value, phase.span, ())) for b in phase.outputs)
        updates = tuple(map(self._update, phase.updates))
        self.editor.phase = replace(phase, outputs=outputs, updates=updates)
        return self.editor.finish(self.editor.ops)

    def lower_sharded(self, op: Exchange, owners: Owners) -> None:
        """Lower an exchange with owners.

            w, m = exchange g into w, m with f
            -->  gs = reduce_scatter(g); ws = slice(w); ms = slice(m);
                 ws', ms' = map f(ws, ms, gs); w' = all_gather(ws'); m' = all_gather(ms')

        The optimizer's state `m` is neither sliced nor gathered if it is sharded.
        """
        values, axes = self.editor.values, self.editor.schedule.axes
        ownership = owners.ownership
        weights, result = op.states[0], op.results[0]
        gradient = self._reduce_gradient(op, owners)
        states = [self._slice_shard(weights, ownership, op.span)]
        updated = [self._add(ownership.part_of(values[result], axes), f"{result}/shard")]
        for ref, new in zip(op.states[1:], op.results[1:], strict=True):
            states.append(ref if ref in self.parts else self._slice_shard(ref, ownership, op.span))
            value = ownership.part_of(values[new], axes)
            updated.append(self._add(value, new if owners.shards_state else f"{new}/shard"))
        # The plan does not prescribe how an exchange runs: its update may overlap its sums, in pieces.
        update = Map(tuple(updated), op.fn, (*states, gradient), op.span, hints=Hints(overlap="backward"))
        self.updated_shards.update(update.results)
        self.editor.ops.append(update)
        # Only gradients use the wire dtype: rounded weights would lose small updates.
        hints = self._hints(op, owners).exact
        for shard, new in zip(updated, op.results, strict=True):
            if shard == new:
                self.parts.add(new)
            else:
                origin = StageOrigin(op.span, (base_name(result),), hints, owners.via)
                join_parts(self.editor, shard, new, ownership, origin)

    def lower_replicated(self, op: Exchange, owners: Owners) -> None:
        """Lower an exchange without owners.

        w, m = exchange g into w, m with f  -->  s = all_reduce(g); w, m = map f(w, m, s)
        """
        update = Map(op.results, op.fn, (*op.states, self._reduce_gradient(op, owners)), op.span)
        self.editor.ops.append(update)

    def _reduce_gradient(self, op: Exchange, owners: Owners) -> Ref:
        """Emit the reduction of the gradient, and return its result: this rank's shard, or all of it."""
        result = self.editor.fresh(f"{op.results[0]}/gradient")
        hints = self._hints(op, owners)
        dtypes = {leaf.dtype for leaf in self.editor.values[op.gradient].leaves}
        is_unweighted_mean = op.op == "mean" and op.weight is None
        if is_unweighted_mean and hints.accumulate is None and DType.F16 in dtypes:
            # The mean that the plan defines does not depend on the levels.
            if few_owners(op.algorithm) is not None:
                hints = replace(hints, accumulate=DType.F16)
            else:
                hints = hints.for_mean(dtypes, None, is_weighted=False)
        stage = graph.Reduce(
            result, op.gradient, owners.axes, graph.Reduction(op.op, op.weight), op.span,
            via=None if owners.ranks else owners.via, hints=hints,
        )  # fmt: skip
        kind = "reduce_scatter" if owners.how == "sharded" else "all_reduce"
        reduction(_ShardBuilder(self.editor, owners), kind, stage)
        return result

    def _hints(self, op: Exchange, owners: Owners) -> Hints:
        """The hints of the collectives.

        Under MPI, a large gradient of sharded states is split in two halves, even if the plan does not
        request overlap. One half is updated and sent back while the other is summed.
        """
        schedule, gradient = self.editor.schedule, self.editor.values[op.gradient]
        hints = hints_of(op, streams=streaming(schedule, owners))
        if hints.overlap or owners.how != "sharded" or schedule.backend != "mpi" or gradient.nbytes < HALVES:
            return hints
        return replace(hints, overlap="update")

    def _add(self, value: Value, name: Ref) -> Ref:
        """Declare a value like `value` under `name`, made unique unless it is the name of `value`."""
        fresh = name if name == value.id else self.editor.fresh(name)
        return self.editor.add(replace(value, id=fresh))

    def _slice_shard(self, ref: Ref, ownership: Ownership, span: Span) -> Ref:
        """Slice this rank's part of `ref`."""
        return self.editor.emit(
            Slice(ref, ref, ownership.axes, span, owners=ownership.owners), f"{ref}/shard"
        )

    def _read_whole(self, op: Op) -> Op:
        """Replace the operands of `op` that are shards by gathered values."""
        for ref in operands_of(op):
            if ref in self.parts:
                op = substitute(op, {ref: self._gather(ref, op.span, (base_name(results_of(op)[0]),))})
        return op

    def _gather(self, ref: Ref, span: Span, stages: tuple[Ref, ...]) -> Ref:
        """Return the whole value of `ref`. Gathers it if it is a shard, once in a phase.

        `span` and `stages` are the stage of the plan that reads it, for the ops of the gather.
        """
        if ref not in self.parts or ref in self._whole:
            return self._whole.get(ref, ref)
        name = self._add(self.whole_values[name_of(ref)], f"{ref}/whole")
        join_parts(self.editor, ref, name, self.ownerships[name_of(ref)], StageOrigin(span, stages))
        self._whole[ref] = name
        return name

    def _update(self, binding: Binding) -> Binding:
        """Bind a sharded state to a shard, and any other to a whole value."""
        span, ops = self.editor.phase.span, self.editor.ops
        if binding.name not in self.ownerships:
            return replace(binding, value=self._gather(binding.value, span, ()))
        if binding.value in self.parts:
            return binding
        ownership = self.ownerships[binding.name]
        maker = DefUse(ops).maker(binding.value)
        if not isinstance(maker, Map) or not self._may_cut_first(maker, binding, ownership):
            slice_span = maker.span if maker is not None else span
            return replace(binding, value=self._slice_shard(binding.value, ownership, slice_span))
        self.editor.add(ownership.part_of(self.editor.values[binding.value], self.editor.schedule.axes))
        index = ops.index(maker)
        end = len(ops)
        for ref in dict.fromkeys(maker.operands):
            if any(leaf.shape for leaf in self.editor.values[ref].leaves):  # a scalar is not sliced
                maker = substitute(maker, {ref: self._slice_shard(ref, ownership, maker.span)})
        # The slices, which were emitted last, precede the map.
        ops[:] = [*ops[:index], *ops[end:], maker, *ops[index + 1 : end]]
        self.parts.add(binding.value)
        return binding

    def _may_cut_first(self, maker: Map, binding: Binding, ownership: Ownership) -> bool:
        """Whether `maker` may run on shards: it is elementwise and its result has no other reader."""
        phase, fn = self.editor.phase, self.editor.schedule.fn(maker.fn)
        if not fn.elementwise or maker.random or maker.per_record or len(maker.results) != 1:
            return False
        if DefUse(self.editor.ops).readers(binding.value):
            return False
        if [b.value for b in (*phase.outputs, *phase.updates)].count(binding.value) != 1:
            return False
        # Operands that are split or differ along the owners' axes cannot be sliced along them.
        placements = [self.editor.values[ref].placement for ref in maker.operands]
        return not any(
            placement.split or any(placement.varies(axis) for axis in ownership.axes)
            for placement in placements
        )


def colocated(schedule: Schedule, ops: Iterable[Op]) -> list[Exchange]:
    """The exchanges among `ops` whose states are stored by the workers."""
    on_servers = {name_of(value.id) for value in schedule.entry if value.placement.server}
    return [op for op in ops if isinstance(op, Exchange) and on_servers.isdisjoint(map(name_of, op.states))]
