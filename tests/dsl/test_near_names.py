"""Misspelt names: one definition suggests corrections for every kind of name."""

from __future__ import annotations

import pytest

from commplan import dsl
from commplan.diagnostics import did_you_mean, near_name, near_note
from commplan.lint.repairs import repair

PLAN = """plan p
axis data = 4
source images : bytes
fn decode(bytes) -> u8[4] on host
fn keep(f32[8]) -> f32[8] on device
input grads : f32[8] partial data
input count : f32 per data
state center : f32[8]
at start {
    center = reduce grads over data by sum
}
each step {
    raw    = load images batch 8 visit exactly_once seed 1
    x      = map decode(raw)
    grads  = reduce grads over data by mean(weight = count) { wire = bf16 }
    center = map keep(grads)
    output x, grads
}
"""


@pytest.mark.parametrize(
    ("name", "candidates", "meant"),
    [
        ("gradz", ["grads", "params"], "grads"),
        ("gradz", ["grads", "grads"], "grads"),  # the same name twice is one
        ("Grads", ["grads"], "grads"),
        ("mpa", ["map", "load"], "map"),  # letters in another order
        ("grad", ["grad1", "grad2"], None),
        ("x", ["y", "z"], None),
        ("gradients" * 9, ["gradients" * 9 + "s"], None),
    ],
)
def test_the_name_that_was_meant(name: str, candidates: list[str], meant: str | None) -> None:
    assert near_name(name, candidates) == meant


def test_two_names_that_are_as_near_are_both_shown() -> None:
    assert did_you_mean("grad", ["grad1", "grad2", "x"], "known:") == "did you mean `grad1` or `grad2`?"
    assert did_you_mean("y", ["grad1", "x"], "known:") == "known: grad1, x"
    assert near_note("y", ["x"]) == ()


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("output x, grads", "output x, gradz"),
        ("reduce grads over data by mean", "reduce gradz over data by mean"),
        ("over data by mean", "over dta by mean"),
        ("weight = count", "weight = cuont"),
        ("weight =", "wieght ="),
        ("by mean", "by maen"),
        ("by mean", "by average"),
        ("by sum", "by add"),
        ("load images", "load image"),
        ("map decode", "map decod"),
        ("= map decode", "= mpa decode"),
        ("map keep(grads)", "map keep(gradz)"),
        ("wire =", "wrie ="),
        ("= bf16", "= bf61"),
        ("exactly_once", "exactly_onec"),
        ("partial data", "partial dat"),
        ("on host", "on hots"),
        ("each step", "each stpe"),
        ("state center", "stat center"),
    ],
)
def test_check_fix_puts_a_misspelt_name_right(right: str, wrong: str) -> None:
    text = PLAN.replace(right, wrong, 1)
    assert text != PLAN
    better, count = repair(text, lambda each: dsl.analyze(each, "p.plan").diagnostics)
    assert (better, count) == (PLAN, 1)


def test_the_plan_is_right() -> None:
    assert not dsl.analyze(PLAN, "p.plan").diagnostics


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("out = reduce x over data by mean { wire = bfloat16 }", "bf16"),
        ("out = reduce x over data by mean { accumulate = float32 }", "f32"),
        ("out = reduce x over data by mean\n  output outt", "out"),
        ("out = reduce x over data by mean\n  output out, outt", None),
        ("out = reduce x over data by mean\n  output outt, out", None),
    ],
)
def test_repairs_of_options_and_outputs(line: str, expected: str | None) -> None:
    """A name that is an output already is no repair of another."""
    _, diagnostics = dsl.load(
        f"plan p\naxis data = 8\ninput x : tree partial data\neach step {{\n  {line}\n}}\n", "p"
    )
    fixes = [diagnostic.fix for diagnostic in diagnostics if diagnostic.code in ("CP0612", "CP0102")]
    assert [fix and fix.text for fix in fixes] == [expected]
