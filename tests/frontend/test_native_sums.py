"""`via native` and leaves wider than the wire type: refused as soon as their types are known."""

from __future__ import annotations

import pytest

from commplan import dsl
from commplan.compiler import compile_plan
from commplan.diagnostics import CommplanError, Diagnostic
from commplan.ir.schedule import Leaf
from commplan.ir.types import DType

TEXT = """plan p
axis a = 2
axis b = 2
input g : tree partial a, b
each step {{
    g = reduce g over a, b by {how}
    output g
}}
"""


def refused(how: str, *dtypes: DType, text: str = TEXT) -> tuple[Diagnostic, ...]:
    plan, problems = dsl.load(text.format(how=how), "p.plan")
    assert plan is not None, problems
    leaves = tuple(Leaf(f"w{i}", (3,), dtype) for i, dtype in enumerate(dtypes))
    try:
        compile_plan(plan, {"g": leaves} if "tree" in text else {})
    except CommplanError as error:
        return error.diagnostics
    return ()


def test_a_narrow_wire_with_wide_leaves() -> None:
    (problem,) = refused("sum via native { wire = bf16 }", DType.I32, DType.BF16, DType.F32)
    assert problem.code == "CP0606"
    assert problem.message == "`native` adds in the wire type bf16, but leaf `w2` of `g` is f32"
    assert problem.span is not None
    assert (problem.span.line, problem.file) == (6, "p.plan")
    first, second = (note.text for note in problem.notes)
    assert first == "without `accumulate`, values are added in their own type"
    assert second.endswith("leave `via` out, or write `accumulate = bf16`")


def test_a_wide_accumulator_with_narrow_leaves() -> None:
    """The checker has no types for the leaves of a tree."""
    (problem,) = refused("mean via native { accumulate = f32 }", DType.BF16)
    assert problem.message == "`native` adds in the wire type bf16, but f32 is requested"


def test_a_level_that_is_native() -> None:
    (problem,) = refused("sum via hierarchical(b, a = native) { wire = f16 }", DType.F32)
    assert "`native` adds in the wire type f16" in problem.message


def test_arrays_are_refused_when_they_are_checked() -> None:
    text = TEXT.replace("tree", "f32[4]")
    plan, (problem,) = dsl.load(text.format(how="sum via native { wire = bf16 }"), "p.plan")
    assert (plan, problem.code) == (None, "CP0606")
    assert problem.message == "`native` adds in the wire type bf16, but `g` is f32"


def test_a_scatter_too() -> None:
    text = (
        TEXT.replace("reduce", "scatter").replace("over a, b", "over a").replace("partial a, b", "partial a")
    )
    (problem,) = refused("sum via native { wire = bf16 }", DType.F32, text=text)
    assert problem.code == "CP0606"


@pytest.mark.parametrize(
    ("how", "dtype"),
    [
        ("sum via native { wire = bf16, accumulate = bf16 }", DType.F32),
        ("sum via native { wire = bf16 }", DType.BF16),
        ("sum via native { wire = f32 }", DType.BF16),
        ("sum via native { accumulate = f32 }", DType.F32),
        ("sum via native", DType.F32),
        ("sum via hierarchical(a, b) { wire = bf16 }", DType.F32),
        ("sum via ring { wire = bf16 }", DType.F32),
        ("sum { wire = bf16 }", DType.F32),
    ],
)
def test_what_can_be_done_is_not_refused(how: str, dtype: DType) -> None:
    assert refused(how, dtype) == ()


@pytest.mark.parametrize("op", ["max", "min"])
def test_nothing_is_added_in_a_maximum(op: str) -> None:
    text = TEXT.replace("partial a, b", "per a, b")
    assert refused(f"{op} via native {{ wire = bf16 }}", DType.F32, text=text) == ()


@pytest.mark.parametrize(
    ("how", "dtypes", "expected"),
    [
        (
            "sum { accumulate = f16 }",
            [DType.F32, DType.I32],
            "CP0614 `accumulate` has no effect: values travel",
        ),
        ("sum { accumulate = f16 }", [DType.F32, DType.F16], ""),  # of one leaf
        ("mean { wire = f32, accumulate = f32 }", [DType.F16], ""),
        ("sum { wire = bf16 }", [DType.I32], "CP0613 `wire` of `g`: it has no float leaf"),
    ],
)
def test_options_without_effect_on_any_leaf(how: str, dtypes: list[DType], expected: str) -> None:
    messages = " ".join(f"{problem.code} {problem.message}" for problem in refused(how, *dtypes))
    assert messages.startswith(expected) and bool(messages) == bool(expected)


@pytest.mark.parametrize(
    "how",
    [
        "mean(weight = n) { wire = bf16, accumulate = bf16 }",
        "mean(weight = n) via ring { wire = f16 }",
        "mean(weight = n) { wire = f64, overlap = backward }",
        "mean { wire = bf16, accumulate = f16, overlap = backward }",
    ],
)
def test_a_tree_without_leaves_takes_any_option(how: str) -> None:
    assert refused(how, text=TEXT.replace("\neach", "\ninput n : i32 per a, b\neach")) == ()


@pytest.mark.parametrize("how", ["sum", "mean"])
@pytest.mark.parametrize("dtype", [DType.F32, DType.BF16])
def test_a_wire_of_64_bits_over_a_level_of_one_rank(how: str, dtype: DType) -> None:
    text = TEXT.replace("axis a = 2", "axis a = 4").replace("axis b = 2", "axis b = 1")
    assert refused(f"{how} via hierarchical(a, b) {{ wire = f64 }}", dtype, text=text) == ()


def test_an_exchanged_mean_of_f16_beside_f64_is_added_in_f64() -> None:
    text = """plan p
axis a = 2
fn update(tree, tree) -> tree on device elementwise
input g : tree partial a
input w : tree per a
state c : tree
at start {{ c = broadcast w over a from 0 }}
each step {{
    c = exchange g into c with update over a by {how}
    output c
}}
"""
    plan, problems = dsl.load(text.format(how="mean"), "p.plan")
    assert plan is not None, problems
    leaves = (Leaf("x", (3,), DType.F16), Leaf("y", (3,), DType.F64))
    compile_plan(plan, {"g": leaves, "w": leaves, "c": leaves})
