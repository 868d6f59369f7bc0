"""Edits that runtimes would obey, and that change results: each is refused when the schedule is loaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from test_field_edits import TREE, compiled

import commplan
from commplan.ir import schedule as ir
from commplan.ir.plan import Hints
from commplan.ir.types import DType
from commplan.verify import verify

Change = Callable[[ir.Phase], ir.Phase]


def op_of(phase: ir.Phase, kind: type[Any], **fields: Any) -> Any:
    fits = (op for op in phase.ops if isinstance(op, kind))
    return next(op for op in fits if all(getattr(op, key) == value for key, value in fields.items()))


def op_with(old: dict[str, Any], kind: type[Any], **fields: Any) -> Change:
    """The first op of `kind` with the fields `old` gets other ones."""

    def change(phase: ir.Phase) -> ir.Phase:
        op = op_of(phase, kind, **old)
        return replace(
            phase, ops=tuple(replace(each, **fields) if each is op else each for each in phase.ops)
        )

    return change


def without(kind: type[Any], **fields: Any) -> Change:
    """The first op of `kind` without these fields; readers of its result read its operand."""

    def change(phase: ir.Phase) -> ir.Phase:
        removed = op_of(phase, kind, **fields)
        names = {removed.result: removed.operand}
        bound = [
            tuple(replace(b, value=names.get(b.value, b.value)) for b in bindings)
            for bindings in (phase.outputs, phase.updates, phase.takes)
        ]
        return replace(
            phase,
            ops=tuple(ir.substitute(op, names) for op in phase.ops if op is not removed),
            values=tuple(value for value in phase.values if value.id != removed.result),
            outputs=bound[0], updates=bound[1], takes=bound[2],
        )  # fmt: skip

    return change


def leaf_with(ref: str, **fields: Any) -> Change:
    """The first leaf of a value gets other fields."""

    def change(phase: ir.Phase) -> ir.Phase:
        value = next(value for value in phase.values if value.id == ref)
        leaves = (replace(value.leaves[0], **fields), *value.leaves[1:])
        new = replace(value, leaves=leaves)
        return replace(phase, values=tuple(new if each is value else each for each in phase.values))

    return change


def read_again(phase: ir.Phase) -> ir.Phase:
    """The first load is read twice."""
    op = op_of(phase, ir.Read)
    names = {ref: f"{ref}/again" for ref in ir.results(op)}
    copies = tuple(replace(each, id=names[each.id]) for each in phase.values if each.id in names)
    at = max(index for index, each in enumerate(phase.values) if each.id in names) + 1
    values = (*phase.values[:at], *copies, *phase.values[at:])
    ops: list[ir.Op] = []
    for each in phase.ops:
        ops += [op, ir.rename_results(op, names)] if each is op else [each]
    return replace(phase, ops=tuple(ops), values=values)


EDITS: dict[str, tuple[str, str, Change, str]] = {
    "a host map skips records": (
        "input", "step", op_with({"fn": "jitter"}, ir.Map, hints=Hints(on_error="skip")), "CP0766"
    ),
    "a load goes on without the dead by a share": (
        "input", "step", op_with({}, ir.Share, hints=Hints(on_failure="continue")), "CP0766"
    ),
    "a load is read twice": ("input", "step", read_again, "CP0766"),
    "a share of the plan is gone": ("input", "step", without(ir.Share), "CP0766"),
    "a share of the plan has another design": (
        "input", "step", op_with({}, ir.Share, design="duplicate", readers=None), "CP0766"
    ),
    "a leaf between two maps has another type": (
        "input", "step", leaf_with("v.0", dtype=DType.I32), "CP0766"
    ),
    "a leaf between two maps has another path": ("input", "step", leaf_with("v.0", path="q"), "CP0766"),
    "members of two ensembles draw in another order": (
        "input", "step", op_with({"fn": "blur"}, ir.Map, per=("group", "member")), "CP0766"
    ),
    "a call draws from the stream of another": (
        "input", "step", op_with({"stream": 2}, ir.Map, stream=1), "CP0766"
    ),
    "coefficients have the same product": (
        "elastic", "step", op_with({}, ir.Elastic, eta=0.25 * 2**20, rho=0.5 / 2**20), "CP0766"
    ),
    "an unpacked tree is shaped like another one": (
        "sums", "step", op_with({"result": "s.0"}, ir.Unpack, like="n.0"), "CP0731"
    ),
    "an unpacked tree is shaped like a later one": (
        "sums", "step", op_with({"result": "s.0"}, ir.Unpack, like="t.0"), "CP0733"
    ),
    "a collective is of a stage that the plan does not have": (
        "sums", "step", op_with({}, ir.Collective, stages=("x.9",)), "CP0730"
    ),
    "a state on servers is not fetched": ("servers", "look", without(ir.Get), "CP0764"),
    "a phase lists an input that it does not read": (
        "servers", "look", lambda phase: replace(phase, inputs=("p.0",)), "CP0766"
    ),
}  # fmt: skip


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_that_is_obeyed_is_refused(edit: str):
    name, phase, change, code = EDITS[edit]
    schedule = compiled(name)
    phases = tuple(change(each) if each.name == phase else each for each in schedule.phases)
    problems = verify(replace(schedule, phases=phases))
    assert phases != schedule.phases and code in {problem.code for problem in problems}


SCATTERED = """plan scattered
axis data = 4
input grads : tree partial data
each step {
    shard = scatter grads over data by sum { wire = bf16 }
    output shard
}
"""


def test_a_sum_that_is_not_sent_on_is_not_rounded_again():
    schedule = commplan.loads(SCATTERED, "tested.plan").compile(shapes={"grads": TREE}).schedule
    (phase,) = schedule.phases
    (output,) = phase.outputs
    value = next(value for value in phase.values if value.id == output.value)
    narrow = tuple(replace(leaf, dtype=DType.BF16) for leaf in value.leaves)
    whole = tuple(replace(leaf, dtype=DType.BF16) for leaf in value.whole)
    added = (replace(value, id="x.0", leaves=narrow, whole=whole), replace(value, id="y.0"))
    casts = (ir.Cast("x.0", value.id, DType.BF16, phase.span), ir.Cast("y.0", "x.0", DType.F32, phase.span))
    outputs, values = (replace(output, value="y.0"),), (*phase.values, *added)
    edited = replace(phase, ops=(*phase.ops, *casts), values=values, outputs=outputs)
    assert [problem.code for problem in verify(replace(schedule, phases=(edited,)))] == ["CP0766"]


PLUS = """plan added
axis data = 2
fn plus(f32[4], f32[4]) -> f32[4] on device elementwise
input a : f32[4] per data
input b : f32[4] per data
each step {
    c = map plus(a, b)
    output c
}
"""


def test_a_function_of_any_name_is_no_addition():
    schedule = commplan.loads(PLUS, "tested.plan").compile().schedule
    (phase,) = schedule.phases
    (call,) = phase.ops
    update = ir.Update("c.0", "a.0", "b.0", phase.span)
    assert isinstance(call, ir.Map) and call.results == ("c.0",)
    assert not verify(schedule)
    problems = verify(replace(schedule, phases=(replace(phase, ops=(update,)),)))
    assert "CP0766" in {problem.code for problem in problems}
