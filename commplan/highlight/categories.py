"""The category of each token of a plan: keyword, type, algorithm, name and so on.

The Pygments lexer, the hovers of the language server and the generated grammars of editors use it.
Words that are not reserved have a meaning only in certain positions: `ring` after `via` is an algorithm, and
elsewhere a name.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from itertools import zip_longest

from commplan.dsl.check.builtins import KEYS as BUILTIN_KEYS
from commplan.dsl.check.clauses.ops import OPS
from commplan.dsl.check.clauses.options import FLOATS, OPTIONS
from commplan.dsl.check.clauses.via import ALGORITHMS, KEYS
from commplan.dsl.check.stages.loads import TAILS, VISITS
from commplan.dsl.check.stages.servers import MODES
from commplan.dsl.check.types import FLAGS, PLACES, TYPES
from commplan.dsl.lexer import CLAUSES, DECLARES, HEADS, VERBS, Token, tokenize
from commplan.dsl.statements import CONTINUES


class Category(enum.StrEnum):
    """Kinds of tokens with a common color."""

    COMMENT = "comment"
    DECLARATION = "declaration"  # `axis`, `input`, `fn`
    PHASE = "phase"  # `at start`, `each step`
    VERB = "verb"  # of a stage: `load`, `reduce`
    CLAUSE = "clause"  # `over`, `by`, `via`, `output`
    TYPE = "type"  # `tree`, `f32`
    CONSTANT = "constant"  # a fixed word: `host`, `exactly_once`, `backward`
    FUNCTION = "function"  # in its declaration and in calls
    ALGORITHM = "algorithm"  # after `via`: `ring`
    OPERATOR = "operator"  # after `by`: `mean`, `sync`
    OPTION = "option"  # a key in braces or parentheses
    NUMBER = "number"  # with its unit
    UNIT = "unit"  # the unit of a number, if a highlighter splits it
    TEXT = "text"  # in quotes
    MARK = "mark"  # `=`, `->`, `?`
    PUNCTUATION = "punctuation"  # brackets and commas
    NAME = "name"  # an axis, a value, and words without a meaning in their position
    BAD = "bad"  # no token of the language


# Keys in the parentheses after `by` and `via`.
ARGUMENTS = tuple(dict.fromkeys(("weight", "eta", "rho", *(key for keys in KEYS.values() for key in keys))))
# Keys in the parentheses of built-in functions.
PARAMETERS = tuple(dict.fromkeys(key for keys in BUILTIN_KEYS.values() for key in keys))
# Words that are values of options in braces.
OPTION_WORDS = tuple(dict.fromkeys(word for rule in OPTIONS.values() for word in rule.words))
# Token types with the same category in all positions.
_PLAIN = {
    "BAD": Category.BAD,
    "TEXT": Category.TEXT,
    **dict.fromkeys(DECLARES, Category.DECLARATION),
    **dict.fromkeys(HEADS, Category.PHASE),
    **dict.fromkeys(VERBS, Category.VERB),
    **dict.fromkeys((*CLAUSES, "OUTPUT"), Category.CLAUSE),
    **dict.fromkeys(("INT", "FLOAT", "QUANTITY"), Category.NUMBER),
    **dict.fromkeys(("EQUAL", "ARROW", "QUESTION"), Category.MARK),
}
_OPEN = {"LPAR": "RPAR", "LSQB": "RSQB", "LBRACE": "RBRACE"}  # closing brackets by opening brackets
# Words that are keywords in the header of a phase only.
_HEAD_WORDS = frozenset({"START", "STEP", "STEPS", "IN", "FRAGMENTS", "HIDDEN", "UNDER"})
# For the type of a token, the meaningful words directly after it (None for all) and their category.
_BEHIND: dict[str, tuple[frozenset[str] | None, Category]] = {
    "FN": (None, Category.FUNCTION),
    "MAP": (None, Category.FUNCTION),
    "COLON": (frozenset(TYPES), Category.TYPE),
    "VIA": (frozenset(ALGORITHMS), Category.ALGORITHM),
    "BY": (frozenset((*OPS, *MODES)), Category.OPERATOR),
    "VISIT": (frozenset(VISITS), Category.CONSTANT),
    "TAIL": (frozenset(TAILS), Category.CONSTANT),
}


def categorize(text: str) -> Iterator[tuple[Token, Category]]:
    """Yield every token and comment of `text` with its category. Never fails.

    A number with a unit is a NUMBER.
    """
    statement = _Statement()
    tokens = list(tokenize(text))
    for token, after in zip_longest(tokens, tokens[1:]):
        if token.type == "COMMENT":
            yield token, Category.COMMENT
            continue
        if token.leads and token.type not in CONTINUES and not statement.open:
            statement = _Statement()
        yield token, statement.category(token, after.type if after else "")


class _Statement:
    """The state within a statement that determines the category of its next token.

    Attributes:
        first: type of the word that begins the statement; empty before it.
        before: type of the previous token; empty at the beginning.
        verb: type of the verb; empty before it.
        clause: type of the last keyword of a clause, to which following brackets belong.
        placed: whether `on host` or `on device` precedes, so that flags may follow.
        open: types of the brackets that are open, outermost first.
    """

    def __init__(self) -> None:
        self.first = ""
        self.before = ""
        self.verb = ""
        self.clause = ""
        self.placed = False
        self.open: list[str] = []

    def category(self, token: Token, after: str) -> Category:
        """Return the category of the next token and advance. `after` is the type of the token after it."""
        kind = token.type
        if kind in DECLARES | HEADS or not self.first:
            self.first = kind
        category = self._word(token, after) if kind not in _PLAIN and token.is_word else _PLAIN.get(kind)
        if kind in _OPEN and not (kind == "LBRACE" and self.first in HEADS):
            self.open.append(kind)
        elif kind in _OPEN.values() and self.open:
            self.open.pop()
        elif kind in VERBS:
            self.verb = kind
        elif kind in CLAUSES or (kind == "EQUAL" and self.first == "FN"):
            self.clause = kind
        self.placed = self.placed or self.before == "ON"
        self.before = kind
        return category or Category.PUNCTUATION

    def _word(self, token: Token, after: str) -> Category:
        """The category of a word that is not reserved, or only in some positions."""
        if token.type in _HEAD_WORDS and self.first in HEADS and not self.open:
            return Category.PHASE
        if token.type == "BATCH" and self.verb == "LOAD" and after in ("INT", "LSQB"):
            return Category.CLAUSE
        if token.type == "SAME" and self.first in ("INPUT", "STATE") and self.before in ("NAME", "RSQB"):
            return Category.CLAUSE
        words, category = self._meaningful_words(after)
        return category if words is None or token.text in words else Category.NAME

    def _meaningful_words(self, after: str) -> tuple[frozenset[str] | None, Category]:
        """The words with a meaning in this position (None for all), and their category."""
        if self.before in _BEHIND:
            return _BEHIND[self.before]
        if self.before == "WITH" and self.verb == "EXCHANGE":
            return None, Category.FUNCTION
        if self.first == "FN" and self.clause == "EQUAL":
            if self.before == "EQUAL":
                return _BEHIND["COLON"] if self.open else (frozenset(BUILTIN_KEYS), Category.FUNCTION)
            return frozenset(PARAMETERS), Category.OPTION
        if self.first == "FN":
            if self.before == "ON":
                return frozenset(PLACES), Category.CONSTANT
            return (frozenset(FLAGS), Category.CONSTANT) if self.placed else _BEHIND["COLON"]
        if not self.open or self.open[-1] == "LSQB":
            return frozenset(), Category.NAME
        if self.open[-1] == "LBRACE":
            keys, words = frozenset(OPTIONS), frozenset((*OPTION_WORDS, *FLOATS))
            return (words, Category.CONSTANT) if self.before == "EQUAL" else (keys, Category.OPTION)
        if after == "EQUAL":
            return frozenset(ARGUMENTS), Category.OPTION
        if self.before == "EQUAL" and self.clause == "VIA":
            return _BEHIND["VIA"]
        return frozenset(), Category.NAME
