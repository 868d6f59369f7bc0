"""The document behind the page, as data. Times are in seconds, sizes in bytes.

Plan lines count from 1; line 0 means no line. `left_out` texts describe truncated data.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from commplan.explain.graph import Edge, Node
from commplan.ir.remark import Choice
from commplan.recorder.summary import Summary

Item = TypeVar("Item")
TEXT = 2000  # the most characters of one text
Work = Literal["host", "device", "network", "other"]


class SourceText(msgspec.Struct, frozen=True):
    """The text of the plan, or its stages in words if the text is not available (`whole` is False)."""

    name: str
    lines: tuple[tuple[int, str], ...]
    whole: bool
    left_out: str = ""


class PhaseGraph(msgspec.Struct, frozen=True):
    """The graph of one phase, with the inputs, sources and states that it reads."""

    phase: str
    title: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    left_out: str = ""


class LaneEvent(msgspec.Struct, frozen=True):
    """An event on a lane.

    Attributes:
        count: number of merged ops, which took `busy` of `seconds`.
        alone: see `cost.schedule.prediction.OpTime`.
        bound: see `cost.schedule.prediction.OpTime`.
        nbytes: bytes on the busiest link of each level.
        waited: for recorded events, seconds until rank `last` arrived.
        predicted: for recorded events, predicted seconds, 0 if unknown.
        size: for recorded events, bytes of the whole buffer.
    """

    name: str
    line: int
    start: float
    seconds: float
    work: Work
    algorithm: str = ""
    count: int = 1
    busy: float = 0.0
    alone: float = 0.0
    bound: float = 0.0
    result: str = ""
    nbytes: dict[str, float] = {}
    waited: float = 0.0
    last: int | None = None
    predicted: float = 0.0
    size: int = 0


class EventLane(msgspec.Struct, frozen=True):
    """Events sorted by start time. `group` is common to several lanes, for example a process."""

    name: str
    events: tuple[LaneEvent, ...]
    group: str = ""


class CriticalStretch(msgspec.Struct, frozen=True):
    """A part of the critical path: equal ops of one line."""

    line: int
    name: str
    seconds: float


class PhasePanel(msgspec.Struct, frozen=True):
    """The times of a phase, see `cost.schedule.prediction.PhaseTime`.

    Attributes:
        nbytes: bytes on the busiest link of each level.
        untimed: number of ops without a known duration.
        times: sentences as printed by `explain` and `simulate`.
    """

    name: str
    title: str
    alone: float
    computation: float
    exposed: float
    seconds: float
    bound: float
    network: float
    compute: float
    nbytes: dict[str, float]
    critical: tuple[CriticalStretch, ...]
    lanes: tuple[EventLane, ...]
    untimed: int
    times: tuple[str, ...]
    left_out: str = ""


class LineSummary(msgspec.Struct, frozen=True):
    """The result of compiling one plan line.

    Attributes:
        seconds: the sum over the ops of the line; None without a topology.
    """

    phase: str
    line: int
    stage: str
    became: tuple[str, ...]
    seconds: float | None


class CollectiveProof(msgspec.Struct, frozen=True):
    """Equal collectives of one line, and their proof."""

    line: int
    kind: str
    count: int
    axes: tuple[str, ...]
    ranks: int
    algorithm: str
    proof: str
    rounds: int | None = None
    busiest: int | None = None
    least: int | None = None


class Proofs(msgspec.Struct, frozen=True):
    """The output of `commplan verify`.

    Attributes:
        facts: sentences on communicators, input, memory and servers.
    """

    proved: str
    assumed: tuple[str, ...]
    not_checked: tuple[str, ...]
    collectives: tuple[CollectiveProof, ...]
    facts: tuple[str, ...]
    left_out: str = ""


class MachineMember(msgspec.Struct, frozen=True):
    """A place or switch of the machine with its uplink and its inner members.

    Attributes:
        up: bytes on its link in each phase, None if not counted for individual members.
        down: as `up`, in the other direction.
        hidden: number of similar members that are not drawn. Bytes are then the largest of theirs.
    """

    name: str
    up: tuple[float, ...] | None
    down: tuple[float, ...] | None
    holds: str
    members: tuple[MachineMember, ...] = ()
    hidden: int = 0


class LinkLevel(msgspec.Struct, frozen=True):
    """A level of links.

    Attributes:
        nbytes: the bytes on its busiest link in one direction, in each phase.
    """

    name: str
    count: int
    latency: float
    bandwidth: float
    nbytes: tuple[float, ...]


class MachineLoad(msgspec.Struct, frozen=True):
    """The topology with its loads, outermost level first.

    Attributes:
        phases: the names of the phases, in the order of the loads.
    """

    name: str
    places: int
    phases: tuple[str, ...]
    levels: tuple[LinkLevel, ...]
    members: tuple[MachineMember, ...]
    left_out: str = ""


class Trace(msgspec.Struct, frozen=True):
    """A recorded run, starting at time 0.

    Attributes:
        phase: the phase; empty for the whole program.
    """

    name: str
    seconds: float
    lanes: tuple[EventLane, ...]
    left_out: str = ""
    phase: str = ""


class ReportDocument(msgspec.Struct, frozen=True):
    """A whole report.

    Attributes:
        facts: names and texts in the head of the page.
        unknown: names of functions and sources without known costs.
        traces: the recorded run, or one run of each phase.
        measured: summary of the recorded run.
    """

    plan: str
    version: str
    facts: tuple[tuple[str, str], ...]
    source: SourceText
    graphs: tuple[PhaseGraph, ...]
    lines: tuple[LineSummary, ...]
    lines_left_out: str
    choices: tuple[Choice, ...]
    choices_left_out: str
    phases: tuple[PhasePanel, ...]
    unknown: tuple[str, ...]
    proofs: Proofs
    machine: MachineLoad | None = None
    traces: tuple[Trace, ...] = ()
    measured: Summary | None = None


def cut_text(text: str, most: int = TEXT) -> str:
    """Truncate `text`, with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


def first_of(items: Sequence[Item], most: int, noun: str) -> tuple[tuple[Item, ...], str]:
    """Return the first `most` items, and a note on the omitted ones, empty if there are none.

    Example:
        >>> first_of("abcd", 3, "letters")
        (('a', 'b', 'c'), '1 of 4 letters are not shown')
    """
    more = len(items) - most
    left_out = f"{more:,} of {len(items):,} {noun} are not shown" if more > 0 else ""
    return tuple(items[:most]), left_out
