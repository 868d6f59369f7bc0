"""One mistake makes one error: nothing follows from a misspelt name or an unreadable statement."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commplan.dsl import load

TESTS = Path(__file__).parents[1]
PLANS = [
    *sorted((TESTS.parent / "examples" / "plans").glob("*.plan")),
    *sorted((TESTS / "plans").glob("*.plan")),
]
WORD = re.compile(r"#[^\n]*|\b[A-Za-z_]\w*")


def _slips(text: str) -> list[str]:
    """The text once for each of its words, that word misspelt."""
    words = [match for match in WORD.finditer(text) if not match[0].startswith("#")]
    return [f"{text[: word.end() - 1]}zq{text[word.end() :]}" for word in words]


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_a_misspelt_word_makes_at_most_one_error(path: Path) -> None:
    slips = _slips(path.read_text(encoding="utf-8"))
    results = [load(slip, path.name)[1] for slip in slips]
    several = [diagnostics for diagnostics in results if len(diagnostics) > 1]
    # A state may get a name that resembles neither its uses nor anything else.
    allowed = [d for d in several if {each.code for each in d} == {"CP0502", "CP0102"}]
    assert len(several) - len(allowed) == 0, "\n\n".join("\n".join(map(str, each)) for each in several)
    assert len(allowed) <= 2


HEAD = """plan p
axis data = 4
source images : u8[8]
input p : tree per data
input g : tree partial data
state w : tree
fn f(tree) -> tree on device
fn h(u8[8]) -> u8[8] on host
at start {
    w = broadcast p over data from 0
}
each step {
"""
FINE = "    w = map f(w)\n"


@pytest.mark.parametrize(
    "body",
    [
        "    g reduce g over data by sum\n    output g\n" + FINE,  # no `=`
        "    = reduce g over data by sum\n    output g\n" + FINE,  # no name
        "    x, = load images batch 8 visit exactly_once seed 0\n    y = map h(x)\n    output y, n\n" + FINE,
        "    , n = load images batch 8 visit exactly_once seed 0\n    y = map h(x)\n    output y, n\n" + FINE,
        "    w = mpa f(w)\n    output w\n",  # a state, in a statement that cannot be read
        "    q = map f(w))\n    output q\n" + FINE,
        "    outptu w\n" + FINE,
    ],
)
def test_an_unreadable_stage_makes_one_error(body: str) -> None:
    _, diagnostics = load(f"{HEAD}{body}}}\n", "p.plan")
    assert [d.code[:4] for d in diagnostics] == ["CP00"], "\n".join(map(str, diagnostics))


@pytest.mark.parametrize(
    "old, new",
    [
        ("axis data = 4", "axis data 4"),
        ("axis data = 4", "axsi data = 4"),
        ("axis data = 4", "axis = 4"),
        ("source images : u8[8]", "images : u8[8]"),
        ("input p : tree per data", "input : tree per data"),
        ("state w : tree", "state w tree"),
        ("fn f(tree) -> tree on device", "fn f(tree) tree on device"),
        ("fn f(tree) -> tree on device", "fun f(tree) -> tree on device"),
        ("at start {", "at begin {"),
    ],
)
def test_an_unreadable_declaration_makes_one_error(old: str, new: str) -> None:
    load_ = "    x = load images batch 8 visit exactly_once seed 0\n"
    text = f"{HEAD}    g = reduce g over data by sum\n{load_}    output g, x\n{FINE}}}\n"
    assert load(text, "p.plan")[0] is not None
    _, diagnostics = load(text.replace(old, new), "p.plan")
    assert [d.code[:4] for d in diagnostics] == ["CP00"], "\n".join(map(str, diagnostics))


def test_errors_beside_an_unreadable_statement_are_still_found() -> None:
    body = "    y = mpa f(w)\n    z = reduce g over dta by sum\n    output z, y\n" + FINE
    _, diagnostics = load(f"{HEAD}{body}}}\n", "p.plan")
    assert [d.code for d in diagnostics][1:] == ["CP0104"]
    assert diagnostics[0].code.startswith("CP00")


def test_thousands_of_unknown_names_end_soon() -> None:
    lines = [f"    a{i} = map f{i}(b{i})" for i in range(3000)]
    plan, diagnostics = load("\n".join([HEAD, *lines, FINE, "}", ""]), "p.plan")
    assert plan is None
    assert len(diagnostics) == 1001
    assert [d.code for d in diagnostics].count("CP0013") == 1


def test_an_axis_declared_twice_is_no_reason_to_say_that_none_is() -> None:
    text = "plan p\naxis data = 8\naxis data = 4\ninput x : f32 per dat\n"
    twice, unknown = load(text, "p.plan")[1]
    assert (twice.code, unknown.code) == ("CP0101", "CP0104")
    assert unknown.notes[0].text == "declared: `data`" and unknown.fix is not None


def test_a_value_reduced_twice_is_found_behind_other_mistakes() -> None:
    body = (
        "    a = reduce g over dta by sum\n"  # the placement of `a` is unknown
        "    b = reduce a over data by sum\n"
        "    c = reduce b over data by sum\n"  # but `b` is the same over `data`
        "    d = reduce c over data by sum\n"
        "    output d\n"
    )
    _, diagnostics = load(f"{HEAD}{body}{FINE}}}\n", "p.plan")
    assert [(d.code, d.span and d.span.line) for d in diagnostics] == [
        ("CP0104", 13), ("CP0301", 15), ("CP0301", 16),
    ]  # fmt: skip
    assert diagnostics[1].notes[-1].text == "remove this `reduce`, and write `b` where `c` is used"
    assert diagnostics[1].notes[0].span is not None and diagnostics[1].notes[0].span.line == 14
    again = "    c = reduce c over data by sum\n"
    _, diagnostics = load(f"{HEAD}{again}    c = mpa f(w)\n{again}    output c\n{FINE}}}\n", "p.plan")
    assert "CP0301" not in [d.code for d in diagnostics]  # `c` is bound anew in between


def test_one_of_several_axes_that_is_done_is_left_out() -> None:
    text = "plan p\naxis node = 2\naxis gpu = 4\ninput g : tree partial node, gpu\n"
    text += "each step {\n    g = reduce g over gpu by sum\n    h = reduce g over node, gpu by sum\n}\n"
    (mistake,) = load(text, "p.plan")[1]
    assert (mistake.code, mistake.notes[-1].text) == ("CP0301", "remove `gpu` from the axes")
