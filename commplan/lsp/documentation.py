"""Documentation of each word of the language, from `words.toml`, for hovers and completion."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files

from commplan import io
from commplan.dsl.check.clauses.options import OPTIONS
from commplan.ir.stages import VERBS

# Markdown by table and word.
_TABLES: Mapping[str, Mapping[str, str]] = io.decode_toml(
    files("commplan.lsp").joinpath("words.toml").read_text(encoding="utf-8")
)
STAGES = _TABLES["stages"]  # verbs
WORDS = _TABLES["words"]  # other keywords
VALUES = _TABLES["values"]  # fixed words and types
ALGORITHMS = _TABLES["algorithms"]  # after `via`
ARGUMENTS = _TABLES["arguments"]  # keys in parentheses
FUNCTIONS = _TABLES["functions"]  # built-in functions
KINDS: Mapping[str, str] = {  # names of kinds of symbols (`lsp.symbols.Kind`)
    "axis": "axis", "ensemble": "ensemble", "server": "server", "source": "source", "fn": "function",
    "input": "input", "state": "state", "value": "value",
}  # fmt: skip


def of_verb(word: str) -> str:
    """The syntax and the documentation of a stage, by its verb."""
    return f"```plan\n{VERBS[word].FORM}\n```\n{STAGES[word]}"


def of_option(word: str) -> str:
    """The documentation of an option, with its values and stages."""
    rule = OPTIONS[word]
    kinds = {
        "bytes": "a size, such as `25 MiB`",
        "count": "a whole number",
        "dtype": "a float type",
        "wire": "a float type, or `int8(block = 32)`, `int4(block = 32)` or `f8e4m3(block = 32)`",
        "cache": 'a size, such as `8 GiB`, or `disk("PATH", 200 GiB)`',
    }
    kind = kinds.get(rule.kind) or " or ".join(f"`{value}`" for value in rule.words)
    return (
        f"{_TABLES['options'][word]}\n\nIt is {kind}, of {', '.join(f'`{stage}`' for stage in rule.stages)}."
    )


def of_word(word: str) -> str | None:
    """The documentation of a word of the language; None for other words."""
    if word in VERBS:
        return of_verb(word)
    if word in OPTIONS:
        return of_option(word)
    return next(
        (table[word] for table in (WORDS, ALGORITHMS, VALUES, ARGUMENTS, FUNCTIONS) if word in table), None
    )
