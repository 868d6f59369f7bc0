"""Random plans: right ones check clean, damaged ones end in diagnostics."""

from __future__ import annotations

import random
import re
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from support.plans import random_plan

from commplan.dsl import load
from commplan.ir.serialization.text import parse_plan, print_plan

TESTS = Path(__file__).parents[1]
PLANS = [
    path.read_text(encoding="utf-8")
    for path in (*sorted((TESTS.parent / "examples" / "plans").glob("*.plan")),
                 *sorted((TESTS / "plans").glob("*.plan")))
]  # fmt: skip
STAGES = "load map broadcast share reduce scatter slice gather exchange elastic"
TOKEN = re.compile(r"#[^\n]*|\w+|\s+|[^\w\s]")


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_random_plan_checks_clean(seed: int) -> None:
    text = random_plan(random.Random(seed))
    plan, diagnostics = load(text, "random.plan")
    assert plan is not None, "\n".join([text, *map(str, diagnostics)])
    assert parse_plan(print_plan(plan)) == plan


def test_random_plans_hold_every_stage() -> None:
    text = "\n".join(random_plan(random.Random(seed)) for seed in range(200))
    for words in (
        "load",
        "map",
        "broadcast",
        "share",
        "reduce",
        "scatter",
        "slice",
        "gather",
        "exchange",
        "elastic",
    ):
        assert f"= {words} " in text


@settings(max_examples=150)
@given(st.sampled_from(PLANS), st.integers(0, 2**32), st.integers(1, 4))
def test_damaged_plan_ends_in_diagnostics(text: str, seed: int, cuts: int) -> None:
    damaged = _damage(text, random.Random(seed), cuts)
    plan, diagnostics = load(damaged, "damaged.plan")
    lines = damaged.count("\n") + 1
    assert (plan is None) == bool(diagnostics)
    for diagnostic in diagnostics:
        assert re.fullmatch(r"CP0[0-6]\d\d", diagnostic.code)
        assert diagnostic.span is not None
        assert 1 <= diagnostic.span.line <= lines + 1
    assert load(damaged, "damaged.plan") == (plan, diagnostics)


def _damage(text: str, rng: random.Random, cuts: int) -> str:
    """Tokens of `text` deleted, doubled, swapped or put in another's place."""
    tokens = TOKEN.findall(text)
    for _ in range(cuts):
        first, second = rng.randrange(len(tokens)), rng.randrange(len(tokens))
        match rng.randrange(4):
            case 0:
                del tokens[first]
            case 1:
                tokens.insert(first, tokens[first])
            case 2:
                tokens[first], tokens[second] = tokens[second], tokens[first]
            case _:
                tokens[first] = tokens[second]
    return "".join(tokens)


@settings(max_examples=100)
@given(st.integers(0, 2**32))
def test_damaged_random_plan_ends_in_diagnostics(seed: int) -> None:
    rng = random.Random(seed)
    plan, diagnostics = load(_damage(random_plan(rng), rng, 1), "damaged.plan")
    assert (plan is None) == bool(diagnostics)
