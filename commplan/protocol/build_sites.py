"""Build the sites of a schedule: the layout of each state, and the messages of each op.

See `sites` for the result, and `units` for the layouts.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, cast

from commplan.diagnostics import Span, fail
from commplan.ir.analysis.server_ops import ServerOp, server_op, worker_operands
from commplan.ir.ops import server_operands
from commplan.ir.plan import AxisKind, Ref, name_of
from commplan.ir.schedule import Elastic, Exchange, Get, Phase, Put, Schedule, Value, results
from commplan.ir.types import DType
from commplan.protocol.sites import FIRST_TAG, Buffer, Chunk, Kind, Site, Sites
from commplan.protocol.units import Flat, StateLayout, layout_auxiliary_state, layout_weights

# The states of a site, the buffers that a worker sends, and the buffers of the answer.
_Request = tuple[tuple[Value, ...], tuple[Buffer, ...], tuple[Buffer, ...]]


def sites(schedule: Schedule) -> Sites:
    """The sites of `schedule`, which are the same on all ranks.

    Raises:
        CommplanError: CP0726 for an auxiliary state that cannot be divided. CP0767 for a state with two kinds
            of update. CP0729 if workers neither reduce over an axis nor have separate states along it.
    """
    return _SiteBuilder(schedule).sites()


class _SiteBuilder:
    """Builds the sites of one schedule.

    Attributes:
        schedule: The schedule.
        entry: The inputs and states, with their values on entry to a phase.
        tags: The tags that are not used yet. They increase in the order of posting.
        first: The number of the first server of each server declaration.
        servers: The number of servers of all declarations.
        layouts: The layouts of states so far, by name.
        updates: How the servers update each state, in words, and the first place that does so.
        read: By phase, the values that its workers read or return.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.entry = {value.id: value for value in schedule.entry}
        self.tags = itertools.count(FIRST_TAG)
        self.first: dict[str, int] = {}
        self.servers = 0
        for axis in schedule.axes:
            if axis.kind is AxisKind.SERVER:
                self.first[axis.name] = self.servers
                self.servers += axis.size
        self.layouts: dict[str, StateLayout] = {}
        self.updates: dict[str, tuple[str, Span]] = {}
        self.read: dict[str, set[Ref]] = {}

    def sites(self) -> Sites:
        """The sites in the order of the schedule; empty if there are no servers."""
        calls: list[Site] = []
        if self.servers:
            ops = list(self._ops())
            for _, op, values in ops:  # layouts follow from exchanges anywhere in the plan
                if isinstance(op, Exchange | Elastic):
                    self._set_layouts(op, values)
            for number, (phase, op, values) in enumerate(ops):
                calls.append(self._site(number, phase, op, values))
        axes = tuple((axis.name, axis.size) for axis in self.schedule.mesh_axes)
        return Sites(tuple(calls), axes, self.servers)

    def _ops(self) -> Iterator[tuple[Phase, ServerOp, dict[Ref, Value]]]:
        """The ops that use servers, each with its phase and the values of the phase. Sets `read`."""
        for phase in self.schedule.phases:
            values = self.entry | {value.id: value for value in phase.values}
            self.read[phase.name] = {ref for op in phase.ops for ref in worker_operands(op, values)}
            self.read[phase.name] |= {binding.value for binding in phase.outputs}
            for op in phase.ops:
                request = server_op(op, values)
                if request is not None:
                    yield phase, request, values

    def _set_layouts(self, op: Exchange | Elastic, values: dict[Ref, Value]) -> None:
        """Lay out the states of an op: first the weights, then the auxiliary states with the same units."""
        center, *auxiliary = server_operands(op)
        sent = worker_operands(op, values)[0]
        how = "exchange" if isinstance(op, Exchange) else f"elastic {op.mode}"
        self._check_use(name_of(center), how, op.span)
        leaves = values[center].leaves
        if name_of(center) not in self.layouts:
            servers = self._server_count(values[center])
            keys = [(x.dtype, y.dtype) for x, y in zip(leaves, values[sent].leaves, strict=True)]
            self.layouts[name_of(center)] = layout_weights(leaves, keys, servers, op.hints.chunk)
        for state in auxiliary:
            weights = self.layouts[name_of(center)]
            self._check_use(name_of(state), f"{how} with {name_of(center)}", op.span)
            state_leaves, file = values[state].leaves, self.schedule.file
            self.layouts[name_of(state)] = layout_auxiliary_state(
                state_leaves, leaves, weights, op.span, file
            )

    def _check_use(self, name: str, how: str, span: Span) -> None:
        """Raise CP0767 if an earlier op updates the state `name` in another way than `how`."""
        first_how, first_span = self.updates.setdefault(name, (how, span))
        if first_how != how:
            message = (
                f"the state `{name}` is used by `{how}` here, and by `{first_how}` on line {first_span.line}"
            )
            fix = "servers update a state in one way: declare two states"
            fail("CP0767", message, fix, span=span, file=self.schedule.file)

    def _server_count(self, value: Value) -> int:
        """The number of servers that store the state `value`."""
        assert value.placement.server is not None
        return self.schedule.axis(value.placement.server).size

    def _layout(self, value: Value) -> StateLayout:
        """The layout of the state `value`."""
        name = name_of(value.id)
        if name not in self.layouts:  # only `put` and `get` use the state
            keys = [leaf.dtype for leaf in value.leaves]
            self.layouts[name] = layout_weights(value.leaves, keys, self._server_count(value), None)
        return self.layouts[name]

    def _site(self, number: int, phase: Phase, op: ServerOp, values: dict[Ref, Value]) -> Site:
        """The site of `op`, the one with index `number`. Takes the tags of its messages."""
        fields: dict[str, Any] = {}
        match op:
            case Exchange():
                states, up, down = self._update_request(phase, op, values)
                fields |= {"staleness": op.hints.staleness or 0, "mean": op.op == "mean"}
                fields |= {"fn": op.fn, "weight": op.weight}
            case Elastic():
                states, up, down = self._update_request(phase, op, values)
                fields |= {"staleness": op.hints.staleness, "mode": op.mode, "eta": op.eta, "rho": op.rho}
            case Put():
                states, down = (values[name_of(op.result) + ".0"],), ()
                layout = self._layout(states[0])
                up = self._whole(layout, op.operand, states[0], down=False)
                fields["token"] = (self._each("token", DType.I32, layout),)
            case Get():
                states = (values[name_of(op.operand) + ".0"],)
                layout = self._layout(states[0])
                up = (self._each("token", DType.I32, layout),)
                down = self._whole(layout, op.result, states[0], down=True)
        placement, kind = states[0].placement, cast("Kind", op.__struct_config__.tag)
        assert placement.server is not None
        names = tuple(name_of(state.id) for state in states)
        layouts = tuple(map(self._layout, states))
        return Site(
            number, kind, phase.name, results(op)[0], op.span, placement.server,
            self.first[placement.server], self._server_count(states[0]), placement.per, names, layouts,
            up, down, **fields,
        )  # fmt: skip

    def _update_request(self, phase: Phase, op: Exchange | Elastic, values: dict[Ref, Value]) -> _Request:
        """The request of an exchange or elastic.

        Workers send the scalars, and a gradient or their weights. They receive the weights or their pull, or
        a token if the phase does not use the result of the exchange.
        """
        (operand, *scalars), answer = worker_operands(op, values), results(op)[0]
        states, wire = tuple(values[ref] for ref in server_operands(op)), op.hints.wire
        self._check_apart(op, states[0])
        layout, leaves = self._layout(states[0]), values[operand].leaves
        up = [self._each("scalar", values[ref].leaves[0].dtype, layout, ref, (0,)) for ref in scalars]
        dtypes = [_wire(leaves[part.leaves[0]].dtype, wire) for part in layout.parts]
        up += self._data(layout, layout.parts, dtypes, operand)
        if isinstance(op, Elastic) or answer in self.read[phase.name]:
            dtypes = [_wire(part.dtype, wire) for part in layout.parts]
            down = self._data(layout, layout.parts, dtypes, answer)
        else:
            down = (self._each("token", DType.I32, layout, down=True),)
        return states, tuple(up), down

    def _check_apart(self, op: Exchange | Elastic, state: Value) -> None:
        """Raise CP0729 if workers along an axis would all send the same value for `state`."""
        several = [axis.name for axis in self.schedule.mesh_axes if axis.size > 1]
        unnamed = [name for name in several if name not in (*op.axes, *state.placement.per)]
        if unnamed:
            message = (
                f"workers along `{unnamed[0]}` hold the same value, and each would send it to the servers"
            )
            note = (
                f"name `{unnamed[0]}` after `over` too, or make it an ensemble with states `per {unnamed[0]}`"
            )
            fail("CP0729", message, note, span=op.span, file=self.schedule.file)

    def _data(
        self, layout: StateLayout, flats: Sequence[Flat], dtypes: Iterable[DType], value: Ref, slot: int = 0
    ) -> tuple[Buffer, ...]:
        """The buffers of one slot, one for each of its parts `flats`, sent in `dtypes`."""
        buffers: list[Buffer] = []
        for part, (flat, dtype) in enumerate(zip(flats, dtypes, strict=True)):
            units = (unit for unit in layout.units if unit.part == part)
            chunks = tuple(Chunk(u.server, u.start, u.size, next(self.tags), u.number) for u in units)
            buffers.append(Buffer("data", dtype, flat.size, chunks, value, flat.leaves, slot, part))
        return tuple(buffers)

    def _whole(self, layout: StateLayout, value: Ref, state: Value, *, down: bool) -> tuple[Buffer, ...]:
        """The buffers of a whole state: its scalars, and all of its slots.

        Args:
            layout: The layout of the state.
            value: The value that is sent, or that the answer becomes.
            state: The state, whose dtypes the buffers have.
            down: Whether servers send it.
        """
        buffers: list[Buffer] = []
        for index in layout.scalars:
            dtype = state.leaves[index].dtype
            buffers.append(self._each("scalar", dtype, layout, value, (index,), down=down))
        for slot, flats in enumerate(layout.slots):
            buffers += self._data(layout, flats, [flat.dtype for flat in flats], value, slot)
        if not buffers and not down:  # an auxiliary state without leaves is set too
            return (self._each("token", DType.I32, layout),)
        return tuple(buffers)

    def _each(
        self,
        kind: Literal["scalar", "token"],
        dtype: DType,
        layout: StateLayout,
        value: Ref = "",
        leaves: tuple[int, ...] = (),
        *,
        down: bool = False,
    ) -> Buffer:
        """A buffer with one element to or from every server that owns a unit.

        A small state may have fewer units than servers. A worker sends the same element to each server;
        coming down, each server's answer has its own element of the buffer.

        Args:
            kind: The content.
            dtype: The dtype.
            layout: The layout of the state.
            value: The value, for a scalar.
            leaves: The index of its leaf.
            down: Whether servers send it.
        """
        servers = sorted({unit.server for unit in layout.units})
        chunks = tuple(
            Chunk(server, index if down else 0, 1, next(self.tags)) for index, server in enumerate(servers)
        )
        return Buffer(kind, dtype, len(chunks) if down else 1, chunks, value, leaves)


def _wire(dtype: DType, wire: DType | None) -> DType:
    """The type of values of `dtype` when they are sent: `wire` for floats, if it is not None."""
    return wire if wire is not None and dtype.is_float else dtype
