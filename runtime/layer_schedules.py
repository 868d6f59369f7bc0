"""Schedules for the layers of `run.layers`: the plan's `gather` and `scatter` for the leaves of one layer.

A phase gathers and scatters all leaves of a value at once. A layer uses the same stages, compiled for its own
leaves. Wire types, means, algorithms and levels are those of the plan, and each schedule is proved against
its stages like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from msgspec.structs import replace

from commplan.diagnostics import fail
from commplan.frontend.infer_shapes import infer
from commplan.frontend.lower.stages import lower
from commplan.ir import plan as graph
from commplan.ir.schedule import Collective, Leaf, Schedule
from commplan.ir.types import TreeType
from commplan.passes.base import Pass, PassContext
from commplan.passes.bucket.bucket import BucketPass
from commplan.passes.pipeline.manager import Pipeline

# Bytes. A leaf of at least this size is sent alone, which saves a copy on both sides.
PACKED_NBYTES = 1 << 20
# The number of layers that are gathered ahead, unless the plan has `{ prefetch = .. }`.
PREFETCH = 1
# Stages in order: each one reads the result of the stage before it.
Stages = tuple[graph.Gather | graph.Scatter | graph.Reduce, ...]
_Kinds = tuple[type[graph.Gather] | type[graph.Scatter] | type[graph.Reduce], ...]


@dataclass(frozen=True)
class ShardedStages:
    """The stages of a phase that gather split weights, and those that scatter their gradients.

    Attributes:
        schedule: The schedule of the run, with its plan.
        phase: The phase of the plan.
        gathers: The stages from the split weights to the whole ones, at least one.
        scatters: The stages from the partial gradients to those placed like the split weights, at least one.
    """

    schedule: Schedule
    phase: graph.Phase
    gathers: Stages
    scatters: Stages

    @property
    def weights(self) -> graph.Value:
        """The weights between steps, which are split."""
        return self._plan.value(self.gathers[0].operand)

    @property
    def gradients(self) -> graph.Value:
        """The gradients before they are scattered, which are partial."""
        return self._plan.value(self.scatters[0].operand)

    @property
    def prefetch(self) -> int:
        """The number of layers that are gathered ahead: the largest of the `gather` stages."""
        depths = [stage.hints.prefetch for stage in self.gathers if stage.hints.prefetch is not None]
        return max(depths, default=PREFETCH)

    @property
    def _plan(self) -> graph.Plan:
        assert self.schedule.origin is not None
        return self.schedule.origin.plan

    def gather_schedules(self, leaves: Sequence[Leaf]) -> Iterator[tuple[tuple[int, ...], Schedule]]:
        """Compile the gather of one layer.

        Args:
            leaves: The whole leaves of the layer.

        Returns:
            Groups of leaves, as indices, each with the schedule that gathers it. Each leaf is in one group.
        """
        return self._schedules(self.gathers, leaves, range(len(leaves)))

    def scatter_schedules(self, leaves: Sequence[Leaf]) -> Iterator[tuple[tuple[int, ...], Schedule]]:
        """Compile the scatter of a layer's gradient; see `gather_schedules`.

        Leaves without a float dtype have no gradient and are in no group.
        """
        floats = [index for index, leaf in enumerate(leaves) if leaf.dtype.is_float]
        return self._schedules(self.scatters, leaves, floats)

    def _schedules(
        self, stages: Stages, leaves: Sequence[Leaf], indices: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], Schedule]]:
        """Divide the leaves `indices` into groups, and compile `stages` for each group.

        If a stage has `{ bucket = .. }`, all leaves are in one group. Otherwise leaves are packed only if the
        pipeline packs by default and they have less than `PACKED_NBYTES`. The others are sent one by one.
        """
        passes = Pipeline.parse(self.schedule.pipeline).passes
        packed = tuple(indices)
        if all(stage.hints.bucket is None for stage in stages):
            packs = any(isinstance(pass_, BucketPass) and pass_.packs_by_default for pass_ in passes)
            packed = tuple(i for i in indices if packs and leaves[i].nbytes < PACKED_NBYTES)
            alone = tuple(i for i in indices if i not in packed)
            if alone:
                unpacked = tuple(pass_ for pass_ in passes if pass_.name != "bucket")
                yield alone, self._schedule(stages, [leaves[i] for i in alone], unpacked)
        if packed:
            yield packed, self._schedule(stages, [leaves[i] for i in packed], passes)

    def _schedule(self, stages: Stages, leaves: Sequence[Leaf], passes: tuple[Pass, ...]) -> Schedule:
        """Compile `stages` for `leaves`, as a plan with one phase that has no other stages."""
        schedule, plan = self.schedule, self._plan
        stages = tuple(map(self._pin_algorithm, stages))
        start, end = stages[0].operand, stages[-1].result
        refs = {start, *(stage.result for stage in stages)}
        output = graph.Binding(plan.value(end).name, end)
        plan_of_stages = replace(
            plan,
            sources=(), fns=(), inputs=(start,), states=(),
            values=tuple(value for value in plan.values if value.id in refs),
            phases=(replace(self.phase, stages=stages, outputs=(output,), updates=()),),
        )  # fmt: skip
        sizes = {axis.name: axis.size for axis in schedule.axes}
        values = infer(plan_of_stages, sizes, {plan.value(start).name: tuple(leaves)})
        lowered = lower(plan_of_stages, schedule.axes, values, schedule.backend, schedule.hosts)
        return Pipeline(passes).run(lowered, PassContext())

    def _pin_algorithm(self, stage: Any) -> Any:
        """Return `stage` with the algorithm of its collectives in the whole schedule.

        That algorithm may depend on the topology, which the layer's schedule does not have. The stage is
        returned unchanged in four cases: its plan line has `via`, no axis has levels, its collectives have
        several algorithms, or the schedule has no such collective.
        """
        ops = (op for phase in self.schedule.phases for op in phase.ops if isinstance(op, Collective))
        kinds = {op.algorithm for op in ops if op.kind == stage.COLLECTIVE and stage.result in op.stages}
        levels = any(axis.levels for axis in self.schedule.axes)
        return replace(stage, via=kinds.pop()) if levels and stage.via is None and len(kinds) == 1 else stage


def sharded_stages(schedule: Schedule, phase: str, weights: str | None, grads: str | None) -> ShardedStages:
    """Find the stages of `phase` for split weights.

    Args:
        schedule: The schedule of the run.
        phase: The name of a phase of the plan.
        weights: The name of the split input or state, or None if there is only one.
        grads: The name of the partial input or state, or None if there is only one.

    Raises:
        CommplanError: CP0826 if an input cannot be identified. Also if the phase does not gather the weights
            whole, or does not scatter the gradient to their placement by a sum or an unweighted mean. Also
            for a schedule that was saved without its plan.
    """
    if schedule.origin is None:
        _cannot(schedule, phase, "the program was saved by an earlier version, without its plan")
    plan = schedule.origin.plan
    plan_phase = plan.phase(phase)
    entries = [plan.value(ref) for ref in (*plan.inputs, *plan.states)]
    trees = [value for value in entries if isinstance(value.type, TreeType)]
    sums = (graph.Scatter, graph.Reduce)
    gathers = [_chain(plan_phase, value.id, (graph.Gather,)) for value in trees if value.placement.split]
    scatters = [_chain(plan_phase, value.id, sums) for value in trees if value.placement.partial]
    gather = _only(schedule, plan_phase, gathers, weights, "weights", "a split tree that it gathers")
    placement = plan.value(gather[0].operand).placement
    fitting = [chain for chain in scatters if chain and plan.value(chain[-1].result).placement == placement]
    scatter = _only(
        schedule, plan_phase, fitting, grads, "grads", f"a partial tree that it makes `{placement}`"
    )
    if plan.value(gather[-1].result).placement.split:
        _cannot(schedule, phase, f"`{plan.value(gather[-1].result).name}` is still split")
    reductions = [stage.op for stage in scatter if isinstance(stage, sums)]
    if any(op.weight is not None or op.name not in ("sum", "mean") for op in reductions):
        _cannot(schedule, phase, "its gradient is not reduced by a sum or an unweighted mean")
    return ShardedStages(schedule, plan_phase, gather, scatter)


def _chain(phase: graph.Phase, ref: graph.Ref, kinds: _Kinds) -> Stages:
    """The stages of `kinds` from `ref` on, up to a value that not exactly one of them reads; may be empty."""
    stages: list[graph.Gather | graph.Scatter | graph.Reduce] = []
    while True:
        candidates = (stage for stage in phase.stages if isinstance(stage, kinds))
        readers = [stage for stage in candidates if stage.operand == ref]
        if len(readers) != 1:
            return tuple(stages)
        stages += readers
        ref = readers[0].result


def _only(
    schedule: Schedule,
    phase: graph.Phase,
    chains: Sequence[Stages],
    name: str | None,
    word: str,
    expected: str,
) -> Stages:
    """The chain of the value `name`, or the only chain. Empty chains do not count.

    Args:
        schedule: The schedule, for errors.
        phase: The phase, for errors.
        chains: The candidates.
        name: The name of the value at which the chain starts; None for the only one.
        word: The parameter of `run.layers` for `name`, for errors.
        expected: A description of the value, for errors.
    """
    named = {graph.name_of(chain[0].operand): chain for chain in chains if chain}
    if name is None and len(named) == 1:
        return next(iter(named.values()))
    if name is not None and name in named:
        return named[name]
    has = f"it has {', '.join(f'`{n}`' for n in named) or 'none'}"
    note = f'name one: run.layers(.., {word}="{next(iter(named), word)}")' if len(named) > 1 else ""
    return _cannot(schedule, phase.name, f"it needs {expected}; {has}", note)


def _cannot(schedule: Schedule, phase: str, why: str, note: str = "") -> NoReturn:
    """Raise CP0826. By default the note shows the stages that are needed."""
    note = note or "such as `weights = gather shards over data` and `grads = scatter grads over data by mean`"
    fail("CP0826", f"run.layers cannot use phase `{phase}`: {why}", note, file=schedule.file)
