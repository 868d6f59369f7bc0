"""Tables of the reference, generated from the definitions of the checker, the compiler and the command.

A page requests a table by a comment on a separate line, such as `<!-- table: verbs -->`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from commplan.cli.arguments import parser
from commplan.collectives import registry
from commplan.dsl.check.builtins import KEYS as BUILTIN_KEYS
from commplan.dsl.check.clauses.ops import OPS
from commplan.dsl.check.clauses.options import OPTIONS, OptionRule
from commplan.dsl.check.clauses.via import ALGORITHMS, KEYS
from commplan.dsl.check.stages.loads import TAILS, VISITS
from commplan.dsl.check.stages.servers import MODES
from commplan.dsl.check.types import FLAGS, PLACES, TYPES
from commplan.dsl.lexer import KEYWORDS, SOFT, UNITS
from commplan.ir.stages import OVER_AXES, VERBS
from commplan.ir.stages.builtins import DEFINITIONS
from commplan.lsp.documentation import FUNCTIONS

USAGE_WIDTH = 90
CODE_OR_BAR = re.compile(r"`[^`]*`|\|")
WANTED = re.compile(r"^<!-- table: (\w+) -->$", re.M)


def made(markdown: str) -> str:
    """`markdown` with its tables. Raises SystemExit for one that there is not."""
    return WANTED.sub(lambda match: _table_called(match[1]), markdown)


def _table_called(name: str) -> str:
    if name not in TABLES:
        raise SystemExit(f"there is no table {name}: {', '.join(TABLES)}")
    return TABLES[name]()


def _rows(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    lines += [f"| {' | '.join(map(cell, row))} |" for row in rows]
    return "\n".join(lines)


def cell(text: str) -> str:
    """Escape bars in `text` outside code. In code a bar does not end the cell, and a backslash would be
    shown."""
    return CODE_OR_BAR.sub(lambda part: "\\|" if part[0] == "|" else part[0], text)


def _code(words: Iterable[str]) -> str:
    return " ".join(f"`{word}`" for word in words)


def _verbs() -> str:
    rows = list[tuple[str, ...]]()
    for verb, stage in VERBS.items():
        over = OVER_AXES.get(verb)
        takes = " or ".join(f"`{place}`" for place in over.TAKES) if over else ""
        makes = ("unchanged" if over.MAKES == "kept" else f"`{over.MAKES}`") if over else ""
        collective = str(over.COLLECTIVE).replace("_", "-") if over and over.COLLECTIVE else ""
        rows.append((f"`{verb}`", f"`{_form(verb, stage)}`", takes, makes, collective))
    return _rows(("verb", "written", "takes", "makes", "collective"), rows)


def _form(verb: str, stage: type) -> str:
    form = getattr(stage, "FORM", "")
    return form or FORMS[verb]


# Of the verbs that are not a stage over axes.
FORMS = {
    "load": "x [, n] = load SOURCE batch N [split AXES] [per MEMBER] visit KIND seed N [tail KIND]",
    "map": "y, .. = map FN(x, ..) [per MEMBER]",
    "exchange": "w [, m] = exchange g into w [, m] with FN over AXES by OP",
    "elastic": "d, c = elastic w with c over AXES by MODE(eta = .., rho = ..)",
}


def _options() -> str:
    rows = [(f"`{name}`", _values(rule), ", ".join(rule.stages)) for name, rule in OPTIONS.items()]
    return _rows(("option", "value", "of"), rows)


def _values(rule: OptionRule) -> str:
    match rule.kind:
        case "bytes":
            return "a size such as `25 MiB`"
        case "count":
            return f"a whole number, {rule.least} or more"
        case "word":
            return " or ".join(f"`{word}`" for word in rule.words)
        case "dtype":
            return "a float type"
        case "wire":
            return "a float type, " + ", ".join(f"`{word}(block = N)`" for word in rule.words)
        case "cache":
            return 'a size such as `8 GiB`, or `disk("PATH", 200 GiB)`'


def _builtins() -> str:
    rows = list[tuple[str, ...]]()
    for name, definition in DEFINITIONS.items():
        keys = ", ".join(f"{key} = .." for key in BUILTIN_KEYS[name])
        call, operands = f"`{name}({keys})`" if keys else f"`{name}`", ", ".join(definition.operands)
        rows.append(
            (
                call,
                f"`({operands})`",
                FUNCTIONS[name].partition(": ")[2] or FUNCTIONS[name],
                definition.numbers,
            )
        )
    return _rows(("function", "operands", "results", "elements"), rows)


def _algorithms() -> str:
    rows = list[tuple[str, ...]]()
    for name, stages in ALGORITHMS.items():
        keys = _code(f"{key} = .." for key in KEYS.get(name, ()))
        rows.append((f"`{name}`", ", ".join(f"`{stage}`" for stage in stages), keys))
    return _rows(("`via`", "carries out", "arguments"), rows)


def _costs() -> str:
    rows = list[tuple[str, ...]]()
    for kind in ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "swap"):
        for name in registry.algorithms(kind):
            cells = [registry.formula(name, kind, n) for n in (6, 8, 64)]
            shown = [f"{rounds}, {share}" for rounds, share in cells]
            rows.append((kind.replace("_", "-"), f"`{name}`", *shown))
    return _rows(("collective", "algorithm", "6 ranks", "8 ranks", "64 ranks"), rows)


def _words() -> str:
    rows = (
        ("keywords", _code(sorted(KEYWORDS))),
        ("words that are keywords in their place only", _code(sorted(SOFT))),
        ("types", _code(TYPES)),
        ("`by`", _code(OPS)),
        ("`by`, of `elastic`", _code(MODES)),
        ("`visit`", _code(VISITS)),
        ("`tail`", _code(TAILS)),
        ("of a `fn`: where it runs", _code(PLACES)),
        ("of a `fn`: what may be relied on", _code(FLAGS)),
        ("units", _code(UNITS)),
    )
    return _rows(("", ""), rows)


def _command() -> str:
    """Every verb of the command with its flags, a heading each."""
    verbs: Any = next(action for action in parser()._actions if action.dest == "verb")
    parts = list[str]()
    for name, verb in verbs.choices.items():
        parts += [
            f"## {name}",
            "",
            (verb.description or "").replace("<", "&lt;"),
            "",
            "```text",
            _usage(verb),
            "```",
            "",
        ]
        flags = [action for action in verb._actions if action.dest != "help"]
        rows = [(f"`{_shown(flag)}`", _help(flag)) for flag in flags]
        parts += [_rows(("", ""), rows), ""]
    return "\n".join(parts)


def _usage(verb: argparse.ArgumentParser) -> str:
    formatter = verb.formatter_class(verb.prog, width=USAGE_WIDTH)
    formatter.add_usage(verb.usage, verb._actions, verb._mutually_exclusive_groups, "")
    return formatter.format_help().strip()


def _shown(flag: argparse.Action) -> str:
    names = ", ".join(flag.option_strings) or str(flag.metavar or flag.dest)
    value = (
        ""
        if flag.nargs == 0 or not flag.option_strings
        else str(flag.metavar or "|".join(map(str, flag.choices or ())))
    )
    return f"{names} {value}".strip()


def _help(flag: argparse.Action) -> str:
    return (flag.help or "").replace("%%", "%").replace("<", "&lt;").replace("\n", " ")


TABLES: dict[str, Callable[[], str]] = {
    "verbs": _verbs, "options": _options, "builtins": _builtins, "algorithms": _algorithms, "costs": _costs,
    "words": _words, "command": _command,
}  # fmt: skip
