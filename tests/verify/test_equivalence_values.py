"""Schedules that differ from their plan in single values: draws, whole leaves, factors, owners."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

import commplan
from commplan.ir import schedule as ir
from commplan.ir.types import SAME, DType, Placement
from commplan.ir.values import Leaf, Part, Value
from commplan.verify import verify

replace = msgspec.structs.replace
PER = Placement(per=("data",))


def compiled(body: str, passes: str | None = None, **shapes: Any) -> ir.Schedule:
    plan = commplan.loads(f"plan tested\naxis data = 3\n{body}", "tested.plan")
    return plan.compile(shapes=shapes or None, passes=passes).schedule


def with_ops(
    schedule: ir.Schedule, ops: Sequence[ir.Op], values: Sequence[Value], name: str = "step", **fields: Any
) -> ir.Schedule:
    changed = replace(schedule.phase(name), ops=tuple(ops), values=tuple(values), **fields)
    return replace(schedule, phases=tuple(changed if x.name == name else x for x in schedule.phases))


def refused(schedule: ir.Schedule) -> str:
    """The errors of a schedule that is consistent but does not do what its plan says."""
    problems = verify(schedule)
    assert {problem.code for problem in problems} == {"CP0766"}, problems
    return problems[0].message


def flat(ref: str, size: int, placement: Placement = SAME) -> Value:
    return Value(ref, "flat", (Leaf("", (size,), DType.F32),), placement)


def test_a_random_function_draws_once_for_each_name():
    schedule = compiled(
        "fn noise(f32[4]) -> f32[4] on device random\nfn difference(f32[4], f32[4]) -> f32[4] on device\n"
        "input a : f32[4]\neach step {\n x = map noise(a)\n b = map difference(x, x)\n output b\n}"
    )
    step = schedule.phase("step")
    draw, difference = step.ops
    again = "x.0/again"
    ops = (draw, replace(draw, results=(again,)), replace(difference, operands=("x.0", again)))
    message = refused(with_ops(schedule, ops, (*step.values, replace(step.values[0], id=again))))
    assert "drawn from 1 for x.0/again" in message


def test_members_draw_numbers_of_their_own():
    schedule = compiled(
        "ensemble member = 3\nfn noise(f32[4]) -> f32[4] on device random\ninput a : f32[4]\n"
        "each step {\n x = map noise(a) per member\n y = reduce x across member by mean\n output y\n}"
    )
    values = {value.id: value for value in schedule.phase("step").values}
    draw = schedule.phase("step").ops[0]
    reduce = next(op for op in schedule.phase("step").ops if isinstance(op, ir.Collective))
    last = ir.results(schedule.phase("step").ops[-1])[0]
    sent = replace(reduce, kind="broadcast", op=None, root=0, operand="x.0", result=last, after=())
    message = refused(with_ops(schedule, (draw, sent), (values["x.0"], values[last])))
    assert "of rank 0 along member" in message


def test_shards_of_a_value_draw_otherwise_than_the_whole():
    schedule = compiled(
        "fn noise(f32[6]) -> f32[6] on device elementwise random\ninput a : f32[6]\n"
        "each step {\n x = map noise(a)\n b = slice x over data\n output b\n}"
    )
    step = schedule.phase("step")
    draw, cut = step.ops
    part = replace(step.values[-1], id="part")
    ops = (replace(cut, operand="a.0", result="part"), replace(draw, operands=("part",), results=("x.0",)))
    outputs = (replace(step.outputs[0], value="x.0"),)
    refused(with_ops(schedule, ops, (part, replace(part, id="x.0")), outputs=outputs))


def test_the_sum_of_products_is_not_the_product_of_sums():
    schedule = compiled(
        "input g : f32[4] per data\ninput n : f32 per data\n"
        "each step {\n b = reduce g over data by mean(weight = n)\n output b\n}",
        "",
    )
    step = schedule.phase("step")
    summed = next(op for op in step.ops if isinstance(op, ir.Collective) and op.operand != "n.0")
    weights = next(op for op in step.ops if isinstance(op, ir.Collective) and op.operand == "n.0")
    span = summed.span
    values = {value.id: value for value in step.values}
    ops = (
        ir.Pack("packed", (Part("g.0", 0, 0, 4, 0),), span),
        replace(summed, kind="all_gather", op=None, result="rows", operand="packed", nbytes=16),
        weights,
        ir.Scale("weighted", "rows", "mul", "n.0", span, over=weights.result),
        replace(summed, result="sums", operand="weighted", nbytes=48),
        ir.LocalSum("row", "sums", 3, span),
        ir.Unpack("b.0", (Part("row", 0, 0, 4, 0),), span),
    )
    results = (
        flat("packed", 4, PER),
        flat("rows", 12),
        flat("weighted", 12, PER),
        flat("sums", 12),
        flat("row", 4),
    )
    message = refused(with_ops(schedule, ops, (*results, values[weights.result], values["b.0"])))
    assert "depends on that axis again" in message


def test_a_part_of_a_leaf_is_not_the_leaf():
    tree = {"w": {"shape": [6], "dtype": "f32"}}
    schedule = compiled("input a : tree\neach step {\n b = slice a over data\n output b\n}", a=tree)
    step = schedule.phase("step")
    (cut,) = step.ops
    short = replace(schedule.entry[0], id="short", leaves=(Leaf("w", (4,), DType.F32),))
    ops = (
        ir.Pack("packed", (Part("a.0", 0, 0, 6, 0),), cut.span),
        ir.Unpack("short", (Part("packed", 0, 0, 4, 0),), cut.span),
        replace(cut, operand="short"),
    )
    part = replace(step.values[0], whole=(Leaf("w", (4,), DType.F32),))
    problems = verify(with_ops(schedule, ops, (flat("packed", 6), short, part)))
    assert "CP0766" in {problem.code for problem in problems}


def test_a_function_may_be_called_mul():
    schedule = compiled(
        "fn mul(f32[4], f32) -> f32[4] on device elementwise\ninput a : f32[4]\ninput n : f32\n"
        "each step {\n b = map mul(a, n)\n output b\n}"
    )
    (call,) = schedule.phase("step").ops
    scaled = ir.Scale("b.0", "a.0", "mul", "n.0", call.span)
    assert "times a scalar" in refused(with_ops(schedule, (scaled,), schedule.phase("step").values))


@pytest.mark.parametrize(
    ("kind", "factors"),
    [("f32", (2.0**-100, 2.0**-100, 2.0**100, 2.0**100)), ("i32", (0.5, 2.0)), ("f32", (3.0, 1 / 3))],
)
def test_factors_are_those_of_the_plan(kind: str, factors: tuple[float, ...]):
    schedule = compiled(f"input a : {kind}[6]\neach step {{\n b = slice a over data\n output b\n}}")
    (cut,) = schedule.phase("step").ops
    ops: list[ir.Op] = []
    values = [*schedule.phase("step").values]
    operand = "a.0"
    for number, factor in enumerate(factors):
        ops.append(ir.Scale(f"scaled{number}", operand, "mul", factor, cut.span))
        operand = f"scaled{number}"
        values.append(replace(schedule.entry[0], id=operand))
    refused(with_ops(schedule, (*ops, replace(cut, operand=operand)), values))


def test_a_cast_is_not_taken_back_across_a_factor():
    schedule = compiled("input a : u8[6]\neach step {\n b = slice a over data\n output b\n}")
    (cut,) = schedule.phase("step").ops
    entry = schedule.entry[0]
    wide = tuple(replace(leaf, dtype=DType.F32) for leaf in entry.leaves)
    ops = (
        ir.Cast("c1", "a.0", DType.F32, cut.span),
        ir.Scale("c2", "c1", "mul", 0.5, cut.span),
        ir.Cast("c3", "c2", DType.U8, cut.span),
        ir.Scale("c4", "c3", "mul", 2.0, cut.span),
        replace(cut, operand="c4"),
    )
    values = (
        *(replace(entry, id=ref, leaves=wide) for ref in ("c1", "c2")),
        *(replace(entry, id=ref) for ref in ("c3", "c4")),
        *schedule.phase("step").values,
    )
    refused(with_ops(schedule, ops, values))


def test_what_one_rank_keeps_is_not_what_another_has():
    schedule = compiled(
        "input x : f32[4] partial data\nstate s : f32[4]\nat start {\n s = reduce x over data by sum\n}\n"
        "each step {\n s = reduce x over data by sum\n}\nphase look {\n output s\n}",
        "",
    )
    entry, state = schedule.entry
    summed = schedule.phase("step").ops[0]
    assert isinstance(summed, ir.Collective)
    local = replace(state, placement=PER)
    for name in ("start", "step"):
        ref = schedule.phase(name).updates[0].value
        ops = (replace(summed, kind="reduce", root=2, result=ref),)
        schedule = with_ops(schedule, ops, (replace(local, id=ref),), name)
    shard = ir.StateShard("s.0", ir.Ownership(("data",), (2,)))
    schedule = replace(schedule, entry=(entry, local), state_shards=(shard,))
    outputs = (replace(schedule.phase("look").outputs[0], value="seen"),)
    sent = replace(summed, kind="broadcast", op=None, operand="s.0", result="seen")

    def shown(root: int) -> ir.Schedule:
        read = (replace(state, id="seen"),)
        return with_ops(schedule, (replace(sent, root=root),), read, "look", outputs=outputs)

    assert "a rank that owns none" in refused(shown(0))
    assert verify(shown(2)) == ()


NARROW = {  # sums and extremes of values that were rounded before
    "the maximum of a pull": """input x : f32[4] per data
    state s : f32[4]
    at start { s = broadcast x over data from 0 }
    each step {
        pull, s = elastic x with s over data by sync(eta = 0.25, rho = 0.125)
        y = reduce pull over data by max { wire = bf16 }
        output y
    }""",
    "the maximum of means": """axis more = 2
    input x : f32[4] per more partial data
    each step {
        mean = reduce x over data by mean { wire = f16 }
        y = reduce mean over more by max { wire = bf16 }
        output y
    }""",
    "the sum of minima": """axis more = 2
    input x : f32[4] per data, more
    each step {
        least = reduce x over data by min { wire = bf16 }
        y = reduce least over more by sum { wire = bf16, accumulate = f32 }
        output y
    }""",
    "a mean level by level": """axis more = 2
    input x : f32[4] partial data, more
    each step {
        y = reduce x over data, more by mean via hierarchical(data, more) { wire = bf16 }
        output y
    }""",
    "a level of one rank": """axis one = 1
    input x : bf16[4] partial data, one
    each step {
        y = reduce x over data, one by sum via hierarchical(data, one) { wire = f32 }
        output y
    }""",
}


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("passes", [None, "", "decompose"])
def test_values_that_are_rounded_twice_compile(name: str, passes: str | None):
    schedule = compiled(NARROW[name], passes)
    assert verify(schedule) == ()
    if name in ("the maximum of a pull", "the sum of minima"):  # the result of an f16 mean is f16 already
        other = compiled(NARROW[name].replace("wire = bf16", "wire = f16"), passes)
        if other.phases != schedule.phases:
            refused(replace(schedule, phases=other.phases))


def test_an_axis_that_a_placement_names_twice_is_refused():
    schedule = compiled(
        "fn both(f32[4], f32[4]) -> f32[4] on device linear\ninput g : f32[4] partial data\n"
        "input h : f32[4] partial data\n"
        "each step {\n x = map both(g, h)\n y = reduce x over data by sum\n output y\n}"
    )
    first, second = schedule.entry
    twice = replace(second, placement=Placement(partial=("data", "data")))
    problems = verify(replace(schedule, entry=(first, twice)))
    assert "names an axis twice" in problems[0].message
