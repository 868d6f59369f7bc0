"""What each line became, and what passes chose and rejected, as `commplan explain` says it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from commplan.cost.schedule.timeline import PhaseTime
from commplan.explain.report import Explanation, line_lines
from commplan.ir.remark import Choice
from commplan.report.document import Line

SHOWN = 300  # choices
EACH = 12  # alternatives of a choice
TEXT = 2000  # characters


def lines(explanation: Explanation, times: Iterable[PhaseTime]) -> tuple[Line, ...]:
    """Every line of every phase; `times` of the phases where they are known."""
    spent = {phase.name: _by_line(phase) for phase in times}
    return tuple(
        Line(
            phase.title,
            line.line,
            _cut(line.stage),
            tuple(map(_cut, line_lines(line))),
            spent[phase.name].get(line.line, 0.0) if phase.name in spent else None,
        )
        for phase in explanation.phases
        for line in phase.lines
    )


def _by_line(phase: PhaseTime) -> Mapping[int, float]:
    seconds: dict[int, float] = {}
    for op in phase.ops:
        seconds[op.line] = seconds.get(op.line, 0.0) + op.seconds
    return seconds


def choices(chosen: tuple[Choice, ...]) -> tuple[tuple[Choice, ...], str]:
    """The choices of a schedule, long ones cut; and what was left out, in words."""
    more = len(chosen) - SHOWN
    left_out = f"{more:,} of {len(chosen):,} choices are not shown" if more > 0 else ""
    return tuple(map(_choice, chosen[:SHOWN])), left_out


def _choice(choice: Choice) -> Choice:
    rejected, alternatives = choice.rejected[:EACH], choice.alternatives[:EACH]
    more = len(choice.rejected) + len(choice.alternatives) - len(rejected) - len(alternatives)
    return msgspec.structs.replace(
        choice,
        what=_cut(choice.what),
        why=_cut(choice.why),
        rejected=(*map(_cut, rejected), *([f"and {more:,} more"] if more else [])),
        alternatives=alternatives,
        sharing=choice.sharing[:EACH],
    )


def _cut(text: str) -> str:
    return text if len(text) <= TEXT else f"{text[: TEXT - 1]}…"
