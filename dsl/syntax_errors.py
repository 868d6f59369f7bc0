"""Diagnostics of statements that do not parse: expected, found, and the fix."""

from __future__ import annotations

import re
from collections.abc import Sequence

from commplan.diagnostics import Diagnostic, Fix, Note, Span, near_name, near_names
from commplan.dsl.grammar import Start, Unexpected, parse_statement
from commplan.dsl.lexer import DECLARES, HEADS, PUNCTUATION, SOFT, VERBS, Token, number_mistake, word_type
from commplan.ir import stages

# Descriptions of types of tokens that are not keywords.
_KINDS = {
    "NAME": "a name", "INT": "a whole number", "FLOAT": "a number", "QUANTITY": "a number with a unit",
    "TEXT": "a text in quotes", "$END": "the end of the line",
} | {name: f"`{text}`" for text, name in PUNCTUATION.items()}  # fmt: skip

# The syntax of each statement, by its first word or the verb of its stage.
FORMS = {
    "PLAN": "plan NAME",
    "AXIS": "axis NAME = N",
    "ENSEMBLE": "ensemble NAME = N",
    "SERVER": "server NAME = N",
    "SOURCE": "source NAME : TYPE",
    "FN": "fn NAME(TYPES) -> TYPES on host|device [elementwise] [linear] [random], or fn NAME = BUILTIN(..)",
    "INPUT": "input NAME : TYPE [per AXES] [partial AXES] [split AXES]",
    "STATE": "state NAME : TYPE [per AXES] [split AXES] [on SERVER]",
    "TOPOLOGY": 'topology "FILE"',
    "AT": "at start { ... }",
    "EACH": "each step { ... }",
    "EVERY": "every N steps [in F fragments] [hidden under V steps] { ... }",
    "PHASE": "phase NAME { ... }",
    "OUTPUT": "output NAMES",
} | {verb.upper(): stage.FORM for verb, stage in stages.VERBS.items()}


def bad_token(token: Token) -> Diagnostic:
    """The diagnostic of text that is not a token of the language."""
    if re.match(r"-?[0-9]", token.text):
        why, suggestion = number_mistake(token.text)
        fix = Fix(f"write `{suggestion}`", token.span, suggestion) if suggestion else None
        return Diagnostic("CP0004", f"malformed number `{_short(token.text)}`: {why}", token.span, fix=fix)
    message = f"unexpected {_character(token.text)}"
    notes: tuple[Note, ...] = ()
    if token.text[0].isalpha():
        notes = (Note("names are made of the letters A to Z and a to z, digits and `_`"),)
    elif token.text[0] in "\"'":
        notes = (Note('names are written bare; only `topology "FILE"` takes a text, in double quotes'),)
    elif token.text.startswith(("//", "/*", ";")):
        notes = (Note("comments start with `#`, and a newline ends a statement"),)
    return Diagnostic("CP0003", message, token.span, notes)


def unquoted(tokens: Sequence[Token]) -> Diagnostic:
    """The diagnostic of a topology path without double quotes, which extends to the end of the line.

    `tokens` are those of the declaration, with an invalid token on its first line.
    """
    path = [token for token in tokens[1:] if token.line == tokens[0].line]
    text, end = "", path[0].column
    for token in path:
        text += " " * (token.column - end) + token.text
        end = token.end_column
    bare = text.strip("'\"")
    suggestion = f'"{bare}"'
    span = path[0].span.to(path[-1].span)
    message = f"expected a text in quotes, found `{_short(text)}`"
    notes = (Note(f"it is written: {FORMS['TOPOLOGY']}"),)
    return Diagnostic("CP0009", message, span, notes, Fix(f"write `{suggestion}`", span, suggestion))


def bad_unit(number: Token, unit: Token) -> Diagnostic:
    """The diagnostic of a number followed by an unknown unit."""
    why, suggestion = number_mistake(f"{number.text}{unit.text}")
    span = number.span.to(unit.span)
    fix = Fix(f"write `{suggestion}`", span, suggestion) if suggestion else None
    return Diagnostic("CP0004", f"malformed number `{number.text} {unit.text}`: {why}", span, fix=fix)


def unknown_statement(tokens: Sequence[Token], inside: bool) -> Diagnostic:
    """The diagnostic of a line that begins with no valid word, inside or outside a phase."""
    first = tokens[0]
    starts = ["output"] if inside else [word.lower() for word in (*DECLARES, *HEADS)]
    suggestion = near_name(first.text, sorted(starts)) if first.type == "NAME" else None
    expected = "a stage `NAMES = ...` or `output`" if inside else "a declaration or a phase"
    notes = () if suggestion else (Note(_KNOWN_INSIDE if inside else _KNOWN_OUTSIDE),)
    return _guessing(
        "CP0008", f"expected {expected}, found {_found_text(tokens, 0)}", first.span, suggestion, *notes
    )


def _guessing(code: str, message: str, span: Span, suggestion: str | None, *notes: Note) -> Diagnostic:
    """A diagnostic that suggests the word that was probably meant, unless `suggestion` is None."""
    if suggestion is None:
        return Diagnostic(code, message, span, notes)
    fix = Fix(f"write `{suggestion}`", span, suggestion)
    return Diagnostic(code, f"{message}; did you mean `{suggestion}`?", span, notes, fix)


# Notes of diagnostics.
PHASES = "phases are `at start { }`, `each step { }`, `every N steps { }`, `phase NAME { }`"
_KNOWN_OUTSIDE = (
    "allowed outside a phase: axis, ensemble, server, source, fn, input, state, topology and the phases: "
    "at start, each step, every N steps, phase NAME"
)
_KNOWN_INSIDE = f"the stages are {', '.join(stages.VERBS)}"


def unexpected(start: Start, tokens: Sequence[Token], error: Unexpected) -> Diagnostic:
    """The diagnostic of the first token of a statement that does not fit, with the tokens that would.

    Args:
        start: The kind of statement.
        tokens: Its tokens.
        error: The exception of `parse_statement` for them.
    """
    index, accepted = error.index, error.accepted
    token = tokens[index] if index < len(tokens) else None
    span = token.span if token else _end(tokens)
    if token and token.type == "TEXT":
        return bad_token(token)
    word = _keyword_as_name(start, tokens, error)
    if word:
        message = f"`{word.text}` is a word of the language: it cannot be a name"
        return Diagnostic("CP0010", message, word.span)
    if token and token.is_word and tokens[index - 1].type in ("INT", "FLOAT") and "COMMA" in accepted:
        return bad_unit(tokens[index - 1], token)
    if token and accepted >= VERBS:
        return _no_stage(tokens, index)
    message = f"expected {_expected_text(accepted)}, found {_found_text(tokens, index)}"
    form = next((FORMS[t.type] for t in tokens if t.type in FORMS), None)
    notes = [Note(f"it is written: {form}")] if form else []
    if token is None and "BATCH" in accepted:
        notes.append(Note("`batch` stays on the line of `load`"))
    elif token is None and tokens[-1].type in ("EQUAL", "COMMA", "ARROW", "COLON"):
        notes.append(Note("a newline ends a statement, except inside brackets"))
    return _guessing("CP0009", message, span, _meant(token, accepted), *notes)


def _no_stage(tokens: Sequence[Token], index: int) -> Diagnostic:
    """The diagnostic of `NAMES =` without a stage after it; `index` is that of the next token."""
    token = tokens[index]
    message = f"expected a stage, found {_found_text(tokens, index)}"
    suggestion = near_name(token.text, sorted(stages.VERBS)) if token.is_word else None
    if token.type == "NAME" and index + 1 < len(tokens) and tokens[index + 1].type == "LPAR":
        fix = Fix("write `map` before it", token.span, f"map {token.text}")
        note = Note("a function is applied with `map`: y = map FN(x)")
        return Diagnostic("CP0009", message, token.span, (note,), fix)
    notes = () if suggestion else (Note(_KNOWN_INSIDE),)
    return _guessing("CP0009", message, token.span, suggestion, *notes)


def _keyword_as_name(start: Start, tokens: Sequence[Token], error: Unexpected) -> Token | None:
    """The keyword that was used as a name, if that is the mistake; else None."""
    index = error.index
    token = tokens[index] if index < len(tokens) else None
    if token is None:
        return None
    if "NAME" in error.accepted and is_keyword(token.text) and _reads_on(start, tokens, index):
        return token
    # `seed = ...` on a new line continues the statement before it.
    for start_index in (index, index - 1):
        pair = tokens[start_index : start_index + 2]
        if len(pair) == 2 and pair[0].leads and pair[1].type == "EQUAL" and is_keyword(pair[0].text):
            return pair[0]
    return None


def _reads_on(start: Start, tokens: Sequence[Token], index: int) -> bool:
    """Whether the statement parses further with the word at `index` as a name."""
    changed = (*tokens[:index], tokens[index]._replace(type="NAME"), *tokens[index + 1 :])
    try:
        parse_statement(start, changed)
    except Unexpected as error:
        return error.index > index + 1
    return True


def _meant(token: Token | None, accepted: frozenset[str]) -> str | None:
    """The accepted keyword that was probably meant; None without one that is near enough."""
    if token is None or token.type != "NAME":
        return None
    words = sorted(kind.lower() for kind in accepted if kind not in _KINDS)
    return near_name(token.text, words)


def _expected_text(accepted: frozenset[str]) -> str:
    """A list of the accepted tokens, such as `over` or `across`; "a stage" instead of all verbs."""
    kinds = set(accepted)
    if kinds >= VERBS:
        return "a stage"
    if "INT" in kinds and "FLOAT" in kinds:
        kinds -= {"FLOAT", "QUANTITY", "INT"}
        kinds.add("number")
    words = sorted(f"`{kind.lower()}`" for kind in kinds if kind not in _KINDS and kind != "number")
    named = [_KINDS[kind] for kind in _KINDS if kind in kinds]
    if "number" in kinds:
        named.insert(0, "a number")
    options = [*words, *named]
    return options[0] if len(options) == 1 else f"{', '.join(options[:-1])} or {options[-1]}"


def _found_text(tokens: Sequence[Token], index: int) -> str:
    """The token at `index` in quotes, or the end of the line."""
    if index >= len(tokens):
        return "the end of the line"
    return f"`{_short(tokens[index].text)}`"


def _end(tokens: Sequence[Token]) -> Span:
    """The location after the last token, one character wide."""
    last = tokens[-1]
    return Span(last.line, last.end_column, last.line, last.end_column + 1)


def _short(text: str) -> str:
    """`text`, shortened to 40 characters."""
    return text if len(text) <= 40 else f"{text[:37]}..."


def _character(text: str) -> str:
    """`text` in quotes, or the number of its first character if it is not printable."""
    shown = _short(text)
    if shown.isprintable():
        return f"`{shown}`"
    return f"character U+{ord(text[0]):04X}"


def is_keyword(text: str) -> bool:
    """Whether `text` is a keyword, which cannot be a name. Soft keywords can."""
    return text not in SOFT and word_type(text) != "NAME"


def is_declaration_like(tokens: Sequence[Token]) -> bool:
    """Whether tokens such as `axes data = 8` look like a declaration with a misspelled keyword.

    That is so if they begin with two words, and the first one is similar to a keyword.
    """
    if len(tokens) < 2 or not tokens[1].is_word:
        return False
    return bool(near_names(tokens[0].text, sorted(word.lower() for word in DECLARES)))
