"""The pass `lower`: from the plan graph, with sizes and shapes, to a schedule.

Each stage becomes a few ops on whole values, which later passes pack, split and order:

    y = reduce x over data by mean   -->  y.1/sum = all_reduce sum(x.1); y.1 = scale(y.1/sum, div 4)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, cast

from commplan.frontend.lower.builder import CollectiveAction, PhaseBuilder, reduction
from commplan.frontend.lower.server_ops import lower_server_ops
from commplan.ir import plan as graph
from commplan.ir import schedule as sched
from commplan.ir.analysis.input_slice import bind_sources
from commplan.ir.assemble import assemble
from commplan.ir.serialization.canonical_json import plan_digest


def lower(
    plan: graph.Plan,
    axes: tuple[sched.Axis, ...],
    values: Mapping[graph.Ref, sched.Value],
    backend: sched.Backend = "jax",
    hosts: tuple[str, ...] = (),
) -> sched.Schedule:
    """The schedule of `plan` before any other pass.

    Args:
        plan: The plan.
        axes: The axes with sizes, from `bind_axes.bind_axes`.
        values: One rank's values, from `infer_shapes.infer`.
        backend: The target backend.
        hosts: The names of the hosts in order of places; empty if the topology does not list them.
    """
    return sched.Schedule(
        plan=plan.name,
        plan_digest=plan_digest(plan),
        axes=axes,
        sources=tuple(sched.SourceType(source.name, source.type) for source in plan.sources),
        fns=tuple(map(sched.FnType.from_fn, plan.fns)),
        inputs=plan.inputs,
        states=plan.states,
        entry=tuple(values[ref] for ref in (*plan.inputs, *plan.states)),
        phases=tuple(Lowering(plan, axes, values).phase(phase) for phase in plan.phases),
        origin=sched.Origin(
            plan, tuple(values[value.id] for value in plan.values), tuple(axis.size for axis in axes)
        ),
        backend=backend,
        hosts=hosts,
        pipeline="lower",
        file=plan.file,
    )


class Lowering(PhaseBuilder):
    """Lowers the stages of one phase after another. Methods other than `phase` append the ops of a stage.

    Attributes:
        plan: The plan.
        streams: For each random function, the number of its calls in this phase so far.
    """

    def __init__(
        self, plan: graph.Plan, axes: tuple[sched.Axis, ...], values: Mapping[graph.Ref, sched.Value]
    ) -> None:
        super().__init__(axes, dict(values))
        self.plan = plan
        self.streams: Counter[str] = Counter()

    def phase(self, phase: graph.Phase) -> sched.Phase:
        """Lower `phase`, whose ops replace those of the phase before."""
        self.ops, self.weights, self.streams = [], {}, Counter[str]()
        for stage in phase.stages:
            _STAGES.get(type(stage), Lowering.over_axes)(self, stage)
        states = [self.plan.value(ref) for ref in self.plan.states]
        outputs, updates = lower_server_ops(self, states, phase.outputs, phase.updates)
        read = {ref for op in self.ops for ref in sched.operands(op)}
        read |= {binding.value for binding in (*outputs, *updates)}
        lowered = sched.Phase(
            name=phase.name,
            kind=phase.kind,
            span=phase.span,
            period=phase.period,
            fragments=phase.fragments,
            hidden=phase.hidden,
            ops=tuple(self.ops),
            inputs=tuple(ref for ref in self.plan.inputs if ref in read),
            states=tuple(ref for ref in self.plan.states if ref in read),
            outputs=outputs,
            updates=updates,
            values=tuple(
                self.values[ref] for op in self.ops for ref in sched.results(op) if ref in self.values
            ),
        )
        return bind_sources(lowered)

    def map(self, stage: graph.MapStage) -> None:
        """Append a `Map`. The calls of a random function in a phase have the streams 1, 2, and so on."""
        fn = self.plan.fn(stage.fn)
        lane = "host_compute" if fn.where == "host" else "device"
        self.streams[fn.name] += fn.random
        stream = self.streams[fn.name]
        self.ops.append(assemble(sched.Map, stage, random=fn.random, stream=stream, lane=lane))

    def share(self, stage: graph.ShareStage) -> None:
        """Append a pinned `Share`, whose design passes keep."""
        count = stage.via.get("readers")
        readers = int(count) if count is not None else None
        op = assemble(sched.Share, stage, design=stage.via.name, readers=readers, pinned=True)
        self.ops.append(op)

    def over_axes(self, stage: Any) -> None:
        """Lower a `StageOverAxes` that reduces nothing to one collective of its kind (`COLLECTIVE`)."""
        kind = cast("sched.CollectiveKind", stage.COLLECTIVE)
        root = stage.rank(self.types.ranks)
        action = CollectiveAction(kind, root=root)
        self.collective(action, stage.result, stage.operand, stage.axes, stage)

    def elastic(self, stage: graph.ElasticStage) -> None:
        """Lower elastic averaging.

        sync         -->  the pull, its sum over the workers, and an update of the center
        other modes  -->  one op for the exchange with a server
        """
        if stage.mode != "sync":
            self.ops.append(assemble(sched.Elastic, stage, lane="network"))
            return
        self.ops.append(assemble(sched.Elastic, stage, result=None, hints=graph.NO_HINTS))
        total = f"{stage.result}/sum"
        self.collective(CollectiveAction("all_reduce", "sum"), total, stage.pull, stage.axes, stage)
        self.ops.append(sched.Update(stage.result, stage.center, total, stage.span))

    def exchange(self, stage: graph.ExchangeStage) -> None:
        """Append an `Exchange`. The pass `lower_exchange` lowers those without servers to collectives."""
        name = "mean" if stage.op.name == "mean" else "sum"
        op = assemble(sched.Exchange, stage, op=name, weight=stage.op.weight, algorithm=stage.via)
        self.ops.append(op)


# How stages are lowered, by type; `Lowering.over_axes` lowers the others.
_STAGES: dict[type, Callable[[Lowering, Any], None]] = {
    graph.Load: lambda builder, stage: builder.ops.append(assemble(sched.Read, stage)),
    graph.MapStage: Lowering.map,
    graph.ShareStage: Lowering.share,
    graph.Reduce: lambda builder, stage: reduction(builder, "all_reduce", stage),
    graph.Scatter: lambda builder, stage: reduction(builder, "reduce_scatter", stage),
    graph.PickStage: lambda builder, stage: builder.ops.append(assemble(sched.Pick, stage)),
    graph.MergeStage: lambda builder, stage: builder.ops.append(assemble(sched.Merge, stage)),
    graph.SliceStage: lambda builder, stage: builder.ops.append(assemble(sched.Slice, stage)),
    graph.ElasticStage: Lowering.elastic,
    graph.ExchangeStage: Lowering.exchange,
}
