"""Every field that affects the results of a schedule is compared with its plan: another value is refused.

The fields are those with that role, so that a new one is edited here as well.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple, get_args, get_type_hints

import msgspec
import pytest
from msgspec.structs import replace
from support.schedule_bases import SERVED
from support.schedule_mutation import Around, changes, in_phase, phase_edits, with_op

import commplan
from commplan.ir import roles
from commplan.ir import schedule as ir
from commplan.ir.plan import Hints
from commplan.ir.roles import Role
from commplan.verify import verify
from commplan.verify.equivalence import Reference

COMPARED = (Role.MEANING, Role.STRUCTURE)
ALIKE = 2  # ops of one kind in a phase that are edited
TREE = {"a": {"shape": [3], "dtype": "f32"}, "w": {"shape": [2, 3], "dtype": "f32"}}
PLANS = {
    "input": """plan loaded
ensemble member = 2
ensemble group = 2
axis data = 2
source photos : bytes
source others : u8[4]
fn decode(bytes) -> u8[4] on host
fn jitter(u8[4]) -> u8[4] on host random
fn blur(f32[4]) -> f32[4] on device random
fn noise(f32[8, 4]) -> f32[8, 4] on device random elementwise
fn widen(u8[4]) -> f32[4] on host
fn begin(tree) -> tree on device
fn fit(tree, tree) -> tree on device
input w0 : tree per member, group
state w : tree per member, group
at start {
    w = map begin(w0)
}
each step {
    raw, n = load photos batch 8 split data visit exactly_once seed 7 { on_error = skip, on_failure = stop }
    one = map decode(raw) { on_error = stop }
    two = map jitter(one)
    three = map jitter(two)
    four = share three over member, group via single_broadcast(readers = 2) { on_failure = stop }
    wide = map widen(four)
    x = map blur(wide) per member, group
    y = map noise(x)
    v = map begin(w)
    w = map fit(v, w)
    output x, y, n
}
phase clocked {
    own = load others batch [8, 4] over group visit at_least_once seed 3
    output own
}
""",
    "sums": """plan sums
axis a = 2
axis b = 2
input g : tree partial a, b
input h : tree partial b
input p : tree per a, b
input q : tree per a, b
input r : tree per b
input n : f32 per a, b
state w : tree
state v : tree split b
fn adam(tree, tree) -> tree on device elementwise
at start {
    w = broadcast p over a, b from 1
    v = slice w over b
}
each step {
    s = reduce g over a, b by mean { wire = bf16, accumulate = f32 }
    c = scatter h over b by sum
    d = gather c over b
    m = reduce q over a, b by mean(weight = n)
    x = reduce r over b by max
    t = shift p over b by 1
    w = map adam(w, s)
    v = map adam(v, c)
    output d, m, x, t
}
""",
    "servers": SERVED.format(
        servers=2, root=1, op="mean", owners=2, within="", second="mean(weight = n)", late=1, mode="async"
    ),
    "fragments": """plan streaming
axis a = 2
axis island = 2
input p : tree per island
state c : tree split island
fn outer = sgd(rate = 0.5)
at start {
    q = broadcast p over island from 1
    c = slice q over island
}
every 6 steps in 3 fragments {
    m = scatter p over island by mean
    d = map subtract(c, m)
    c = map outer(c, d)
    p = gather c over island
    output p
}
""",
    "blocks": """plan blocks
axis a = 2
input g : tree partial a
input p : tree per a
each step {
    s = reduce g over a by mean { wire = int4(block = 8), bucket = 1 KiB }
    q = broadcast p over a from 1 { wire = int8(block = 16) }
    output s, q
}
""",
    "elastic": """plan elastic_sync
axis worker = 4
input own : tree per worker
input e : f32
state center : tree
at start { center = broadcast own over worker from 1 }
each step {
    pull, center = elastic own with center over worker by sync(eta = 0.25, rho = 0.5)
    output pull
}
phase other {
    pull, center = elastic own with center over worker by sync(eta = e, rho = 0.5)
    output pull
}
""",
}
# Edits without effect, by op, field and kind of edit.
NOTHING = {
    ("pack", "parts", "exchanged"): "each part says where it goes",
    ("unpack", "parts", "exchanged"): "each part says where it goes",
    ("collective", "axes", "exchanged"): "a sum over the same ranks",
    ("collective", "hints.wire", ""): "the pass `wire` alone obeys it, and has written it out",
    ("collective", "hints.codec", ""): "the pass `wire` alone obeys it, and has written it out",
    ("collective", "hints.accumulate", ""): "the pass `wire` alone obeys it, and has written it out",
}


SAME = "`m.0/weights`: kind: tree"  # in a phase: a scalar is a tree of one leaf too


class Edit(NamedTuple):
    op: str
    field: str
    what: str
    schedule: ir.Schedule

    @property
    def changes_nothing(self) -> bool:
        return any((self.op, self.field) == key[:2] and key[2] in self.what for key in NOTHING)


@functools.cache
def compiled(name: str) -> ir.Schedule:
    plan = commplan.loads(PLANS[name], f"{name}.plan")
    trees = [value.name for value in plan.graph.values if str(value.type) == "tree"]
    return plan.compile(shapes=dict.fromkeys(trees, TREE)).schedule


def fields_of(value: msgspec.Struct) -> Iterator[tuple[str, Any, Any]]:
    """The fields of `value` that are compared, with their values and types; options one by one."""
    types = get_type_hints(type(value))
    for field in roles.fields(type(value)):
        if field.role in COMPARED:
            item = getattr(value, field.name)
            if isinstance(item, Hints):
                for name, inner, kind in fields_of(item):
                    yield f"{field.name}.{name}", inner, kind
            else:
                yield field.name, item, types[field.name]


def edited(op: Any, field: str, value: Any) -> Any:
    first, _, remainder = field.partition(".")
    return replace(op, **{first: replace(getattr(op, first), **{remainder: value}) if remainder else value})


def edits(schedule: ir.Schedule) -> Iterator[Edit]:
    for number, phase in enumerate(schedule.phases):
        counts = Counter[tuple[object, ...]]()
        for at, op in enumerate(phase.ops):
            kind = (op.title, *(getattr(op, name, None) for name in ("fn", "how", "over")))
            counts[kind] += 1
            if counts[kind] > ALIKE:
                continue
            tag, around = str(op.__struct_config__.tag), Around(schedule, number, at)
            for field, item, hint in fields_of(op):
                for change in changes(item, hint, around, field.rpartition(".")[2]):
                    new = with_op(phase, at, edited(op, field, change.value))
                    yield Edit(tag, field, change.what, in_phase(schedule, number, new))


@pytest.mark.parametrize("name", PLANS)
def test_another_value_of_a_field_is_refused(name: str):
    schedule = compiled(name)
    assert schedule.origin is not None and verify(schedule) == ()
    reference = Reference(schedule.origin, schedule.axes)
    accepted = [
        (edit.op, edit.field, edit.what)
        for edit in edits(schedule)
        if not edit.changes_nothing and not verify(edit.schedule, reference=reference)
    ]
    accepted += [
        ("phase", edit.kind, edit.what)
        for number in range(len(schedule.phases))
        for edit in phase_edits(schedule, number)
        if not edit.what.endswith(SAME) and not verify(edit.make(), reference=reference)
    ]
    assert accepted == []


def test_every_field_of_every_op_is_edited():
    tried = {(edit.op, edit.field) for name in PLANS for edit in edits(compiled(name))}
    missing: list[tuple[str, str]] = []
    for kind in get_args(ir.Op):
        tag = str(kind.__struct_config__.tag)
        for field in (field for field in roles.fields(kind) if field.role in COMPARED):
            inner = [part.name for part in roles.fields(Hints) if part.role in COMPARED]
            names = [f"hints.{name}" for name in inner] if field.type is Hints else [field.name]
            missing += [(tag, name) for name in names if (tag, name) not in tried]
    assert missing == []
