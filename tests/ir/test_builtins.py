"""Built-in functions: their formulas as coefficients, their parameters, and the operands that they accept."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

import commplan
from commplan.diagnostics import CommplanError
from commplan.ir.serialization.canonical_json import decode, encode, plan_digest
from commplan.ir.serialization.text import parse_plan, parse_schedule, print_plan, print_schedule
from commplan.ir.stages.builtins import BUILTIN_NAMES, DEFINITIONS, Builtin
from commplan.ir.types import DType
from commplan.ir.values import Leaf
from commplan.verify import verify

PLAN = """plan diloco
axis island = 4
input params : tree per island
state center : tree
state moment : tree
fn outer = nesterov(rate = 0.7, momentum = 0.9)
fn half = cast(dtype = {dtype})
at start {{
    center = broadcast params over island from 0
    moment = map zeros(center)
}}
every 36 steps {{
    delta = map subtract(center, params)
    delta = reduce delta over island by mean
    center, moment = map outer(center, moment, delta)
    low = map half(center)
    output low
}}
"""
SHAPES: Any = {"params": {"w": {"shape": [5, 3], "dtype": "f32"}, "s": {"shape": [], "dtype": "f32"}}}


def leaf(dtype: str, *shape: int, path: str = "") -> tuple[Leaf, ...]:
    return (Leaf(path, shape, DType(dtype)),)


def test_each_name_has_one_definition():
    assert tuple(DEFINITIONS) == BUILTIN_NAMES


@pytest.mark.parametrize(
    ("body", "rows"),
    [
        (Builtin("zeros"), [[0]]),
        (Builtin("add"), [[1, 1]]),
        (Builtin("subtract"), [[1, -1]]),
        (Builtin("scale", (-2.5,)), [[Fraction(-5, 2)]]),
        (Builtin("blend", (0.3,)), [[Fraction(3, 10), Fraction(7, 10)]]),
        (Builtin("sgd", (0.1,)), [[1, Fraction(-1, 10)]]),
        (
            Builtin("nesterov", (0.5, 0.9)),
            [[1, Fraction(-405, 1000), Fraction(-95, 100)], [0, Fraction(9, 10), 1]],
        ),
    ],
    ids=str,
)
def test_coefficients_are_exact(body: Builtin, rows: list[list[Any]]):
    assert [list(row) for row in body.coefficients()] == rows


def test_the_text_of_a_call_is_that_of_the_plan():
    bodies = (Builtin("add"), Builtin("nesterov", (0.7, 0.9)), Builtin("cast", dtype=DType.BF16))
    assert list(map(str, bodies)) == ["add", "nesterov(rate = 0.7, momentum = 0.9)", "cast(dtype = bf16)"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (Builtin("blend"), "does not have the parameters of `blend`"),
        (Builtin("add", (1.0,)), "does not have the parameters of `add`"),
        (Builtin("cast"), "does not have the parameters of `cast`"),
        (Builtin("add", dtype=DType.F32), "does not have the parameters of `add`"),
        (Builtin("blend", (1.5,)), "`alpha` of `blend` is a number from 0 to 1, found `1.5`"),
        (Builtin("sgd", (0.0,)), "`rate` of `sgd` is a positive number"),
        (Builtin("sgd", (1e-60,)), "`rate` of `sgd` is a positive number"),
        (Builtin("nesterov", (0.1, 1.0)), "`momentum` of `nesterov` is at least 0 and below 1"),
        (Builtin("scale", (float("nan"),)), "`factor` of `scale` is finite in f32"),
        (Builtin("scale", (1e39,)), "`factor` of `scale` is finite in f32"),
    ],
    ids=str,
)
def test_wrong_parameters(body: Builtin, message: str):
    violation = body.violation()
    assert violation is not None and message in violation.message


@pytest.mark.parametrize(
    ("body", "operands", "message"),
    [
        (Builtin("add"), [leaf("f32", 3), leaf("f32", 4)], "`x` and `y` do not fit in `add`: [3] and [4]"),
        (Builtin("add"), [leaf("f32", path="a"), leaf("f32", path="b")], "only one of them has `a` and `b`"),
        (Builtin("add"), [leaf("f32"), leaf("i32")], "`y` is i32, but another operand is f32"),
        (Builtin("add"), [leaf("i32"), leaf("u8")], "`y` is u8, but another operand is i32"),
        (Builtin("add"), [leaf("bool"), leaf("bool")], "`x` is bool"),
        (Builtin("blend", (0.5,)), [leaf("i32"), leaf("i32")], "`x` is i32, and `blend` needs floats"),
        (Builtin("scale", (0.5,)), [leaf("i32")], "`x` is i32, and the factor is 0.5"),
        (Builtin("cast", dtype=DType.I32), [leaf("f32")], "a cast to i32 drops fractions"),
        (Builtin("cast", dtype=DType.F32), [leaf("i32", path="n")], "a cast of a tree converts floats"),
    ],
    ids=str,
)
def test_operands_that_do_not_fit(body: Builtin, operands: list[tuple[Leaf, ...]], message: str):
    violation = body.misfit(list(zip("xyz", operands, strict=False)))
    assert violation is not None and message in violation.message


@pytest.mark.parametrize(
    ("body", "operands"),
    [
        (Builtin("add"), [leaf("i32", 3), leaf("i32", 3)]),
        (Builtin("scale", (-2.0,)), [leaf("u8")]),
        (Builtin("zeros"), [leaf("bool", 2)]),
        (Builtin("blend", (0.5,)), [leaf("bf16"), leaf("f32")]),
        (Builtin("cast", dtype=DType.F32), [leaf("u8", 4)]),
        (Builtin("cast", dtype=DType.BF16), [leaf("f64", path="w")]),
    ],
    ids=str,
)
def test_operands_that_fit(body: Builtin, operands: list[tuple[Leaf, ...]]):
    assert body.misfit(list(zip("xyz", operands, strict=False))) is None


def test_a_result_has_the_type_of_the_operand_in_its_place():
    outer = Builtin("nesterov", (0.7, 0.9))
    operands = [leaf("f32", 3), leaf("bf16", 3), leaf("f16", 3)]
    assert outer.results(operands) == (leaf("f32", 3), leaf("bf16", 3))
    assert Builtin("cast", dtype=DType.F16).results(operands[:1]) == (leaf("f16", 3),)


def test_plans_and_schedules_with_them_are_written_and_read():
    plan = commplan.loads(PLAN.format(dtype="bf16"))
    assert parse_plan(print_plan(plan.graph)) == plan.graph
    schedule = plan.compile(shapes=SHAPES).schedule
    assert decode(encode(schedule)) == schedule
    assert parse_schedule(print_schedule(schedule)) == schedule
    assert verify(schedule) == ()
    other = commplan.loads(PLAN.format(dtype="f16"))
    assert plan_digest(plan.graph) != plan_digest(other.graph)


def test_leaves_of_trees_follow_from_the_operands():
    schedule = commplan.loads(PLAN.format(dtype="bf16")).compile(shapes=SHAPES).schedule
    values = {value.id: value for value in (*schedule.entry, *schedule.phase("every_36").values)}
    assert [each.dtype for each in values["low.0"].leaves] == [DType.BF16, DType.BF16]
    assert values["moment.0"].leaves == values["params.0"].leaves == values["delta.0"].leaves


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"center": {"w": {"shape": [5, 4], "dtype": "f32"}}}, "center"),
        ({"params": {"w": {"shape": [3], "dtype": "f32"}, "n": {"shape": [], "dtype": "i32"}}}, "leaf `n`"),
    ],
)
def test_leaves_that_do_not_fit_are_found_when_the_plan_is_compiled(shapes: Any, message: str):
    with pytest.raises(CommplanError) as caught:
        commplan.loads(PLAN.format(dtype="bf16")).compile(shapes={**SHAPES, **shapes})
    assert any(message in diagnostic.message for diagnostic in caught.value.diagnostics)
    assert {"CP0218", "CP0704", "CP0705"} & {diagnostic.code for diagnostic in caught.value.diagnostics}


def test_a_declaration_of_the_plan_has_precedence():
    text = PLAN.format(dtype="bf16") + "fn zeros(tree) -> tree on device elementwise\n"
    plan = commplan.loads(text).graph
    assert plan.fn("zeros").body is None and plan.fn("subtract").body == Builtin("subtract")
