"""One server and all its possible environments: every order of messages and deaths.

A server observes a worker only through its messages. A worker posts its messages leg by leg: a leg ends with
a request whose answers it waits for, and the next one begins when *every* server has answered. Messages may
take any time. So every sequence that a server observes among other servers, with a leg posted late, it also
observes alone, with the leg posted at once and delayed. A property of a server is therefore proved for any
number of servers when it is proved for one (compositional model checking; Clarke, Long, McMillan 1989):

- no push is lost and none counts twice: an acknowledged push has been applied once, on every unit;
- updates of an exchange have one term of each live worker, all of the same request, in rank order;
- an answer is no older than `staleness` allows, and no asynchronous worker further ahead;
- requests read a state that has been put as often as their worker has reached a put, no more and no less;
- `round_robin` is cyclic, and `async` serves a worker on all units of a server before the next.

Absence of deadlock follows from one more property, *progress*:

- if at least n whole legs of each present worker have arrived at a server, the server has answered the first
  n of all of them. A worker that has left, or whose death was detected, is not present.

Suppose that no event is possible with several servers, and some worker waits. Among the waiting workers take
one whose last leg, its n-th, is the earliest, and a server that has not answered it. All posted messages have
arrived, in whole legs, and every worker that does not wait has left or is known to be dead everywhere. So n
legs or more of each present worker have arrived, and by progress the server has answered the first n of all
of them, a contradiction.

A worker may die at any time: each server has then received any prefix of its posted messages when it detects
the death. So a death is an event of each server, and the servers share only the number of legs that the
worker has posted.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from commplan.protocol.server import Effect, Machine
from commplan.protocol.sites import LEAVE, Sites, receives, sends

from .models import Model, program

NEVER = 127  # a leg that no worker comes to


class Event(NamedTuple):
    """An event at a server: the next message of a worker, or the detection of its death."""

    worker: int
    dies: bool

    def said(self, server: int) -> str:
        if self.dies:
            return f"worker {self.worker} dies, as server {server} hears"
        return f"a message of worker {self.worker} reaches server {server}"


class Message(NamedTuple):
    """`leg`: the leg that posts it. `opens`: the answers that the server owes after its arrival."""

    tag: int
    leg: int
    opens: frozenset[int] = frozenset()


class Book(NamedTuple):
    """The history of a unit.

    Attributes:
        counts: requests of each worker that it contains.
        updates: the number of updates of an exchange.
        adding: terms since the last update.
        order: the workers served since all units of its server agreed.
        puts: the number of puts.
    """

    counts: tuple[int, ...]
    updates: int = 0
    adding: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    puts: int = 0

    def counting(self, worker: int, number: int = 1) -> Book:
        """The book with so many more requests of a worker."""
        counts = list(self.counts)
        counts[worker] += number
        return self._replace(counts=tuple(counts))


class BrokenError(Exception):
    """Something that must never happen has happened."""


def legs(model: Model, sites: Sites) -> tuple[tuple[int, ...], ...]:
    """The sites of a worker's program, cut behind each whose answers it waits for; the last one leaves."""
    parts: list[tuple[int, ...]] = [()]
    for number in program(model):
        parts[-1] += (number,)
        if receives(sites.all[number]):
            parts.append(())
    return tuple(parts)


def stream(model: Model, sites: Sites, worker: int, server: int) -> tuple[Message, ...]:
    """All that a worker sends to a server, in its order, if it lives."""
    messages: list[Message] = []
    parts = legs(model, sites)
    for number, leg in enumerate(parts):
        for site in map(sites.all.__getitem__, leg):
            opens = frozenset(move.tag for move in receives(site) if move.server == server)
            for move in sends(site, first=worker == 0):
                if move.server == server:
                    messages.append(Message(move.tag, number, opens))
                    opens = frozenset[int]()
    return (*messages, Message(LEAVE, len(parts) - 1))


class Desk:
    """A server, its received messages, and the histories of its units.

    Attributes:
        sent: the number of messages received from each worker.
        missing: the answers that each worker waits for here.
        answered: the number of whole legs of each worker that have been answered.
        heard: the workers that are known to be dead.
    """

    def __init__(self, model: Model, sites: Sites, server: int) -> None:
        self.model, self.sites, self.server = model, sites, server
        self.legs = legs(model, sites)
        self.streams = tuple(stream(model, sites, worker, server) for worker in range(model.workers))
        self.machine = Machine(sites, server)
        self.sent, self.answered = [0] * model.workers, [0] * model.workers
        self.missing = [frozenset[int]()] * model.workers
        self.heard: frozenset[int] = frozenset()
        self.units = tuple(unit.number for unit in sites.all[0].layout.owned(server))
        self.books = dict.fromkeys(self.units, Book((0,) * model.workers))
        self.failed = False

    def copy(self) -> Desk:
        server = copy.copy(self)
        server.machine = self.machine.copy()
        server.sent, server.answered = list(self.sent), list(self.answered)
        server.missing, server.books = list(self.missing), dict(self.books)
        return server

    def key(self) -> tuple[Hashable, ...]:
        """Equal for desks at which the same can happen from now on."""
        sent = tuple(-1 if worker in self.heard else number for worker, number in enumerate(self.sent))
        books = tuple(self.books.values())
        return self.machine.key(), sent, tuple(self.missing), tuple(self.answered), books, self.failed

    def gone(self, worker: int) -> bool:
        """Whether a worker has left, or is known to be dead."""
        return worker in self.heard or self.sent[worker] == len(self.streams[worker])

    def leg(self, worker: int) -> int:
        """The leg of the next message of a worker, which has sent all those before in whole."""
        return NEVER if self.gone(worker) else self.streams[worker][self.sent[worker]].leg

    def _amid(self, worker: int) -> bool:
        """Whether a leg of a worker has arrived in part."""
        number = self.sent[worker]
        return number > 0 and self.streams[worker][number - 1].leg == self.leg(worker)

    def events(self) -> Iterator[Event]:
        """The possible next events, if other servers have answered everything that this one has."""
        for worker in () if self.failed else range(self.model.workers):
            if self.leg(worker) <= self.answered[worker]:
                yield Event(worker, False)
            if len(self.heard) < self.model.deaths and not self.gone(worker):
                yield Event(worker, True)

    def after(self, event: Event) -> Desk:
        """The desk after an event. Raises `BrokenError`."""
        result, worker = self.copy(), event.worker
        if event.dies:
            result.heard |= {worker}
            result.missing[worker] = frozenset()
            result.books = {  # units serve the live workers in one order
                number: book._replace(order=tuple(other for other in book.order if other != worker))
                for number, book in self.books.items()
            }
            effects = result.machine.lost(worker)
        else:
            message = self.streams[worker][self.sent[worker]]
            result.sent[worker] += 1
            result.missing[worker] |= message.opens
            effects = result.machine.arrive(worker, message.tag)
        for effect in effects:
            result._keep(effect)
        if not result.failed:
            result._progress()
            for dead in result.heard:
                result._settle(dead)
        return result

    def _settle(self, worker: int) -> None:
        """Drop the messages of a dead worker when no more of them can be applied."""
        units = (unit for state in self.machine.group_states.values() for unit in state.units.values())
        if any(unit.queue[worker] for unit in units):
            return
        if any(worker in book.adding for book in self.books.values()):
            return
        self._counted(worker)
        self.answered[worker] = 0
        for unit, book in self.books.items():
            self.books[unit] = book.counting(worker, -book.counts[worker])

    def _counted(self, worker: int) -> None:
        """The acknowledged pushes of a worker that is gone are applied, and all of them if it left alive."""
        pushes = sum(leg[-1] == 1 for leg in self.legs[: self.answered[worker]])
        for unit, book in self.books.items():
            if book.counts[worker] < pushes:
                raise BrokenError(f"unit {unit} lacks a push of worker {worker} that was answered")
            if worker not in self.heard and book.counts[worker] != self.model.requests:
                raise BrokenError(f"unit {unit} has {book.counts[worker]} pushes of worker {worker}")

    def _progress(self) -> None:
        """All messages of present workers are answered; without any, everything has been applied."""
        present = [worker for worker in range(self.model.workers) if not self.gone(worker)]
        shared = 0 if any(map(self._amid, present)) else min(map(self.leg, present), default=0)
        for worker in present:
            if self.answered[worker] < shared:
                raise BrokenError(f"worker {worker} waits forever for {len(self.missing[worker])} answers")
        if present:
            return
        if not self.machine.all_departed:
            raise BrokenError(f"server {self.server} does not end after all workers have left")
        for worker in range(self.model.workers):
            self._counted(worker)

    def _keep(self, effect: Effect) -> None:
        kind, book = effect.kind, self.books.get(effect.unit)
        if kind == "fail":
            self.failed = True
            if 0 not in self.heard:
                raise BrokenError(f"server {self.server} gives up: {effect.text}")
        elif kind == "set" and book is not None:
            self.books[effect.unit] = book._replace(puts=book.puts + 1)
        elif kind == "add" and book is not None:
            self._put(effect, book)
            if book.counts[effect.worker] + book.adding.count(effect.worker) != effect.request:
                raise BrokenError(f"request {effect.request} of worker {effect.worker} is added out of turn")
            self.books[effect.unit] = book._replace(adding=(*book.adding, effect.worker))
        elif kind == "apply" and book is not None:
            self._applied(effect, book)
        elif kind == "pull" and book is not None:
            self._pulled(effect, book)
            self._answer(effect)
        elif kind == "answer":
            self._fresh(effect)
            self._answer(effect)

    def _applied(self, effect: Effect, book: Book) -> None:
        for worker in sorted({*range(self.model.workers)} - {*effect.workers} - self.heard):
            if book.counts[worker] < self.model.requests:
                raise BrokenError(f"an update is applied without the term of worker {worker}, which lives")
        if effect.workers != book.adding or list(effect.workers) != sorted(set(effect.workers)):
            raise BrokenError(f"an update adds terms of workers {book.adding}, not each once in rank order")
        counts = tuple(n + (w in effect.workers) for w, n in enumerate(book.counts))
        self.books[effect.unit] = book._replace(counts=counts, updates=book.updates + 1, adding=())

    def _pulled(self, effect: Effect, book: Book) -> None:
        worker, mode = effect.worker, self.model.mode
        self._put(effect, book)
        if book.counts[worker] != effect.request:
            raise BrokenError(f"request {effect.request} of worker {worker} is met out of turn")
        if mode == "round_robin" and not self.heard and sum(book.counts) % self.model.workers != worker:
            raise BrokenError(f"worker {worker} is met when it is not its turn")
        living = [number for w, number in enumerate(book.counts) if w == worker or w not in self.heard]
        ahead = book.counts[worker] - min(living)
        if self.model.staleness is not None and ahead > self.model.staleness:
            raise BrokenError(f"worker {worker} is {ahead} requests ahead")
        order = (*book.order, worker) if mode == "async" else ()
        self.books[effect.unit] = book.counting(worker)._replace(order=order)
        self._agree()

    def _put(self, effect: Effect, book: Book) -> None:
        """A request reads the last put before it."""
        sites = [site for leg in self.legs for site in leg if site != 2]
        place = [place for place, site in enumerate(sites) if site == 1][effect.request]
        puts = sites[:place].count(0)
        if book.puts != puts:
            request = f"request {effect.request} of worker {effect.worker}"
            raise BrokenError(f"{request} meets put {book.puts}, not put {puts}")

    def _agree(self) -> None:
        """Units of one server serve workers in one order; drops the common prefix."""
        orders = [book.order for book in self.books.values()]
        shared = min(map(len, orders))
        longest = max(orders, key=len)
        if any(order != longest[: len(order)] for order in orders):
            raise BrokenError(f"units of one server meet workers in different orders: {orders}")
        for unit, book in self.books.items():
            self.books[unit] = book._replace(order=book.order[shared:])

    def _fresh(self, effect: Effect) -> None:
        """An answer of an exchange includes the required updates."""
        site = self.sites.all[effect.site]
        if site.kind != "exchange":
            return
        for unit in [effect.unit] if effect.unit >= 0 else self.units:
            late = effect.request + 1 - (site.staleness or 0) - self.books[unit].updates
            if late > 0:
                raise BrokenError(f"worker {effect.worker} is answered {late} updates too early")

    def _answer(self, effect: Effect) -> None:
        """An answer is sent, and the worker waits for it, unless it has died."""
        worker, site = effect.worker, self.sites.all[effect.site]
        chunks = [c for b in site.down for c in b.chunks if c.server == self.server]
        came = frozenset(c.tag for c in chunks if effect.unit in (-1, c.unit))
        if not came <= self.missing[worker]:
            raise BrokenError(f"worker {worker} gets an answer that it does not wait for")
        self.missing[worker] -= came
        self.answered[worker] += not self.missing[worker]


class State(NamedTuple):
    """A state of a server.

    Attributes:
        arrived, lost: by worker the number of the state after its next message, and after its death, -1 if
        impossible.
        leg: by worker that of its next message, NEVER if there is none.
        answered: by worker the answered legs, NEVER if it is known to be dead.
        rank: a number that every event increases.
        failed, over: whether the server has failed, and whether all workers are gone.
    """

    arrived: list[int]
    lost: list[int]
    leg: tuple[int, ...]
    answered: tuple[int, ...]
    rank: int
    failed: bool
    over: bool

    @classmethod
    def of(cls, server: Desk) -> State:
        workers = range(server.model.workers)
        leg = tuple(map(server.leg, workers))
        answered = tuple(NEVER if w in server.heard else server.answered[w] for w in workers)
        rank = sum(len(server.streams[w]) if server.gone(w) else server.sent[w] for w in workers)
        after = [-1] * len(workers)
        return cls(after, [*after], leg, answered, rank, server.failed, all(map(server.gone, workers)))


@dataclasses.dataclass
class Graph:
    """All states of a server by number, from 0, the first; the error, and the events that lead to it."""

    states: list[State]
    wrong: str = ""
    path: tuple[str, ...] = ()


def explore_server(model: Model, sites: Sites, server: int, *, most: int) -> Graph:
    """Explore every state of a server of `model`, up to the first event that violates a property.

    Raises:
        ValueError: if there are more than `most` states.
    """
    start = Desk(model, sites, server)
    graph, numbers = Graph([State.of(start)]), {start.key(): 0}
    ways: list[tuple[int, Event] | None] = [None]
    queue = collections.deque([(start, 0)])
    while queue:
        current, number = queue.popleft()  # breadth first, so that the path to an error is a shortest one
        for event in current.events():
            try:
                after = current.after(event)
            except BrokenError as broken:
                graph.wrong, graph.path = str(broken), _path(ways, number, event, server)
                return graph
            successor = numbers.setdefault(after.key(), len(ways))
            if successor == len(ways):
                ways.append((number, event))
                graph.states.append(State.of(after))
                queue.append((after, successor))
            state = graph.states[number]
            (state.lost if event.dies else state.arrived)[event.worker] = successor
        if len(ways) > most:
            raise ValueError(f"{model} has more than {most} states")
    return graph


def _path(ways: list[tuple[int, Event] | None], number: int, last: Event, server: int) -> tuple[str, ...]:
    events = [last.said(server)]
    while (way := ways[number]) is not None:
        number, event = way
        events.append(event.said(server))
    return tuple(reversed(events))
