"""The meaning of built-in functions in proofs: linear combinations of exact operands, and calls of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

import commplan
from commplan.ir import schedule as ir
from commplan.ir.stages.builtins import Builtin
from commplan.ir.types import DType
from commplan.verify import verify

LINEAR = """plan linear
axis data = 4
input x : f32[8] partial data
input y : f32[8] partial data
fn mix = blend(alpha = 0.25)
fn other = blend(alpha = 0.75)
each step {
    d = map mix(x, y)
    s = reduce d over data by sum
    output s
}
phase other {
    d = map other(y, x)
    d = reduce d over data by sum
    output d
}
"""
NARROW = """plan narrow
axis data = 4
input c : f32[8]
input p : f32[8] per data
each step {
    d = map subtract(c, p)
    s = reduce d over data by mean { wire = bf16, accumulate = f32 }
    q = broadcast p over data from 0 { wire = bf16 }
    e = map subtract(p, q)
    output s, e
}
"""
Ops = list[Any]


def compiled(text: str) -> ir.Schedule:
    return commplan.loads(text, "p.plan").compile(passes="").schedule


def edited(schedule: ir.Schedule, change: Callable[[Ops, dict[str, ir.Value]], None]) -> ir.Schedule:
    """`schedule` with other ops in its first phase. `change` edits ops, and values by name."""
    phase = schedule.phases[0]
    ops, values = list(phase.ops), {value.id: value for value in (*schedule.entry, *phase.values)}
    change(ops, values)
    results = tuple(values[ref] for op in ops for ref in ir.results(op))
    return replace(schedule, phases=(replace(phase, ops=tuple(ops), values=results), *schedule.phases[1:]))


def summed_first(fn: str, order: tuple[str, str]) -> Callable[[Ops, dict[str, ir.Value]], None]:
    """s = sum(mix(x, y))  -->  s = FN(sum(x), sum(y))"""

    def change(ops: Ops, values: dict[str, ir.Value]) -> None:
        mix, total = ops
        sums = [replace(total, operand=f"{name}.0", result=f"{name}.0/sum", stages=()) for name in order]
        values |= {each.result: replace(values["s.0"], id=each.result) for each in sums}
        operands = tuple(each.result for each in sums)
        ops[:] = [*sums, replace(mix, fn=fn, operands=operands, results=("s.0",))]

    return change


def test_a_sum_of_linear_combinations_is_the_combination_of_the_sums():
    schedule = compiled(LINEAR)
    problems = verify(edited(schedule, summed_first("mix", ("x", "y"))))
    assert not [problem for problem in problems if problem.code == "CP0766"], problems


@pytest.mark.parametrize(("fn", "order"), [("mix", ("y", "x")), ("other", ("x", "y"))])
def test_other_coefficients_are_refused(fn: str, order: tuple[str, str]):
    problems = verify(edited(compiled(LINEAR), summed_first(fn, order)))
    assert [problem.code for problem in problems] == ["CP0766"]
    assert "output `s`" in problems[0].message


def test_the_same_coefficients_by_another_name_are_equal():
    """blend(alpha = 0.75)(y, x) is blend(alpha = 0.25)(x, y)."""
    problems = verify(edited(compiled(LINEAR), summed_first("other", ("y", "x"))))
    assert not [problem for problem in problems if problem.code == "CP0766"], problems


def test_operands_may_not_be_rounded_in_place_of_the_difference():
    """The plan sends the difference in bf16. Rounding the weights before would lose its digits."""

    def change(ops: Ops, values: dict[str, ir.Value]) -> None:
        at = next(i for i, op in enumerate(ops) if isinstance(op, ir.Map))
        difference, span = ops[at], ops[at].span
        narrow = ir.Cast("p.0/bf16", "p.0", DType.BF16, span)
        wide = ir.Cast("p.0/f32", narrow.result, DType.F32, span)
        (leaf,) = values["p.0"].leaves
        values["p.0/bf16"] = replace(
            values["p.0"], id="p.0/bf16", leaves=(replace(leaf, dtype=narrow.dtype),)
        )
        values["p.0/f32"] = replace(values["p.0"], id="p.0/f32")
        ops[at : at + 1] = [narrow, wide, replace(difference, operands=("c.0", wide.result))]

    schedule = commplan.loads(NARROW, "p.plan").compile(passes="wire").schedule
    assert verify(schedule) == ()
    problems = verify(edited(schedule, change))
    assert [problem.code for problem in problems] == ["CP0766"] and "`s`" in problems[0].message


def test_a_rounding_error_is_not_zero():
    """p - bf16(p) does not cancel: zeros in its place are refused."""
    schedule = commplan.loads(NARROW, "p.plan").compile(passes="wire").schedule

    def change(ops: Ops, values: dict[str, ir.Value]) -> None:
        last = next(op for op in reversed(ops) if isinstance(op, ir.Map))
        ops[ops.index(last)] = replace(last, operands=("p.0", "p.0"))

    problems = verify(edited(schedule, change))
    assert [problem.code for problem in problems] == ["CP0766"] and "`e`" in problems[0].message


@pytest.mark.parametrize(
    "body", [Builtin("blend", (0.5,)), Builtin("blend", (2.0,)), Builtin("zeros"), Builtin("cast")], ids=str
)
def test_a_file_with_another_function_is_refused(body: Builtin):
    schedule = compiled(LINEAR)
    fns = tuple(replace(fn, body=body) if fn.name == "mix" else fn for fn in schedule.fns)
    assert verify(replace(schedule, fns=fns))


@pytest.mark.parametrize("change", [{"where": "host"}, {"elementwise": False}, {"random": True}], ids=str)
def test_a_built_in_function_has_no_other_properties(change: dict[str, Any]):
    schedule = compiled(LINEAR)
    fns = tuple(replace(fn, **change) if fn.name == "mix" else fn for fn in schedule.fns)
    assert "with other properties" in verify(replace(schedule, fns=fns))[0].message


def test_the_result_of_a_map_has_the_leaves_of_the_function():
    def change(ops: Ops, values: dict[str, ir.Value]) -> None:
        (leaf,) = values["d.0"].leaves
        values["d.0"] = replace(values["d.0"], leaves=(replace(leaf, shape=(7,)),))

    problems = verify(edited(compiled(LINEAR), change))
    assert any("`mix` makes" in problem.message for problem in problems)
