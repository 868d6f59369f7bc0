"""Jobs of workers and servers in one process.

Messages wait on wires, and are delivered in a random order that keeps the order of each wire, as MPI does.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import commplan
from commplan.ir.plan import name_of
from commplan.lowering.jax.pytree import flatten, known_structures
from commplan.protocol.build_sites import sites as survey
from commplan.protocol.sites import LEAVE, Buffer, Chunk, Site, Sites
from commplan.runtime.input.sources.record_convert import numpy_dtype
from commplan.runtime.param_server.driver import ServerDriver
from commplan.runtime.param_server.routing import RoutingTable

Array = Any
# The program of a worker: yields a site and its operands by name, receives the leaves of the site's answer.
Program = Generator[tuple[Site, Mapping[str, Any]], list[Array], None]


def compiled(folder: Path, text: str, shapes: Mapping[str, Any]) -> Any:
    path = folder / "plan.plan"
    path.write_text(text)
    return commplan.load(path).compile(backend="mpi", shapes=shapes)


@dataclass
class Job:
    """One server process for each server of the plan, and wires to and from its workers.

    hear: called with (server, worker, tag, buffer) for each message, in place of the driver.
    """

    program: Any
    functions: Mapping[str, Callable[..., Any]]
    sites: Sites = field(init=False)
    drivers: list[ServerDriver] = field(init=False)
    wires: dict[tuple[int, int], deque[tuple[int, Array]]] = field(default_factory=dict)
    inbox: dict[tuple[int, int], deque[Array]] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    order: list[tuple[int, int, int]] = field(default_factory=list)  # deliveries: server, worker, tag
    hear: Callable[[int, int, int, Array], None] | None = None

    def __post_init__(self) -> None:
        schedule = self.program.schedule
        self.sites = survey(schedule)
        self.drivers = []
        for server in range(self.sites.servers):
            structures = known_structures(self.program.structures.values())
            desks = RoutingTable(schedule, self.sites, server, self.functions, structures)
            self.drivers.append(ServerDriver(self.sites, server, desks, self.answer))

    def site(self, kind: str, phase: str, state: str | None = None) -> Site:
        return next(
            site
            for site in self.sites.all
            if site.kind == kind and site.phase == phase and state in (None, site.states[0])
        )

    def answer(self, worker: int, tag: int, array: Array) -> None:
        self.inbox.setdefault((worker, tag), deque()).append(np.array(array).reshape(-1))

    # --- the worker's side ---

    def ask(self, worker: int, site: Site, values: Mapping[str, Any]) -> None:
        """Put the messages of a request on the wires."""
        first = self.sites.members(site)[self.sites.group(site, worker)][0]
        buffers = site.token if site.kind == "put" and worker != first else site.up
        messages = [(chunk, self.flat(site, buffer, values)) for buffer in buffers for chunk in buffer.chunks]
        for chunk, flat in sorted(messages, key=lambda message: message[0].tag):
            part = flat[chunk.start : chunk.start + chunk.size]
            data = np.ascontiguousarray(part).view(np.uint8).copy()
            self.wires.setdefault((worker, site.first + chunk.server), deque()).append((chunk.tag, data))

    def flat(self, site: Site, buffer: Buffer, values: Mapping[str, Any]) -> Array:
        """The elements of a buffer. `values` are by name; a put has the name of the state that it sets."""
        dtype = numpy_dtype(buffer.dtype)
        if buffer.content == "token":
            return np.zeros(buffer.size, dtype)
        name = site.states[0] if site.kind == "put" else name_of(buffer.value)
        leaves = flatten(values[name])[1].leaves
        arrays = [np.asarray(leaves[place]).reshape(-1) for place in buffer.leaves]
        return np.concatenate(arrays).astype(dtype)

    def leave(self, worker: int) -> None:
        for server in range(self.sites.servers):
            self.wires.setdefault((worker, server), deque()).append((LEAVE, np.zeros(0, np.uint8)))

    def answered(self, worker: int, site: Site) -> list[Array] | None:
        """The buffers of a request's answer, None before all of it has arrived."""
        chunks = [(buffer, chunk) for buffer in site.down for chunk in buffer.chunks]
        if any(not self.inbox.get((worker, chunk.tag)) for _, chunk in chunks):
            return None
        return [self._joined(worker, buffer, buffer.chunks) for buffer in site.down]

    def _joined(self, worker: int, buffer: Buffer, chunks: Sequence[Chunk]) -> Array:
        flat = np.zeros(buffer.size, numpy_dtype(buffer.dtype))
        for chunk in chunks:
            flat[chunk.start : chunk.start + chunk.size] = self.inbox[worker, chunk.tag].popleft()
        return flat

    # --- time ---

    def deliver(self, worker: int, server: int) -> None:
        tag, data = self.wires[worker, server].popleft()
        self.order.append((server, worker, tag))
        if self.hear is not None:
            self.hear(server, worker, tag, data)
        else:
            self.drivers[server].arrive(worker, tag, data)

    def kill(self, worker: int) -> None:
        self.dead.add(worker)
        for server, driver in enumerate(self.drivers):
            self.wires.pop((worker, server), None)
            driver.lost(worker)

    def run(
        self, programs: Mapping[int, Program], seed: int = 0, *, leave: bool = True, most: int = 10**6
    ) -> None:
        """All programs to their ends; deliveries and workers take turns at random, at most `most` of them."""
        rng = random.Random(seed)
        waiting: dict[int, Site | None] = dict.fromkeys(programs)
        answers: dict[int, list[Array] | None] = dict.fromkeys(programs)
        running = dict(programs)
        for _ in range(most):
            running = {worker: each for worker, each in running.items() if worker not in self.dead}
            ready = [w for w in running if waiting[w] is None or self._ready(w, waiting[w])]
            wires = [key for key, line in self.wires.items() if line]
            moves: list[Any] = [*ready, *wires]
            if not moves:
                break
            move = rng.choice(moves)
            if not isinstance(move, int):
                self.deliver(*move)
                continue
            site = waiting[move]
            answers[move] = self.answered(move, site) if site is not None else None
            try:
                site, values = running[move].send(answers[move])  # type: ignore[arg-type]
            except StopIteration:
                del running[move]
                if leave:
                    self.leave(move)
                continue
            waiting[move] = site
            self.ask(move, site, values)
        else:
            return
        assert not running, f"workers {sorted(running)} wait for ever"

    def _ready(self, worker: int, site: Site | None) -> bool:
        assert site is not None
        return all(self.inbox.get((worker, c.tag)) for b in site.down for c in b.chunks)

    # --- contents of servers ---

    def held(self, state: str, group: int = 0) -> list[list[Array]]:
        """Of each slot of a state its flat parts, put together from all servers; then the scalars."""
        site = next(site for site in self.sites.all if state in site.states)
        layout = site.layouts[site.states.index(state)]
        slots = [[np.zeros(f.size, numpy_dtype(f.dtype)) for f in parts] for parts in layout.slots]
        scalars: list[Array] = []
        for driver in self.drivers:
            cell = driver.store.cells.get((state, group))
            for stored in cell.units.values() if cell is not None else ():
                unit = stored.unit
                for slot, array in zip(slots, stored.slots, strict=True):
                    slot[unit.part][unit.start : unit.start + unit.size] = array
                scalars = [np.asarray(value) for value in stored.scalars]
        return [*slots, scalars] if scalars else slots
