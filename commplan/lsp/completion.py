"""Words that may follow at a location of a plan, with documentation.

The grammar (`dsl.grammar.followers`) determines the keywords, and whether a name may follow. The functions of
this module select the names and words that are valid there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from commplan.dsl.check.builtins import BARE
from commplan.dsl.check.builtins import KEYS as BUILTIN_KEYS
from commplan.dsl.check.clauses.ops import OPS
from commplan.dsl.check.clauses.options import FLOATS, OPTIONS, options_of
from commplan.dsl.check.clauses.via import KEYS, carrying, carrying_a_level
from commplan.dsl.check.stages.loads import TAILS, VISITS
from commplan.dsl.check.stages.servers import MODES
from commplan.dsl.check.types import FLAGS, PLACES, TYPES
from commplan.dsl.grammar import Start, followers
from commplan.dsl.lexer import CLAUSES, DECLARES, SOFT, VERBS, Token
from commplan.dsl.statements import CONTINUES, GiveUp, PhaseClose, PhaseOpen, Statement, split
from commplan.ir.types import DType
from commplan.lsp import documentation
from commplan.lsp.document import PlanDocument
from commplan.lsp.symbols import Symbol

ItemKind = Literal["keyword", "verb", "value", "axis", "function", "algorithm", "option", "type", "constant"]
_HEADERS = (  # headers of phases, as templates
    "at start {",
    "each step {",
    "every N steps {",
    "every N steps in F fragments {",
    "every N steps hidden under V steps {",
    "phase NAME {",
)
_BRACKETS = {"LPAR": "RPAR", "LSQB": "RSQB", "LBRACE": "RBRACE"}  # closing brackets by opening brackets


class Completion(NamedTuple):
    """A completion.

    Attributes:
        label: the text to insert.
        kind: its kind, for the icon.
        detail: a description in one line; empty for none.
        documentation: Markdown; empty for none.
    """

    label: str
    kind: ItemKind
    detail: str = ""
    documentation: str = ""


class _CompletionContext(NamedTuple):
    """The statement before a location.

    Attributes:
        document: the document.
        line: the line of the location, from 1.
        column: the column of the location, from 1.
        tokens: the tokens of the statement up to the location, without the word being typed.
        inside: whether the location is within a phase.
        fresh: whether a new statement may begin there.
    """

    document: PlanDocument
    line: int
    column: int
    tokens: tuple[Token, ...]
    inside: bool
    fresh: bool


def complete(document: PlanDocument, line: int, column: int) -> list[Completion]:
    """Return the words that may follow at a location, in display order, without duplicate labels."""
    cursor = _cursor(document, line, column)
    if cursor is None:
        return []
    items: dict[str, Completion] = {}
    for item in _items(cursor):
        items.setdefault(item.label, item)
    return list(items.values())


def _cursor(document: PlanDocument, line: int, column: int) -> _CompletionContext | None:
    """The statement at a location; None inside a comment, or if the text before cannot be parsed."""
    before: list[Token] = []
    for token in document.tokens:
        if (token.line, token.column) >= (line, column):
            break
        if token.type == "COMMENT":
            if token.line == line:
                return None
            continue
        if token.line == line and token.end_column >= column and token.is_word:
            break
        before.append(token)
    inside, last = False, None
    try:
        for event in split(iter(before), lambda diagnostic: None):
            match event:
                case PhaseOpen():
                    inside, last = True, None if event.brace else event
                case PhaseClose():
                    inside = event.brace is None and inside
                    last = None if event.brace else last
                case Statement():
                    last = event
    except GiveUp:
        return None
    tokens = last.tokens if last else ()
    fresh = not tokens or (tokens[-1].line < line and not _open(tokens))
    return _CompletionContext(document, line, column, tokens, inside, fresh)


def _open(tokens: Sequence[Token]) -> list[Token]:
    """The unclosed brackets in `tokens`."""
    brackets: list[Token] = []
    for token in tokens:
        if token.type in _BRACKETS:
            brackets.append(token)
        elif token.type in _BRACKETS.values() and brackets:
            brackets.pop()
    return brackets


def _items(cursor: _CompletionContext) -> Iterator[Completion]:
    """The completions, which may have duplicates: beginnings of statements, names, and keywords."""
    if cursor.fresh:
        yield from _beginnings(cursor)
    if not cursor.tokens:
        return
    start = _start(cursor)
    following = followers(start, cursor.tokens)
    if cursor.fresh:
        following &= CONTINUES
    if "NAME" in following:
        yield from _names(cursor)
    if following & (DECLARES | VERBS | CLAUSES) or following & {word.upper() for word in SOFT}:
        yield from _keywords(following, cursor)


def _start(cursor: _CompletionContext) -> Start:
    """The rule of the grammar that the statement at the cursor is parsed with."""
    first = cursor.tokens[0].type
    if cursor.inside:
        return "statement"
    return "header" if first == "PLAN" else "declaration" if first in DECLARES else "phase"


def _beginnings(cursor: _CompletionContext) -> Iterator[Completion]:
    """The first words of statements."""
    if cursor.inside:
        yield _word("output")
        for symbol in cursor.document.symbols.visible(cursor.line, cursor.column).values():
            yield _symbol(cursor, symbol)
        return
    words = ["plan"] if not cursor.document.analysis.tree.name else []
    for word in (*words, *sorted(keyword.lower() for keyword in DECLARES if keyword != "PLAN")):
        yield _word(word)
    for header in _HEADERS:
        yield Completion(header, "keyword", "a phase", documentation.WORDS[header.split()[0]])


def _keywords(following: Iterable[str], cursor: _CompletionContext) -> Iterator[Completion]:
    """Verbs and clauses among the token types `following`; `across` only if there is an ensemble."""
    for kind in sorted(following):
        if kind in VERBS:
            verb = kind.lower()
            yield Completion(verb, "verb", documentation.STAGES[verb], documentation.of_verb(verb))
        elif kind in CLAUSES or kind.lower() in SOFT:
            if kind == "ACROSS" and not _axes(cursor, ("ensemble",)):
                continue
            yield _word(kind.lower())


def _word(word: str) -> Completion:
    return Completion(word, "keyword", "", documentation.WORDS[word])


def _names(cursor: _CompletionContext) -> Iterator[Completion]:
    """The names for a position in which the grammar accepts any name."""
    tokens = cursor.tokens
    brackets = _open(tokens)
    before = _clause(tokens)
    verb = next((token.text for token in tokens if token.type in VERBS), None)
    if brackets and brackets[-1].type == "LBRACE":
        yield from _in_braces(tokens, verb)
    elif brackets and before in ("VIA", "BY"):
        yield from _in_call(cursor, tokens, before, verb)
    elif tokens[0].type in DECLARES:
        yield from _in_declaration(cursor, before)
    elif before in ("OVER", "ACROSS", "PER", "SPLIT"):
        yield from _axes(cursor, _KINDS_OVER.get((verb, before), _EITHER))
    elif before in _FIXED:
        kind, words = _FIXED[before]
        yield from _constants(words, kind)
    elif before == "VIA":
        for name in carrying(_stage(tokens, verb)):
            yield Completion(name, "algorithm", "", documentation.ALGORITHMS[name])
    elif before == "BY":
        yield from _constants(MODES if verb == "elastic" else OPS, "constant")
    elif before == "LOAD":
        yield from _declared_names(cursor, ("source",))
    elif (before == "MAP" and not brackets) or (before == "WITH" and verb == "exchange"):
        yield from _declared_names(cursor, ("fn",))
        yield from _builtins(BARE)
    elif cursor.inside:
        states = before == "INTO" or (before == "WITH" and verb == "elastic")
        for symbol in cursor.document.symbols.visible(cursor.line, cursor.column).values():
            if not states or symbol.kind == "state":
                yield _symbol(cursor, symbol)


_EITHER = ("axis", "ensemble")  # kinds of axes without servers
# The kinds of axes in a clause of a verb, if they are not `_EITHER`.
_KINDS_OVER: Mapping[tuple[str | None, str], tuple[str, ...]] = {
    ("load", "PER"): ("ensemble",),
    ("load", "OVER"): ("ensemble",),
    ("load", "SPLIT"): ("axis",),
    ("map", "PER"): ("ensemble",),
    ("share", "OVER"): ("ensemble",),
    ("reduce", "ACROSS"): ("ensemble",),
    **{(verb, "OVER"): ("axis",) for verb in documentation.STAGES if verb not in ("load", "share")},
}
_FIXED: Mapping[str, tuple[ItemKind, Sequence[str]]] = {  # the fixed words of a clause, and their kind
    "VISIT": ("constant", VISITS),
    "TAIL": ("constant", TAILS),
}


def _clause(tokens: Sequence[Token]) -> str:
    """The type of the last keyword, which determines the possible words."""
    return next((token.type for token in reversed(tokens) if token.type in CLAUSES | VERBS | DECLARES), "")


def _stage(tokens: Sequence[Token], verb: str | None) -> str:
    """The name of a stage in the lists of algorithms and options, for example `elastic sync`."""
    if verb != "elastic":
        return verb or ""
    return next((f"elastic {token.text}" for token in tokens if token.text in MODES), "elastic sync")


def _in_braces(tokens: Sequence[Token], verb: str | None) -> Iterator[Completion]:
    """The remaining options of a stage, or the possible values of an option."""
    if tokens[-1].type == "EQUAL":
        rule = OPTIONS.get(tokens[-2].text)
        if rule is not None and rule.kind in ("word", "dtype", "wire"):
            yield from _constants(rule.words if rule.kind == "word" else FLOATS, "constant")
        if rule is not None and rule.kind == "wire":
            yield from _constants((f"{word}(block = 32)" for word in rule.words), "constant")
        return
    written = {token.text for token in tokens}
    stage = _stage(tokens, verb)
    keys = {*options_of(stage), *(options_of("host map") if stage == "map" else ())}
    for key in OPTIONS:
        if key in keys and key not in written:
            yield Completion(key, "option", "", documentation.of_option(key))


def _in_call(
    cursor: _CompletionContext, tokens: Sequence[Token], clause: str, verb: str | None
) -> Iterator[Completion]:
    """Arguments of the word after `via` or `by`, inside its parentheses.

    Args:
        cursor: the location.
        tokens: the tokens of the statement.
        clause: `VIA` or `BY`.
        verb: the verb of the stage, if it has one.
    """
    opened = _open(tokens)[-1]
    name = tokens[tokens.index(opened) - 1].text
    is_value = tokens[-1].type == "EQUAL"  # of an argument, whose key precedes
    if clause == "VIA" and name == "hierarchical":
        if is_value:
            for level in carrying_a_level(_stage(tokens, verb)):
                yield Completion(level, "algorithm", "", documentation.ALGORITHMS[level])
        else:
            yield from _levels(cursor)
    elif clause == "VIA" and not is_value:
        yield from _arguments(KEYS.get(name, ()))
    elif clause == "VIA":
        yield from _levels(cursor)
    elif not is_value:
        yield from _arguments(("weight",) if name == "mean" else ("eta", "rho"))
    else:
        for symbol in cursor.document.symbols.visible(cursor.line, cursor.column).values():
            yield _symbol(cursor, symbol)


def _levels(cursor: _CompletionContext) -> Iterator[Completion]:
    """The axes of the stage that its algorithm does not list yet."""
    tokens = cursor.tokens
    via = next(number for number, token in enumerate(tokens) if token.type == "VIA")
    before, written = {token.text for token in tokens[:via]}, {token.text for token in tokens[via:]}
    for item in _declared_names(cursor, _EITHER):
        if item.label in before and item.label not in written:
            yield item


def _arguments(keys: Iterable[str]) -> Iterator[Completion]:
    for key in keys:
        yield Completion(key, "option", "", documentation.ARGUMENTS[key])


def _in_declaration(cursor: _CompletionContext, before: str) -> Iterator[Completion]:
    """The names for a declaration; `before` is the type of its last keyword."""
    tokens = cursor.tokens
    first, last = tokens[0].type, tokens[-1].type
    if first == "FN" and any(token.type == "EQUAL" for token in tokens):
        yield from _in_builtin(tokens)
    elif before == "ON" and first == "FN":
        yield from _constants(PLACES if last == "ON" else FLAGS, "constant")
    elif before == "ON":
        yield from _declared_names(cursor, ("server",))
    elif before in ("PER", "PARTIAL", "SPLIT"):
        yield from _axes(cursor, ("axis",) if before != "PER" else _EITHER)
    elif last in ("COLON", "LPAR", "ARROW", "COMMA"):
        yield from _constants(TYPES, "type")


def _in_builtin(tokens: Sequence[Token]) -> Iterator[Completion]:
    """After the `=` of a function: a built-in one, its parameters, or the type of a cast."""
    brackets = _open(tokens)
    if not brackets:
        yield from _builtins(BUILTIN_KEYS)
    elif tokens[-1].type != "EQUAL":
        name = tokens[tokens.index(brackets[-1]) - 1].text
        written = {token.text for token in tokens}
        yield from _arguments(key for key in BUILTIN_KEYS.get(name, ()) if key not in written)
    elif tokens[-2].text == "dtype":
        yield from _constants((str(dtype) for dtype in DType if not dtype.is_only_moved), "type")


def _builtins(names: Iterable[str]) -> Iterator[Completion]:
    for name in names:
        yield Completion(name, "function", "built in", documentation.FUNCTIONS[name])


def _constants(words: Iterable[str], kind: ItemKind) -> Iterator[Completion]:
    for word in words:
        yield Completion(word, kind, "", documentation.VALUES.get(word, ""))


def _axes(cursor: _CompletionContext, kinds: Sequence[str]) -> list[Completion]:
    return list(_declared_names(cursor, kinds))


def _declared_names(cursor: _CompletionContext, kinds: Sequence[str]) -> Iterator[Completion]:
    """The declared names of certain kinds (`Symbol.kind`), in the order of declarations."""
    for symbol in cursor.document.symbols.declared.values():
        if symbol.kind in kinds:
            yield _symbol(cursor, symbol)


def _symbol(cursor: _CompletionContext, symbol: Symbol) -> Completion:
    """A declared or bound name, with its type and placement."""
    kinds: dict[str, ItemKind] = {"fn": "function", "input": "value", "state": "value", "value": "value"}
    value = cursor.document.symbols.values.get(symbol.definition)
    detail = f"{value.type}, {value.placement}" if value else documentation.KINDS[symbol.kind]
    return Completion(symbol.name, kinds.get(symbol.kind, "axis"), detail)
