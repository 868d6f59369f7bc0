"""The protocol of workers and servers, explored exhaustively: every order in which messages can arrive.

The servers are those that the runtime runs, `commplan.protocol.server`; workers are what `protocol.worker`
says. A model has few of each, and units of one element: what happens to one unit does not depend on how many
there are, and workers are alike. A state of the model is where the workers are, what is under way, and the
servers; from each every possible next event is tried. Proved of every path:

- nobody waits for ever: where nothing can happen any more, every living worker is done;
- no push is lost and none counts twice: what was answered has been applied once, on every unit;
- updates of an exchange have one term of each worker that lives, all of the same request, in rank order;
- an answer is no older than `staleness` says, and no asynchronous worker further ahead;
- `round_robin` goes round, and `async` meets a worker on all units of a server before the next.

With `deaths`, workers may die at any moment, and servers hear of it at different ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Sequence
from typing import Literal, NamedTuple

import msgspec

from commplan.diagnostics import Span
from commplan.ir.schedule import Leaf
from commplan.ir.types import DType
from commplan.protocol.server import Effect, Machine
from commplan.protocol.sites import LEAVE, Buffer, Chunk, Kind, Mode, Site, Sites
from commplan.protocol.units import Layout, weights
from commplan.protocol.worker import receives, sends

Event = tuple[str, int, int]  # what happens, to which worker, and at which server, or -1
LOST = -1  # in a channel: the server hears that the worker has died


@dataclasses.dataclass(frozen=True)
class Model:
    """What is explored. units: of each server. acknowledged: pushes that are answered by a token.

    requests: of each worker, after the put with which all begin; `puts` of them in all, evenly between.
    """

    kind: Literal["exchange", "elastic"] = "exchange"
    mode: Mode | None = None
    workers: int = 2
    servers: int = 1
    units: int = 1
    requests: int = 2
    staleness: int | None = None
    acknowledged: bool = False
    gets: bool = False
    puts: int = 1
    deaths: int = 0

    def __str__(self) -> str:
        what = f"exchange, staleness {self.staleness or 0}" if self.mode is None else f"{self.mode}"
        if self.mode is not None and self.staleness is not None:
            what += f", staleness {self.staleness}"
        extra = [_counted(self.requests, "request"), *(["acknowledged"] if self.acknowledged else [])]
        extra += ["gets"] * self.gets + [f"{self.puts} puts"] * (self.puts > 1)
        extra += [f"up to {_counted(self.deaths, 'death')}"] * (self.deaths > 0)
        size = ", ".join(
            (_counted(self.workers, "worker"), _counted(self.servers, "server"), _counted(self.units, "unit"))
        )
        return f"{what}: {size}, {', '.join(extra)}"


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


@dataclasses.dataclass(frozen=True)
class Explored:
    """states: how many there are. wrong: what is wrong, if anything; path: the events that lead there."""

    model: Model
    states: int
    wrong: str = ""
    path: tuple[str, ...] = ()


def sites_of(model: Model) -> Sites:
    """The sites of a model: a put, the exchange or meeting, and a get."""
    span = Span(1, 1, 1, 1)
    total = model.servers * model.units
    layout = weights((Leaf("", (total,), DType.F32),), (0,), model.servers, 4)
    tags = iter(range(16, 10_000))

    def data() -> Buffer:
        chunks = tuple(Chunk(u.server, u.start, u.size, next(tags), u.number) for u in layout.units)
        return Buffer("data", DType.F32, total, chunks, "w", (0,))

    def token() -> Buffer:
        chunks = tuple(Chunk(j, 0, 1, next(tags)) for j in range(model.servers))
        return Buffer("token", DType.I32, 1, chunks)

    down = token() if model.acknowledged else data()
    met = _site(1, model.kind, layout, (data(),), (down,), span)
    met = msgspec.structs.replace(met, mode=model.mode, staleness=model.staleness)
    put = msgspec.structs.replace(_site(0, "put", layout, (data(),), (), span), token=(token(),))
    get = _site(2, "get", layout, (token(),), (data(),), span)
    return Sites((put, met, get), (("worker", model.workers),), model.servers)


def _site(
    number: int, kind: Kind, layout: Layout, up: tuple[Buffer, ...], down: tuple[Buffer, ...], span: Span
) -> Site:
    result = f"{kind}.{number}"
    return Site(
        number, kind, "step", result, span, "hub", 0, layout.servers, (), ("state",), (layout,), up, down
    )  # fmt: skip


def program(model: Model) -> tuple[int, ...]:
    """The sites that a worker comes to: a put, then requests with the other puts between."""
    found = [0]
    for number in range(model.requests):
        found += [1, 2] if model.gets else [1]
        if number < model.puts - 1:
            found.append(0)
    return tuple(found)


class Worker(NamedTuple):
    """at: how far it is in its program. missing: answers that it waits for."""

    at: int = 0
    missing: frozenset[tuple[int, int]] = frozenset()
    dead: bool = False
    done: bool = False


class Book(NamedTuple):
    """What has happened to a unit.

    counts: requests of each worker that are in it. updates: how many, of an exchange. adding: terms since the
    last one. order: whom it has met since all units of its server agreed.
    """

    counts: tuple[int, ...]
    updates: int = 0
    adding: tuple[int, ...] = ()
    order: tuple[int, ...] = ()


class BrokenError(Exception):
    """Something that must never happen has happened."""


class World:
    """Workers, what is under way to each server, servers, and the books that are kept of them."""

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
        self.answered = dict.fromkeys(range(model.workers), 0)  # requests of which every answer has come
        self.deaths, self.failed = 0, False
        for worker in range(model.workers):
            self._advance(worker)

    def copy(self) -> World:
        made = World.__new__(World)
        vars(made).update(vars(self))
        made.workers, made.channels = list(self.workers), dict(self.channels)
        made.machines, made.keys = list(self.machines), list(self.keys)
        made.books, made.answered = dict(self.books), dict(self.answered)
        return made

    def key(self) -> tuple[Hashable, ...]:
        """Equal for worlds in which the same can happen from now on; its length is the model's."""
        return (*self.workers, *self.channels.values(), *self.keys, *self.books.values(), self.failed)

    def events(self) -> Iterator[Event]:
        """What may happen next: a message arrives, or a worker dies."""
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
        what, worker, server = event
        made = self.copy()
        if what == "dies":
            made.deaths += 1
            made.workers[worker] = self.workers[worker]._replace(dead=True)
            for other in range(self.model.servers):
                made.channels[worker, other] = (LOST,)
            return made
        tag, *rest = self.channels[worker, server]
        made.channels[worker, server] = tuple(rest)
        made.machines[server] = machine = self.machines[server].copy()
        effects = machine.lost(worker) if tag == LOST else machine.arrive(worker, tag)
        made.keys[server] = machine.key()
        for effect in effects:
            made._keep(server, effect)
        return made

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
        self.books[effect.unit] = Book(counts, order=(*book.order, worker))
        if mode == "async" and not self.deaths:
            self._agree([u.number for u in self.sites.all[0].layout.owned(server)])

    def _agree(self, units: list[int]) -> None:
        """Units of one server meet workers in one order; what all have done already is forgotten."""
        orders = [self.books[unit].order for unit in units]
        shared = min(map(len, orders))
        longest = max(orders, key=len)
        if any(order != longest[: len(order)] for order in orders):
            raise BrokenError(f"units of one server meet workers in different orders: {orders}")
        for unit in units:
            self.books[unit] = self.books[unit]._replace(order=self.books[unit].order[shared:])

    def _fresh(self, server: int, effect: Effect) -> None:
        """An answer of an exchange has what it must have."""
        site = self.sites.all[effect.site]
        if site.kind != "exchange":
            return
        units = [effect.unit] if effect.unit >= 0 else [u.number for u in site.layout.owned(server)]
        for unit in units:
            late = effect.request + 1 - (site.staleness or 0) - self.books[unit].updates
            if late > 0:
                raise BrokenError(f"worker {effect.worker} is answered {late} updates too early")

    def _answer(self, server: int, effect: Effect) -> None:
        """The answer reaches its worker at once: when it does changes nothing for anybody else."""
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
        """Nothing can happen any more. Raises `BrokenError` where somebody waits, or a push is lost."""
        if self.failed:
            return
        for number, worker in enumerate(self.workers):
            if not worker.dead and not worker.done:
                raise BrokenError(f"worker {number} waits for ever for {len(worker.missing)} answers")
            for unit, book in self.books.items():
                if book.counts[number] < self.answered[number]:
                    raise BrokenError(f"unit {unit} lacks a push of worker {number} that was answered")
                if not worker.dead and book.counts[number] != self.model.requests:
                    raise BrokenError(f"unit {unit} has {book.counts[number]} pushes of worker {number}")
        if not all(machine.over for machine in self.machines):
            raise BrokenError("a server does not end after all workers have left")


class _Seen:
    """The states so far: the number of each, and how it was come to.

    States are the same where their keys are, not where a hash of them is. A state shares nearly all parts of
    its key with others, so that a part is kept once, and a key is the numbers of its parts.
    """

    def __init__(self, start: World) -> None:
        self.parts: dict[Hashable, int] = {}
        self.numbers: dict[tuple[int, ...], int] = {self._key(start): 0}
        self.ways: list[tuple[int, Event] | None] = [None]

    def _key(self, world: World) -> tuple[int, ...]:
        return tuple(self.parts.setdefault(part, len(self.parts)) for part in world.key())

    def add(self, world: World, before: int, event: Event) -> int | None:
        """The number of a new state, to which `event` leads from state `before`; None where it is known."""
        number = len(self.ways)
        if self.numbers.setdefault(self._key(world), number) < number:
            return None
        self.ways.append((before, event))
        return number

    def path(self, number: int) -> tuple[str, ...]:
        """The events that lead to a state."""
        found: list[str] = []
        while (way := self.ways[number]) is not None:
            number, event = way
            found.append(_said(event))
        return tuple(reversed(found))


def explore(model: Model, *, most: int = 10_000_000) -> Explored:
    """Every reachable state of `model`, or the first one where something is wrong with the way to it.

    Raises ValueError where there are more than `most` states.
    """
    start = World(model, sites_of(model))
    seen = _Seen(start)
    left = [(start, 0)]
    while left:
        world, number = left.pop()
        events = list(world.events())
        try:
            if not any(event[0] == "arrives" for event in events):
                world.end()
        except BrokenError as broken:
            return Explored(model, len(seen.ways), str(broken), seen.path(number))
        for event in events:
            try:
                after = world.after(event)
            except BrokenError as broken:
                return Explored(model, len(seen.ways), str(broken), (*seen.path(number), _said(event)))
            new = seen.add(after, number, event)
            if new is not None:
                left.append((after, new))
        if len(seen.ways) > most:
            raise ValueError(f"{model} has more than {most} states")
    return Explored(model, len(seen.ways))


def _said(event: Event) -> str:
    what, worker, server = event
    if what == "dies":
        return f"worker {worker} dies"
    return f"a message of worker {worker} reaches server {server}"


# Workers, servers, units of each server, requests of each worker.
QUICK = ((2, 1, 2, 2), (3, 1, 1, 2), (2, 2, 1, 2))
WHOLE = (*QUICK, (4, 2, 1, 1), (4, 1, 1, 2), (3, 2, 1, 1), (3, 1, 2, 1))
_MODES: tuple[Mode, ...] = ("round_robin", "async", "hogwild")
_DEADLY = 4  # workers times servers beyond which deaths, too, are too many to try where nobody waits


def models(sizes: Sequence[tuple[int, int, int, int]] = QUICK) -> tuple[Model, ...]:
    """What is explored: every order of service in every size, with deaths and without."""
    found: list[Model] = []
    for workers, servers, units, requests in sizes:
        made = Model(workers=workers, servers=servers, units=units, requests=requests)
        for staleness in (0, 1):
            stale = dataclasses.replace(made, staleness=staleness)
            found += [stale, dataclasses.replace(stale, acknowledged=True)]
        found += [dataclasses.replace(made, gets=True), dataclasses.replace(made, deaths=1)]
        for mode in _MODES:
            one = dataclasses.replace(made, kind="elastic", mode=mode)
            found += [one, dataclasses.replace(one, staleness=1)]
            if mode == "round_robin" or workers * servers <= _DEADLY:
                found.append(dataclasses.replace(one, deaths=1))
    twice = Model(puts=2)
    found += [twice, dataclasses.replace(twice, kind="elastic", mode="async", gets=True)]
    return tuple(found)
