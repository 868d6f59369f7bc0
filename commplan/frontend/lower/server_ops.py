"""Lower the traffic between workers and servers to `Put` and `Get` ops.

A phase that sets a state on a server without `exchange` or `elastic` puts the new value there (`Put`). A
phase that reads one without them fetches it first (`Get`). The workers receive the first result of an
exchange with its answer; other results stay on the servers and are fetched if a `map` or an output reads
them.

    half = map fn(weights)          -->  weights.0/got = get(weights.0); half = map fn(weights.0/got)
    weights = broadcast params      -->  weights.1 = broadcast params; weights.1/there = put(weights.1)
    center = broadcast params       -->  center.1/there = put(params.0), if no worker reads it
"""

from __future__ import annotations

from collections.abc import Sequence

from commplan.diagnostics import Span
from commplan.frontend.lower.builder import PhaseBuilder
from commplan.ir import schedule as sched
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.analysis.server_ops import server_op, server_results
from commplan.ir.ops import add_results
from commplan.ir.plan import Binding, Ref, Value
from commplan.ir.transfer import value_like

# Outputs or updates of a phase, bound to values of the schedule.
Bindings = tuple[sched.Binding, ...]


def lower_server_ops(
    builder: PhaseBuilder, states: Sequence[Value], outputs: Sequence[Binding], updates: Sequence[Binding]
) -> tuple[Bindings, Bindings]:
    """Add `Get` and `Put` ops to a phase, and remove broadcasts that they make superfluous.

    Args:
        builder: The ops of the phase, which are replaced, and its values, which are added to.
        states: All states of the plan.
        outputs: The outputs of the phase in the plan.
        updates: The updates of the phase in the plan.

    Returns:
        The outputs and updates, bound to values of the schedule.
    """
    on_servers = {state.name: state for state in states if state.placement.server is not None}
    reads = _ServerReads(builder, {state.id: state.span for state in on_servers.values()})
    for op in builder.ops:
        reads.add(op)
    bound = tuple(sched.Binding(b.name, reads.get(b.value)) for b in outputs)
    builder.ops = reads.ops
    output_refs = {b.value for b in outputs}
    return bound, _put(builder, [(b, on_servers.get(b.name)) for b in updates], output_refs)


class _ServerReads:
    """Inserts `Get` ops before the first op, or output, that reads a value on a server.

    Args:
        builder: The values of the phase, which the fetched ones are added to.
        on_servers: The values that exist on servers only, with the spans that make them. Results of later
            ops are added.

    Attributes:
        ops: The ops so far, with the inserted ones.
        fetched: The fetched copy of each value that has been read.
    """

    def __init__(self, builder: PhaseBuilder, on_servers: dict[Ref, Span]) -> None:
        self.builder, self.on_servers = builder, on_servers
        self.ops: list[sched.Op] = []
        self.fetched: dict[Ref, Ref] = {}

    def add(self, op: sched.Op) -> None:
        """Append `op`, after the `Get` ops that it needs. Only operands of a `map` are fetched."""
        if isinstance(op, sched.Map):
            op = sched.substitute(op, {ref: self.get(ref, op.span) for ref in op.operands})
        self.ops.append(op)
        request = server_op(op, self.builder.values)
        if request is not None:
            self.on_servers |= dict.fromkeys(server_results(request), op.span)

    def get(self, ref: Ref, span: Span | None = None) -> Ref:
        """`ref`, or its fetched copy if it is on a server.

        Args:
            ref: The value.
            span: The place of the read, for the `Get`; None for that of the value.
        """
        if ref not in self.on_servers:
            return ref
        if ref not in self.fetched:
            self.fetched[ref] = f"{ref}/got"
            self.ops.append(sched.Get(self.fetched[ref], ref, span or self.on_servers[ref]))
            add_results(self.ops[-1], self.builder.types, self.builder.values, self.builder.values)
        return self.fetched[ref]


def _put(
    builder: PhaseBuilder, updates: Sequence[tuple[Binding, Value | None]], read: set[Ref]
) -> tuple[sched.Binding, ...]:
    """The updates, with a `Put` for each new value of a state on a server that was not made there.

    If an op broadcasts the value of the first worker and only servers need the result, the broadcast is
    removed, since the first worker itself puts the value.

    Args:
        builder: The ops of the phase, which the `Put` ops are added to.
        updates: The updates, each with its state if that is on a server, else None.
        read: The values that the phase outputs.
    """
    uses = DefUse(builder.ops)
    read = read.union(*(sched.operands(op) for op in builder.ops))
    bound: list[sched.Binding] = []
    puts: list[sched.Op] = []
    unread: set[Ref] = set()  # the results of broadcasts to remove
    for binding, state in updates:
        ref, maker = binding.value, uses.maker(binding.value)
        if state is None or maker is None or isinstance(maker, sched.Exchange | sched.Elastic):
            bound.append(sched.Binding(binding.name, ref))
            continue
        put = f"{ref}/there"
        builder.values[put] = value_like(builder.values[ref], put, state.placement)
        bound.append(sched.Binding(binding.name, put))
        match maker:
            case sched.Collective(kind="broadcast", root=0) if ref not in read:
                unread.add(ref)
                puts.append(sched.Put(put, maker.operand, maker.span))
            case _:
                puts.append(sched.Put(put, ref, maker.span))
    builder.ops = [*(op for op in builder.ops if unread.isdisjoint(sched.results(op))), *puts]
    return tuple(bound)
