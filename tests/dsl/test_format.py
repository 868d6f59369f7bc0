"""The one layout of plans: columns, breaks, comments, blank lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from commplan.diagnostics import CommplanError
from commplan.dsl.format import WIDTH, format_source

ROOT = Path(__file__).parents[2]
PLANS = [
    *sorted((ROOT / "examples" / "plans").glob("*.plan")),
    *sorted((ROOT / "commplan" / "cli" / "templates").glob("*.plan")),
]

UGLY = """#a
plan p # hi
axis d=8
ensemble  memberxx =?   # c
server q = 1# dd
# own
input x:tree per d,memberxx   partial   d
# two


source y :   u8[3,4]
fn f(tree,# one
 # own
 u8[3]) ->tree on host
each step{ a,b=load y batch [32,32] over memberxx visit k seed 1_000 # trailing

  # first
  }
at start { } # end
every 4 steps # why
{
# in

 x = reduce x over d # because
   # really
   by mean(weight=n) {bucket=25MiB,   # size
   overlap=backward
   # last
   }# tr
 out = map f( )  { }
 output x

}
# fin"""

NEAT = """#a
plan p  # hi

axis     d        = 8
ensemble memberxx = ?   # c
server   q        = 1  # dd
# own
input x : tree per d, memberxx partial d
# two

source y : u8[3, 4]
fn f(tree,  # one
     # own
     u8[3]) -> tree on host

each step {
    a, b = load y batch [32, 32] over memberxx visit k seed 1_000  # trailing

    # first
}

at start {
}  # end

every 4 steps {  # why
    # in

    x   = reduce x over d  # because
          # really
          by mean(weight = n) { bucket = 25 MiB,  # size
                                overlap = backward
                                # last
                                }  # tr
    out = map f() { }
    output x
}

# fin
"""


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_the_examples_stand_as_they_are(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert format_source(text, path.name) == text


def test_everything_at_once() -> None:
    assert format_source(UGLY, "ugly.plan") == NEAT
    assert format_source(NEAT, "neat.plan") == NEAT


def _stages(*lines: str) -> str:
    body = "".join(f"    {line}\n" for line in lines)
    return f"plan p\n\neach step {{\n{body}}}\n"


def test_a_stage_that_is_too_long_breaks_before_a_clause() -> None:
    options = "{ bucket = 25 MiB, overlap = backward, wire = bf16, accumulate = f32 }"
    text = _stages(f"grads = reduce grads over data by mean {options}")
    assert format_source(text, "p") == _stages("grads = reduce grads over data by mean", f"        {options}")


def test_lines_that_fit_are_joined() -> None:
    text = _stages("grads = reduce grads over data", "        by mean", "        { wire = bf16 }")
    assert format_source(text, "p") == _stages("grads = reduce grads over data by mean { wire = bf16 }")


def test_what_is_too_long_in_brackets_breaks_behind_a_comma() -> None:
    sizes = ", ".join(["1_000_000"] * 30)
    text = format_source(_stages(f"x = load s batch [{sizes}] over m visit k seed 1"), "p")
    lines = text.splitlines()[3:-1]
    assert len(lines) == 4 and all(len(line) <= WIDTH for line in lines)
    column = lines[0].index("[") + 1
    assert all(line.index("1_000") == column for line in lines)
    assert format_source(text, "p") == text


def test_names_that_cannot_be_broken_stay_on_one_line() -> None:
    names = ", ".join(f"value_number_{i}" for i in range(20))
    text = _stages(f"output {names}")
    assert format_source(text, "p") == text


@pytest.mark.parametrize(
    "written, formatted",
    [
        (
            "fn a(tree) -> tree\nfn longer(tree, tree) -> tree",
            "fn a(tree) -> tree\nfn longer(tree, tree) -> tree",
        ),
        ("fn a (tree) -> tree\nfn longer(tree) -> tree", "fn a     (tree) -> tree\nfn longer(tree) -> tree"),
        ("fn a(tree)  -> tree\nfn longer(tree) -> tree", "fn a(tree)      -> tree\nfn longer(tree) -> tree"),
        ("fn a (tree)  -> tree", "fn a(tree) -> tree"),
        ("fn a=blend(alpha=0.5)\nfn longer =add", "fn a = blend(alpha = 0.5)\nfn longer = add"),
        ("fn a      = zeros\nfn longer=add", "fn a      = zeros\nfn longer = add"),
        ("fn a(tree) -> tree=zeros\nfn longer  = add", "fn a(tree) -> tree = zeros\nfn longer  = add"),
    ],
)
def test_columns_of_functions_are_kept_where_they_were_written(written: str, formatted: str) -> None:
    assert format_source(f"plan p\n\n{written}\n", "p") == f"plan p\n\n{formatted}\n"


def test_a_blank_line_parts_columns_and_a_comment_does_not() -> None:
    text = "plan p\n\naxis a = 1\n# why\naxis long = 2\n\naxis b = 3\n"
    assert format_source(text, "p") == "plan p\n\naxis a    = 1\n# why\naxis long = 2\n\naxis b = 3\n"


def test_remarks_in_one_column_stay_in_one() -> None:
    text = "plan p\n\naxis a = 1       # one\naxis longer = 22 # two\naxis c = 3  # alone\n"
    neat = "plan p\n\naxis a      = 1   # one\naxis longer = 22  # two\naxis c      = 3  # alone\n"
    assert format_source(text, "p") == neat


def test_blank_lines() -> None:
    text = (
        "\n\n# c\n\n\n\nplan p\naxis a = 1\neach step {\n\n\noutput x\n\n\n\noutput y\n\n}\n"
        "# d\nat start {\n}\naxis b = 1\n\n\n"
    )
    neat = (
        "# c\n\nplan p\n\naxis a = 1\n\neach step {\n    output x\n\n    output y\n}\n\n"
        "# d\nat start {\n}\n\naxis b = 1\n"
    )
    assert format_source(text, "p") == neat


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_line_ends_are_kept_and_the_byte_order_mark_is_not(newline: str) -> None:
    text = newline.join(["plan p", "", "axis a = 1", ""])
    assert format_source("\ufeff" + text, "p") == text


def test_numbers_and_their_units_stand_one_space_apart() -> None:
    assert "{ a = 25 MiB, b = 1_000, c = 2 Mbit/s }" in format_source(
        _stages("x = reduce g over a by sum { a = 25MiB, b = 1_000, c = 2   Mbit/s }"), "p"
    )


def test_text_that_does_not_parse_is_refused_with_its_mistakes() -> None:
    with pytest.raises(CommplanError) as caught:
        format_source("plan p\naxes a = 1\n", "bad.plan")
    assert [(d.code, d.file) for d in caught.value.diagnostics] == [("CP0008", "bad.plan")]
