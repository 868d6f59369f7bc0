"""What workers put on servers and get from them, as ops of their own.

A state on a server that a phase sets otherwise than by `exchange` and `elastic` is put there; one that it
reads otherwise is got before it is needed. The weights that an exchange gives come with its answer; anything
else that a worker reads of a server after it is got.

    half = map fn(weights)          -->  weights.0/got = get(weights.0); half = map fn(weights.0/got)
    weights = broadcast params      -->  weights.1 = broadcast params; weights.1/there = put(weights.1)
    center = broadcast params       -->  center.1/there = put(params.0), where no worker wants it
"""

from __future__ import annotations

from collections.abc import Sequence

from commplan.diagnostics import Span
from commplan.frontend.lower.builder import Builder
from commplan.ir import schedule as sched
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.analysis.server_ops import renewed, server_op
from commplan.ir.ops import add_results
from commplan.ir.plan import Binding, Ref, Value
from commplan.ir.transfer import placed

Bindings = tuple[sched.Binding, ...]


def lower_server_ops(
    building: Builder, states: Sequence[Value], outputs: Sequence[Binding], updates: Sequence[Binding]
) -> tuple[Bindings, Bindings]:
    """Add `Get` and `Put` to the ops of a phase; its outputs and updates, bound to what they make.

    states: all states of the plan.
    """
    on_servers = {state.name: state for state in states if state.placement.server is not None}
    getting = _Getting(building, {state.id: state.span for state in on_servers.values()})
    for op in building.ops:
        getting.add(op)
    bound = tuple(sched.Binding(b.name, getting.get(b.value)) for b in outputs)
    building.ops = getting.ops
    kept = {b.value for b in outputs}
    return bound, _put(building, [(b, on_servers.get(b.name)) for b in updates], kept)


class _Getting:
    """The ops so far, and what lies on servers: each value with the place in the plan that it comes from."""

    def __init__(self, building: Builder, held: dict[Ref, Span]) -> None:
        self.building, self.held = building, held
        self.ops: list[sched.Op] = []
        self.got: dict[Ref, Ref] = {}

    def add(self, op: sched.Op) -> None:
        if isinstance(op, sched.Map):
            op = sched.substitute(op, {ref: self.get(ref, op.span) for ref in op.operands})
        self.ops.append(op)
        asking = server_op(op, self.building.of)
        if asking is not None:
            self.held |= dict.fromkeys(renewed(asking), op.span)

    def get(self, ref: Ref, span: Span | None = None) -> Ref:
        """`ref`, or what a worker gets of it where it lies on a server."""
        if ref not in self.held:
            return ref
        if ref not in self.got:
            self.got[ref] = f"{ref}/got"
            self.ops.append(sched.Get(self.got[ref], ref, span or self.held[ref]))
            add_results(self.ops[-1], self.building.types, self.building.of, self.building.of)
        return self.got[ref]


def _put(
    building: Builder, updates: Sequence[tuple[Binding, Value | None]], kept: set[Ref]
) -> tuple[sched.Binding, ...]:
    """The updates, each with its state where that lies on a server: new values that were not made there are
    put there. kept: what the phase puts out.

    Where an op brings the first worker's value to all others, and only the servers want it, nobody needs to
    wait for anybody, for it is the first worker that sends it there.
    """
    uses = DefUse(building.ops)
    kept = kept.union(*(sched.operands(op) for op in building.ops))
    bound, puts, unread = list[sched.Binding](), list[sched.Op](), set[Ref]()
    for binding, state in updates:
        ref, maker = binding.value, uses.maker(binding.value)
        if state is None or maker is None or isinstance(maker, sched.Exchange | sched.Elastic):
            bound.append(sched.Binding(binding.name, ref))
            continue
        put = f"{ref}/there"
        building.of[put] = placed(building.of[ref], put, state.placement)
        bound.append(sched.Binding(binding.name, put))
        match maker:
            case sched.Collective(kind="broadcast", root=0) if ref not in kept:
                unread.add(ref)
                puts.append(sched.Put(put, maker.operand, maker.span))
            case _:
                puts.append(sched.Put(put, ref, maker.span))
    building.ops = [*(op for op in building.ops if unread.isdisjoint(sched.results(op))), *puts]
    return tuple(bound)
