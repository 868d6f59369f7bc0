"""The document behind the page: everything that it shows, as data. Times are seconds, sizes bytes.

Plan lines count from 1; line 0 means none. `left_out` texts say what a bound of the page cut off.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from commplan.explain.graph import Edge, Node
from commplan.ir.remark import Choice
from commplan.recorder import Summary

Work = Literal["host", "device", "network", "other"]


class Source(msgspec.Struct, frozen=True):
    """The text of the plan. whole: whether it is the file's; else stages in words, at their lines."""

    name: str
    lines: tuple[tuple[int, str], ...]
    whole: bool
    left_out: str = ""


class Graph(msgspec.Struct, frozen=True):
    """The graph of one phase, with the inputs, sources and states that it reads."""

    phase: str
    title: str
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]
    left_out: str = ""


class Event(msgspec.Struct, frozen=True):
    """Something on a lane. count: how many ops it stands for, which took `busy` seconds of `seconds`.
    alone, bound: as in `cost.schedule.prediction.OpTime`; nbytes: on the busiest link of each level. Of a
    run, waited: seconds at its begin until rank `last` came; predicted: seconds, 0 where they are not known;
    size: of the whole buffer."""

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


class Lane(msgspec.Struct, frozen=True):
    """Events in the order in which they start. group: what lanes have in common, such as a process."""

    name: str
    events: tuple[Event, ...]
    group: str = ""


class Stretch(msgspec.Struct, frozen=True):
    """A part of the critical path, the ops of one line that do the same together."""

    line: int
    name: str
    seconds: float


class Phase(msgspec.Struct, frozen=True):
    """A phase in time: see `cost.schedule.prediction.PhaseTime`. nbytes: on the busiest link of each level.
    untimed: ops that take no time, as far as is known. times: in words, as `explain` and `simulate` print."""

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
    critical: tuple[Stretch, ...]
    lanes: tuple[Lane, ...]
    untimed: int
    times: tuple[str, ...]
    left_out: str = ""


class Line(msgspec.Struct, frozen=True):
    """What one line of the plan became. seconds: of its ops, one by one; None without a topology."""

    phase: str
    line: int
    stage: str
    became: tuple[str, ...]
    seconds: float | None


class Collective(msgspec.Struct, frozen=True):
    """Collectives of one line that are alike, and how they are known to be right."""

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
    """What `commplan verify` says. facts: of communicators, input, memory and servers, a sentence each."""

    proved: str
    believed: tuple[str, ...]
    not_looked_at: tuple[str, ...]
    collectives: tuple[Collective, ...]
    facts: tuple[str, ...]
    left_out: str = ""


class Member(msgspec.Struct, frozen=True):
    """A place or switch of the machine with the link that leads to it from outside, and what is inside it.

    hidden: how many members like it are left out of the picture; the figures are then the largest of theirs.
    up, down: bytes on its link in each phase; None where they are not counted member by member.
    """

    name: str
    up: tuple[float, ...] | None
    down: tuple[float, ...] | None
    holds: str
    members: tuple[Member, ...] = ()
    hidden: int = 0


class Level(msgspec.Struct, frozen=True):
    """A level of links. nbytes: on its busiest link, in one direction, in each phase."""

    name: str
    count: int
    latency: float
    bandwidth: float
    nbytes: tuple[float, ...]


class Machine(msgspec.Struct, frozen=True):
    """The topology with its loads; levels outermost first. phases: names, in the order of the loads."""

    name: str
    places: int
    phases: tuple[str, ...]
    levels: tuple[Level, ...]
    members: tuple[Member, ...]
    left_out: str = ""


class Trace(msgspec.Struct, frozen=True):
    """What a run recorded, its first event at 0. phase: whose run it is; nothing: of the whole program."""

    name: str
    seconds: float
    lanes: tuple[Lane, ...]
    left_out: str = ""
    phase: str = ""


class Document(msgspec.Struct, frozen=True):
    """A whole report. facts: the head of the page, name and text. unknown: what was charged nothing. traces:
    of a run, the whole or one for each phase; measured: what its ranks recorded, in numbers."""

    plan: str
    version: str
    facts: tuple[tuple[str, str], ...]
    source: Source
    graphs: tuple[Graph, ...]
    lines: tuple[Line, ...]
    lines_left_out: str
    choices: tuple[Choice, ...]
    choices_left_out: str
    phases: tuple[Phase, ...]
    unknown: tuple[str, ...]
    proofs: Proofs
    machine: Machine | None = None
    traces: tuple[Trace, ...] = ()
    measured: Summary | None = None
