"""A TextMate grammar of plans, for VS Code, GitHub and other tools with TextMate grammars.

The format has local rules only: the class of a word depends on the text before it on its line, or on the
brackets around it. For plans in the layout of `commplan fmt` the grammar agrees with `categories`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from commplan.dsl.check.builtins import KEYS as BUILTIN_KEYS
from commplan.dsl.check.clauses.ops import OPS
from commplan.dsl.check.clauses.options import FLOATS, OPTIONS
from commplan.dsl.check.clauses.via import ALGORITHMS
from commplan.dsl.check.stages.loads import TAILS, VISITS
from commplan.dsl.check.stages.servers import MODES
from commplan.dsl.check.types import FLAGS, PLACES, TYPES
from commplan.dsl.lexer import CLAUSES, DECLARES, HEADS, UNITS, VERBS
from commplan.highlight.categories import ARGUMENTS, OPTION_WORDS, PARAMETERS, Category

Rule = Mapping[str, Any]

SCOPES: Mapping[Category, str] = {
    Category.COMMENT: "comment.line.number-sign.plan",
    Category.DECLARATION: "storage.type.declaration.plan",
    Category.PHASE: "keyword.control.phase.plan",
    Category.VERB: "keyword.control.stage.plan",
    Category.CLAUSE: "keyword.other.clause.plan",
    Category.TYPE: "support.type.plan",
    Category.CONSTANT: "constant.language.plan",
    Category.FUNCTION: "entity.name.function.plan",
    Category.ALGORITHM: "support.class.algorithm.plan",
    Category.OPERATOR: "support.function.operator.plan",
    Category.OPTION: "variable.parameter.option.plan",
    Category.NUMBER: "constant.numeric.plan",
    Category.UNIT: "keyword.other.unit.plan",
    Category.TEXT: "string.quoted.double.plan",
    Category.MARK: "keyword.operator.plan",
    Category.PUNCTUATION: "punctuation.separator.plan",
    Category.NAME: "variable.other.plan",
    Category.BAD: "invalid.illegal.plan",
}
_NAME = "[A-Za-z_][A-Za-z0-9_]*"
_BEGINS = "|".join(sorted(word.lower() for word in DECLARES | HEADS))


def grammar() -> str:
    """The grammar as JSON."""
    document = {
        "information_for_contributors": ["Written by `make grammars` from the lists of the language."],
        "name": "commplan plan",
        "scopeName": "source.plan",
        "fileTypes": ["plan"],
        "patterns": _included("texts", "comment", *_STATEMENTS, "words"),
        "repository": {name: {"patterns": rules} for name, rules in _repository().items()},
    }
    return json.dumps(document, indent=2) + "\n"


_STATEMENTS = ("fn", "valued", "phase", "braces", "called", "exchange", "placed")


def _repository() -> dict[str, list[Rule]]:
    number = rf"(-?\d[\d_]*(?:\.[\d_]*)?(?:[eE][+-]?\d+)?)(?:[ \t]*({_words(UNITS)})(?![\w/]))?"
    name = {"match": rf"\b{_NAME}\b", "name": SCOPES[Category.NAME]}
    return {
        "comment": [{"match": "#.*$", "name": SCOPES[Category.COMMENT]}],
        "numbers": [_match(number, Category.NUMBER, Category.UNIT)],
        "marks": [_match("(->|[=?])", Category.MARK), _match(r"([:,()\[\]{}])", Category.PUNCTUATION)],
        "names": [name],
        "texts": [_match('("[^"]*")', Category.TEXT)],
        "rest": [*_included("texts", "comment", "numbers", "marks", "names")],
        "words": [
            _match(rf"\b({_lower(VERBS)})\b", Category.VERB),
            _match(rf"\b({_lower(DECLARES)})\b", Category.DECLARATION),
            _match(rf"\b({_lower(HEADS)})\b", Category.PHASE),
            _match(rf"\b({_lower(CLAUSES)}|output)\b", Category.CLAUSE),
            *_included("rest"),
        ],
        "types": [_match(rf"\b({_words(TYPES)})\b", Category.TYPE), *_included("rest")],
        "fn": _fn(),
        "valued": _valued(),
        "phase": _phase(),
        "braces": _braces(),
        "called": [
            *_called("via", ALGORITHMS, Category.ALGORITHM),
            *_called("by", (*OPS, *MODES), Category.OPERATOR),
        ],
        "exchange": _exchange(),
        "placed": _placed(),
    }


def _fn() -> list[Rule]:
    """`fn NAME(TYPES) -> TYPES on host FLAGS`, `fn NAME = BUILTIN(KEY = VALUE)`."""
    flags = {"patterns": [_match(rf"\b({_words(FLAGS)})\b", Category.CONSTANT), *_included("names")]}
    on = rf"\b(on)\s+(?:({_words(PLACES)})|({_NAME}))\b((?:[ \t]+{_NAME})*)"
    return [
        {
            "begin": rf"\b(fn)\b(?:\s+({_NAME}))?",
            "beginCaptures": _captures(Category.DECLARATION, Category.FUNCTION),
            "end": r"(?=\bon\b)|(?=[{}])|^(?=\s*(?:" + _BEGINS + r"|output)\b)",
            "patterns": [
                _match(rf"(=)\s*({_words(BUILTIN_KEYS)})\b", Category.MARK, Category.FUNCTION),
                _match(rf"\b({_words(PARAMETERS)})\b(?=\s*=)", Category.OPTION),
                *_included("types"),
            ],
        },
        {
            "match": on,
            "captures": {**_captures(Category.CLAUSE, Category.CONSTANT, Category.NAME), "4": flags},
        },
    ]


def _valued() -> list[Rule]:
    """`input NAME : TYPE same ..`, and the types of sources and states."""
    return [
        {
            "begin": rf"\b(input|state)\b(?:\s+({_NAME}))?",
            "beginCaptures": _captures(Category.DECLARATION, Category.NAME),
            "end": r"$|(?=\bon\b)",
            "patterns": [
                _match(rf"(:)\s*({_words(TYPES)})\b", Category.PUNCTUATION, Category.TYPE),
                _match(r"(?<=[\w\]])[ \t]+(same)\b", Category.CLAUSE),
                *_included("comment", "words"),
            ],
        },
        _match(rf"(:)\s*({_words(TYPES)})\b", Category.PUNCTUATION, Category.TYPE),
    ]


def _phase() -> list[Rule]:
    """A header with its brace, so that other braces hold options."""
    return [
        {
            "begin": rf"\b({_lower(HEADS)})\b",
            "beginCaptures": _captures(Category.PHASE),
            "end": r"(\{)|$",
            "endCaptures": _captures(Category.PUNCTUATION),
            "patterns": [
                _match(r"\b(start|steps?|in|fragments|hidden|under)\b", Category.PHASE),
                *_included("words"),
            ],
        }
    ]


def _braces() -> list[Rule]:
    constants = _words((*OPTION_WORDS, *FLOATS))
    return [
        {
            "begin": r"(\{)",
            "beginCaptures": _captures(Category.PUNCTUATION),
            "end": r"(\})|^(?=\s*(?:" + _BEGINS + r")\b)",
            "endCaptures": _captures(Category.PUNCTUATION),
            "patterns": [
                _match(rf"(=)\s*({constants})\b", Category.MARK, Category.CONSTANT),
                _match(rf"(=)\s*({_NAME})\b", Category.MARK, Category.NAME),
                _match(rf"\b({_words(OPTIONS)})\b", Category.OPTION),
                *_included("rest"),
            ],
        }
    ]


def _called(clause: str, known: Iterable[str], category: Category) -> list[Rule]:
    """`via NAME`, `by NAME`, with arguments or without."""
    either = {"patterns": [_match(rf"\b({_words(known)})\b", category), *_included("names")]}
    head = rf"\b({clause})\s+({_NAME})\b"
    captures = {**_captures(Category.CLAUSE), "2": either, "3": {"name": SCOPES[Category.PUNCTUATION]}}
    levels = [_match(rf"(=)\s*({_words(known)})\b", Category.MARK, category)] if clause == "via" else []
    return [
        {
            "begin": rf"{head}\s*(\()",
            "beginCaptures": captures,
            "end": r"(\))|(?=[}])",
            "endCaptures": _captures(Category.PUNCTUATION),
            "patterns": [
                *levels,
                _match(rf"(=)\s*({_NAME})\b", Category.MARK, Category.NAME),
                _match(rf"\b({_words(ARGUMENTS)})\b(?=\s*=)", Category.OPTION),
                *_included("rest"),
            ],
        },
        {"match": head, "captures": captures},
    ]


def _exchange() -> list[Rule]:
    """`exchange g into w with FN`."""
    return [
        {
            "begin": r"\b(exchange)\b",
            "beginCaptures": _captures(Category.VERB),
            "end": rf"\b(with)\s+({_NAME})\b|(?=[{{}}])|^(?=\s*(?:{_BEGINS}|output)\b)",
            "endCaptures": _captures(Category.CLAUSE, Category.FUNCTION),
            "patterns": _included("comment", "called", "words"),
        }
    ]


def _placed() -> list[Rule]:
    """Words that mean something behind one other word only."""
    return [
        _match(rf"\b(map)\s+({_NAME})\b", Category.VERB, Category.FUNCTION),
        _match(rf"\b(visit)\s+({_words(VISITS)})\b", Category.CLAUSE, Category.CONSTANT),
        _match(rf"\b(tail)\s+({_words(TAILS)})\b", Category.CLAUSE, Category.CONSTANT),
        _match(r"\b(batch)\b(?=\s*[\d\[])", Category.CLAUSE),
    ]


def _included(*names: str) -> list[Rule]:
    return [{"include": f"#{name}"} for name in names]


def _match(pattern: str, *categories: Category) -> Rule:
    """A rule whose groups are of these categories, in order."""
    return {"match": pattern, "captures": _captures(*categories)}


def _captures(*categories: Category) -> dict[str, Any]:
    return {str(number): {"name": SCOPES[category]} for number, category in enumerate(categories, 1)}


def _words(words: Iterable[str]) -> str:
    """A pattern for any of `words`, the longest first."""
    return "|".join(re.escape(word) for word in sorted(words, key=lambda word: (-len(word), word)))


def _lower(words: Iterable[str]) -> str:
    return _words(word.lower() for word in words)
