"""The answers of the language server, without a protocol: completion, hovers, renaming, hints, repairs."""

from __future__ import annotations

import random
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commplan.diagnostics import CommplanError, Fix
from commplan.dsl.check.clauses.ops import OPS
from commplan.dsl.check.clauses.options import OPTIONS
from commplan.dsl.check.clauses.via import ALGORITHMS
from commplan.dsl.check.stages.loads import TAILS, VISITS
from commplan.dsl.check.stages.servers import MODES
from commplan.dsl.check.types import FLAGS, PLACES, TYPES
from commplan.dsl.lexer import KEYWORDS, SOFT, VERBS, tokenize
from commplan.highlight.categories import ARGUMENTS, OPTION_WORDS, PARAMETERS
from commplan.ir.stages.builtins import BUILTIN_NAMES
from commplan.lint.repairs import apply_fixes
from commplan.lsp import documentation
from commplan.lsp.completion import complete
from commplan.lsp.document import PlanDocument
from commplan.lsp.hints import placements
from commplan.lsp.hover import hover
from commplan.lsp.rename import renamed
from commplan.lsp.repairs import all_repairs, repairs

PLANS = sorted((Path(__file__).parents[2] / "examples" / "plans").glob("*.plan"))
PLAN = """plan p
axis node = 2
axis data = 4
ensemble member = 2
server hub = 1
source images : u8[8]
fn decode(u8[8]) -> u8[8] on host random
fn update(tree, tree) -> tree on device elementwise
input grads : tree partial node, data
input eta : f32
state w : tree on hub

at start {
    w = broadcast w over data from 0
}

each step {
    raw, n = load images batch 64 split data visit exactly_once seed 1
    px = map decode(raw) per member  # their own
    grads = reduce grads over node, data by mean via hierarchical(data = ring) { bucket = 1 GiB }
    w = exchange grads into w with update over data by sum
    output grads, px
}
"""


STAGES = "broadcast elastic exchange gather load map reduce scatter share shift slice swap"
SUMS = "native ring recursive_doubling halving_doubling binomial_tree double_tree torus chain hierarchical"


def place(marked: str) -> tuple[str, int, int]:
    """The text without its `|`, and its position."""
    line = next(number for number, each in enumerate(marked.splitlines(), 1) if "|" in each)
    column = marked.splitlines()[line - 1].index("|") + 1
    return marked.replace("|", ""), line, column


def at(before: str, after: str = "") -> tuple[PlanDocument, int, int]:
    """The plan cut after `before`, which occurs once, and that position; `after` replaces the rest of the
    line."""
    assert PLAN.count(before) == 1, before
    end = PLAN.index(before) + len(before)
    remainder = PLAN[end:].partition("\n")[2]
    text = f"{PLAN[:end]}{after}\n{remainder}"
    line = text[:end].count("\n") + 1
    return PlanDocument(text, "p.plan"), line, end - text.rfind("\n", 0, end)


# completion


@pytest.mark.parametrize(
    ("before", "words"),
    [
        ("at start {\n    w = ", STAGES),
        ("raw, n = load ", "images"),
        ("raw, n = lo", STAGES),
        ("raw, n = load images ", "batch"),
        ("split ", "data node"),
        ("visit ", "exactly_once at_least_once at_most_once"),
        ("map ", "decode update zeros add subtract"),
        ("map decode(", "grads eta w raw n"),
        ("map decode(raw) ", "per"),
        ("map decode(raw) per ", "member"),
        ("grads = reduce ", "grads eta w raw n px"),
        ("grads = reduce grads ", "across over"),
        ("grads = reduce grads over ", "data node"),
        ("over node, ", "data node"),
        ("over node, data by ", "sum mean max min"),
        ("over node, data by mean via h", SUMS),
        ("via hierarchical(", "node data"),
        ("via hierarchical(data = ring) { ", "bucket overlap wire accumulate integers chunk"),
        ("{ bucket = 1 GiB", ""),
        ("into ", "w"),
        ("with ", "decode update zeros add subtract"),
        ("output ", "grads eta w raw n px"),
        ("input grads : ", "f32 bf16 f16 f64 i32 i64 u8 bool i8 i16 u16 u32 bytes tree"),
        ("input grads : tree ", "partial per same split"),
        ("input grads : tree partial ", "data node"),
        ("state w : tree ", "on partial per same split"),
        ("state w : tree on ", "hub"),
        ("fn decode(", "f32 bf16 f16 f64 i32 i64 u8 bool i8 i16 u16 u32 bytes tree"),
        ("fn decode(u8[8]) -> u8[8] on ", "host device"),
        ("fn decode(u8[8]) -> u8[8] on host ", "elementwise linear random"),
        ("plan ", ""),
        ("axis node = ", ""),
        ("per member  # ", ""),
    ],
)  # fmt: skip
def test_completion(before: str, words: str):
    document, line, column = at(before)
    labels = [item.label for item in complete(document, line, column)]
    if "over" in before or "split " in before or "partial " in before:
        labels.sort()
        words = " ".join(sorted(words.split()))
    assert labels == words.split()


@pytest.mark.parametrize(
    ("marked", "words"),
    [
        ("|", {"plan", "axis", "input", "each step {"}),
        ("plan p\n|", {"axis", "at start {"}),
        ("plan p\nfn mix = |", {"blend", "nesterov", "zeros", "cast"}),
        ("plan p\nfn mix = nesterov(rate = 1, |", {"momentum"}),
        ("plan p\nfn mix = cast(dtype = |", {"bf16", "i32"}),
        ("plan p\naxis a = 2\neach step {\n  x = load s batch 2\n  |", {"output", "visit", "split"}),
        (
            "plan p\neach step {\n  y = reduce x over a by sum {\n    wire = |\n}",
            {"bf16", "f32", "int8(block = 32)"},
        ),
        ("plan p\neach step {\n  y = reduce x over a by sum { overlap = |", {"backward"}),
        ("plan p\neach step {\n  d, c = elastic x with c over a by |", set(MODES)),
        ("plan p\neach step {\n  d, c = elastic x with c over a by sync(|", {"eta", "rho"}),
        ("plan p\neach step {\n  y = reduce x over a by mean(|", {"weight"}),
        ("plan p\neach step {\n  y = share x over m via multi_broadcast(|", {"readers"}),
        ("plan p\nensemble m = 2\naxis a = 2\neach step {\n  y = share x over |", {"m"}),
    ],
)
def test_completion_of_what_is_just_being_written(marked: str, words: set[str]):
    text, line, column = place(marked)
    assert words <= {item.label for item in complete(PlanDocument(text), line, column)}


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.stem)
def test_every_word_of_a_plan_is_among_what_completion_offers(plan: Path):
    """At the beginning of each word, the rest of the text being there or not."""
    whole = PlanDocument(plan.read_text("utf-8"))
    new = {use.span for use in whole.symbols.uses if use.symbol and use.symbol.definition == use.span}
    lines = whole.text.splitlines()
    for token in whole.tokens:
        header = lines[token.line - 1].startswith(("plan ", "at ", "each ", "every ", "phase "))
        if not token.is_word or token.span in new or header:  # headers are offered whole
            continue
        for document in (whole, PlanDocument(whole.text[: whole.offsets.offset(token.line, token.column)])):
            labels = {item.label for item in complete(document, token.line, token.column)}
            assert token.text in labels, (token, labels)


def test_every_word_is_documented():
    constants = (*TYPES, *PLACES, *FLAGS, *VISITS, *TAILS, *OPS, *MODES, *OPTION_WORDS)
    for word in (
        *KEYWORDS,
        *SOFT,
        *constants,
        *ALGORITHMS,
        *OPTIONS,
        *ARGUMENTS,
        *PARAMETERS,
        *BUILTIN_NAMES,
    ):
        assert documentation.of_word(word), word
    assert set(documentation.STAGES) == {verb.lower() for verb in VERBS}


# hovers


def hovered(before: str, stages: dict[int, list[str]] | None = None) -> str:
    end = PLAN.index(before) + len(before)
    line, column = PLAN[:end].count("\n") + 1, end - PLAN.rfind("\n", 0, end)
    answer = hover(PlanDocument(PLAN, "p.plan"), line, column, stages)
    return answer[0] if answer else ""


def test_hover_of_a_value_says_how_it_lies():
    assert "grads : tree partial node, data" in hovered("input gr")
    assert "`partial node, data`" in hovered("grads = reduce gr")
    assert "`same`" in hovered("    gr") and "reduce grads over node, data" in hovered("    gr")
    assert "`same`" in hovered("output gr")


def test_hover_of_words_and_names():
    assert "axis data = 4" in hovered("axis da") == hovered("over node, da")
    assert "y = reduce x over AXES" in hovered("grads = red")
    assert "One or" not in hovered("{ buck") and "`reduce`" in hovered("{ buck")
    assert "right neighbor" in hovered("(data = ri")
    assert "fn update(tree, tree)" in hovered("with upd")
    assert hovered("# thei") == "" == hovered("grads, px\n}")


@pytest.mark.parametrize(
    ("marked", "expected"),
    [
        ("plan p\ninput x : tree\neach step {\n    y = map subtr|act(x, x)\n    output y\n}", "x - y"),
        ("plan p\nfn f = ble|nd(alpha = 0.5)\n", "alpha x + (1 - alpha) y"),
        ("plan p\nfn f = blend(alp|ha = 0.5)\n", "weight of the first operand"),
        ("plan p\nfn ad|d(tree, tree) -> tree on device\n", "fn add(tree, tree) -> tree on device"),
    ],
)
def test_hover_of_built_in_functions(marked: str, expected: str):
    text, line, column = place(marked)
    answer = hover(PlanDocument(text, "p.plan"), line, column)
    assert answer is not None and expected in answer[0]


def test_hover_of_a_stage_says_what_became_of_it():
    line = PLAN[: PLAN.index("grads = reduce")].count("\n") + 1
    became = {line: ["line 20: all of it", "    all_reduce"]}
    assert "    all_reduce" in hovered("grads = red", became) and "all_reduce" in hovered("reduce gr", became)
    assert "all_reduce" not in hovered("input gr", became)


# names


def test_a_name_that_is_bound_again_is_another_value():
    document = PlanDocument(PLAN)
    line = PLAN[: PLAN.index("    grads = ")].count("\n") + 1
    assert [place.line for place in renamed(document, line, 5, "sums")] == [line, line + 1, line + 2]
    first = PLAN[: PLAN.index("input grads")].count("\n") + 1
    assert [place.line for place in renamed(document, first, 8, "terms")] == [first, line]


def test_a_state_is_one_name_wherever_it_is_bound():
    document = PlanDocument(PLAN)
    line = PLAN[: PLAN.index("state w")].count("\n") + 1
    places = renamed(document, line, 7, "weights")
    assert len(places) == 5
    text, _ = apply_fixes(PLAN, [Fix("", each, "weights") for each in places])
    assert len(PlanDocument(text).diagnostics) == len(document.diagnostics)
    assert "exchange grads into weights with update" in text


@pytest.mark.parametrize("name", ["reduce", "2x", "a b", "", "n", "grads", "data", "decode", "w"])
def test_a_name_that_would_mean_something_else_is_refused(name: str):
    line = PLAN[: PLAN.index("    raw, n")].count("\n") + 1
    with pytest.raises(CommplanError, match="CP1117"):
        renamed(PlanDocument(PLAN), line, 6, name)


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.stem)
def test_renaming_changes_no_diagnostic_and_comes_back(plan: Path):
    text = plan.read_text("utf-8")
    document = PlanDocument(text)
    for symbol in [*document.symbols.declared.values(), *document.symbols.bound]:
        spot = symbol.definition
        places = renamed(document, spot.line, spot.column, "unheard_of")
        new, count = apply_fixes(text, [Fix("", place, "unheard_of") for place in places])
        assert count == len(symbol.places) == len(places)
        other = PlanDocument(new)
        assert not other.diagnostics
        back = renamed(other, spot.line, spot.column, symbol.name)
        assert apply_fixes(new, [Fix("", place, symbol.name) for place in back])[0] == text


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.stem)
def test_every_name_of_a_plan_is_known(plan: Path):
    document = PlanDocument(plan.read_text("utf-8"))
    assert document.symbols.uses and all(use.symbol for use in document.symbols.uses)


# hints and repairs


def test_hints_say_how_results_lie():
    document = PlanDocument(PLAN)
    line = PLAN[: PLAN.index("    raw, n")].count("\n") + 1
    hints = [(hint.line - line, hint.text) for hint in placements(document, line, line + 1)]
    assert hints == [(0, ": split data"), (0, ": per data"), (1, ": per member split data")]


def test_a_warning_can_be_ignored_where_it_stands():
    text = "plan p\naxis a = 2\ninput x : f32 per a\neach step {\n    y = reduce x over a by sum   # all\n}\n"
    for expected in ("by sum   # commplan: ignore CP1201: all", "by sum  # commplan: ignore CP1201"):
        (ignored,) = repairs(PlanDocument(text), 5, 5)
        assert not ignored.certain and ignored.diagnostic and ignored.diagnostic.code == "CP1201"
        ((start, end, new),) = ignored.edits
        changed = text[:start] + new + text[end:]
        assert expected in changed and not PlanDocument(changed).diagnostics
        text = text.replace("   # all", "")
    assert repairs(PlanDocument(text), 1, 4) == []


def test_all_that_is_certain_at_once():
    text = PLAN.replace("mean", "maen").replace("visit exactly_once", "visit exactly_onc")
    everything = all_repairs(PlanDocument(text))
    assert everything is not None
    ((_, _, new),) = everything.edits
    assert "by mean" in new and "exactly_once" in new
    assert all_repairs(PlanDocument(PLANS[0].read_text("utf-8"))) is None


@settings(max_examples=60)
@given(st.integers(0, 2**32))
def test_damaged_plans_are_answered(seed: int):
    """No request raises at any position, except for names that cannot be renamed."""
    rng = random.Random(seed)
    texts = [plan.read_text("utf-8") for plan in rng.sample(PLANS, 2)]
    words = [token.text for text in texts for token in tokenize(text)]
    text = texts[0]
    for _ in range(rng.randint(1, 4)):
        start = rng.randrange(len(text) + 1)
        new = rng.choice(
            ["", "\n", "\r\n", "{", "}", "é", "# commplan: ignore CP1201", *rng.sample(words, 4)]
        )
        text = text[:start] + new + text[start + rng.choice([0, 0, 1, 5, 30]) :]
    document, lines = PlanDocument(text), text.split("\n")
    for _ in range(3):
        line = rng.randrange(len(lines)) + 1
        column = rng.randrange(len(lines[line - 1]) + 1) + 1
        complete(document, line, column)
        hover(document, line, column, {line: ["what became of it"]})
        placements(document, 1, len(lines))
        repairs(document, line, line)
        with suppress(CommplanError):
            renamed(document, line, column, rng.choice(words))
    all_repairs(document)
