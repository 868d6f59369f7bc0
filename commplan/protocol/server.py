"""The state machine of a server, without arrays, clocks or messages.

The driver stores the payloads of messages, first in first out for each worker and tag. It reports their
arrival to a `Machine`, and carries out the returned effects in order:

    set     store the payload of `tag` as its part of the state
    add     add the worker's oldest payload of `unit` to the sum
    apply   w [, m] <- FN(w [, m], the sum or mean over `workers`)
    pull    d = eta * rho * (W - C), C <- C + d, answer d (Zhang et al. 2015)
    answer  the current unit; for unit -1 the server's whole state (get), or the token
    fail    stop serving, for the reason in `text`

Messages of a worker are processed in the order of arrival. The units of a state are served independently. An
exchange adds terms in rank order, so that sums are bitwise reproducible. `round_robin` serves workers in rank
order, `async` in the order of the first messages of their requests, and `hogwild` the lowest rank whose
request has arrived. Updates are elementwise, so the result equals an update of the whole state.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from commplan.protocol.sites import LEAVE, Site, Sites

# The actions of the driver; see the module.
EffectKind = Literal["set", "add", "apply", "pull", "answer", "fail"]


class Effect(NamedTuple):
    """An action for the driver.

    Attributes:
        kind: The action; see the module.
        site: The index of the site.
        unit: The number of the unit; -1 for all units of this server.
        worker: The worker whose message is processed or answered; for `apply`, the first of `workers`.
        request: The index, from 0, of the worker's request at this site; for `apply`, of the update of the
            unit at this site.
        tag: For `set`, the tag of the message; else 0.
        workers: For `apply`, the workers whose terms have been added, in order; else empty.
        text: For `fail`, the reason; else empty.
    """

    kind: EffectKind
    site: int = -1
    unit: int = -1
    worker: int = -1
    request: int = 0
    tag: int = 0
    workers: tuple[int, ...] = ()
    text: str = ""


class MessageRole(NamedTuple):
    """The meaning of a tag on this server.

    Attributes:
        site: The site of the message.
        unit: The number of the unit; -1 for scalars and tokens.
        has_data: Whether the message has elements of a unit, rather than a scalar or a token.
        is_first: Whether it is the first message of its request on this server.
        is_last: Whether it is the last one.
    """

    site: Site
    unit: int
    has_data: bool
    is_first: bool
    is_last: bool


@dataclasses.dataclass
class ServedUnit:
    """One unit of a state of one group. Sites are denoted by their index, and requests are counted by site.

    Attributes:
        queue: By worker, the requests that have arrived and are not served yet, as (site, request).
        site: The site of the latest term; -1 before the first one.
        added: The workers whose terms are in the sum of the update in progress, in order.
        applied: The number of updates so far, by site.
        turn: The number of workers served or skipped so far; for `async`, since the oldest ticket.
        unanswered: The requests of exchanges without an answer so far, as (worker, site, request).
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
        """A hashable key of the state."""
        queue = tuple((worker, tuple(waiting)) for worker, waiting in self.queue.items() if waiting)
        applied = tuple(self.applied.items())
        return queue, self.site, tuple(self.added), applied, self.turn, tuple(self.unanswered)


@dataclasses.dataclass
class GroupState:
    """A state of the plan for one group of workers, as one server stores it.

    Attributes:
        members: The workers of the group, in rank order. The first one sends the value of puts.
        units: The units that this server owns, by number.
        marks: By member, the number of puts that it has begun, whether it sends the value or a mark.
        done: By member, the number of elastic requests served in all units.
        puts: The number of puts applied in full; 0 if the state is not set yet.
        tickets: For `async`, the members whose requests began, in order, until all units have served them.
        answered: By (site, worker), the number of answered units of a request that is answered in part.
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

    def drop_served_tickets(self) -> None:
        """Drop the tickets that every unit has served."""
        count = min(unit.turn for unit in self.units.values()) if self.tickets else 0
        del self.tickets[:count]
        for unit in self.units.values():
            unit.turn -= count

    def count_answer(self, site: int, worker: int) -> bool:
        """Count one more answered unit of a worker's request; returns whether it was the last one here."""
        count = self.answered.pop((site, worker), 0) + 1
        if count < len(self.units):
            self.answered[site, worker] = count
        return count == len(self.units)


class Machine:
    """The state machine of one server. Its effects depend only on the order of messages and deaths.

    Args:
        sites: The sites of the plan.
        server: The number of the server, among all servers of the plan.

    Attributes:
        departed: The workers that have left or died.
        failed: The reason of the `fail` effect, after which messages are ignored; empty before it.
        backlog: By worker, the tags of its messages that have arrived and are not processed yet.
        counts: By (site, worker), the number of requests that the worker has begun.
        group_states: By name of a state and number of a group, the state of that group.
        group: By (site, worker), the number of the worker's group.
        roles: By tag, the meaning of a message.
    """

    def __init__(self, sites: Sites, server: int) -> None:
        self.sites, self.server = sites, server
        self.departed: set[int] = set()
        self.failed = ""
        self.backlog: dict[int, list[int]] = {worker: [] for worker in range(sites.workers)}
        self.counts: dict[tuple[int, int], int] = {}
        self.group_states: dict[tuple[str, int], GroupState] = {}
        self.group: dict[tuple[int, int], int] = {}
        self.roles: dict[int, MessageRole] = {}
        self._touched: list[tuple[GroupState, int]] = []  # units that may have something to do
        for site in sites.all:
            self._add_site(site)

    def _add_site(self, site: Site) -> None:
        local_index = self.server - site.first
        if not 0 <= local_index < site.servers:
            return
        for buffers in (site.up, site.token):
            chunks = [(b.content == "data", c) for b in buffers for c in b.chunks if c.server == local_index]
            for i, (data, chunk) in enumerate(chunks):
                self.roles[chunk.tag] = MessageRole(site, chunk.unit, data, i == 0, i == len(chunks) - 1)
        for group, members in enumerate(self.sites.members(site)):
            self.group |= {(site.number, worker): group for worker in members}
            for name, layout in zip(site.states, site.layouts, strict=True):
                if (name, group) not in self.group_states:
                    units = {
                        u.number: ServedUnit({w: [] for w in members}) for u in layout.owned(local_index)
                    }
                    marks, done = dict.fromkeys(members, 0), dict.fromkeys(members, 0)
                    self.group_states[name, group] = GroupState(members, units, marks, done)

    def copy(self) -> Machine:
        """Another machine in the same state. Must be called between messages."""
        machine = copy.copy(self)
        machine.departed, machine.counts, machine._touched = set(self.departed), dict(self.counts), []
        machine.backlog = {worker: list(tags) for worker, tags in self.backlog.items()}
        machine.group_states = {name: state.copy() for name, state in self.group_states.items()}
        return machine

    def key(self) -> tuple[object, ...]:
        """Equal for machines with the same future behavior."""
        backlog = tuple(map(tuple, self.backlog.values()))
        states = tuple(state.key(self.departed) for state in self.group_states.values())
        counts = tuple(sorted(item for item in self.counts.items() if item[0][1] not in self.departed))
        return tuple(sorted(self.departed)), backlog, counts, states, self.failed

    @property
    def all_departed(self) -> bool:
        """Whether every worker has left or died."""
        return len(self.departed) == self.sites.workers

    def mark_restored(self) -> None:
        """Mark all states as set, since a checkpoint has their values."""
        for state in self.group_states.values():
            state.puts, state.marks = 1, dict.fromkeys(state.members, 1)

    def arrive(self, worker: int, tag: int) -> list[Effect]:
        """Process the arrival of a worker's message. Returns the effects that are possible now, in order."""
        if worker in self.departed or self.failed:
            return []
        self.backlog[worker].append(tag)
        return list(self._process([worker]))

    def lost(self, worker: int) -> list[Effect]:
        """Remove a dead worker. Returns the effects that are possible now, in order.

        Terms that are already in a sum remain there. Requests that wait are dropped, except those of an
        exchange that were answered before their update (`staleness`): the worker took them for served.
        """
        if worker in self.departed or self.failed:
            return []
        for state in self.group_states.values():
            for unit in state.units.values():
                if worker not in unit.queue:
                    continue
                unit.queue[worker] = [
                    (site_number, request)
                    for site_number, request in unit.queue[worker]
                    if self.sites.all[site_number].kind == "exchange"
                    and (worker, site_number, request) not in unit.unanswered
                ]
                unit.unanswered = [request for request in unit.unanswered if request[0] != worker]
        self._leave(worker)
        return list(self._process([worker]))

    def _leave(self, worker: int) -> None:
        """Remove a worker and its unprocessed messages. Any unit may have waited for it."""
        self.departed.add(worker)
        self.backlog[worker].clear()
        self._touched += [(state, number) for state in self.group_states.values() for number in state.units]

    def _process(self, workers: Sequence[int]) -> Iterator[Effect]:
        """Yield all effects that are possible now, beginning with the messages of `workers`."""
        turn, is_first_round = list(workers), True
        while turn and not self.failed:
            has_progressed = False
            for worker in turn:
                while self.backlog[worker] and not self.failed:
                    tag = self.backlog[worker][0]
                    if tag != LEAVE and not self._can_process(worker, self.roles[tag]):
                        break
                    has_progressed = True
                    self.backlog[worker].pop(0)
                    if tag == LEAVE:
                        self._leave(worker)
                    else:
                        yield from self._accept(worker, tag, self.roles[tag])
            yield from self._serve()
            waiting = [worker for worker, tags in self.backlog.items() if tags]
            # A served request, or a message that only reports progress, may unblock other workers.
            turn = waiting if has_progressed or is_first_round else []
            is_first_round = False
        if not self.failed:
            yield from self._deadlock()

    def _state(self, worker: int, site: Site, index: int = 0) -> GroupState:
        """The state of a site with this index, for the group of `worker`."""
        return self.group_states[site.states[index], self.group[site.number, worker]]

    def _living(self, state: GroupState) -> list[int]:
        return [worker for worker in state.members if worker not in self.departed]

    def _can_process(self, worker: int, role: MessageRole) -> bool:
        """Whether the next message of a worker may be processed; otherwise it waits, with all later ones."""
        site = role.site
        state = self._state(worker, site)
        if site.kind == "put":
            return self._can_put(worker, role, state)
        if not all(self._state(worker, site, i).puts for i in range(len(site.states))):
            return False  # a state is not set yet
        if not role.is_first or site.staleness is None or site.kind != "elastic":
            return True
        return state.done[worker] - min(state.done[w] for w in self._living(state)) <= site.staleness

    def _can_put(self, worker: int, role: MessageRole, state: GroupState) -> bool:
        """Whether a message of a put may be processed.

        Only the first member sends the value; the others send a mark at the same line. A mark waits for its
        put. A put other than the first waits until all members have reached their mark.
        """
        put_number = state.marks[worker] + role.is_first  # of this put, from 1
        if worker != state.members[0]:
            return state.puts >= put_number
        if put_number == 1 or not role.is_first:
            return True
        return not self._without_mark(role.site, state, put_number)

    def blocked_put(self) -> tuple[Site, list[int]] | None:
        """The site of a put that waits, and the live workers that have not reached their mark; or None."""
        for state in self.group_states.values():
            sender = state.members[0]
            role = self._next_role(sender)
            if role is None or role.site.kind != "put" or self._can_process(sender, role):
                continue
            if self._state(sender, role.site) is state:
                return role.site, self._without_mark(role.site, state, state.marks[sender] + 1)
        return None

    def blocked_workers(self) -> tuple[list[int], list[int]]:
        """Return the live workers that wait for this server, and those that do not, both sorted.

        A worker waits if one of its messages is not processed yet, or has no answer yet. One of the workers
        that do not wait blocks the others.
        """
        waiting = {worker for worker, tags in self.backlog.items() if tags}
        for state in self.group_states.values():
            for unit in state.units.values():
                waiting |= {worker for worker, _, _ in unit.unanswered}
                waiting |= {w for w, queue in unit.queue.items() if any(self._pulls(s) for s, _ in queue)}
        idle = [worker for worker in range(self.sites.workers) if worker not in waiting | self.departed]
        return sorted(waiting - self.departed), idle

    def _pulls(self, site_number: int) -> bool:
        return self.sites.all[site_number].kind == "elastic"

    def _without_mark(self, site: Site, state: GroupState, put_number: int) -> list[int]:
        """The live workers that have not reached their marks of a put; `put_number` counts puts from 1."""
        members = (worker for worker in self._living(state) if worker != state.members[0])
        return [worker for worker in members if not self._has_mark(worker, site, state, put_number)]

    def _next_role(self, worker: int) -> MessageRole | None:
        """The meaning of a worker's next message; None if there is none, or if it is a leave message."""
        tags = self.backlog[worker]
        return self.roles.get(tags[0]) if tags else None

    def _has_mark(self, worker: int, site: Site, state: GroupState, put_number: int) -> bool:
        """Whether a worker's next message is its mark of put `put_number` to the state of `site`."""
        role = self._next_role(worker)
        if role is None or state.marks[worker] != put_number - 1:
            return False
        return role.site.kind == "put" and role.site.states == site.states

    def _accept(self, worker: int, tag: int, role: MessageRole) -> Iterator[Effect]:
        """Process a message: set or get a state, or queue a request for its unit."""
        site, state = role.site, self._state(worker, role.site)
        if role.is_first:
            self.counts[site.number, worker] = self.counts.get((site.number, worker), 0) + 1
        request = self.counts[site.number, worker] - 1
        if site.kind == "put":
            state.marks[worker] += role.is_first
            if worker == state.members[0]:
                yield Effect("set", site.number, role.unit, worker, request, tag)
                state.puts += role.is_last
        elif site.kind == "get":
            yield Effect("answer", site.number, -1, worker, request)
        else:
            if role.is_first and site.mode == "async":
                state.tickets.append(worker)
            if role.has_data:
                unit = state.units[role.unit]
                unit.queue[worker].append((site.number, request))
                if site.kind == "exchange":
                    unit.unanswered.append((worker, site.number, request))
                self._touched.append((state, role.unit))

    def _serve(self) -> Iterator[Effect]:
        """Yield all effects of the touched units that are possible now."""
        while self._touched:
            state, unit_number = self._touched.pop(0)
            while not self.failed and (effects := self._step(state, unit_number)) is not None:
                yield from effects
        self._touched.clear()

    def _step(self, state: GroupState, unit_number: int) -> Iterator[Effect] | None:
        """The next effects of a unit, None if there are none."""
        unit = state.units[unit_number]
        for unanswered in unit.unanswered:
            if self._is_due(unit, unanswered):
                return self._answer(state, unit_number, unanswered)
        if unit.added and not self._missing(state, unit):
            return self._apply(unit_number, unit)
        worker = self._next(state, unit)
        return None if worker is None else self._serve_request(state, unit_number, worker)

    def _missing(self, state: GroupState, unit: ServedUnit) -> list[int]:
        """The workers whose terms an update still lacks, in rank order; departed ones only if queued."""
        return [
            worker
            for worker in state.members
            if worker not in unit.added and (worker not in self.departed or unit.queue[worker])
        ]

    def _next(self, state: GroupState, unit: ServedUnit) -> int | None:
        """The worker to serve next; None if its message for this unit has not arrived."""
        waiting = [worker for worker in state.members if unit.queue[worker]]
        if not waiting:
            return None
        site = self.sites.all[unit.queue[waiting[0]][0][0]]
        if site.kind == "exchange":
            first = next(iter(self._missing(state, unit)), None)
            return first if first in waiting else None
        if site.mode == "hogwild":
            return waiting[0]
        order = state.tickets if site.mode == "async" else state.members
        while site.mode == "round_robin" or unit.turn < len(order):
            worker = order[unit.turn % len(order)]
            if worker not in self.departed:
                return worker if worker in waiting else None
            unit.turn += 1
        return None

    def _serve_request(self, state: GroupState, unit_number: int, worker: int) -> Iterator[Effect]:
        """Serve the oldest request of a worker for a unit: a term, or a complete elastic update."""
        unit = state.units[unit_number]
        site_number, request = unit.queue[worker].pop(0)
        if self.sites.all[site_number].kind == "elastic":
            unit.turn += 1
            if state.count_answer(site_number, worker):
                state.done[worker] += 1
                state.drop_served_tickets()
            yield Effect("pull", site_number, unit_number, worker, request)
            return
        if unit.added and site_number != unit.site:
            lines = sorted(self.sites.all[index].span.line for index in (site_number, unit.site))
            problem = f"workers {unit.added[0]} and {worker} reached different exchanges of one state"
            yield self._fail(f"{problem}, of lines {lines[0]} and {lines[1]}")
            return
        unit.site = site_number
        unit.added.append(worker)
        yield Effect("add", site_number, unit_number, worker, request)

    def _apply(self, unit_number: int, unit: ServedUnit) -> Iterator[Effect]:
        """Apply the update: all terms have been added."""
        workers, unit.added = tuple(unit.added), []
        update = unit.applied.get(unit.site, 0)
        unit.applied[unit.site] = update + 1
        yield Effect("apply", unit.site, unit_number, workers[0], update, workers=workers)

    def _is_due(self, unit: ServedUnit, unanswered: tuple[int, int, int]) -> bool:
        """Whether the update of a request is applied, or may be missing (`staleness`)."""
        _, site_number, request = unanswered
        staleness = self.sites.all[site_number].staleness or 0
        return unit.applied.get(site_number, 0) >= request + 1 - staleness

    def _answer(self, state: GroupState, unit_number: int, due: tuple[int, int, int]) -> Iterator[Effect]:
        """Answer with a unit or, if workers read nothing, one token after the request's last unit."""
        state.units[unit_number].unanswered.remove(due)
        worker, site_number, request = due
        if any(buffer.content == "data" for buffer in self.sites.all[site_number].down):
            yield Effect("answer", site_number, unit_number, worker, request)
        elif state.count_answer(site_number, worker):
            yield Effect("answer", site_number, -1, worker, request)

    def _deadlock(self) -> Iterator[Effect]:
        """Fail if a state will never be set although a message waits for it.

        The first member of its group has left, or requests the state before setting it.
        """
        for (name, _), state in self.group_states.items():
            sender = state.members[0]
            is_alive = sender not in self.departed
            for worker in [sender] if is_alive else self._living(state):
                role = self._next_role(worker)
                if role is None or name not in role.site.states:
                    continue
                is_put = role.site.kind == "put"
                if is_alive and not is_put and not state.puts:
                    reason = f"asks for `{name}`, which is not set: call run.start first"
                    yield self._fail(f"worker {sender} {reason}")
                    return
                if not is_alive and (is_put or not state.puts) and not self._can_process(worker, role):
                    yield self._fail(f"worker {sender}, which sets `{name}`, is gone")
                    return

    def _fail(self, text: str) -> Effect:
        self.failed = text
        return Effect("fail", text=text)
