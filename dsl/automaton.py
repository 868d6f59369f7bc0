"""The LALR automaton of `plan.lark`: reads tokens one at a time and builds values as it reduces rules.

Its tables are in `plan.tables.json`, which `make grammars` computes with Lark. Lark is not needed to read a
plan. `grammar` has the builders of the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

END = "$END"  # the symbol at the end of the text
# By rule: makes the value of the rule from the values of its children.
Builders = Mapping[str, Callable[[list[Any]], Any]]


class Tables(msgspec.Struct, frozen=True):
    """The tables of the automaton.

    Attributes:
        starts: For each start symbol, the first state.
        ends: For each start symbol, the state after it. The end of the text is valid there.
        rules: For each rule, the symbol that it makes, and the number of symbols that it replaces.
        states: For each state, the actions by symbol. An action of at least 0 is the next state, after the
            symbol is read. A negative action is `~rule`, for the rule to reduce.
    """

    starts: dict[str, int]
    ends: dict[str, int]
    rules: list[tuple[str, int]]
    states: list[dict[str, int]]


@cache
def _tables() -> Tables:
    return msgspec.json.decode(Path(__file__).with_name("plan.tables.json").read_bytes(), type=Tables)


class _Spliced(list[Any]):
    """The children of a rule without a builder, which take its place among those of the rule around it."""


class Automaton:
    """A parser of one start symbol.

    Args:
        start: The start symbol, a key of `Tables.starts`.
        builders: The builders of rules. The children of a rule without a builder take its place in the rule
            around it.
    """

    def __init__(self, start: str, builders: Builders) -> None:
        self._builders, self._tables = builders, _tables()
        self._end = self._tables.ends[start]
        self._states, self._values = [self._tables.starts[start]], list[Any]()

    @property
    def choices(self) -> Mapping[str, int]:
        """The actions of the current state by symbol. A symbol in it may still not fit, see `accepts`."""
        return self._tables.states[self._states[-1]]

    def accepts(self) -> frozenset[str]:
        """The types of tokens that may come next, with `END` if the text may end."""
        terminals = filter(str.isupper, self.choices)
        return frozenset(kind for kind in terminals if self._reduce(list(self._states), kind, None))

    def feed(self, kind: str, token: object) -> bool:
        """Read a token, and return whether it fits.

        Args:
            kind: The type of the token.
            token: Its value, which builders receive.
        """
        if not self._reduce(self._states, kind, self._values):
            return False
        self._states.append(self.choices[kind])
        self._values.append(token)
        return True

    def finish(self) -> Any | None:
        """The value of the start symbol, after the last token; None if the text may not end here.

        It is the first child if the start symbol has no builder.
        """
        if not self._reduce(self._states, END, self._values):
            return None
        value = self._values[-1]
        return value[0] if isinstance(value, _Spliced) else value

    def _reduce(self, states: list[int], kind: str, values: list[Any] | None) -> bool:
        """Apply the rules that end before a token of type `kind`, and return whether the token fits then.

        Changes `states` and `values` in place. Builds no values if `values` is None.
        """
        while kind != END or states[-1] != self._end:
            action = self._tables.states[states[-1]].get(kind)
            if action is None or action >= 0:
                return action is not None
            symbol, size = self._tables.rules[~action]
            del states[len(states) - size :]
            states.append(self._tables.states[states[-1]][symbol])
            if values is not None:
                children = _splice(values[len(values) - size :])
                del values[len(values) - size :]
                builder = self._builders.get(symbol)
                values.append(children if builder is None else builder(children))
        return True


def _splice(values: Sequence[Any]) -> _Spliced:
    """The children of a rule. Those of a left-recursive rule, as of a long list, are extended in place."""
    children = values[0] if values and isinstance(values[0], _Spliced) else _Spliced(values[:1])
    for value in values[1:]:
        if isinstance(value, _Spliced):
            children += value
        else:
            children.append(value)
    return children
