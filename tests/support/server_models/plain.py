"""Workers and servers as one whole, explored without reductions: the reference for other methods.

A worker that dies immediately loses its messages in flight, to every server, and the checks treat it as dead
from then on; servers detect it at different times.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import NamedTuple

from commplan.protocol.server import Effect, Machine
from commplan.protocol.sites import LEAVE, Sites, receives, sends

from .models import Model, program, sites_of
from .one_server import Book, BrokenError

Event = tuple[str, int, int]  # the event, its worker, and its server, or -1
LOST = -1  # in a channel: the server hears that the worker has died


class Worker(NamedTuple):
    """at: how far it is in its program. missing: answers that it waits for."""

    at: int = 0
    missing: frozenset[tuple[int, int]] = frozenset()
    dead: bool = False
    done: bool = False


class World:
    """Workers, messages in flight to each server, servers, and the histories of their units."""

    def __init__(self, model: Model, sites: Sites) -> None:
        self.model, self.sites, self.program = model, sites, program(model)
        self.workers = [Worker() for _ in range(model.workers)]
        self.channels: dict[tuple[int, int], tuple[int, ...]] = {
            (w, s): () for w in range(model.workers) for s in range(model.servers)
        }
        self.machines = [Machine(sites, s) for s in range(model.servers)]
        self.keys = [machine.key() for machine in self.machines]  # an event changes one of them at most
        zero = Book((0,) * model.workers)
        self.books = {unit.number: zero for unit in sites.all[0].layout.units}
        self.answered = dict.fromkeys(range(model.workers), 0)  # requests with all their answers
        self.deaths, self.failed = 0, False
        for worker in range(model.workers):
            self._advance(worker)

    def copy(self) -> World:
        result = World.__new__(World)
        vars(result).update(vars(self))
        result.workers, result.channels = list(self.workers), dict(self.channels)
        result.machines, result.keys = list(self.machines), list(self.keys)
        result.books, result.answered = dict(self.books), dict(self.answered)
        return result

    def key(self) -> tuple[Hashable, ...]:
        """Equal for worlds with the same future; its length is that of the model."""
        return (*self.workers, *self.channels.values(), *self.keys, *self.books.values(), self.failed)

    def events(self) -> Iterator[Event]:
        """The possible next events: a message arrives, or a worker dies."""
        if self.failed:
            return
        for (worker, server), tags in self.channels.items():
            if tags:
                yield "arrives", worker, server
        if self.deaths < self.model.deaths:
            for number, worker in enumerate(self.workers):
                if not worker.dead and not worker.done:
                    yield "dies", number, -1

    def after(self, event: Event) -> World:
        """The world after an event. Raises `BrokenError`."""
        kind, worker, server = event
        result = self.copy()
        if kind == "dies":
            result.deaths += 1
            result.workers[worker] = self.workers[worker]._replace(dead=True)
            for other in range(self.model.servers):
                result.channels[worker, other] = (LOST,)
            return result
        tag, *remaining = self.channels[worker, server]
        result.channels[worker, server] = tuple(remaining)
        result.machines[server] = machine = self.machines[server].copy()
        effects = machine.lost(worker) if tag == LOST else machine.arrive(worker, tag)
        result.keys[server] = machine.key()
        for effect in effects:
            result._keep(server, effect)
        return result

    def _advance(self, number: int) -> None:
        """Post the next requests of a worker, up to one whose answer it must wait for."""
        worker, program = self.workers[number], self.program
        while not worker.missing and not worker.done:
            if worker.at == len(program):
                worker = worker._replace(done=True)
                for server in range(self.model.servers):
                    self.channels[number, server] += (LEAVE,)
                break
            site = self.sites.all[program[worker.at]]
            for move in sends(site, first=number == 0):
                self.channels[number, move.server] += (move.tag,)
            missing = frozenset((move.server, move.tag) for move in receives(site))
            worker = worker._replace(at=worker.at + 1, missing=missing)
        self.workers[number] = worker

    def _keep(self, server: int, effect: Effect) -> None:
        kind, book = effect.kind, self.books.get(effect.unit)
        if kind == "fail":
            self.failed = True
            if not self.workers[0].dead:
                raise BrokenError(f"server {server} gives up: {effect.text}")
        elif kind == "add" and book is not None:
            if book.counts[effect.worker] + book.adding.count(effect.worker) != effect.request:
                raise BrokenError(f"request {effect.request} of worker {effect.worker} is added out of turn")
            self.books[effect.unit] = book._replace(adding=(*book.adding, effect.worker))
        elif kind == "apply" and book is not None:
            self._applied(effect, book)
        elif kind == "pull" and book is not None:
            self._pulled(server, effect, book)
            self._answer(server, effect)
        elif kind == "answer":
            self._fresh(server, effect)
            self._answer(server, effect)

    def _applied(self, effect: Effect, book: Book) -> None:
        absent = [
            number
            for number, worker in enumerate(self.workers)
            if number not in effect.workers and not worker.dead and book.counts[number] < self.model.requests
        ]
        if absent:
            raise BrokenError(f"an update is applied without the term of worker {absent[0]}, which lives")
        if effect.workers != book.adding or list(effect.workers) != sorted(set(effect.workers)):
            raise BrokenError(f"an update adds terms of workers {book.adding}, not each once in rank order")
        counts = tuple(n + (w in effect.workers) for w, n in enumerate(book.counts))
        self.books[effect.unit] = Book(counts, book.updates + 1)

    def _pulled(self, server: int, effect: Effect, book: Book) -> None:
        worker, mode = effect.worker, self.model.mode
        if book.counts[worker] != effect.request:
            raise BrokenError(f"request {effect.request} of worker {worker} is met out of turn")
        if mode == "round_robin" and not self.deaths and sum(book.counts) % self.model.workers != worker:
            raise BrokenError(f"worker {worker} is met when it is not its turn")
        ahead = book.counts[worker] - min(
            n for w, n in enumerate(book.counts) if w == worker or not self.workers[w].dead
        )
        if self.model.staleness is not None and ahead > self.model.staleness:
            raise BrokenError(f"worker {worker} is {ahead} requests ahead")
        counts = tuple(n + (w == worker) for w, n in enumerate(book.counts))
        self.books[effect.unit] = Book(counts)
        if mode == "async" and not self.deaths:
            self.books[effect.unit] = Book(counts, order=(*book.order, worker))
            self._agree([u.number for u in self.sites.all[0].layout.owned(server)])

    def _agree(self, units: list[int]) -> None:
        """Units of one server serve workers in one order; drops the common prefix."""
        orders = [self.books[unit].order for unit in units]
        shared = min(map(len, orders))
        longest = max(orders, key=len)
        if any(order != longest[: len(order)] for order in orders):
            raise BrokenError(f"units of one server meet workers in different orders: {orders}")
        for unit in units:
            self.books[unit] = self.books[unit]._replace(order=self.books[unit].order[shared:])

    def _fresh(self, server: int, effect: Effect) -> None:
        """An answer of an exchange includes the required updates."""
        site = self.sites.all[effect.site]
        if site.kind != "exchange":
            return
        units = [effect.unit] if effect.unit >= 0 else [u.number for u in site.layout.owned(server)]
        for unit in units:
            late = effect.request + 1 - (site.staleness or 0) - self.books[unit].updates
            if late > 0:
                raise BrokenError(f"worker {effect.worker} is answered {late} updates too early")

    def _answer(self, server: int, effect: Effect) -> None:
        """The answer reaches its worker at once: the delay affects no other process."""
        worker, site = self.workers[effect.worker], self.sites.all[effect.site]
        chunks = [c for b in site.down for c in b.chunks if c.server == server]
        chunks = [c for c in chunks if effect.unit in (-1, c.unit)]
        if worker.dead:
            return
        came = frozenset((server, chunk.tag) for chunk in chunks)
        if not came <= worker.missing:
            raise BrokenError(f"worker {effect.worker} gets an answer that it does not wait for")
        self.workers[effect.worker] = worker._replace(missing=worker.missing - came)
        if worker.missing == came:
            self.answered[effect.worker] += site.number == 1
            self._advance(effect.worker)

    def end(self) -> None:
        """No event is possible. Raises `BrokenError` if a worker waits, or a push is lost."""
        if self.failed:
            return
        for number, worker in enumerate(self.workers):
            if not worker.dead and not worker.done:
                raise BrokenError(f"worker {number} waits forever for {len(worker.missing)} answers")
            for unit, book in self.books.items():
                if book.counts[number] < self.answered[number]:
                    raise BrokenError(f"unit {unit} lacks a push of worker {number} that was answered")
                if not worker.dead and book.counts[number] != self.model.requests:
                    raise BrokenError(f"unit {unit} has {book.counts[number]} pushes of worker {number}")
        if not all(machine.all_departed for machine in self.machines):
            raise BrokenError("a server does not end after all workers have left")


def explore_plainly(model: Model) -> tuple[int, str]:
    """The number of states of `model`, and the first error found."""
    start = World(model, sites_of(model))
    visited, pending = {start.key()}, [start]
    while pending:
        world = pending.pop()
        events = list(world.events())
        try:
            if not any(event[0] == "arrives" for event in events):
                world.end()
            for event in events:
                after = world.after(event)
                if after.key() not in visited:
                    visited.add(after.key())
                    pending.append(after)
        except BrokenError as broken:
            return len(visited), str(broken)
    return len(visited), ""
