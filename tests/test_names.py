"""Names of variables and parameters describe the value: none is a word of grammar."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ROOMS = ("commplan", "dsl", "lowering", "runtime")
PROGRAMS = ("bench", "docs")
GRAMMAR = {"about", "beside", "found", "here", "made", "one", "said", "there", "together", "told", "what"}


def bound(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """The variables and parameters of functions, with their lines; fields of classes are no part of it."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.lineno, node.id
            elif isinstance(node, ast.arg):
                yield node.lineno, node.arg


def test_it_finds_them():
    tree = ast.parse(
        "def f(one):\n for found in one: pass\n y = lambda what: [here for here in y]\nclass A:\n told: int"
    )
    assert sorted({name for _, name in bound(tree)}) == ["found", "here", "one", "what", "y"]


@pytest.mark.parametrize("room", ROOMS + PROGRAMS)
def test_no_variable_is_a_word_of_grammar(room: str):
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / room).rglob("*.py"))
        if not (room == "commplan" and path.relative_to(ROOT / room).parts[0] in ROOMS)
        for line, name in bound(ast.parse(path.read_text(encoding="utf-8")))
        if name in GRAMMAR
    ]
    assert not wrong, "\n".join(sorted(set(wrong)))
