"""Random trees are read back as they were printed; damaged text ends in diagnostics."""

from __future__ import annotations

import random
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from support.random_ast import Printer, Trees, bare

from commplan.diagnostics import CommplanError
from commplan.dsl import ast
from commplan.dsl.format import format_source
from commplan.dsl.lexer import tokenize
from commplan.dsl.parser import parse

PLANS = sorted((Path(__file__).parents[2] / "examples" / "plans").glob("*.plan"))
TEXTS = [path.read_text(encoding="utf-8") for path in PLANS]


def _printed(seed: int) -> tuple[ast.File, str, list[str]]:
    rng = random.Random(seed)
    tree = Trees(rng).file("random.plan")
    printer = Printer(rng)
    return tree, printer.file(tree), printer.comments


def _comments(text: str) -> list[str]:
    return [token.text for token in tokenize(text) if token.type == "COMMENT"]


@settings(max_examples=120)
@given(st.integers(0, 2**32))
def test_printed_trees_are_read_back(seed: int) -> None:
    tree, text, comments = _printed(seed)
    parsed, diagnostics = parse(text, "random.plan")
    assert not diagnostics, "\n".join([text, *map(str, diagnostics)])
    assert bare(parsed) == bare(tree), text
    assert _comments(text) == comments


@settings(max_examples=120)
@given(st.integers(0, 2**32))
def test_formatting_changes_space_only_and_once(seed: int) -> None:
    tree, text, comments = _printed(seed)
    once = format_source(text, "random.plan")
    parsed, diagnostics = parse(once, "random.plan")
    assert not diagnostics, "\n".join([text, once, *map(str, diagnostics)])
    assert bare(parsed) == bare(tree), once
    assert _comments(once) == comments
    assert format_source(once, "random.plan") == once


@settings(max_examples=120)
@given(st.sampled_from(TEXTS), st.randoms(use_true_random=False))
def test_damaged_plans_end_in_diagnostics(text: str, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 3)):
        start = rng.randrange(len(text) + 1)
        end = min(len(text), start + rng.choice([0, 1, 1, 5, 40]))
        text = (
            text[:start]
            + rng.choice(["", "{", "}", "(", ")", "]", ",", "=", "\n", "é", "9x", " on ", "\r"])
            + text[end:]
        )
    tree, diagnostics = parse(text, "damaged.plan")
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    for diagnostic in diagnostics:
        assert diagnostic.span
        assert 1 <= diagnostic.span.line <= diagnostic.span.end_line <= len(lines)
        assert diagnostic.span.column <= len(lines[diagnostic.span.line - 1]) + 1
        assert diagnostic.file == "damaged.plan"
    bad = [item for item in tree.items if isinstance(item, ast.BadStmt)]
    bad += [
        statement
        for item in tree.items
        if isinstance(item, ast.PhaseDecl)
        for statement in item.body
        if isinstance(statement, ast.BadStmt)
    ]
    assert diagnostics or not bad
    try:
        once = format_source(text, "damaged.plan")
    except CommplanError as error:
        assert error.diagnostics == diagnostics
        return
    assert not diagnostics
    assert format_source(once, "damaged.plan") == once


@settings(max_examples=100)
@given(st.text(max_size=200))
def test_any_text_ends_in_diagnostics(text: str) -> None:
    tree, diagnostics = parse(text, "any.plan")
    assert diagnostics or tree.name


WORDS = (
    "plan", "p", "each", "step", "{", "}", "(", ")", "=", ",", "\n", "map", "x", "[", "1", "at", "every",
    "input", ":", "output", "->", "by", "# c\n", "axis", "batch",
)  # fmt: skip


@settings(max_examples=120)
@given(st.lists(st.sampled_from(WORDS)))
def test_any_words_end_in_diagnostics(words: list[str]) -> None:
    tree, diagnostics = parse(" ".join(words), "words.plan")
    assert diagnostics or tree.name
