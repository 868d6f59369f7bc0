"""The results of compiling each line, and the choices of passes, as described by `commplan explain`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from commplan.cost.schedule.prediction import PhaseTime
from commplan.explain.report import Explanation, StageSummary, line_lines
from commplan.ir.remark import Choice
from commplan.report.document import LineSummary, cut_text, first_of

CHOICES = 300
EACH = 12  # most alternatives of a choice
LINES = 1000
BECAME = 60  # most sentences of a line


def lines(explanation: Explanation, times: Iterable[PhaseTime]) -> tuple[tuple[LineSummary, ...], str]:
    """Summarize every line of every phase; also returns a note on omitted lines.

    `times` are the predicted times of phases, if known.
    """
    spent = {phase.name: _by_line(phase) for phase in times}
    every = [(phase, line) for phase in explanation.phases for line in phase.lines]
    shown, left_out = first_of(every, LINES, "stages")
    return tuple(
        LineSummary(
            phase.title,
            line.line,
            cut_text(line.stage),
            _became(line),
            spent[phase.name].get(line.line, 0.0) if phase.name in spent else None,
        )
        for phase, line in shown
    ), left_out


def _became(line: StageSummary) -> tuple[str, ...]:
    sentences, left_out = first_of(line_lines(line), BECAME, "sentences")
    return (*map(cut_text, sentences), *([left_out] if left_out else []))


def _by_line(phase: PhaseTime) -> Mapping[int, float]:
    seconds: dict[int, float] = {}
    for op in phase.ops:
        seconds[op.line] = seconds.get(op.line, 0.0) + op.seconds
    return seconds


def choices(chosen: tuple[Choice, ...]) -> tuple[tuple[Choice, ...], str]:
    """Truncate the choices of a schedule; also returns a note on omitted choices."""
    shown, left_out = first_of(chosen, CHOICES, "choices")
    return tuple(map(_choice, shown)), left_out


def _choice(choice: Choice) -> Choice:
    rejected, alternatives = choice.rejected[:EACH], choice.alternatives[:EACH]
    more = len(choice.rejected) + len(choice.alternatives) - len(rejected) - len(alternatives)
    return msgspec.structs.replace(
        choice,
        what=cut_text(choice.what),
        why=cut_text(choice.why),
        rejected=(*map(cut_text, rejected), *([f"and {more:,} more"] if more else [])),
        alternatives=alternatives,
        sharing=choice.sharing[:EACH],
    )
