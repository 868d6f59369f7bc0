"""Schedules for the layers of `run.layers`: the plan's `gather` and `scatter`, for the leaves of one.

A phase gathers and scatters all leaves of a value at once. A layer alone is moved by the same stages,
compiled for its own leaves: wire types, means, algorithms and levels are the plan's, and each schedule is
proved against its stages as every other one is.
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
from commplan.passes.bucket.bucket import BucketPass
from commplan.passes.pipeline.base import Pass, PassContext
from commplan.passes.pipeline.manager import Pipeline

PACKED_NBYTES = 1 << 20  # of a whole leaf: a larger one travels as it lies, which saves a copy on both sides
PREFETCH = 1  # layers ahead, where the plan does not say
Stages = tuple[graph.Gather | graph.Scatter | graph.Reduce, ...]
_Kinds = tuple[type[graph.Gather] | type[graph.Scatter] | type[graph.Reduce], ...]


@dataclass(frozen=True)
class ShardedStages:
    """What a phase says about split weights: the stages that gather them, and those that scatter their
    gradient."""

    schedule: Schedule
    phase: graph.Phase
    gathers: Stages
    scatters: Stages

    @property
    def weights(self) -> graph.Value:
        """The weights as they lie between steps: split."""
        return self._plan.value(self.gathers[0].operand)

    @property
    def gradients(self) -> graph.Value:
        """Their gradient before it is scattered: partial."""
        return self._plan.value(self.scatters[0].operand)

    @property
    def prefetch(self) -> int:
        depths = [stage.hints.prefetch for stage in self.gathers if stage.hints.prefetch is not None]
        return max(depths, default=PREFETCH)

    @property
    def _plan(self) -> graph.Plan:
        assert self.schedule.origin is not None
        return self.schedule.origin.plan

    def gather_schedules(self, leaves: Sequence[Leaf]) -> Iterator[tuple[tuple[int, ...], Schedule]]:
        """The leaves of a layer that travel together, by their places, and the schedule that gathers them."""
        return self._schedules(self.gathers, leaves, range(len(leaves)))

    def scatter_schedules(self, leaves: Sequence[Leaf]) -> Iterator[tuple[tuple[int, ...], Schedule]]:
        """The same for the gradient; leaves of whole numbers have none."""
        floats = [place for place, leaf in enumerate(leaves) if leaf.dtype.is_float]
        return self._schedules(self.scatters, leaves, floats)

    def _schedules(
        self, stages: Stages, leaves: Sequence[Leaf], places: Sequence[int]
    ) -> Iterator[tuple[tuple[int, ...], Schedule]]:
        passes = Pipeline.parse(self.schedule.pipeline).passes
        packed = tuple(places)
        if all(stage.hints.bucket is None for stage in stages):
            packs = any(isinstance(pass_, BucketPass) and pass_.packs_unasked for pass_ in passes)
            packed = tuple(i for i in places if packs and leaves[i].nbytes < PACKED_NBYTES)
            alone = tuple(i for i in places if i not in packed)
            if alone:
                own = tuple(pass_ for pass_ in passes if pass_.name != "bucket")
                yield alone, self._schedule(stages, [leaves[i] for i in alone], own)
        if packed:
            yield packed, self._schedule(stages, [leaves[i] for i in packed], passes)

    def _schedule(self, stages: Stages, leaves: Sequence[Leaf], passes: tuple[Pass, ...]) -> Schedule:
        """The stages alone, compiled for `leaves`."""
        schedule, plan = self.schedule, self._plan
        stages = tuple(map(self._pinned, stages))
        start, end = stages[0].operand, stages[-1].result
        known = {start, *(stage.result for stage in stages)}
        output = graph.Binding(plan.value(end).name, end)
        own = replace(
            plan,
            sources=(), fns=(), inputs=(start,), states=(),
            values=tuple(value for value in plan.values if value.id in known),
            phases=(replace(self.phase, stages=stages, outputs=(output,), updates=()),),
        )  # fmt: skip
        sizes = {axis.name: axis.size for axis in schedule.axes}
        values = infer(own, sizes, {plan.value(start).name: tuple(leaves)})
        first = lower(own, schedule.axes, values, schedule.backend, schedule.hosts)
        return Pipeline(passes).run(first, PassContext())

    def _pinned(self, stage: Any) -> Any:
        """The stage with the algorithm that the whole schedule has for it: that may come from a topology,
        which is not known here."""
        ops = (op for phase in self.schedule.phases for op in phase.ops if isinstance(op, Collective))
        kinds = {op.algorithm for op in ops if op.kind == stage.COLLECTIVE and stage.result in op.stages}
        levels = any(axis.levels for axis in self.schedule.axes)
        return replace(stage, via=kinds.pop()) if levels and stage.via is None and len(kinds) == 1 else stage


def sharded_stages(schedule: Schedule, phase: str, weights: str | None, grads: str | None) -> ShardedStages:
    """What `phase` says about split weights. weights, grads: the inputs meant, where there are several.

    Raises CP0826 where there are none, or several.
    """
    if schedule.origin is None:
        _cannot(schedule, phase, "the program was saved by an earlier version, without its plan")
    plan = schedule.origin.plan
    own = plan.phase(phase)
    entries = [plan.value(ref) for ref in (*plan.inputs, *plan.states)]
    trees = [value for value in entries if isinstance(value.type, TreeType)]
    sums = (graph.Scatter, graph.Reduce)
    gathers = [_chain(own, value.id, (graph.Gather,)) for value in trees if value.placement.split]
    scatters = [_chain(own, value.id, sums) for value in trees if value.placement.partial]
    gather = _only(schedule, own, gathers, weights, "weights", "a split tree that it gathers")
    placement = plan.value(gather[0].operand).placement
    fitting = [chain for chain in scatters if chain and plan.value(chain[-1].result).placement == placement]
    scatter = _only(schedule, own, fitting, grads, "grads", f"a partial tree that it makes `{placement}`")
    if plan.value(gather[-1].result).placement.split:
        _cannot(schedule, phase, f"`{plan.value(gather[-1].result).name}` is still split")
    reductions = [stage.op for stage in scatter if isinstance(stage, sums)]
    if any(op.weight is not None or op.name not in ("sum", "mean") for op in reductions):
        _cannot(schedule, phase, "the gradient is reduced by something else than a sum or a plain mean")
    return ShardedStages(schedule, own, gather, scatter)


def _chain(phase: graph.Phase, ref: graph.Ref, kinds: _Kinds) -> Stages:
    """The stages of `kinds` that take `ref`, and each what the one before makes."""
    stages: list[graph.Gather | graph.Scatter | graph.Reduce] = []
    while True:
        own = (stage for stage in phase.stages if isinstance(stage, kinds))
        readers = [stage for stage in own if stage.operand == ref]
        if len(readers) != 1:
            return tuple(stages)
        stages += readers
        ref = readers[0].result


def _only(
    schedule: Schedule, phase: graph.Phase, chains: Sequence[Stages], name: str | None, word: str, wanted: str
) -> Stages:
    """The chain of the value called `name`, or the only one."""
    named = {graph.name_of(chain[0].operand): chain for chain in chains if chain}
    if name is None and len(named) == 1:
        return next(iter(named.values()))
    if name is not None and name in named:
        return named[name]
    has = f"it has {', '.join(f'`{n}`' for n in named) or 'none'}"
    note = f'name one: run.layers(.., {word}="{next(iter(named), word)}")' if len(named) > 1 else ""
    return _cannot(schedule, phase.name, f"it needs {wanted}; {has}", note)


def _cannot(schedule: Schedule, phase: str, why: str, note: str = "") -> NoReturn:
    note = note or "such as `weights = gather shards over data` and `grads = scatter grads over data by mean`"
    fail("CP0826", f"run.layers cannot work by phase `{phase}`: {why}", note, file=schedule.file)
