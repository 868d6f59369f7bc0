"""The prose of docstrings and pages, and the names of values, are plain technical English.

Each pattern below is a construction that reads like a riddle, with its replacement. At most a small share of
the docstrings of a room may use it. Other constructions are left to reviewers.
"""

from __future__ import annotations

import ast
import collections
import functools
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("commplan", "dsl", "lowering", "runtime")
_AUXILIARY = "is|are|was|were|has|have|had|can|cannot|may|must|will|would|does|do|did"
_VERBS = (
    f"{_AUXILIARY}|comes?|came|goes|waits?|reads?|makes?|holds?|held|leaves?|left|needs?|takes?|else|they|it"
)
PATTERNS = {
    # "what is sent" -> "the message", "the operand": use the noun
    "what-clause": rf"\b[Ww]hat (?:{_VERBS}|a|an|the|one|each|all|no|lies|moves|runs?|stands|differs|"
    r"another|other|there|this|that|these|"
    r"[a-z`_]+s? (?:is|are|was|has|have|gives?|says?|takes?|needs?|makes?|holds?))\b",
    # "where there is one" -> "if there is one": "where" is for places
    "where-for-if": r"\b[Ww]here (?:it|there|they|that|this|these|those|a|an|the|no|one|none|nothing|nobody|"
    r"not|both|all|each|some|only)\b",
    # "who waits" -> "the waiting rank": a process is not a person
    "who": rf"\b(?:[Ww]ho(?:ever)?|[Ww]hom|[Nn]obody|[Ee]verybody|[Ss]omebody) (?:{_VERBS}|dies|died|lives?|"
    r"knows?|asks?|asked)\b",
    # "lies in a buffer" -> "is in a buffer"
    "lies-stands": r"\b(?:lies?|lay|stands?|stood)\b(?! for)",
    # "beside the weights" -> "in addition to", "next to"
    "beside": r"\b[Bb]eside\b",
    # "is told", "is given" -> "receives", "takes": programs neither speak nor listen
    "told": r"\b(?:is|are|was|were|be|been) (?:told|asked|said|given|spoken|let|had|meant|seen|awaited)\b|"
    r"\btold\b",
}
WORDS = {  # each match of a pattern contains one of these: a fast test
    "what-clause": ("hat ",),
    "where-for-if": ("here ",),
    "who": ("ho ", "whom ", "Whom ", "hoever ", "body "),
    "lies-stands": ("lie", "lay", "stand", "stood"),
    "beside": ("eside",),
    "told": ("told", " asked", " said", " given", " spoken", " let", " had", " meant", " seen", " awaited"),
}
SHARE = {"product": 2.0, "other": 3.0}  # percent of the texts of a room
AMBIGUOUS = {
    "about", "asked", "beside", "beyond", "come", "company", "course", "crew", "desk", "found", "given",
    "gone", "hand", "held", "here", "joined", "kept", "known", "left", "made", "one", "others", "own",
    "parcel", "parted", "patience", "rest", "rooms", "roster", "said", "seen", "stairs", "taken", "there",
    "together", "told", "wanted", "what",
}  # fmt: skip
# A file without a match assigns to none of these names: a fast test.
_ASSIGNED = re.compile(rf"\b_*(?:{'|'.join(sorted(AMBIGUOUS))})_*\b *(?:[:=,)\]]|in\b|\+=)")
# Variables, parameters and attributes with such a name, at most.
MOST_AMBIGUOUS = {"product": 16, "tests": 107}
MOST_HOMONYMS = 20  # public classes that share their name with another one


class Text(NamedTuple):
    """A docstring or a paragraph."""

    path: Path
    line: int
    text: str


def _files(room: str, suffix: str) -> list[Path]:
    """The files of a room, without those reached through the links of `commplan`."""
    links = {place.name for place in (ROOT / room).iterdir() if place.is_symlink()}
    paths = sorted((ROOT / room).rglob(f"*{suffix}"))
    return [path for path in paths if path.relative_to(ROOT / room).parts[0] not in links]


class Room(NamedTuple):
    """The contents of a room, collected in one pass over its files.

    Attributes:
        docstrings: the docstrings.
        names: ambiguous names, once for each assignment.
        classes: public classes, with their files.
        undefined: functions with documented parameters that do not exist, one line each.
    """

    docstrings: list[Text]
    names: list[str]
    classes: list[tuple[str, Path]]
    undefined: list[str]


_DOCSTRING = re.compile(r'(?:\A|:(?: *#[^\n]*)?\n) *r?"""(.*?)"""', re.S)


@functools.cache
def _room(room: str) -> Room:
    result = Room([], [], [], [])
    for path in _files(room, ".py"):
        source = path.read_text("utf-8")
        for match in _DOCSTRING.finditer(source):
            result.docstrings.append(Text(path, source.count("\n", 0, match.start(1)) + 1, match[1]))
        result.classes.extend((name, path) for name in re.findall(r"^ *class ([A-Za-z]\w*)", source, re.M))
        counts_names = room in (*PRODUCT, "tests") and _ASSIGNED.search(source)
        if not counts_names and "Args:\n" not in source:
            continue  # parsing is slow
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (names := undefined(node)):
                result.undefined.append(f"{path.relative_to(ROOT)}:{node.lineno}: {', '.join(sorted(names))}")
            elif counts_names and (name := _stored(node)).strip("_") in AMBIGUOUS:
                result.names.append(name)
    return result


def _stored(node: ast.AST) -> str:
    """The name of a parameter, or of an assigned variable or attribute; empty for other nodes."""
    match node:
        case (
            ast.arg(arg=name) | ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store())
        ):
            return name
        case _:
            return ""


def _paragraphs(room: str) -> Iterator[Text]:
    """The paragraphs of Markdown files, without code and tables."""
    for path in _files(room, ".md"):
        prose = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.S)
        for paragraph in re.split(r"\n\s*\n", prose):
            if paragraph.strip() and not paragraph.lstrip().startswith("|"):
                yield Text(path, 1, paragraph)


def matches(texts: list[Text], pattern: str) -> list[str]:
    """The texts that use a construction, one line each."""
    expression, words = re.compile(PATTERNS[pattern]), WORDS[pattern]
    return [
        f"{text.path.relative_to(ROOT)}:{text.line}: {' '.join(text.text.split())[:90]}"
        for text in texts
        if any(word in text.text for word in words) and expression.search(text.text)
    ]


def undefined(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The names in the section `Args` of a docstring that are not parameters of the function."""
    names = set[str]()
    lines = iter((ast.get_docstring(function) or "").split("\n"))
    for _ in itertools.takewhile(lambda line: line != "Args:", lines):
        pass
    for line in itertools.takewhile(lambda line: not line or line.startswith(" "), lines):
        if named := re.match(r" {4}(\*{0,2}\w+(?:, \*{0,2}\w+)*): ", line):
            names |= {name.strip("* ") for name in named[1].split(",")}
    a = function.args
    arguments = [*a.posonlyargs, *a.args, *a.kwonlyargs, *filter(None, (a.vararg, a.kwarg))]
    return names - {argument.arg for argument in arguments}


def test_the_patterns_match_what_they_are_for():
    riddles = {
        "what-clause": "What is passed counts.",
        "where-for-if": "None where there is none.",
        "who": "Whoever waits is named.",
        "lies-stands": "It lies in a buffer.",
        "beside": "A state beside the weights.",
        "told": "The rank is told.",
    }
    assert riddles.keys() == PATTERNS.keys()
    for name, text in riddles.items():
        assert matches([Text(ROOT, 1, text)], name), name
    plain = "Return the buffer where `x` is stored, if any; raises an error that names the waiting rank."
    assert not any(re.search(pattern, plain) for pattern in PATTERNS.values())


def test_a_missing_parameter_is_found():
    tree = ast.parse('def f(a, *b):\n    """F.\n\n    Args:\n        a: x.\n        c: y.\n    """')
    function = tree.body[0]
    assert isinstance(function, ast.FunctionDef) and undefined(function) == {"c"}


ROOMS = [*((room, "docstrings") for room in (*PRODUCT, "bench", "examples", "tests", "docs")),
         *((room, "markdown") for room in ("commplan", "docs"))]  # fmt: skip


@pytest.mark.parametrize(("room", "kind"), ROOMS, ids=map("-".join, ROOMS))
def test_a_room_keeps_to_its_budget(room: str, kind: str):
    texts = _room(room).docstrings if kind == "docstrings" else list(_paragraphs(room))
    assert texts
    share = SHARE["product" if room in PRODUCT and kind == "docstrings" else "other"]
    for name in PATTERNS:
        allowed = int(share / 100 * len(texts))
        wrong = matches(texts, name)
        assert len(wrong) <= allowed, f"{name}: {len(wrong)} of at most {allowed}\n" + "\n".join(wrong)


@pytest.mark.parametrize("room", [*PRODUCT, "bench", "examples", "tests", "docs"])
def test_every_documented_parameter_exists(room: str):
    assert not _room(room).undefined, "\n".join(_room(room).undefined)


@pytest.mark.parametrize("part", MOST_AMBIGUOUS)
def test_names_say_what_the_value_is(part: str):
    rooms = PRODUCT if part == "product" else (part,)
    names = collections.Counter(name for room in rooms for name in _room(room).names)
    assert sum(names.values()) <= MOST_AMBIGUOUS[part], names.most_common()


def test_a_class_name_means_one_class():
    places: dict[str, set[Path]] = collections.defaultdict(set)
    for name, path in (item for room in PRODUCT for item in _room(room).classes):
        places[name].add(path)
    homonyms = {name: sorted(paths) for name, paths in places.items() if len(paths) > 1}
    assert len(homonyms) <= MOST_HOMONYMS, homonyms
