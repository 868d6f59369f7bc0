"""Mutants of schedules: every single edit, one at a time.

Edits are derived from the structs: fields get other values of their types, references other values (of equal
shape first), tuples lose, repeat or exchange members. Ops are dropped, repeated, exchanged, moved and
removed, and readers of a removed op read its operands. `schedule_repair` adapts the rest.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from commplan.collectives.registry import algorithms
from commplan.ir import schedule as ir
from commplan.ir.codec import Codec
from commplan.ir.plan import Algorithm, Arg
from commplan.ir.types import DType, Placement

NAMES = ("native", *algorithms())


class Edit(NamedTuple):
    """One change. `op`: the index of the changed op, None if the change is elsewhere."""

    kind: str
    what: str
    phase: int
    op: int | None
    make: Callable[[], ir.Schedule]
    line: int | None = None  # of the plan


class Change(NamedTuple):
    what: str
    value: Any


class Around:
    """The replacements that an edit may use."""

    def __init__(self, schedule: ir.Schedule, phase: int, before: int | None = None) -> None:
        self.schedule, self.phase = schedule, schedule.phases[phase]
        self.values = {value.id: value for value in (*schedule.entry, *self.phase.values)}
        self.axes = tuple(axis.name for axis in schedule.axes)
        self.fns = tuple(fn.name for fn in schedule.fns)
        self.sources = tuple(source.name for source in schedule.sources)
        refs = [ref for op in self.phase.ops[:before] for ref in ir.results(op)]
        self.readable = (*self.phase.inputs, *self.phase.states, *refs)

    def leaves(self, ref: str) -> tuple[ir.Leaf, ...]:
        return self.values[ref].leaves if ref in self.values else ()

    def others(self, ref: str, most: int = 4) -> list[str]:
        """Values to read instead of `ref`: those of its shapes and place, of its shapes, any."""
        own_value = self.values.get(ref)

        def far(other: str) -> int:
            value = self.values[other]
            if own_value is None or value.kind != own_value.kind or value.leaves != own_value.leaves:
                return 2
            return int(value.placement != own_value.placement)

        candidates = [
            other for other in dict.fromkeys(reversed(self.readable)) if other != ref and other in self.values
        ]
        candidates.sort(key=far)
        alike = [other for other in candidates if far(other) < 2][:most]
        return [*alike, *[other for other in candidates if far(other) == 2][: 1 if alike else 2]]


# other values of a field


@cache
def _hints_of(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _members(hint: Any) -> tuple[Any, ...]:
    """The types that a hint allows."""
    return typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)


def changes(value: Any, hint: Any, around: Around, name: str) -> list[Change]:
    """Other values for the field `name`, which has `value` and is declared as `hint`."""
    different = [change for change in _changes(value, hint, around, name) if change.value != value]
    unique = {repr(change.value): change for change in different}
    return list(unique.values())


def _changes(value: Any, hint: Any, around: Around, name: str) -> Iterator[Change]:
    for kind in _members(hint):
        if kind is type(None):
            yield Change("none", None)
        elif typing.get_origin(kind) is Literal:
            yield from (Change(str(other), other) for other in typing.get_args(kind))
    if isinstance(value, Algorithm) or (value is None and Algorithm in _members(hint)):
        yield from _algorithms(value, around)
    elif isinstance(value, DType) or (value is None and DType in _members(hint)):
        yield from (Change(str(other), other) for other in DType)
    elif value is None and Codec in _members(hint):
        yield Change("int8(block = 8)", Codec("int8", 8))
    elif isinstance(value, bool):
        yield Change(str(not value), not value)
    elif isinstance(value, int) or (value is None and int in _members(hint)):
        number = value or 0
        yield from (Change(str(n), n) for n in (0, 1, number - 1, number + 1, 2 * number, 3, 64))
    elif isinstance(value, float):
        yield from (Change(str(n), n) for n in (2 * value, value / 2, value + 1, 1.0, -value))
        yield from (Change(ref, ref) for ref in _scalars(around))
    elif isinstance(value, str):
        yield from _texts(value, around, name)
    elif isinstance(value, tuple):
        yield from _tuples(typing.cast("tuple[Any, ...]", value), hint, around, name)
    elif isinstance(value, msgspec.Struct):
        yield from _structs(value, around)


def _scalars(around: Around) -> list[str]:
    refs = [ref for ref in around.readable if [leaf.shape for leaf in around.leaves(ref)] == [()]]
    return refs[:2]


def _texts(value: str, around: Around, name: str) -> Iterator[Change]:
    """A text is the name of something: another one of its kind."""
    if name == "lane":
        names_of: Sequence[str] = ("device", "network", "host_compute", "host_read")
    elif value in around.values:
        names_of = around.others(value)
    else:
        names_of = next((names for names in (around.axes, around.fns, around.sources) if value in names), ())
    yield from (Change(other, other) for other in names_of)


def _algorithms(value: Algorithm | None, around: Around) -> Iterator[Change]:
    names = [*NAMES, "hierarchical", "duplicate", "parameter_server"]
    yield from (Change(name, Algorithm(name)) for name in names)
    if value is None or not value.args:
        levels = tuple(Arg(axis) for axis in around.axes)
        yield Change("hierarchical over all axes", Algorithm("hierarchical", levels))
        return
    for args in _tuples(value.args, tuple[Arg, ...], around, "args"):
        yield Change(f"{value.name}: {args.what}", replace(value, args=args.value))
    for at, arg in enumerate(value.args):
        for name in NAMES:
            keyed = Arg(name, arg.key) if arg.key else Arg(name, str(arg.value))
            yield Change(f"level {at} {name}", replace(value, args=_with(value.args, at, keyed)))


def _structs(value: msgspec.Struct, around: Around) -> Iterator[Change]:
    for field in msgspec.structs.fields(type(value)):
        hint = _hints_of(type(value))[field.name]
        if field.name == "span":
            continue
        for change in changes(getattr(value, field.name), hint, around, field.name):
            yield Change(f"{field.name} = {change.what}", replace(value, **{field.name: change.value}))


def _tuples(value: tuple[Any, ...], hint: Any, around: Around, name: str) -> Iterator[Change]:
    if value:
        yield Change("emptied", ())
    places = range(len(value)) if len(value) <= 4 else (0, 1, len(value) // 2, len(value) - 1)
    inner = next((typing.get_args(kind)[0] for kind in _members(hint) if typing.get_args(kind)), object)
    for at in places:
        yield Change(f"without {at}", (*value[:at], *value[at + 1 :]))
        yield Change(f"{at} twice", (*value[: at + 1], *value[at:]))
        if at + 1 < len(value):
            yield Change(
                f"{at} and {at + 1} exchanged", (*value[:at], value[at + 1], value[at], *value[at + 2 :])
            )
            yield from _crossed(value, at)
        for change in changes(value[at], inner, around, name):
            yield Change(f"{at}: {change.what}", _with(value, at, change.value))
    if inner is str:
        yield from _more(value, around, name)
    elif name == "owners":
        yield from (Change(f"owners {n}", n) for n in ((0,), (1, 0)))


def _crossed(value: tuple[Any, ...], at: int) -> Iterator[Change]:
    """Two structs, such as parts of a buffer, exchange one field."""
    first, second = value[at], value[at + 1]
    if not isinstance(first, msgspec.Struct) or type(first) is not type(second):
        return
    for field in type(first).__struct_fields__:
        mine, theirs = getattr(first, field), getattr(second, field)
        pair = replace(first, **{field: theirs}), replace(second, **{field: mine})
        yield Change(f"{field} of {at} and {at + 1} exchanged", (*value[:at], *pair, *value[at + 2 :]))


def _more(value: tuple[Any, ...], around: Around, name: str) -> Iterator[Change]:
    """One member more, for lists of names."""
    if name == "after":
        yield from (Change(f"and {ref}", (*value, ref)) for ref in around.readable[-1:])
    elif value and all(isinstance(each, str) and each in around.values for each in value):
        yield from (Change(f"and {ref}", (*value, ref)) for ref in around.others(value[-1], 1))
    elif all(isinstance(each, str) and each in around.axes for each in value):
        yield from (Change(f"and {axis}", (*value, axis)) for axis in around.axes if axis not in value)


def _with(value: tuple[Any, ...], at: int, member: Any) -> tuple[Any, ...]:
    return (*value[:at], member, *value[at + 1 :])


# edits of ops


def op_edits(schedule: ir.Schedule, phase: int, at: int) -> Iterator[Edit]:
    """Every single edit of one op."""
    around = Around(schedule, phase, at)
    edited = around.phase
    op, name = edited.ops[at], type(edited.ops[at]).__name__

    def edit(kind: str, description: str, make: Callable[[], ir.Phase]) -> Edit:
        text = f"phase {edited.name}, op {at} {label(op)}: {description}"
        return Edit(kind, text, phase, at, lambda: in_phase(schedule, phase, make()), op.span.line)

    refs = ir.results(op)
    for field in msgspec.structs.fields(type(op)):
        value = getattr(op, field.name)
        if field.name == "span" or value in refs or (value and value == refs):
            continue
        for change in changes(value, _hints_of(type(op))[field.name], around, field.name):
            new = replace(op, **{field.name: change.value})
            yield edit(
                f"{name}.{field.name}",
                f"{field.name}: {change.what}",
                lambda new=new: with_op(edited, at, new),
            )
    for ref in refs:
        for other in _stand_ins(around, at, ref):
            yield edit(
                "cut out",
                f"`{ref}` becomes `{other}`",
                lambda ref=ref, other=other: rewired(edited, at, ref, other),
            )
    yield edit("dropped", "dropped", lambda: without(edited, at))
    for place in sorted({0, at - 1, at + 1, len(edited.ops) - 1} & set(range(len(edited.ops))) - {at}):
        yield edit("moved", f"to {place}", lambda place=place: moved(edited, at, place))
    needed = _readers(edited, at)
    for other in _partners(around, at):
        yield edit("exchanged", f"with op {other}", lambda other=other: exchanged(edited, at, other))
        if other in needed:
            continue
        yield edit(
            "results exchanged", f"with op {other}", lambda other=other: results_exchanged(edited, at, other)
        )
        if len(ir.operands(op)) == len(ir.operands(edited.ops[other])) > 0:
            yield edit(
                "operands exchanged",
                f"with op {other}",
                lambda other=other: operands_exchanged(edited, at, other),
            )
    if refs and ir.operands(op):
        yield edit("doubled", "twice, one after the other", lambda: doubled(edited, at))
        placement = around.values[refs[0]].placement
        if ir.operands(op)[0] in around.values:
            placement = around.values[ir.operands(op)[0]].placement
        yield edit("doubled", f"twice, first as {placement}", lambda: doubled(edited, at, placement))


def label(op: Any) -> str:
    return f"{getattr(op, 'kind', type(op).__name__.lower())} `{', '.join(ir.results(op))}`"


def in_phase(schedule: ir.Schedule, at: int, phase: ir.Phase) -> ir.Schedule:
    return replace(schedule, phases=_with(schedule.phases, at, phase))


def with_op(phase: ir.Phase, at: int, op: ir.Op) -> ir.Phase:
    return replace(phase, ops=_with(phase.ops, at, op))


def renamed(op: Any, names: dict[str, str], *, results: bool = False) -> Any:
    """`op` with every reference in `names` replaced; in its results only where `results` is set."""
    refs = ir.results(op)

    def other(value: Any) -> Any:
        if isinstance(value, str):
            return names.get(value, value)
        if isinstance(value, tuple):
            return tuple(map(other, typing.cast("tuple[Any, ...]", value)))
        if isinstance(value, ir.Part):
            return replace(value, value=names.get(value.value, value.value))
        return value

    fields = {
        field: other(getattr(op, field))
        for field in type(op).__struct_fields__
        if (getattr(op, field) in refs or getattr(op, field) == refs) == results or field == "after"
    }
    return replace(op, **fields)


def bound(phase: ir.Phase, names: dict[str, str]) -> ir.Phase:
    """`phase` with its outputs and updates bound to other values."""

    def other(bindings: tuple[ir.Binding, ...]) -> tuple[ir.Binding, ...]:
        return tuple(replace(b, value=names.get(b.value, b.value)) for b in bindings)

    return replace(
        phase, outputs=other(phase.outputs), updates=other(phase.updates), takes=other(phase.takes)
    )


def without(phase: ir.Phase, at: int) -> ir.Phase:
    removed = ir.results(phase.ops[at])
    values = tuple(value for value in phase.values if value.id not in removed)
    return replace(phase, ops=(*phase.ops[:at], *phase.ops[at + 1 :]), values=values)


def rewired(phase: ir.Phase, at: int, ref: str, other: str) -> ir.Phase:
    """Replace `ref` by `other` in all readers, and remove unused ops."""
    names = {ref: other}
    ops = tuple(op if place <= at else renamed(op, names) for place, op in enumerate(phase.ops))
    return pruned(bound(replace(phase, ops=ops), names))


def pruned(phase: ir.Phase) -> ir.Phase:
    needed = {b.value for b in (*phase.outputs, *phase.updates)}
    ops: list[Any] = []
    for op in reversed(phase.ops):
        if not ir.results(op) or needed & set(ir.results(op)):
            ops.append(op)
            needed |= set(ir.operands(op))
    defined = {ref for op in ops for ref in ir.results(op)}
    ops = [replace(op, after=tuple(ref for ref in op.after if ref in defined)) for op in reversed(ops)]
    return replace(
        phase, ops=tuple(ops), values=tuple(value for value in phase.values if value.id in defined)
    )


def moved(phase: ir.Phase, at: int, place: int) -> ir.Phase:
    ops = [*phase.ops[:at], *phase.ops[at + 1 :]]
    ops.insert(place, phase.ops[at])
    return replace(phase, ops=tuple(ops))


def exchanged(phase: ir.Phase, at: int, other: int) -> ir.Phase:
    ops = list(phase.ops)
    ops[at], ops[other] = ops[other], ops[at]
    return replace(phase, ops=tuple(ops))


def results_exchanged(phase: ir.Phase, at: int, other: int) -> ir.Phase:
    pair = list(zip(ir.results(phase.ops[at]), ir.results(phase.ops[other]), strict=False))
    names = dict(pair) | {theirs: mine for mine, theirs in pair}
    ops = list(phase.ops)
    for place in (at, other):
        ops[place] = renamed(ops[place], names, results=True)
    return replace(phase, ops=tuple(ops))


def operands_exchanged(phase: ir.Phase, at: int, other: int) -> ir.Phase:
    pair = list(zip(ir.operands(phase.ops[at]), ir.operands(phase.ops[other]), strict=True))
    ops = list(phase.ops)
    ops[at] = renamed(ops[at], dict(pair))
    ops[other] = renamed(ops[other], {theirs: mine for mine, theirs in pair})
    return replace(phase, ops=tuple(ops))


def doubled(phase: ir.Phase, at: int, placement: Placement | None = None) -> ir.Phase:
    """The op applied twice; readers read the second result. `placement`: the declared placement of the first
    result, if it differs."""
    op = phase.ops[at]
    refs = ir.results(op)
    fresh = {ref: f"{ref.rpartition('.')[0]}_again.{ref.rpartition('.')[2]}" for ref in refs}
    again = renamed(renamed(op, fresh, results=True), {ir.operands(op)[0]: refs[0]})
    later = (renamed(each, fresh) for each in phase.ops[at + 1 :])
    values: list[ir.Value] = []
    for value in phase.values:
        if value.id in fresh:
            values.append(replace(value, id=fresh[value.id]))
        first = value.id == refs[0] and placement is not None
        values.append(replace(value, placement=placement) if first else value)
    made_twice = replace(phase, ops=(*phase.ops[: at + 1], again, *later), values=tuple(values))
    return bound(made_twice, fresh)


def _readers(phase: ir.Phase, at: int) -> set[int]:
    """The ops that need a result of the op at `at`, through others too."""
    refs, readers = set(ir.results(phase.ops[at])), set[int]()
    for place in range(at + 1, len(phase.ops)):
        if refs & set(ir.operands(phase.ops[place])):
            readers.add(place)
            refs |= set(ir.results(phase.ops[place]))
    return readers


def _stand_ins(around: Around, at: int, ref: str) -> list[str]:
    """Possible replacements of `ref`: its operands, and earlier values of its shapes."""
    makers = {ref_of: op for op in around.phase.ops[: at + 1] for ref_of in ir.results(op)}
    front, candidates = [ref], dict[str, None]()
    for _ in range(6):
        front = [operand for each in front if each in makers for operand in ir.operands(makers[each])]
        candidates |= dict.fromkeys(front)
    alike = [other for other in candidates if around.leaves(other) == around.leaves(ref)]
    return list(dict.fromkeys([*ir.operands(around.phase.ops[at]), *alike]))[:6]


def _partners(around: Around, at: int) -> list[int]:
    """Ops to exchange something with: the next one, the next of the same type, and the next that makes or
    reads values of the same shapes."""
    ops = around.phase.ops

    def leaves(refs: Sequence[str]) -> list[tuple[ir.Leaf, ...]]:
        return [around.leaves(ref) for ref in refs]

    rules: tuple[Callable[[Any], Any], ...] = (
        lambda _: 0, type, lambda op: leaves(ir.results(op)), lambda op: leaves(ir.operands(op))
    )  # fmt: skip
    later = range(at + 1, len(ops))
    firsts = [next((n for n in later if rule(ops[n]) == rule(ops[at])), None) for rule in rules]
    return sorted({place for place in firsts if place is not None})


# edits of everything else


def phase_edits(schedule: ir.Schedule, at: int) -> Iterator[Edit]:
    """Edits of a phase outside its ops: bindings, values, entry values, and its period."""
    around = Around(schedule, at)
    phase = around.phase
    for field in msgspec.structs.fields(ir.Phase):
        if field.name in ("ops", "span", "values"):
            continue
        hint = _hints_of(ir.Phase)[field.name]
        for change in [*changes(getattr(phase, field.name), hint, around, field.name)]:
            new = replace(phase, **{field.name: change.value})
            text = f"phase {phase.name}: {field.name}: {change.what}"
            yield Edit(f"phase {field.name}", text, at, None, lambda new=new: in_phase(schedule, at, new))
    for number, value in enumerate(phase.values):
        for change in _values(value, around):
            new = replace(phase, values=_with(phase.values, number, change.value))
            text = f"phase {phase.name}: value `{value.id}`: {change.what}"
            yield Edit("value", text, at, None, lambda new=new: in_phase(schedule, at, new))


def _values(value: ir.Value, around: Around) -> Iterator[Change]:
    for change in changes(value.placement, Placement, around, "placement"):
        yield Change(change.what, replace(value, placement=change.value))
    for field in ("kind", "leaves", "whole"):
        hint = _hints_of(ir.Value)[field]
        for change in changes(getattr(value, field), hint, around, field)[:12]:
            yield Change(f"{field}: {change.what}", replace(value, **{field: change.value}))


def head_edits(schedule: ir.Schedule) -> Iterator[Edit]:
    """Edits of axes, functions, sources, entry and phases."""
    around = Around(schedule, 0)
    for field in ("axes", "sources", "fns", "inputs", "states", "entry", "phases", "backend"):
        value, hint = getattr(schedule, field), _hints_of(ir.Schedule)[field]
        if field in ("entry", "phases"):
            variants = list(_rearranged(value))
        else:
            variants = changes(value, hint, around, field)
        if field == "entry":
            for at, each in enumerate(schedule.entry):
                variants += [
                    Change(f"`{each.id}`: {c.what}", _with(value, at, c.value)) for c in _values(each, around)
                ]
        for change in variants:
            new = replace(schedule, **{field: change.value})
            yield Edit(f"schedule {field}", f"{field}: {change.what}", 0, None, lambda new=new: new)


def _rearranged(value: tuple[Any, ...]) -> Iterator[Change]:
    for at in range(len(value)):
        yield Change(f"without {at}", (*value[:at], *value[at + 1 :]))
        if at + 1 < len(value):
            yield Change(
                f"{at} and {at + 1} exchanged", (*value[:at], value[at + 1], value[at], *value[at + 2 :])
            )
