"""From a schedule to its sites: which states lie where, and what each op sends and gets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from commplan.diagnostics import Span, fail
from commplan.ir.ops import kept
from commplan.ir.plan import AxisKind, Ref, name_of
from commplan.ir.schedule import Elastic, Exchange, Get, Phase, Put, Schedule, Value, results
from commplan.ir.serving import ServerOp, sent, server_op
from commplan.ir.types import DType
from commplan.protocol.sites import FIRST_TAG, Buffer, Chunk, Mode, Site, Sites
from commplan.protocol.units import Flat, Layout, Unit, beside, weights


def sites(schedule: Schedule) -> Sites:
    """The sites of `schedule`; none where no state lives on a server.

    Raises CP0726 for a state beside the weights that cannot be divided, CP0767 for a state that is used in
    two ways, CP0729 where workers neither meet in an op nor have a state of their own.
    """
    return _Survey(schedule).sites()


class _Tags:
    """Tags are given out in the order in which messages are posted."""

    def __init__(self) -> None:
        self.next = FIRST_TAG

    def take(self) -> int:
        self.next += 1
        return self.next - 1


class _Survey:
    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.entry = {value.id: value for value in schedule.entry}
        self.tags = _Tags()
        self.first: dict[str, int] = {}
        count = 0
        for axis in schedule.axes:
            if axis.kind is AxisKind.SERVER:
                self.first[axis.name] = count
                count += axis.size
        self.servers = count
        self.layouts: dict[str, Layout] = {}
        self.used: dict[str, tuple[str, Span]] = {}
        self.read: dict[
            str, set[Ref]
        ] = {}  # of each phase: what its workers need, in ops of theirs or as outputs

    def sites(self) -> Sites:
        found: list[Site] = []
        if self.servers:
            ops = list(self._ops())
            for _, op, values in ops:  # layouts follow from exchanges wherever these stand
                if isinstance(op, Exchange | Elastic):
                    self._lay(op, values)
            for number, (phase, op, values) in enumerate(ops):
                found.append(self._site(number, phase, op, values))
        axes = tuple((axis.name, axis.size) for axis in self.schedule.mesh_axes)
        return Sites(tuple(found), axes, self.servers)

    def _ops(self) -> Iterator[tuple[Phase, ServerOp, dict[Ref, Value]]]:
        for phase in self.schedule.phases:
            values = self.entry | {value.id: value for value in phase.values}
            self.read[phase.name] = {ref for op in phase.ops for ref in sent(op)}
            self.read[phase.name] |= {binding.value for binding in phase.outputs}
            for op in phase.ops:
                asking = server_op(op, values)
                if asking is not None:
                    yield phase, asking, values

    def _lay(self, op: Exchange | Elastic, values: dict[Ref, Value]) -> None:
        """The layouts of the states of an op: the first one is cut, a second one with it."""
        (center, *others), met = kept(op), sent(op)[0]
        how = "exchange" if isinstance(op, Exchange) else f"elastic {op.mode}"
        self._use(name_of(center), how, op.span)
        leaves = values[center].leaves
        if name_of(center) not in self.layouts:
            servers = self._count(values[center])
            keys = [(x.dtype, y.dtype) for x, y in zip(leaves, values[met].leaves, strict=True)]
            self.layouts[name_of(center)] = weights(leaves, keys, servers, op.hints.chunk)
        for state in others:
            like = self.layouts[name_of(center)]
            self._use(name_of(state), f"{how} beside {name_of(center)}", op.span)
            self.layouts[name_of(state)] = beside(
                values[state].leaves, leaves, like, op.span, self.schedule.file
            )

    def _use(self, name: str, how: str, span: Span) -> None:
        before = self.used.setdefault(name, (how, span))
        if before[0] != how:
            fail(
                "CP0767",
                f"the state `{name}` is used by `{how}` here, and by `{before[0]}` on line {before[1].line}",
                "what servers do with a state is one thing: give each of the two a state of its own",
                span=span,
                file=self.schedule.file,
            )

    def _count(self, value: Value) -> int:
        assert value.placement.server is not None
        return self.schedule.axis(value.placement.server).size

    def _layout(self, value: Value) -> Layout:
        name = name_of(value.id)
        if name not in self.layouts:  # never exchanged: put and got alone
            keys = [leaf.dtype for leaf in value.leaves]
            self.layouts[name] = weights(value.leaves, keys, self._count(value), None)
        return self.layouts[name]

    def _site(self, number: int, phase: Phase, op: ServerOp, values: dict[Ref, Value]) -> Site:
        match op:
            case Exchange():
                return self._exchange(number, phase, op, values)
            case Elastic():
                return self._elastic(number, phase, op, values)
            case Put():
                state = values[name_of(op.result) + ".0"]
                layout = self._layout(state)
                up = self._whole(layout, op.operand, values[state.id], down=False)
                made = self._of(number, "put", phase, op, (state,), up, ())
                return msgspec.structs.replace(made, token=(self._token(layout, down=False),))
            case Get():
                state = values[name_of(op.operand) + ".0"]
                layout = self._layout(state)
                up = (self._token(layout, down=False),)
                down = self._whole(layout, op.result, state, down=True)
                return self._of(number, "get", phase, op, (state,), up, down)

    def _of(
        self,
        number: int,
        kind: str,
        phase: Phase,
        op: ServerOp,
        states: tuple[Value, ...],
        up: tuple[Buffer, ...],
        down: tuple[Buffer, ...],
    ) -> Site:
        placement = states[0].placement
        assert placement.server is not None
        first = results(op)[0]
        return msgspec.convert(
            {
                "number": number, "kind": kind, "phase": phase.name, "result": first, "span": op.span,
                "server": placement.server, "first": self.first[placement.server],
                "servers": self._count(states[0]), "per": placement.per,
                "states": tuple(name_of(state.id) for state in states),
                "layouts": tuple(self._layout(state) for state in states), "up": up, "down": down,
            },
            Site,
        )  # fmt: skip

    def _exchange(self, number: int, phase: Phase, op: Exchange, values: dict[Ref, Value]) -> Site:
        states = tuple(values[ref] for ref in op.states)
        self._meet(op, states[0], op.axes)
        layout, leaves = self._layout(states[0]), values[op.gradient].leaves
        up: list[Buffer] = []
        if op.weight is not None:
            up.append(self._scalar(layout, op.weight, values[op.weight].leaves[0].dtype))
        dtypes = [_wire(leaves[part.leaves[0]].dtype, op.hints.wire) for part in layout.parts]
        up += self._data(layout, layout.parts, dtypes, op.gradient)
        if op.results[0] in self.read[phase.name]:
            dtypes = [_wire(part.dtype, op.hints.wire) for part in layout.parts]
            down = self._data(layout, layout.parts, dtypes, op.results[0])
        else:
            down = (self._token(layout, down=True),)
        made = self._of(number, "exchange", phase, op, states, tuple(up), tuple(down))
        return msgspec.structs.replace(
            made, staleness=op.hints.staleness or 0, fn=op.fn, mean=op.op == "mean", weight=op.weight
        )

    def _elastic(self, number: int, phase: Phase, op: Elastic, values: dict[Ref, Value]) -> Site:
        center = values[op.center]
        self._meet(op, center, op.axes)
        layout, leaves = self._layout(center), values[op.operand].leaves
        scalars = [x for x in (op.eta, op.rho) if isinstance(x, str)]
        up = [self._scalar(layout, ref, values[ref].leaves[0].dtype) for ref in scalars]
        dtypes = [_wire(leaves[part.leaves[0]].dtype, op.hints.wire) for part in layout.parts]
        up += self._data(layout, layout.parts, dtypes, op.operand)
        down = self._data(layout, layout.parts, dtypes, op.pull)
        made = self._of(number, "elastic", phase, op, (center,), tuple(up), tuple(down))
        mode: Mode | None = op.mode if op.mode != "sync" else None
        return msgspec.structs.replace(made, staleness=op.hints.staleness, mode=mode, eta=op.eta, rho=op.rho)

    def _meet(self, op: Exchange | Elastic, state: Value, over: tuple[str, ...]) -> None:
        left = [a.name for a in self.schedule.mesh_axes if a.name not in (*over, *state.placement.per)]
        left = [name for name in left if self.schedule.axis(name).size > 1]
        if left:
            fail(
                "CP0729",
                f"workers along `{left[0]}` hold the same, and each would send it to the servers",
                f"name `{left[0]}` after `over` too, or make it an ensemble with states `per {left[0]}`",
                span=op.span,
                file=self.schedule.file,
            )

    def _data(
        self, layout: Layout, flats: Sequence[Flat], dtypes: Sequence[DType], value: Ref,
        slot: int = 0, state: int = 0,
    ) -> tuple[Buffer, ...]:  # fmt: skip
        return tuple(
            Buffer(
                "data", dtypes[number], flat.size,
                tuple(self._chunk(unit) for unit in layout.units if unit.part == number),
                value, flat.leaves, state, slot, number,
            )
            for number, flat in enumerate(flats)
        )  # fmt: skip

    def _chunk(self, unit: Unit) -> Chunk:
        return Chunk(unit.server, unit.start, unit.size, self.tags.take(), unit.number)

    def _whole(self, layout: Layout, value: Ref, state: Value, *, down: bool) -> tuple[Buffer, ...]:
        """A whole state: its scalars, and all of its slots."""
        found = [
            self._scalar(layout, value, state.leaves[place].dtype, place, down=down)
            for place in layout.scalars
        ]
        for slot, flats in enumerate(layout.slots):
            found += self._data(layout, flats, [flat.dtype for flat in flats], value, slot)
        if not found and not down:  # of a state without leaves it is told that it is there
            return (self._token(layout, down=False),)
        return tuple(found)

    def _scalar(
        self, layout: Layout, value: Ref, dtype: DType, leaf: int = 0, *, down: bool = False
    ) -> Buffer:
        chunks = self._each(layout, down=down)
        return Buffer("scalar", dtype, len(chunks) if down else 1, chunks, value, (leaf,))

    def _token(self, layout: Layout, *, down: bool) -> Buffer:
        chunks = self._each(layout, down=down)
        return Buffer("token", DType.I32, len(chunks) if down else 1, chunks)

    def _each(self, layout: Layout, *, down: bool) -> tuple[Chunk, ...]:
        """One element to or from every server that owns a part; a small state may leave some without."""
        servers = sorted({unit.server for unit in layout.units})
        return tuple(Chunk(j, i if down else 0, 1, self.tags.take()) for i, j in enumerate(servers))


def _wire(dtype: DType, wire: DType | None) -> DType:
    return wire if wire is not None and dtype.is_float else dtype
