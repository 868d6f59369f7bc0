"""The document behind the page, as data: `gather` creates it, and the scripts in `assets` draw it.

In all structs, times are in seconds, and sizes in bytes. Plan lines (`line`) count from 1; line 0 means no
line. `left_out` is a note on data that is omitted to limit the size of the page; empty if nothing is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeVar

import msgspec

from commplan.explain.graph import Edge, Node
from commplan.ir.remark import Choice
from commplan.recorder.summary import Summary

Item = TypeVar("Item")
TEXT = 2000  # most characters of one text
Work = Literal["host", "device", "network", "other"]  # kinds of work, which determine the color of events


class SourceText(msgspec.Struct, frozen=True):
    """The text of the plan, or its stages if the text is not available.

    Attributes:
        name: name of the plan's file.
        lines: number and text of each line; of the first line of each stage if `whole` is False.
        whole: whether this is the text of the plan.
        left_out: see above.
    """

    name: str
    lines: tuple[tuple[int, str], ...]
    whole: bool
    left_out: str = ""


class PhaseGraph(msgspec.Struct, frozen=True):
    """The graph of one phase, with the inputs, sources and states that it reads.

    Attributes:
        phase: name of the phase.
        title: its heading in the plan.
        nodes: the nodes.
        edges: the edges; both ends of each are in `nodes`.
        left_out: see above.
    """

    phase: str
    title: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    left_out: str = ""


class LaneEvent(msgspec.Struct, frozen=True):
    """An op, several merged ops, or a recorded operation.

    Attributes:
        name: kind of the op, or name of the recorded operation.
        line: plan line.
        start: seconds from the start of the phase or of the recorded run.
        seconds: duration.
        work: kind of work.
        algorithm: algorithm of a collective; empty for other ops.
        count: number of merged ops, which took `busy` of `seconds`.
        busy: sum of the durations of the merged ops.
        alone: seconds of a collective without others, as in `cost.schedule.prediction.OpTime`; 0 if unknown.
        bound: a lower bound of `alone` for all algorithms; 0 if unknown.
        result: the values that it makes; empty for recorded events.
        nbytes: bytes on the busiest link of each level.
        waited: for recorded events, seconds until rank `last` arrived; 0 if unknown.
        last: for recorded events, the last rank to arrive; None if unknown.
        predicted: for recorded events, predicted seconds; 0 if unknown.
        size: for recorded events, bytes of the whole buffer; 0 if unknown.
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
    """Events that are drawn in one row.

    Attributes:
        name: label of the row.
        events: the events, sorted by start.
        group: heading above adjacent lanes with the same group, such as a process; empty for none.
    """

    name: str
    events: tuple[LaneEvent, ...]
    group: str = ""


class CriticalStretch(msgspec.Struct, frozen=True):
    """A part of the critical path: equal ops of one line.

    Attributes:
        line: plan line.
        name: description of the ops.
        seconds: their time on the critical path.
    """

    line: int
    name: str
    seconds: float


class PhasePanel(msgspec.Struct, frozen=True):
    """The predicted times of a phase, as in `cost.schedule.prediction.PhaseTime`.

    Attributes:
        name: name of the phase.
        title: its heading in the plan.
        alone: time of the phase without a step.
        computation: time of the step's computation; 0 without a step.
        exposed: time from the end of that computation to the end of the phase; `alone` without a step.
        seconds: time of the step and the phase together.
        bound: a lower bound of `alone`; 0 if unknown.
        network: time in which some collective runs.
        compute: time in which some other op runs.
        nbytes: bytes on the busiest link of each level.
        critical: the critical path, with equal ops added up.
        lanes: the timeline; empty if no op has a known duration.
        untimed: number of ops without a known duration, which are not in `lanes`.
        times: sentences as printed by `explain` and `simulate`.
        left_out: see above.
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
        phase: heading of the phase.
        line: plan line.
        stage: the stage as text.
        became: sentences about its ops and its traffic.
        seconds: the sum over the ops of the line; None without a topology.
    """

    phase: str
    line: int
    stage: str
    became: tuple[str, ...]
    seconds: float | None


class CollectiveProof(msgspec.Struct, frozen=True):
    """Equal collectives of one line, and their proof.

    Attributes:
        line: plan line.
        kind: kind of the collectives.
        count: number of collectives.
        axes: the axes that they communicate over.
        ranks: number of ranks along `axes`.
        algorithm: their algorithm.
        proof: the part that is proved, in words.
        rounds: number of rounds; None for native collectives.
        busiest: the larger of the bytes that the busiest rank sends and receives; None as above.
        least: a lower bound of `busiest` for any algorithm; None as above.
    """

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
    """The results of `commplan verify`.

    Attributes:
        proved: the property that was proved.
        assumed: assumptions of the proof.
        not_checked: properties that were not considered.
        collectives: the proofs of collectives.
        facts: sentences on communicators, input, memory and servers.
        left_out: see above.
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
        name: its name, such as `host 3`.
        up: bytes on its link to the outer level in each phase; None if not counted for individual members.
        down: as `up`, in the other direction.
        holds: its ranks and servers in words; empty if it is idle.
        members: its inner members; empty for a place, and for merged or idle members.
        hidden: number of members that it stands for; 0 for a single one. Bytes are the largest of theirs.
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
        name: its name.
        count: number of members in each place of the next outer level.
        latency: seconds of an empty message.
        bandwidth: bytes per second, per member and direction.
        nbytes: the bytes on its busiest link in one direction, in each phase.
    """

    name: str
    count: int
    latency: float
    bandwidth: float
    nbytes: tuple[float, ...]


class MachineLoad(msgspec.Struct, frozen=True):
    """The topology with its loads.

    Attributes:
        name: name of the topology.
        places: number of places.
        phases: the names of the phases, in the order of the loads.
        levels: the levels, outermost first.
        members: the members of the outermost level.
        left_out: see above.
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
        name: description of the run.
        seconds: its duration.
        lanes: its events, by rank or thread.
        left_out: see above.
        phase: name of the phase; empty for the whole program.
    """

    name: str
    seconds: float
    lanes: tuple[EventLane, ...]
    left_out: str = ""
    phase: str = ""


class ReportDocument(msgspec.Struct, frozen=True):
    """A whole report.

    Attributes:
        plan: name of the plan.
        version: version of commplan.
        facts: names and texts in the head of the page.
        source: text of the plan.
        graphs: the graph of each nonempty phase; empty if the schedule does not contain its plan.
        lines: the results of compiling each line; empty as above.
        lines_left_out: a note on omitted lines.
        choices: the choices of passes.
        choices_left_out: a note on omitted choices.
        phases: the predicted times of each phase; empty without a topology.
        unknown: names of functions and sources without known costs.
        proofs: the results of the verifier.
        machine: the loads of links; None without a topology.
        traces: the recorded run, or one run of each phase; empty without a recorded run.
        measured: summary of the recorded run; None without flight records.
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
    """Truncate `text` to `most` characters, including an ellipsis."""
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
