"""The text form of both graphs: its appearance, and a round trip."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.byhand import compiled, ensemble_plan, reduce_plan, sharded_plan, tree
from support.random_case import make_case

import commplan
from commplan.diagnostics import CommplanError, Span
from commplan.ir import plan as graph
from commplan.ir.remark import Choice
from commplan.ir.schedule import Schedule
from commplan.ir.serialization.text import parse_plan, parse_schedule, print_plan, print_schedule
from commplan.ir.types import DType

PLANS = [
    *sorted((Path(__file__).parents[2] / "examples" / "plans").glob("*.plan")),
    Path(__file__).parents[1] / "plans" / "caches.plan",
]
GIVEN = tree(w=(3, 3), b=(2,))


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_example_plans_read_back(path: Path) -> None:
    plan = commplan.load(path).graph
    assert parse_plan(print_plan(plan)) == plan


def test_a_schedule_as_text() -> None:
    text = print_schedule(compiled(reduce_plan("mean", data=4), "bucket", grads=GIVEN))
    assert (
        "        grads.1/sum/b0/pack = pack parts=[grads.0#1[0:9]->0, grads.0#0[0:2]->9] @1:1-1:2\n" in text
    )
    assert (
        "        grads.1/sum/b0 = collective kind=all_reduce operand=grads.1/sum/b0/pack axes=[data] "
        "dtype=f32 nbytes=44 @1:1-1:2 op=sum stages=[grads.1]\n"
    ) in text
    assert "        grads.1 = scale operand=grads.1/sum how=div by=4.0 @1:1-1:2\n" in text
    assert '        grads.1 = value kind=tree leaves=["b": f32[2], "w": f32[3, 3]] placement=<>\n' in text
    assert (
        '    grads.0 = value kind=tree leaves=["b": f32[2], "w": f32[3, 3]] placement=<partial data>\n'
        in text
    )


@pytest.mark.parametrize("pipeline", ["", None, "bucket{max=8},overlap"])
def test_schedules_read_back(pipeline: str | None) -> None:
    hints = graph.Hints(wire=DType.BF16, bucket=1000, integers="max")
    via = graph.Algorithm("hierarchical", (graph.Arg("a"), graph.Arg("ring", "b")))
    for schedule in (
        compiled(reduce_plan("mean", via, hints, b=2, a=3), pipeline, grads=GIVEN),
        compiled(sharded_plan(), pipeline, params=GIVEN, grads=GIVEN),
        compiled(ensemble_plan(), pipeline),
    ):
        assert parse_schedule(print_schedule(schedule)) == schedule


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_random_plans_and_schedules_read_back(seed: int) -> None:
    case = make_case(seed)
    plan = commplan.loads(case.text, "x.plan")
    assert parse_plan(print_plan(plan.graph)) == plan.graph
    sizes = {axis.name: case.sizes[axis.name] for axis in plan.graph.axes}
    schedule = plan.compile(axes=sizes, shapes=case.shapes, passes=case.pipeline).schedule
    assert parse_schedule(print_schedule(schedule)) == schedule


names = st.text(min_size=1, max_size=8)


@given(names, st.text(), st.lists(st.text(), max_size=3), st.floats(allow_nan=False, allow_infinity=False))
def test_any_text_is_quoted_where_it_must_be(name: str, why: str, rejected: list[str], by: float) -> None:
    base = compiled(reduce_plan("mean"), "", grads=GIVEN)
    choice = Choice(name, why, why, Span(1, 2, 3, 4), tuple(rejected))
    phase = base.phases[0]
    scaled = msgspec.structs.replace(phase.ops[1], by=by)
    phase = msgspec.structs.replace(phase, ops=(phase.ops[0], scaled))
    schedule = msgspec.structs.replace(base, file=why, choices=(choice,), phases=(phase,))
    assert parse_schedule(print_schedule(schedule)) == schedule


@pytest.mark.parametrize(
    "word", ["none", "true", "false", "1", "-1", "1e5", "a b", "", "@1:1-1:2", "[", "é", "x\n"]
)
def test_words_that_mean_something_else_are_quoted(word: str) -> None:
    schedule = msgspec.structs.replace(compiled(ensemble_plan(), ""), file=word)
    assert parse_schedule(print_schedule(schedule)) == schedule


TEXT = print_schedule(compiled(reduce_plan("mean"), "bucket", grads=GIVEN))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schedule\n", "plan\n", "expected `schedule`, found `plan`"),
        ("how=div", "how=;", "expected a value"),
        ("how=div", "how div", "expected `=`"),
        ("how=div", "how=sub", "Invalid enum value 'sub'"),
        ("by=4.0", "by=[4.0]", "Expected"),
        ("grads.1 = scale", "grads.1, grads.2 = scale", "`scale` makes 1 values, not 2"),
        ("grads.1 = scale", "grads.1 = stretch", "there is no op `stretch`"),
        ("axes=[data]", "axes=[data", "expected `,`, found `dtype`"),
        ("placement=<partial data>", "placement=<partial data", "expected `;`"),
        ('"b": f32[2]', '"b": 3', "expected the type of a leaf"),
        ("pipeline =", "pipeline ? =", "`?` is not allowed here"),
        ("  file = made.plan\n", "  file = made.plan\n}", "expected a word, found `}`"),
        ("phases {", "phases [", "expected `=`"),
    ],
)
def test_wrong_texts(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(CommplanError) as caught:
        parse_schedule(TEXT.replace(old, new, 1), "x.txt")
    (problem,) = caught.value.diagnostics
    assert (problem.code, problem.file) == ("CP1008", "x.txt")
    assert message in problem.message
    assert problem.span is not None


def test_the_place_of_a_mistake() -> None:
    lines = TEXT.split("\n")
    row = next(i for i, line in enumerate(lines) if "how=div" in line)
    with pytest.raises(CommplanError) as caught:
        parse_schedule(TEXT.replace("how=div", "how=;", 1))
    span = caught.value.diagnostics[0].span
    assert span is not None
    assert (span.line, span.column) == (row + 1, lines[row].index("how=div") + 5)


@given(st.integers(0, len(TEXT)), st.integers(0, 30), st.text(max_size=3))
def test_damaged_text_is_refused_or_read(start: int, length: int, put: str) -> None:
    damaged = TEXT[:start] + put + TEXT[start + length :]
    try:
        assert isinstance(parse_schedule(damaged), Schedule)
    except CommplanError as error:
        assert error.diagnostics[0].code == "CP1008"


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(CommplanError) as caught:
        parse_schedule("schedule\nplan = " + "[" * 100_000)
    assert caught.value.diagnostics[0].code == "CP1008"
