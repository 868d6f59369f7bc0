"""Who holds the others, from what processes say of themselves, in the words of the engine's watchdog."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from commplan.runtime.observe.joint_calls import JointReport

_SHOWN = 4
_LISTED = 8
EXCUSE = "wrap longer work in `with run.late():`, or raise the limit: bind(.., watchdog_s=SECONDS)"


class Waiting(msgspec.Struct, frozen=True, array_like=True):
    """A call of `processes` that has not ended. where: the plan's lines. seconds: since it began."""

    processes: tuple[int, ...]
    number: int
    where: str
    seconds: float


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What a process says of itself.

    begun: by processes that call alike, as text, how many calls it has begun. recent: likewise, the number of
    a call and the names from there on. idle: seconds since a call last began or ended. late: it said that it
    comes later. last: where it last finished something, and how often. stack: what its Python does. left: why
    it has ended, empty if well; None while it runs. aborted: a thread of its runtime has called `abort`.
    joint: how far its calls with collectives are, by processes that call alike.
    """

    process: int
    host: str
    begun: dict[str, int]
    recent: dict[str, tuple[int, tuple[str, ...]]]
    waits: Waiting | None
    idle: float
    late: bool
    last: str
    runs: int
    stack: str
    left: str | None = None
    aborted: bool = False
    joint: dict[str, JointReport] = {}


class Patience(NamedTuple):
    """Seconds. bound: for those that cannot come any more. late: for those that are alive."""

    bound: float
    late: float


def key(processes: Sequence[int]) -> str:
    return ",".join(map(str, processes))


def silence(reports: Mapping[int, Report], silent: Mapping[int, tuple[str, Sequence[str]]]) -> str:
    """The verdict on processes that do not answer, each with how it is and notes on it."""
    lines = [f"process {number} {state}" for number, (state, _) in sorted(silent.items())]
    notes = [note for _, (_, notes) in sorted(silent.items()) for note in notes]
    if waiting := sorted(number for number, report in reports.items() if report.waits):
        notes.append(f"{listed(waiting)} {'wait' if len(waiting) > 1 else 'waits'}")
    return "".join([lines[0], *map(_note, lines[1:] + notes)])


def departure(gone: Report) -> str:
    """The verdict on a process whose program has ended."""
    why = f": {gone.left}" if gone.left else ""
    return f"the program has ended on process {gone.process}{why}{_finished(gone)}"


def conclude(own: int, reports: Mapping[int, Report], patience: Patience, awaiting: str) -> str:
    """Who holds process `own`, which waits; empty while that cannot be said. All have answered.

    awaiting: the note on what waits for the culprit.
    """
    aborted = sorted(number for number, report in reports.items() if report.aborted)
    mine = reports[own].waits
    if mine is None and not aborted:
        return ""
    compared = {number for report in reports.values() for number in report.recent}
    for group in sorted(compared) if mine is None else [key(mine.processes)]:
        text = another_order(group, reports)
        if text and (aborted or _idle(reports) >= patience.bound):
            return text
    if aborted:
        text = f"process {aborted[0]} was aborted by its runtime: its own output says why"
        return text + _finished(reports[aborted[0]]) + awaiting
    waiting, late = _reached(own, reports)
    if not late:
        idle = _idle({number: reports[number] for number in waiting})
        groups = {report.waits.processes for report in reports.values() if report.waits}
        if len(groups) == 1 or idle < patience.late:
            return ""  # devices may compute for as long as they like
        text = f"the processes wait for one another since {idle:.1f} s, in another order of steps"
        return text + "".join(_note(_waits(reports[number])) for number in waiting[:_SHOWN])
    excused = any(reports[number].late for number in late)
    idle = min(reports[number].idle for number in [*late, own])
    if excused or reports[own].idle < patience.late or idle < patience.bound:
        return ""
    seconds = mine.seconds if mine else 0.0
    text = f"{listed(late)} {'have' if len(late) > 1 else 'has'} not come within {seconds:.1f} s"
    return text + "".join(_alive(reports[number]) for number in late[:_SHOWN]) + _note(EXCUSE) + awaiting


def stalled(own: int, reports: Mapping[int, Report], patience: Patience) -> bool:
    """Whether all have come to the step of `own`, and nothing has moved for too long: it may compute."""
    return (
        reports[own].waits is not None and not _reached(own, reports)[1] and _idle(reports) >= patience.late
    )


def another_order(group: str, reports: Mapping[int, Report]) -> str:
    """The verdict where the processes of `group` have not called the same steps; empty if they have, as far
    as they remember."""
    recent = {n: report.recent[group] for n, report in sorted(reports.items()) if group in report.recent}
    if len(recent) < 2:
        return ""
    first = max(start for start, _ in recent.values())
    last = max(start + len(names) for start, names in recent.values())
    for place in range(first, last):
        at = {n: names[place - start] for n, (start, names) in recent.items() if place < start + len(names)}
        if len(set(at.values())) < 2:
            continue
        usual = Counter(at.values()).most_common(1)[0][0]
        odd = [number for number, name in at.items() if name != usual]
        others = [number for number, name in at.items() if name == usual]
        text = (
            f"the processes call their steps in another order: {listed(odd)} `{at[odd[0]]}` as call {place},"
        )
        text += f" {listed(others)} `{usual}`"
        waits = [report for _, report in sorted(reports.items()) if report.waits]
        return text + "".join(_note(_waits(report)) for report in waits[:_SHOWN])
    return ""


def _reached(own: int, reports: Mapping[int, Report]) -> tuple[list[int], list[int]]:
    """The processes that wait and on whom `own` depends, and those that they wait for."""
    waiting, late = [own], list[int]()
    for number in waiting:
        waits = reports[number].waits
        if waits is None:
            continue
        for other in waits.processes:
            report = reports.get(other)
            if report is None or report.begun.get(key(waits.processes), 0) >= waits.number:
                continue
            group = waiting if report.waits else late
            if other not in group:
                group.append(other)
    return sorted(waiting), sorted(late)


def _idle(reports: Mapping[int, Report]) -> float:
    """Seconds in which nothing has moved anywhere."""
    return min((report.idle for report in reports.values()), default=0.0)


def _alive(report: Report) -> str:
    text = f"{_named(report)} is alive, in no step for {report.idle:.1f} s"
    text = _note(f"{text}; it last finished {_last(report)}" if report.last else text)
    return text + (_note(f"its Python: {report.stack}") if report.stack else "")


def _finished(report: Report) -> str:
    return _note(f"{_named(report)} last finished {_last(report)}") if report.last else ""


def _last(report: Report) -> str:
    return f"{report.last}, {report.runs} times so far"


def _waits(report: Report) -> str:
    return f"process {report.process} waits in {report.waits.where if report.waits else 'nothing'}"


def _named(report: Report) -> str:
    return f"process {report.process} ({report.host})"


def _note(text: str) -> str:
    return f"\nnote: {text}"


def listed(numbers: Sequence[int]) -> str:
    """`processes 0, 2`."""
    text = f"process{'es' if len(numbers) > 1 else ''} {', '.join(map(str, numbers[:_LISTED]))}"
    return text + (f" and {len(numbers) - _LISTED} more" if len(numbers) > _LISTED else "")
