"""The class of each token of a plan, and the lexer for Pygments that uses it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pygments.lexers import get_lexer_by_name, get_lexer_for_filename
from pygments.token import Error, Keyword, Number, Text

from commplan.dsl.check.clauses.options import OPTIONS
from commplan.dsl.check.clauses.via import ALGORITHMS
from commplan.dsl.lexer import CLAUSES, DECLARES, HEADS, VERBS
from commplan.highlight.categories import Category, categorize
from commplan.highlight.pygments import PlanLexer

ROOT = Path(__file__).parents[2]
PLANS = sorted([*(ROOT / "examples/plans").glob("*.plan"), *(ROOT / "tests/plans").glob("*.plan")])


def categories(text: str) -> list[tuple[str, str]]:
    return [(token.text, str(category)) for token, category in categorize(text)]


def words_of(category: Category) -> set[str]:
    texts = (plan.read_text("utf-8") for plan in PLANS)
    return {token.text for text in texts for token, kind in categorize(text) if kind is category}


@pytest.mark.parametrize(
    ("line", "word", "category"),
    [
        ("y = reduce x over ring by sum via ring", "ring", ["name", "algorithm"]),
        ("sum = reduce sum over data by sum", "sum", ["name", "name", "operator"]),
        ("fn tree(tree, f32[3]) -> tree on host random", "tree", ["function", "type", "type"]),
        ("y = map f(host, f32)", "host", ["name"]),
        ("input same : tree same data", "same", ["name", "clause"]),
        ("x = load batch batch 4", "batch", ["name", "clause"]),
        ("step = gather step over step", "step", ["name"] * 3),
        ("every 4 steps {", "steps", ["phase"]),
        ("y = reduce x over a, b via hierarchical(a = ring, b) { bucket = 1 MiB }", "a", ["name", "name"]),
        ("w = exchange g into w with update over data by sum", "update", ["function"]),
        ("d, c = elastic w with c over data by sync(eta = eta)", "eta", ["option", "name"]),
        ("y = reduce x over a by sum { wire = bf16, wires = bf17 }", "wires", ["name"]),
    ],
)
def test_a_word_means_something_in_its_place_only(line: str, word: str, category: list[str]):
    assert [kind for text, kind in categories(line) if text == word] == category


def test_the_plans_show_every_keyword_and_what_belongs_to_it():
    words = {word.lower() for word in VERBS}
    assert words_of(Category.VERB) == words
    assert words_of(Category.DECLARATION) == {word.lower() for word in DECLARES}
    assert {word.lower() for word in HEADS} < words_of(Category.PHASE)
    assert {word.lower() for word in CLAUSES} < words_of(Category.CLAUSE)
    assert words_of(Category.ALGORITHM) <= set(ALGORITHMS)
    assert set(OPTIONS) < words_of(Category.OPTION)
    assert not words_of(Category.BAD)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.stem)
def test_the_pieces_join_to_the_text(plan: Path):
    text = plan.read_text("utf-8")
    pieces = list(PlanLexer().get_tokens_unprocessed(text))
    assert "".join(piece for _, _, piece in pieces) == text
    assert all(text[start : start + len(piece)] == piece for start, _, piece in pieces)
    assert all(not piece.strip() for _, kind, piece in pieces if kind in Text)
    assert not [piece for _, kind, piece in pieces if kind is Error]


@given(st.text("axis data=4\n\r:tree{}()[]#?,->_% \tbyMiBé", max_size=200))
def test_any_text_is_cut_without_a_loss(text: str):
    assert "".join(piece for _, _, piece in PlanLexer().get_tokens_unprocessed(text)) == text


def test_a_unit_is_a_piece_of_its_own():
    pieces = [(kind, text) for _, kind, text in PlanLexer().get_tokens_unprocessed("25 MiB")]
    assert pieces == [(Number, "25"), (Text.Whitespace, " "), (Number.Unit, "MiB")]


def test_pygments_finds_the_lexer():
    assert isinstance(get_lexer_by_name("plan"), PlanLexer)
    assert isinstance(get_lexer_for_filename("training.plan"), PlanLexer)
    assert (Keyword, "reduce") in get_lexer_by_name("plan").get_tokens("y = reduce x over a by sum")
