"""The LALR tables of the language, computed by Lark from `dsl/plan.lark`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import lark

from commplan.ir.stages import OVER_AXES, VERBS

GRAMMAR = Path(__file__).parents[2] / "dsl" / "plan.lark"
STARTS = ("header", "declaration", "phase", "statement")


def tables() -> str:
    """The tables as JSON, see `commplan.dsl.automaton.Tables`. States are numbered in the order of a walk."""
    table = _parse_table()
    rows: dict[Any, dict[str, Any]] = {
        state: dict(sorted(row.items())) for state, row in table.states.items()
    }
    places: dict[Any, int] = {}
    waiting = [table.start_states[start] for start in STARTS]
    for state in waiting:
        if state not in places:
            places[state] = len(places)
            waiting += [target for action, target in rows[state].values() if action.name == "Shift"]
    ends = [rule for row in rows.values() for action, rule in row.values() if action.name == "Reduce"]
    rules = sorted(set(map(_reduction, ends)))
    states = [
        {
            symbol: places[target] if action.name == "Shift" else ~rules.index(_reduction(target))
            for symbol, (action, target) in rows[state].items()
        }
        for state in places
    ]
    fields = {
        "starts": {start: places[table.start_states[start]] for start in STARTS},
        "ends": {start: places[table.end_states[start]] for start in STARTS},
        "rules": rules,
        "states": states,
    }
    return "{\n" + ",\n".join(f'"{name}": {_laid_out(value)}' for name, value in fields.items()) + "\n}\n"


def _parse_table() -> Any:
    grammar = GRAMMAR.read_text(encoding="utf-8")
    grammar += f"\n%declare {' '.join(VERBS).upper()}\n_verb: {' | '.join(OVER_AXES).upper()}\n"
    options: dict[str, Any] = {"maybe_placeholders": False, "keep_all_tokens": True}
    parser: Any = lark.Lark(grammar, parser="lalr", lexer=_NoLexer, start=list(STARTS), **options)
    return parser.parser.parser._parse_table


def _reduction(rule: Any) -> tuple[str, int]:
    """The symbol that a rule makes, and the number of symbols that it replaces."""
    return rule.origin.name, len(rule.expansion)


def _laid_out(value: Any) -> str:
    """JSON, with one line for each item of a list."""
    if not isinstance(value, list):
        return json.dumps(value)
    return "[\n" + ",\n".join(map(json.dumps, cast("list[Any]", value))) + "\n]"


class _NoLexer(lark.lexer.Lexer):
    """A lexer without input: only the tables are of interest."""

    def __init__(self, lexer_conf: object) -> None: ...

    def lex(self, lexer_state: object, parser_state: object) -> Any:
        raise NotImplementedError
