"""Workers and servers of one job in one process: everything of a server but MPI is the real one.

What a worker sends waits on its wire to the server, which keeps the order, as MPI does. Which wire delivers
next, or which worker goes on, is drawn: every worker and every wire has a pace of its own. A worker that is
killed leaves some of what it had sent; each server learns of its death when the rest has come.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.servers.cases import Case, Tree, asked, functions, noise, program, started, stepped
from commplan.protocol.build_sites import sites as survey
from commplan.protocol.sites import LEAVE, Buffer, Site, Sites, receives, sends, sent
from commplan.runtime.input.sources.record_convert import numpy_dtype
from commplan.runtime.param_server.driver import Driver
from commplan.runtime.param_server.event_log import LOST, Recorder, log_header, read_events
from commplan.runtime.param_server.mailbox import Mail
from commplan.runtime.param_server.routing import RoutingTable
from commplan.runtime.param_server.serve import ABORT, ServerLoop
from commplan.runtime.run import known_structures

Array = Any
_MOST = 10**6  # moves; nothing that runs so long will ever end
_NOTHING = np.zeros(0, np.uint8)


@dataclass(frozen=True)
class Made:
    """A case, ready for many jobs."""

    case: Case
    sites: Sites
    desks: tuple[RoutingTable, ...]


def made(case: Case) -> Made:
    compiled = program(case)
    sites = survey(compiled.schedule)
    structures = known_structures(compiled)
    desks = [
        RoutingTable(compiled.schedule, sites, k, functions(case), structures) for k in range(sites.servers)
    ]
    return Made(case, sites, tuple(desks))


@dataclass(frozen=True)
class Ends:
    """What a run has led to: digests of what each server holds and of each worker's weights after each step.
    lost: the workers that died."""

    held: tuple[str, ...]
    weights: tuple[tuple[str, ...], ...]
    lost: tuple[int, ...]


class Silent(ServerLoop):
    """A server that tells nobody what happens."""

    def say(self, event: str) -> None:
        del event


@dataclass
class Wires:
    """How one server's messages come and go (`serve.Posting`)."""

    inbox: list[dict[int, deque[Array]]]
    sorry: set[int]
    beside: deque[tuple[int, Mail]]  # from server to server
    number: int
    broken: str = ""
    busy: bool = False
    mail: list[Mail] = field(default_factory=list[Mail])
    fresh: list[int] = field(default_factory=list[int])

    def poll(self) -> list[Mail]:
        mail, self.mail = self.mail, []
        return mail

    def take_lost(self) -> list[int]:
        lost, self.fresh = self.fresh, []
        return lost

    def send(self, worker: int, tag: int, array: Array) -> None:
        if worker >= len(self.inbox):
            mail = Mail(len(self.inbox) + self.number, tag, array.view(np.uint8))
            self.beside.append((worker - len(self.inbox), mail))
        elif tag == ABORT:
            self.sorry.add(worker)
        else:
            self.inbox[worker].setdefault(tag, deque()).append(np.array(array).reshape(-1))

    def idle(self) -> bool:
        return not self.mail and not self.fresh


class Job:
    """One run of a case. folder: of its recordings, which are made, or followed where `replay` is set.
    victim: a worker, and after how many moves of its own it is killed."""

    def __init__(
        self, setup: Made, folder: Path, seed: int, *, replay: bool, victim: tuple[int, int] | None = None
    ) -> None:
        self.case, self.sites = setup.case, setup.sites
        self.rng, self.victim = random.Random(seed), victim
        workers, servers = range(setup.case.workers), range(setup.case.servers)
        self.inbox: list[dict[int, deque[Array]]] = [{} for _ in workers]
        self.sorry: set[int] = set()
        self.wires = {(w, k): deque[tuple[int, Array]]() for w in workers for k in servers}
        self.pace = {key: self.rng.choice((0.05, 0.3, 1, 1, 3)) for key in (*workers, *self.wires)}
        self.beside: deque[tuple[int, Mail]] = deque()
        self.posts = [Wires(self.inbox, self.sorry, self.beside, k) for k in servers]
        self.drivers = [Driver(self.sites, k, setup.desks[k], self.posts[k].send) for k in servers]
        self.serving = [
            Silent(driver, post, "server", post.idle)
            for driver, post in zip(self.drivers, self.posts, strict=True)
        ]
        self.recorders: list[Recorder] = []
        for k, serving in enumerate(self.serving):
            path = folder / f"{k}.order"
            if replay:
                serving.follow(read_events(path, log_header(self.sites, k)))
            else:
                serving.recorder = Recorder(path, log_header(self.sites, k))
                self.recorders.append(serving.recorder)
        self.weights: list[list[str]] = [[] for _ in workers]
        self.asking: dict[int, Site | None] = dict.fromkeys(workers)
        self.programs = {worker: self.worked(worker) for worker in workers}
        self.ended: set[int] = set()

    def run(self) -> Ends:
        """To the end. Raises RuntimeError where nothing can go on, or it goes on for ever."""
        moves = [0] * self.case.workers
        for _ in range(_MOST):
            ready: list[Any] = [w for w in self.programs if w not in self.ended and self.ready(w)]
            ready += [wire for wire, line in self.wires.items() if line]
            if not ready:
                break
            move = self.rng.choices(ready, [self.pace[rank] for rank in ready])[0]
            if not isinstance(move, int):
                self.deliver(*move)
                continue
            moves[move] += 1
            if self.victim == (move, moves[move]):
                self.end(move, LOST)
            else:
                self.go_on(move)
        else:
            raise RuntimeError(f"{self.case} goes on for ever")
        for recorder in self.recorders:
            recorder.close()
        if not all(driver.over for driver in self.drivers):
            raise RuntimeError(f"{self.case} hangs: {sorted(set(self.programs) - self.ended)} wait")
        lost = sorted({worker for serving in self.serving for worker in serving.lost})
        return Ends(tuple(map(_held, self.drivers)), tuple(map(tuple, self.weights)), tuple(lost))

    # --- workers ---

    def worked(self, worker: int) -> Iterator[tuple[Site, Mapping[str, Any]]]:
        """What a worker asks, one request after another."""
        case = self.case
        w = noise(case, worker if case.elastic else 0)
        first = [site for site in self.sites.all if site.phase == "start"]
        (site,) = [site for site in self.sites.all if site.phase == "step"]
        given = started(case, worker)
        for put in first:
            yield put, given | {put.states[0]: given["opt" if put.states[0] == "moment" else "params"]}
        for step in range(case.steps):
            yield site, asked(case, worker, step, w)
            w = stepped(case, worker, step, w, self.answer(worker, site))
            self.weights[worker].append(_digest([w[name] for name in sorted(w)]))

    def go_on(self, worker: int) -> None:
        if self.asking[worker] is not None and worker in self.sorry:
            self.end(worker, LEAVE)  # its call fails, and so does the program
            return
        try:
            site, values = next(self.programs[worker])
        except StopIteration:
            self.ended.add(worker)
            for server in range(self.sites.servers):
                self.wires[worker, server].append((LEAVE, _NOTHING))
            return
        self.asking[worker] = site
        first = self.sites.members(site)[self.sites.group(site, worker)][0] == worker
        flats = [self.flat(buffer, values) for buffer in sent(site, first=first)]
        for move in sends(site, first=first):
            part = flats[move.buffer][move.start : move.start + move.size]
            data = np.ascontiguousarray(part).view(np.uint8).copy()
            self.wires[worker, site.first + move.server].append((move.tag, data))

    def end(self, worker: int, how: int) -> None:
        """A worker is killed, or gives up: of what is on its wires, only the beginning comes."""
        self.ended.add(worker)
        for server in range(self.sites.servers):
            wire = self.wires[worker, server]
            for _ in range(self.rng.randint(0, len(wire))):
                wire.pop()
            wire.append((how, np.frombuffer(b"it was told to end", np.uint8)))

    def ready(self, worker: int) -> bool:
        site = self.asking[worker]
        if site is None or worker in self.sorry:
            return True
        return all(self.inbox[worker].get(move.tag) for move in receives(site))

    def flat(self, buffer: Buffer, values: Mapping[str, Any]) -> Array:
        dtype = numpy_dtype(buffer.dtype)
        if buffer.what == "token":
            return np.zeros(buffer.size, dtype)
        value: Any = values[buffer.value.split(".")[0]]
        leaves = _leaves(value)
        flat: Any = np.concatenate([np.asarray(leaves[place]).reshape(-1) for place in buffer.leaves])
        return flat.astype(dtype)

    def answer(self, worker: int, site: Site) -> Tree:
        """The tree that the servers have sent."""
        names, shapes = sorted(self.case.shapes), self.case.shapes
        arrays = {name: np.zeros(shapes[name][0], shapes[name][1]) for name in names}
        flats = [np.zeros(buffer.size, numpy_dtype(buffer.dtype)) for buffer in site.down]
        for move in receives(site):
            flats[move.buffer][move.start : move.start + move.size] = self.inbox[worker][move.tag].popleft()
        for buffer, flat in zip(site.down, flats, strict=True):
            at = 0
            for place in buffer.leaves:
                shape = shapes[names[place]][0]
                size = int(np.prod(shape))
                arrays[names[place]] = flat[at : at + size].reshape(shape)
                at += size
        return arrays

    # --- servers ---

    def deliver(self, worker: int, server: int) -> None:
        tag, data = self.wires[worker, server].popleft()
        post = self.posts[server]
        if tag == LOST:
            post.fresh.append(worker)
        else:
            post.mail.append(Mail(worker, tag, data))
        self.serving[server].run()  # until it has dealt with that
        while self.beside:
            other, mail = self.beside.popleft()
            self.posts[other].mail.append(mail)
            self.serving[other].run()


def _held(driver: Driver) -> str:
    return _digest([array for _, kept in driver.store for array in kept.arrays()])


def _digest(arrays: list[Array]) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def differences(case: Case, first: Ends, again: Ends) -> list[str]:
    """Where a replay is not what was recorded. Of who died, only what both runs have is compared."""
    problems: list[str] = []
    if first.held != again.held:
        problems.append(f"{case}: servers hold {again.held}, recorded {first.held}")
    if first.lost != again.lost:
        problems.append(f"{case}: {again.lost} died, recorded {first.lost}")
    for worker, (before, after) in enumerate(zip(first.weights, again.weights, strict=True)):
        most = (min if worker in first.lost else max)(len(before), len(after))
        if before[:most] != after[:most]:
            problems.append(f"{case}: worker {worker} has other weights than recorded")
    return problems


def _leaves(value: Any) -> list[Any]:
    """Of a dict by name, or the one array."""
    tree: Any = value
    return [tree[name] for name in sorted(tree)] if isinstance(value, dict) else [value]
