"""The results of compiling each line, and the choices of passes, as described by `commplan explain`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from commplan.cost.schedule.prediction import PhaseTime
from commplan.explain.report import Explanation, StageSummary, line_lines
from commplan.ir.remark import Choice
from commplan.report.document import LineSummary, cut_text, first_of

CHOICES = 300  # most choices
EACH = 12  # most alternatives of a choice, and most rejected options and designs
LINES = 1000  # most plan lines, over all phases
BECAME = 60  # most sentences of a line


def lines(explanation: Explanation, times: Iterable[PhaseTime]) -> tuple[tuple[LineSummary, ...], str]:
    """Summarize every line of every phase.

    Args:
        explanation: the explained plan.
        times: the predicted times of its phases; empty if unknown.

    Returns:
        The summaries of at most `LINES` lines, and a note on omitted lines, empty if there are none.
    """
    seconds = {phase.name: _by_line(phase) for phase in times}
    all_lines = [(phase, line) for phase in explanation.phases for line in phase.lines]
    shown, left_out = first_of(all_lines, LINES, "stages")
    return tuple(
        LineSummary(
            phase.title,
            line.line,
            cut_text(line.stage),
            _became(line),
            seconds[phase.name].get(line.line, 0.0) if phase.name in seconds else None,
        )
        for phase, line in shown
    ), left_out


def _became(line: StageSummary) -> tuple[str, ...]:
    """The ops and the traffic of a line, and a note on omitted ones."""
    sentences, left_out = first_of(line_lines(line), BECAME, "sentences")
    return (*map(cut_text, sentences), *([left_out] if left_out else []))


def _by_line(phase: PhaseTime) -> Mapping[int, float]:
    """The sum of the seconds of the ops of each line."""
    seconds: dict[int, float] = {}
    for op in phase.ops:
        seconds[op.line] = seconds.get(op.line, 0.0) + op.seconds
    return seconds


def choices(chosen: tuple[Choice, ...]) -> tuple[tuple[Choice, ...], str]:
    """Truncate the choices of a schedule.

    Returns:
        At most `CHOICES` choices, and a note on omitted choices, empty if there are none.
    """
    shown, left_out = first_of(chosen, CHOICES, "choices")
    return tuple(map(_choice, shown)), left_out


def _choice(choice: Choice) -> Choice:
    """Truncate a choice. If alternatives are omitted, the last sentence of `rejected` is their number."""
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
