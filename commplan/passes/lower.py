"""lower: the plan graph, with sizes and shapes, becomes a schedule.

Each stage turns into the few ops that carry it out on whole values; later passes pack, cut and
order them. `reduce by mean` --> all_reduce sum, then a division.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from commplan.ir import plan as graph
from commplan.ir import schedule as sched
from commplan.ir.choice import Design
from commplan.ir.serial import plan_digest
from commplan.ir.sources import bind_sources
from commplan.passes.atservers import at_servers
from commplan.passes.building import Building
from commplan.passes.means import reduction


def lower(
    plan: graph.Plan,
    axes: tuple[sched.Axis, ...],
    values: Mapping[graph.Ref, sched.Value],
    backend: sched.Backend = "jax",
    hosts: tuple[str, ...] = (),
) -> sched.Schedule:
    """The schedule of `plan` before any rewriting; `values` come from `shapes.infer`.

    backend: what it is for. hosts: the names of the topology's hosts, where they are known.
    """
    return sched.Schedule(
        plan=plan.name,
        plan_digest=plan_digest(plan),
        axes=axes,
        sources=tuple(sched.SourceType(source.name, source.type) for source in plan.sources),
        fns=tuple(map(sched.FnType.of, plan.fns)),
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


class Lowering(Building):
    """Lowers the stages of one phase after another, collecting ops and the values they make."""

    def __init__(
        self, plan: graph.Plan, axes: tuple[sched.Axis, ...], values: Mapping[graph.Ref, sched.Value]
    ) -> None:
        super().__init__(axes, dict(values))
        self.plan = plan
        self.made: list[sched.Value] = []

    def phase(self, phase: graph.Phase) -> sched.Phase:
        self.ops, self.made, self.weights = [], [], {}
        for stage in phase.stages:
            _STAGES[type(stage)](self, stage)
        states = [self.plan.value(ref) for ref in self.plan.states]
        outputs, updates = at_servers(self, states, phase.outputs, phase.updates)
        for op in self.ops:
            self.made += [self.of[ref] for ref in sched.results(op) if ref in self.of]
        read = {ref for op in self.ops for ref in sched.operands(op)}
        read |= {binding.value for binding in (*outputs, *updates)}
        lowered = sched.Phase(
            name=phase.name,
            kind=phase.kind,
            span=phase.span,
            period=phase.period,
            ops=tuple(self.ops),
            inputs=tuple(ref for ref in self.plan.inputs if ref in read),
            states=tuple(ref for ref in self.plan.states if ref in read),
            outputs=outputs,
            updates=updates,
            values=tuple(self.made),
        )
        return bind_sources(lowered)

    def load(self, stage: graph.Load) -> None:
        self.ops.append(
            sched.Read(
                stage.result, stage.source, stage.batch, stage.visit, stage.seed, stage.span, stage.count,
                stage.clock, stage.split, stage.per, stage.tail, stage.hints,
            )
        )  # fmt: skip

    def map(self, stage: graph.Map) -> None:
        fn = self.plan.fn(stage.fn)
        lane = "host_compute" if fn.where == "host" else "device"
        self.ops.append(
            sched.Map(
                stage.results, stage.fn, stage.operands, stage.span, stage.per, stage.per_record, fn.random,
                stage.hints, lane=lane,
            )
        )  # fmt: skip

    def share(self, stage: graph.Share) -> None:
        design = cast("Design", stage.via.name)
        asked = stage.via.get("readers")
        readers = int(asked) if asked is not None else None
        self.ops.append(
            sched.Share(stage.result, stage.operand, stage.axes, design, stage.span, readers, stage.hints)
        )

    def broadcast(self, stage: graph.Broadcast) -> None:
        self.collective("broadcast", stage.result, stage.operand, stage.axes, stage, root=stage.root)

    def reduce(self, stage: graph.Reduce) -> None:
        reduction(self, "all_reduce", stage, stage.axes)

    def scatter(self, stage: graph.Scatter) -> None:
        reduction(self, "reduce_scatter", stage, stage.axes)

    def gather(self, stage: graph.Gather) -> None:
        self.collective("all_gather", stage.result, stage.operand, stage.axes, stage)

    def slice(self, stage: graph.Slice) -> None:
        self.ops.append(sched.Slice(stage.result, stage.operand, stage.axes, stage.span))

    def elastic(self, stage: graph.Elastic) -> None:
        """sync --> pull, its sum, the centre moved by the sum; otherwise the whole exchange is one op."""
        sync = stage.mode == "sync"
        self.ops.append(
            sched.Elastic(
                stage.pull, stage.operand, stage.center, stage.mode, stage.eta, stage.rho, stage.axes,
                stage.span, None if sync else stage.result, stage.hints, lane="device" if sync else "network",
            )
        )  # fmt: skip
        if not sync:
            return
        total = f"{stage.result}/sum"
        self.collective("all_reduce", total, stage.pull, stage.axes, stage, op="sum")
        self.ops.append(sched.Update(stage.result, stage.center, total, stage.span))

    def exchange(self, stage: graph.Exchange) -> None:
        name = "mean" if stage.op.name == "mean" else "sum"
        self.ops.append(
            sched.Exchange(
                stage.results, stage.gradient, stage.states, stage.fn, stage.axes, name, stage.span,
                stage.op.weight, stage.via, stage.hints,
            )
        )  # fmt: skip


_STAGES: dict[type, Callable[[Lowering, Any], None]] = {
    graph.Load: Lowering.load,
    graph.Map: Lowering.map,
    graph.Share: Lowering.share,
    graph.Broadcast: Lowering.broadcast,
    graph.Reduce: Lowering.reduce,
    graph.Scatter: Lowering.scatter,
    graph.Gather: Lowering.gather,
    graph.Slice: Lowering.slice,
    graph.Elastic: Lowering.elastic,
    graph.Exchange: Lowering.exchange,
}
