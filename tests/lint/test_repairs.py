"""Repairs: each edit changes only what its description says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commplan import dsl
from commplan.diagnostics import Diagnostic, Fix, Span
from commplan.dsl.lexer import tokenize
from commplan.lint import lint
from commplan.lint.repairs import TextOffsets, apply_fixes, repair

WRONG = sorted((Path(__file__).parents[1] / "plans" / "wrong").glob("*.plan"))


def diagnostics(text: str) -> tuple[Diagnostic, ...]:
    analysis = dsl.analyze(text, "p.plan")
    return analysis.diagnostics or lint(analysis)


def comments(text: str) -> list[str]:
    return [token.text for token in tokenize(text) if token.type == "COMMENT"]


def test_layout_and_comments_stay():
    text = (
        "\ufeffplan  p   # é\r\naxis data=4\r\n\r\nsource s:u8[4]\r\neach   step {\r\n"
        "  x , n=load s   batch 8 visit exactly_onc seed 1   # why\r\n"
        "  output  x\r\n}\r\n"
    )
    better, count = repair(text, diagnostics)
    assert count == 2  # the word, and then the unused count
    assert better == text.replace("exactly_onc", "exactly_once").replace("x , n=load", "x=load")
    assert not diagnostics(better)


def test_comments_that_ignore_nothing_go_with_their_line():
    text = "plan p\naxis a = 2\ninput x : f32 per a\neach step {\n    # commplan: ignore CP1201\n"
    text += (
        "    y = reduce x over a by sum  # commplan: ignore CP1205, CP1201, CP1209 as said\n    output y\n}\n"
    )
    better, count = repair(text, diagnostics)
    assert count == 4
    lines = text.splitlines(keepends=True)
    assert better.splitlines(keepends=True) == [*lines[:4], "    y = reduce x over a by sum\n", *lines[6:]]


@pytest.mark.parametrize("path", WRONG, ids=lambda path: path.stem)
def test_repairs_of_wrong_plans_leave_no_more_errors_and_all_comments(path: Path):
    text = path.read_text("utf-8")
    better, count = repair(text, diagnostics)
    assert (count > 0) == any(each.fix for each in diagnostics(text))
    assert comments(better) == comments(text)
    errors = {each.code for each in diagnostics(text)}
    assert len(diagnostics(better)) <= len(diagnostics(text)) or not errors & {
        each.code for each in diagnostics(better)
    }
    assert repair(better, diagnostics) == (better, 0)


def test_what_comes_back_ends_the_repairs():
    turns = {"a": "b", "b": "a"}

    def find(text: str) -> list[Diagnostic]:
        return [Diagnostic("CP1201", "", fix=Fix("", Span(1, 1, 1, 2), turns[text]))]

    assert repair("a", find) == ("b", 1)


def test_of_fixes_that_overlap_the_first_is_taken():
    fixes = [Fix("", Span(1, 2, 1, 4), "X"), Fix("", Span(1, 3, 1, 5), "Y"), Fix("", Span(1, 5, 1, 6), "Z")]
    assert apply_fixes("abcdef", fixes) == ("aXdZf", 2)


@given(st.text("a\n\ré\ufeff", max_size=30), st.integers(0, 40))
def test_places_and_offsets_are_inverse(text: str, offset: int):
    offsets = TextOffsets(text)
    offset = min(max(offset, offsets.starts[0]), len(text))
    line, column = offsets.location(offset)
    inside = any(start <= offset <= end for start, end in zip(offsets.starts, offsets.ends, strict=True))
    assert offsets.offset(line, column) == offset or not inside
