"""What may stand at a place of a plan, each with what it means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from commplan.dsl.check.clauses.ops import OPS
from commplan.dsl.check.clauses.options import FLOATS, OPTIONS, options_of
from commplan.dsl.check.clauses.via import KEYS, carrying, carrying_a_level
from commplan.dsl.check.stages.loads import TAILS, VISITS
from commplan.dsl.check.stages.servers import MODES
from commplan.dsl.check.types import FLAGS, PLACES, TYPES
from commplan.dsl.grammar import Start, followers
from commplan.dsl.lexer import CLAUSES, DECLARES, SOFT, VERBS, Token
from commplan.dsl.statements import CONTINUES, GiveUp, PhaseClose, PhaseOpen, Statement, split
from commplan.lsp import documentation
from commplan.lsp.document import Document
from commplan.lsp.symbols import Symbol

ItemKind = Literal["keyword", "verb", "value", "axis", "function", "algorithm", "option", "type", "constant"]
_HEADERS = ("at start {", "each step {", "every N steps {", "phase NAME {")
_BRACKETS = {"LPAR": "RPAR", "LSQB": "RSQB", "LBRACE": "RBRACE"}


class Item(NamedTuple):
    """A word that may stand at the place: what it is, a line about it, and more in Markdown."""

    label: str
    kind: ItemKind
    detail: str = ""
    documentation: str = ""


class _Cursor(NamedTuple):
    """The statement up to the place, without the word that is being written there."""

    document: Document
    line: int
    column: int
    tokens: tuple[Token, ...]
    inside: bool  # a phase
    fresh: bool  # a new statement may begin


def complete(document: Document, line: int, column: int) -> list[Item]:
    """The words that may stand at a place, in the order in which they should be shown."""
    cursor = _cursor(document, line, column)
    if cursor is None:
        return []
    items: dict[str, Item] = {}
    for item in _items(cursor):
        items.setdefault(item.label, item)
    return list(items.values())


def _cursor(document: Document, line: int, column: int) -> _Cursor | None:
    """The statement at a place; None inside a comment."""
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
    return _Cursor(document, line, column, tokens, inside, fresh)


def _open(tokens: Sequence[Token]) -> list[Token]:
    """The brackets that are open behind `tokens`."""
    brackets: list[Token] = []
    for token in tokens:
        if token.type in _BRACKETS:
            brackets.append(token)
        elif token.type in _BRACKETS.values() and brackets:
            brackets.pop()
    return brackets


def _items(cursor: _Cursor) -> Iterator[Item]:
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


def _start(cursor: _Cursor) -> Start:
    first = cursor.tokens[0].type
    if cursor.inside:
        return "statement"
    return "header" if first == "PLAN" else "declaration" if first in DECLARES else "phase"


def _beginnings(cursor: _Cursor) -> Iterator[Item]:
    """What a statement may begin with."""
    if cursor.inside:
        yield _word("output")
        for symbol in cursor.document.symbols.visible(cursor.line, cursor.column).values():
            yield _symbol(cursor, symbol)
        return
    words = ["plan"] if not cursor.document.analysis.tree.name else []
    for word in (*words, *sorted(each.lower() for each in DECLARES if each != "PLAN")):
        yield _word(word)
    for header in _HEADERS:
        yield Item(header, "keyword", "a phase", documentation.WORDS[header.split()[0]])


def _keywords(following: Iterable[str], cursor: _Cursor) -> Iterator[Item]:
    for kind in sorted(following):
        if kind in VERBS:
            verb = kind.lower()
            yield Item(verb, "verb", documentation.STAGES[verb], documentation.of_verb(verb))
        elif kind in CLAUSES or kind.lower() in SOFT:
            if kind == "ACROSS" and not _axes(cursor, ("ensemble",)):
                continue
            yield _word(kind.lower())


def _word(word: str) -> Item:
    return Item(word, "keyword", "", documentation.WORDS[word])


def _names(cursor: _Cursor) -> Iterator[Item]:
    """The names that fit where the grammar takes any."""
    tokens = cursor.tokens
    brackets = _open(tokens)
    before = _clause(tokens)
    verb = _verb(tokens)
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
            yield Item(name, "algorithm", "", documentation.ALGORITHMS[name])
    elif before == "BY":
        yield from _constants(MODES if verb == "elastic" else OPS, "constant")
    elif before == "LOAD":
        yield from _declared(cursor, ("source",))
    elif (before == "MAP" and not brackets) or (before == "WITH" and verb == "exchange"):
        yield from _declared(cursor, ("fn",))
    elif cursor.inside:
        states = before == "INTO" or (before == "WITH" and verb == "elastic")
        for symbol in cursor.document.symbols.visible(cursor.line, cursor.column).values():
            if not states or symbol.kind == "state":
                yield _symbol(cursor, symbol)


_EITHER = ("axis", "ensemble")
_KINDS_OVER: Mapping[tuple[str | None, str], tuple[str, ...]] = {
    ("load", "PER"): ("ensemble",),
    ("load", "OVER"): ("ensemble",),
    ("load", "SPLIT"): ("axis",),
    ("map", "PER"): ("ensemble",),
    ("share", "OVER"): ("ensemble",),
    ("reduce", "ACROSS"): ("ensemble",),
    **{(verb, "OVER"): ("axis",) for verb in documentation.STAGES if verb not in ("load", "share")},
}
_FIXED: Mapping[str, tuple[ItemKind, Sequence[str]]] = {
    "VISIT": ("constant", VISITS),
    "TAIL": ("constant", TAILS),
}


def _clause(tokens: Sequence[Token]) -> str:
    """The word that the place belongs to: the last keyword."""
    return next((token.type for token in reversed(tokens) if token.type in CLAUSES | VERBS | DECLARES), "")


def _verb(tokens: Sequence[Token]) -> str | None:
    return next((token.text for token in tokens if token.type in VERBS), None)


def _stage(tokens: Sequence[Token], verb: str | None) -> str:
    """A stage as the lists of algorithms and options call it: elastic averaging has its mode beside it."""
    if verb != "elastic":
        return verb or ""
    return next((f"elastic {token.text}" for token in tokens if token.text in MODES), "elastic sync")


def _in_braces(tokens: Sequence[Token], verb: str | None) -> Iterator[Item]:
    """Options of a stage that are not written yet, and the words that one takes."""
    if tokens[-1].type == "EQUAL":
        rule = OPTIONS.get(tokens[-2].text)
        words = (
            ()
            if rule is None
            else rule.words
            if rule.kind == "word"
            else FLOATS
            if rule.kind == "dtype"
            else ()
        )
        yield from _constants(words, "constant")
        return
    written = {token.text for token in tokens}
    stage = _stage(tokens, verb)
    keys = {*options_of(stage), *(options_of("host map") if stage == "map" else ())}
    for key in OPTIONS:
        if key in keys and key not in written:
            yield Item(key, "option", "", documentation.of_option(key))


def _in_call(cursor: _Cursor, tokens: Sequence[Token], clause: str, verb: str | None) -> Iterator[Item]:
    """Arguments of what stands behind `via` or `by`."""
    opened = _open(tokens)[-1]
    name = tokens[tokens.index(opened) - 1].text
    value = tokens[-1].type == "EQUAL"
    if clause == "VIA" and name == "hierarchical":
        if value:
            for level in carrying_a_level(_stage(tokens, verb)):
                yield Item(level, "algorithm", "", documentation.ALGORITHMS[level])
        else:
            yield from _levels(cursor)
    elif clause == "VIA" and not value:
        yield from _arguments(KEYS.get(name, ()))
    elif clause == "VIA":
        yield from _levels(cursor)
    elif not value:
        yield from _arguments(("weight",) if name == "mean" else ("eta", "rho"))
    else:
        for symbol in cursor.document.symbols.visible(cursor.line, cursor.column).values():
            yield _symbol(cursor, symbol)


def _levels(cursor: _Cursor) -> Iterator[Item]:
    """The axes of the stage that its algorithm does not name yet."""
    tokens = cursor.tokens
    via = next(number for number, token in enumerate(tokens) if token.type == "VIA")
    stage, written = {token.text for token in tokens[:via]}, {token.text for token in tokens[via:]}
    for item in _declared(cursor, _EITHER):
        if item.label in stage and item.label not in written:
            yield item


def _arguments(keys: Iterable[str]) -> Iterator[Item]:
    for key in keys:
        yield Item(key, "option", "", documentation.ARGUMENTS[key])


def _in_declaration(cursor: _Cursor, before: str) -> Iterator[Item]:
    tokens = cursor.tokens
    first, last = tokens[0].type, tokens[-1].type
    if before == "ON" and first == "FN":
        yield from _constants(PLACES if last == "ON" else FLAGS, "constant")
    elif before == "ON":
        yield from _declared(cursor, ("server",))
    elif before in ("PER", "PARTIAL", "SPLIT"):
        yield from _axes(cursor, ("axis",) if before != "PER" else _EITHER)
    elif last in ("COLON", "LPAR", "ARROW", "COMMA"):
        yield from _constants(TYPES, "type")


def _constants(words: Iterable[str], kind: ItemKind) -> Iterator[Item]:
    for word in words:
        yield Item(word, kind, "", documentation.VALUES.get(word, ""))


def _axes(cursor: _Cursor, kinds: Sequence[str]) -> list[Item]:
    return list(_declared(cursor, kinds))


def _declared(cursor: _Cursor, kinds: Sequence[str]) -> Iterator[Item]:
    for symbol in cursor.document.symbols.declared.values():
        if symbol.kind in kinds:
            yield _symbol(cursor, symbol)


def _symbol(cursor: _Cursor, symbol: Symbol) -> Item:
    """A name that is declared or bound, with how it is written and where a value lies."""
    kinds: dict[str, ItemKind] = {"fn": "function", "input": "value", "state": "value", "value": "value"}
    value = cursor.document.symbols.values.get(symbol.definition)
    detail = f"{value.type}, {value.placement}" if value else documentation.KINDS[symbol.kind]
    return Item(symbol.name, kinds.get(symbol.kind, "axis"), detail)
