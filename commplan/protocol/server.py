"""The state machine of a server, without arrays, clocks or messages.

The driver stores the payloads, first in first out for each worker and tag. It reports arrivals, and carries
out the returned effects in order:

    set     store the payload of `tag` as its part of the state
    add     add the worker's oldest payload of `unit` to the sum
    apply   w [, m] <- FN(w [, m], the sum or mean over `workers`)
    pull    d = eta * rho * (W - C), C <- C + d, answer d (Zhang et al. 2015)
    answer  the current unit; for unit -1 the server's whole state (get), or the token
    fail    stop serving, for the reason in `text`

Messages of a worker are processed in the order of arrival. The units of a state are served independently,
each in the order that the site requires: terms of an exchange in rank order, so that sums are bitwise
reproducible; `round_robin` in rank order; `async` in the order in which requests began; `hogwild` in the
order of arrival. Updates are elementwise, so the result equals an update of the whole state.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from commplan.protocol.sites import LEAVE, Site, Sites

EffectKind = Literal["set", "add", "apply", "pull", "answer", "fail"]


class Effect(NamedTuple):
    """An action for the driver. `request` is the index of the worker's request at this site, from 0."""

    kind: EffectKind
    site: int = -1
    unit: int = -1
    worker: int = -1
    request: int = 0
    tag: int = 0
    workers: tuple[int, ...] = ()
    text: str = ""


class Place(NamedTuple):
    """The meaning of a tag on this server.

    Attributes:
        site: the site of the message.
        unit: the unit.
        data: whether the message carries data.
        first: whether it is the first message of its request on this server.
        last: whether it is the last one.
    """

    site: Site
    unit: int
    data: bool
    first: bool
    last: bool


@dataclasses.dataclass
class ServedUnit:
    """One unit of a state.

    Attributes:
        queue: by worker, the requests that have arrived: (site, number).
        site: the site of the update in progress.
        added: the workers whose terms it contains.
        applied: the number of updates so far, by site.
        turn: the number of workers served or skipped, in the order of `round_robin` and `async`.
        unanswered: requests without an answer so far: (worker, site, number).
    """

    queue: dict[int, list[tuple[int, int]]]
    site: int = -1
    added: list[int] = dataclasses.field(default_factory=list[int])
    applied: dict[int, int] = dataclasses.field(default_factory=dict[int, int])
    turn: int = 0
    unanswered: list[tuple[int, int, int]] = dataclasses.field(default_factory=list[tuple[int, int, int]])

    def copy(self) -> ServedUnit:
        queue = {worker: list(waiting) for worker, waiting in self.queue.items()}
        return ServedUnit(
            queue, self.site, list(self.added), dict(self.applied), self.turn, list(self.unanswered)
        )

    def key(self) -> tuple[object, ...]:
        queue = tuple((worker, tuple(waiting)) for worker, waiting in self.queue.items() if waiting)
        applied = tuple(self.applied.items())
        return queue, self.site, tuple(self.added), applied, self.turn, tuple(self.unanswered)


@dataclasses.dataclass
class GroupState:
    """A state of one group of workers.

    Attributes:
        members: the workers of the group.
        units: the units of this server, by number.
        marks: the number of puts that each member has begun.
        done: the number of requests served, by member.
        puts: the number of puts applied.
        tickets: members whose requests began, in order.
        answered: the number of answered units of the request in progress, by (site, worker).
    """

    members: tuple[int, ...]
    units: dict[int, ServedUnit]
    marks: dict[int, int]
    done: dict[int, int]
    puts: int = 0
    tickets: list[int] = dataclasses.field(default_factory=list[int])
    answered: dict[tuple[int, int], int] = dataclasses.field(default_factory=dict[tuple[int, int], int])

    def copy(self) -> GroupState:
        units = {number: unit.copy() for number, unit in self.units.items()}
        marks, done, tickets = dict(self.marks), dict(self.done), list(self.tickets)
        return GroupState(self.members, units, marks, done, self.puts, tickets, dict(self.answered))

    def key(self, departed: set[int]) -> tuple[object, ...]:
        """A key of the state, without counts of members that have left, which no longer matter."""
        units = tuple(unit.key() for unit in self.units.values())
        counts = tuple((w, self.marks[w], self.done[w]) for w in self.members if w not in departed)
        answered = tuple(sorted(item for item in self.answered.items() if item[0][1] not in departed))
        return units, counts, self.puts, tuple(self.tickets), answered

    def forget(self) -> None:
        """Drop the tickets that every unit has served."""
        past = min(unit.turn for unit in self.units.values()) if self.tickets else 0
        del self.tickets[:past]
        for unit in self.units.values():
            unit.turn -= past

    def served(self, site: int, worker: int) -> bool:
        """Count one more unit of a worker's request; whether it was the last one here."""
        count = self.answered.pop((site, worker), 0) + 1
        if count < len(self.units):
            self.answered[site, worker] = count
        return count == len(self.units)


class Machine:
    """The state machine of server `server` of a plan. Its effects depend only on the order of messages."""

    def __init__(self, sites: Sites, server: int) -> None:
        self.sites, self.server = sites, server
        self.departed: set[int] = set()
        self.failed = ""
        self.backlog: dict[int, list[int]] = {worker: [] for worker in range(sites.workers)}
        self.counts: dict[tuple[int, int], int] = {}  # requests that a worker has begun at a site
        self.cells: dict[tuple[str, int], GroupState] = {}
        self.group: dict[tuple[int, int], int] = {}  # of a worker at a site
        self.places: dict[int, Place] = {}
        self._touched: list[tuple[GroupState, int]] = []  # units that may have something to do
        for site in sites.all:
            self._know(site)

    def _know(self, site: Site) -> None:
        local_index = self.server - site.first
        if not 0 <= local_index < site.servers:
            return
        for buffers in (site.up, site.token):
            chunks = [(b.content == "data", c) for b in buffers for c in b.chunks if c.server == local_index]
            for i, (data, chunk) in enumerate(chunks):
                self.places[chunk.tag] = Place(site, chunk.unit, data, i == 0, i == len(chunks) - 1)
        for group, members in enumerate(self.sites.members(site)):
            self.group |= {(site.number, worker): group for worker in members}
            for name, layout in zip(site.states, site.layouts, strict=True):
                if (name, group) not in self.cells:
                    units = {
                        u.number: ServedUnit({w: [] for w in members}) for u in layout.owned(local_index)
                    }
                    marks, done = dict.fromkeys(members, 0), dict.fromkeys(members, 0)
                    self.cells[name, group] = GroupState(members, units, marks, done)

    def copy(self) -> Machine:
        """Another machine in the same state."""
        machine = copy.copy(self)
        machine.departed, machine.counts, machine._touched = set(self.departed), dict(self.counts), []
        machine.backlog = {worker: list(tags) for worker, tags in self.backlog.items()}
        machine.cells = {name: cell.copy() for name, cell in self.cells.items()}
        return machine

    def key(self) -> tuple[object, ...]:
        """Equal for machines with the same future behaviour."""
        backlog = tuple(map(tuple, self.backlog.values()))
        cells = tuple(cell.key(self.departed) for cell in self.cells.values())
        counts = tuple(sorted(item for item in self.counts.items() if item[0][1] not in self.departed))
        return tuple(sorted(self.departed)), backlog, counts, cells, self.failed

    @property
    def over(self) -> bool:
        """Whether every worker has left or died."""
        return len(self.departed) == self.sites.workers

    def restored(self) -> None:
        """Every state has a value already, though no worker has put one."""
        for cell in self.cells.values():
            cell.puts, cell.marks = 1, dict.fromkeys(cell.members, 1)

    def arrive(self, worker: int, tag: int) -> list[Effect]:
        """Process the arrival of a worker's message."""
        if worker in self.departed or self.failed:
            return []
        self.backlog[worker].append(tag)
        return list(self._go_on([worker]))

    def lost(self, worker: int) -> list[Effect]:
        """Remove a dead worker. Its messages count if they were acknowledged, or are terms of an exchange."""
        if worker in self.departed or self.failed:
            return []
        for cell in self.cells.values():
            for unit in cell.units.values():
                if worker not in unit.queue:
                    continue
                unit.queue[worker] = [
                    (site, number)  # otherwise a stale answer has acknowledged it
                    for site, number in unit.queue[worker]
                    if self.sites.all[site].kind == "exchange"
                    and (worker, site, number) not in unit.unanswered
                ]
                unit.unanswered = [owed for owed in unit.unanswered if owed[0] != worker]
        self._leave(worker)
        return list(self._go_on([worker]))

    def _leave(self, worker: int) -> None:
        """Remove a worker. Any unit may have waited for it."""
        self.departed.add(worker)
        self.backlog[worker].clear()
        self._touched += [(cell, number) for cell in self.cells.values() for number in cell.units]

    def _go_on(self, workers: Sequence[int]) -> Iterator[Effect]:
        """Yield all effects that are possible now, beginning with the messages of `workers`."""
        turn, first = list(workers), True
        while turn and not self.failed:
            moved = False
            for worker in turn:
                while self.backlog[worker] and not self.failed:
                    tag = self.backlog[worker][0]
                    if tag != LEAVE and not self._may(worker, self.places[tag]):
                        break
                    moved = True
                    self.backlog[worker].pop(0)
                    if tag == LEAVE:
                        self._leave(worker)
                    else:
                        yield from self._take(worker, tag, self.places[tag])
            yield from self._serve()
            waiting = [worker for worker, tags in self.backlog.items() if tags]
            # A served request, or a message that only reports progress, may unblock other workers.
            turn = waiting if moved or first else []
            first = False
        if not self.failed:
            yield from self._stuck()

    def _cell(self, worker: int, site: Site, state: int = 0) -> GroupState:
        return self.cells[site.states[state], self.group[site.number, worker]]

    def _living(self, cell: GroupState) -> list[int]:
        return [worker for worker in cell.members if worker not in self.departed]

    def _may(self, worker: int, place: Place) -> bool:
        """Whether the next message of a worker may be processed; otherwise it waits, with all later ones."""
        site = place.site
        cell = self._cell(worker, site)
        if site.kind == "put":
            return self._may_put(worker, place, cell)
        if not all(self._cell(worker, site, i).puts for i in range(len(site.states))):
            return False
        if not place.first or site.staleness is None or site.kind != "elastic":
            return True
        return cell.done[worker] - min(cell.done[w] for w in self._living(cell)) <= site.staleness

    def _may_put(self, worker: int, place: Place, cell: GroupState) -> bool:
        """A mark waits for its put. A put other than the first waits until all members have reached their
        mark."""
        number = cell.marks[worker] + place.first
        if worker != cell.members[0]:
            return cell.puts >= number
        if number == 1 or not place.first:
            return True
        return not self._unmarked(place.site, cell, number)

    def awaited(self) -> tuple[Site, list[int]] | None:
        """A put that waits for others, and the live workers that have not reached their marks of it."""
        for cell in self.cells.values():
            sender = cell.members[0]
            place = self._following(sender)
            if place is None or place.site.kind != "put" or self._may(sender, place):
                continue
            if self._cell(sender, place.site) is cell:
                return place.site, self._unmarked(place.site, cell, cell.marks[sender] + 1)
        return None

    def held(self) -> tuple[list[int], list[int]]:
        """Workers whose messages or answers wait, and the live workers without any: one of these blocks the
        others."""
        waiting = {worker for worker, tags in self.backlog.items() if tags}
        for cell in self.cells.values():
            for unit in cell.units.values():
                waiting |= {worker for worker, _, _ in unit.unanswered}
                waiting |= {w for w, queue in unit.queue.items() for at, _ in queue if self._pulls(at)}
        idle = [worker for worker in range(self.sites.workers) if worker not in waiting | self.departed]
        return sorted(waiting - self.departed), idle

    def _pulls(self, site: int) -> bool:
        return self.sites.all[site].kind == "elastic"

    def _unmarked(self, site: Site, cell: GroupState, number: int) -> list[int]:
        """The live workers that have not reached their marks of put `number`."""
        members = (worker for worker in self._living(cell) if worker != cell.members[0])
        return [worker for worker in members if not self._at_mark(worker, site, cell, number)]

    def _following(self, worker: int) -> Place | None:
        """The meaning of a worker's next message; None if there is none, or if it is a leave message."""
        tags = self.backlog[worker]
        return self.places.get(tags[0]) if tags else None

    def _at_mark(self, worker: int, site: Site, cell: GroupState, number: int) -> bool:
        """Whether a worker's next message is its mark of put `number` to the state of `site`."""
        place = self._following(worker)
        if place is None or cell.marks[worker] != number - 1:
            return False
        return place.site.kind == "put" and place.site.states == site.states

    def _take(self, worker: int, tag: int, place: Place) -> Iterator[Effect]:
        site, cell = place.site, self._cell(worker, place.site)
        if place.first:
            self.counts[site.number, worker] = self.counts.get((site.number, worker), 0) + 1
        number = self.counts[site.number, worker] - 1
        if site.kind == "put":
            cell.marks[worker] += place.first
            if worker == cell.members[0]:
                yield Effect("set", site.number, place.unit, worker, number, tag)
                cell.puts += place.last
        elif site.kind == "get":
            yield Effect("answer", site.number, -1, worker, number)
        else:
            if place.first and site.mode == "async":
                cell.tickets.append(worker)
            if place.data:
                unit = cell.units[place.unit]
                unit.queue[worker].append((site.number, number))
                if site.kind == "exchange":
                    unit.unanswered.append((worker, site.number, number))
                self._touched.append((cell, place.unit))

    def _serve(self) -> Iterator[Effect]:
        """Yield all effects of units that are possible now."""
        while self._touched:
            cell, number = self._touched.pop(0)
            while not self.failed and (step := self._step(cell, number)) is not None:
                yield from step
        self._touched.clear()

    def _step(self, cell: GroupState, number: int) -> Iterator[Effect] | None:
        """The next effects of a unit, None if there are none."""
        unit = cell.units[number]
        for owed in unit.unanswered:
            if self._due(unit, owed):
                return self._answer(cell, number, owed)
        if unit.added and not self._missing(cell, unit):
            return self._apply(number, unit)
        worker = self._next(cell, unit)
        return None if worker is None else self._meet(cell, number, worker)

    def _missing(self, cell: GroupState, unit: ServedUnit) -> list[int]:
        """The workers whose terms the current update of an exchange still lacks, in rank order."""
        return [
            worker
            for worker in cell.members
            if worker not in unit.added and (worker not in self.departed or unit.queue[worker])
        ]

    def _next(self, cell: GroupState, unit: ServedUnit) -> int | None:
        """The worker to serve next, if its message for this unit has arrived."""
        waiting = [worker for worker in cell.members if unit.queue[worker]]
        if not waiting:
            return None
        site = self.sites.all[unit.queue[waiting[0]][0][0]]
        if site.kind == "exchange":
            first = next(iter(self._missing(cell, unit)), None)
            return first if first in waiting else None
        if site.mode == "hogwild":
            return waiting[0]
        order = cell.tickets if site.mode == "async" else cell.members
        while site.mode == "round_robin" or unit.turn < len(order):
            worker = order[unit.turn % len(order)]
            if worker not in self.departed:
                return worker if worker in waiting else None
            unit.turn += 1
        return None

    def _meet(self, cell: GroupState, number: int, worker: int) -> Iterator[Effect]:
        """Serve the oldest request of a worker for a unit: a term, or a complete elastic update."""
        unit = cell.units[number]
        site, request = unit.queue[worker].pop(0)
        if self.sites.all[site].kind == "elastic":
            unit.turn += 1
            if cell.served(site, worker):
                cell.done[worker] += 1
                cell.forget()
            yield Effect("pull", site, number, worker, request)
            return
        if unit.added and site != unit.site:
            lines = sorted(self.sites.all[number].span.line for number in (site, unit.site))
            meet = f"workers {unit.added[0]} and {worker} have come to different exchanges of one state"
            yield self._fail(f"{meet}, of lines {lines[0]} and {lines[1]}")
            return
        unit.site = site
        unit.added.append(worker)
        yield Effect("add", site, number, worker, request)

    def _apply(self, number: int, unit: ServedUnit) -> Iterator[Effect]:
        """Apply the update: all terms have arrived."""
        workers, unit.added = tuple(unit.added), []
        request = unit.applied.get(unit.site, 0)
        unit.applied[unit.site] = request + 1
        yield Effect("apply", unit.site, number, workers[0], request, workers=workers)

    def _due(self, unit: ServedUnit, owed: tuple[int, int, int]) -> bool:
        _, site, request = owed
        return unit.applied.get(site, 0) >= request + 1 - (self.sites.all[site].staleness or 0)

    def _answer(self, cell: GroupState, number: int, owed: tuple[int, int, int]) -> Iterator[Effect]:
        """Answer with a unit or, if workers read nothing, one token after the request's last unit."""
        cell.units[number].unanswered.remove(owed)
        worker, site, request = owed
        if any(buffer.content == "data" for buffer in self.sites.all[site].down):
            yield Effect("answer", site, number, worker, request)
        elif cell.served(site, worker):
            yield Effect("answer", site, -1, worker, request)

    def _stuck(self) -> Iterator[Effect]:
        """Report a deadlock: a put whose sender has left, or waits for a message that only its put would
        release."""
        for (name, _), cell in self.cells.items():
            first = cell.members[0]
            lives = first not in self.departed
            for worker in [first] if lives else self._living(cell):
                place = self._following(worker)
                if place is None or name not in place.site.states:
                    continue
                puts = place.site.kind == "put"
                if lives and not puts and not cell.puts:
                    reason = f"asks for `{name}`, which is not set: call run.start first"
                    yield self._fail(f"worker {first} {reason}")
                    return
                if not lives and (puts or not cell.puts) and not self._may(worker, place):
                    yield self._fail(f"worker {first}, which sets `{name}`, is gone")
                    return

    def _fail(self, text: str) -> Effect:
        self.failed = text
        return Effect("fail", text=text)
