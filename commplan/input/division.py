"""Who makes which rows of a batch, and what then moves between hosts.

The processes that share a value are counted 0 to n - 1. `readers` of them make it; the rows of each batch are cut
into as many parts, which differ by one row at most. Inside a host all write to the same memory, so only whole
hosts exchange anything: readers are put in the order of their hosts, and a host's parts lie in one run of rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from commplan.ir.schedule import Design


@dataclass(frozen=True)
class Move:
    """One collective between hosts.

    kind: what it is. hosts: those that take part, in the order of their runs; all of them call it alike.
    runs: for each of them the parts [low, high) that it brings; of a broadcast there is one, the root's.
    root: the place in `hosts` that a broadcast comes from.
    """

    kind: Literal["all_gather", "broadcast"]
    hosts: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    root: int = 0


@dataclass(frozen=True)
class Division:
    """The work of one shared value.

    design: the schedule's. readers: the processes that make rows, part by part. hosts: the host of each process.
    """

    design: Design
    readers: tuple[int, ...]
    hosts: tuple[int, ...]

    @property
    def parts(self) -> int:
        return len(self.readers)

    def part(self, rows: int, number: int) -> tuple[int, int]:
        """The rows [low, high) of part `number` in a batch of `rows`."""
        return number * rows // self.parts, (number + 1) * rows // self.parts

    def of(self, process: int) -> tuple[int, ...]:
        """The parts that `process` makes: one, or none."""
        return tuple(number for number, reader in enumerate(self.readers) if reader == process)

    def run(self, host: int) -> tuple[int, int]:
        """The parts [low, high) that are made on `host`; (0, 0) where none are."""
        mine = [number for number, reader in enumerate(self.readers) if self.hosts[reader] == host]
        return (mine[0], mine[-1] + 1) if mine else (0, 0)

    def leader(self, host: int) -> int:
        """The process that speaks for `host`: its first."""
        return self.hosts.index(host)

    def heir(self, process: int, alive: Collection[int]) -> int | None:
        """Who makes the part of a dead `process`: the next living one of its host, in a ring; None: nobody lives there.

        Every process of a host sees every part of its memory, a mere consumer too.
        """
        peers = [other for other, host in enumerate(self.hosts) if host == self.hosts[process]]
        at = peers.index(process)
        return next((other for other in (*peers[at + 1 :], *peers[:at]) if other in alive), None)

    def moves(self) -> tuple[Move, ...]:
        """What goes between hosts once every host has its own parts, in order; none inside one host."""
        everyone = tuple(dict.fromkeys(self.hosts))
        if len(everyone) == 1 or self.design == "duplicate":
            return ()
        makers = tuple(dict.fromkeys(self.hosts[reader] for reader in self.readers))
        others = tuple(host for host in everyone if host not in makers)
        runs = tuple(self.run(host) for host in makers)
        if self.design == "multi_broadcast":
            return tuple(
                Move("broadcast", (host, *(other for other in everyone if other != host)), (run,))
                for host, run in zip(makers, runs, strict=True)
            )
        gathered = (Move("all_gather", makers, runs),) if len(makers) > 1 else ()
        spread = (Move("broadcast", (makers[-1], *others), ((0, self.parts),)),) if others else ()
        return (*gathered, *spread)


def division(design: Design, hosts: Sequence[int], readers: int | None = None) -> Division:
    """The division of work between processes on `hosts`.

    readers: how many make rows (`single_broadcast`, `multi_broadcast`): processes 0 to readers - 1; all of them
    where None. They are put in the order in which their hosts first appear.
    """
    count = len(hosts) if readers is None or design == "all_shared" else min(readers, len(hosts))
    order = {host: place for place, host in enumerate(dict.fromkeys(hosts))}
    chosen = sorted(range(count), key=lambda process: (order[hosts[process]], process))
    return Division(design, tuple(chosen), tuple(hosts))


def without(found: Division, dead: Collection[int]) -> Division:
    """The division that holds once `dead` processes are gone: the living readers share all rows among them; where no
    reader lives, every living process is one. Raises ValueError where nobody lives."""
    alive = [process for process in range(len(found.hosts)) if process not in dead]
    if not alive:
        raise ValueError("no process is left")
    readers = tuple(reader for reader in found.readers if reader not in dead)
    if not readers:
        order = {host: place for place, host in enumerate(dict.fromkeys(found.hosts[p] for p in alive))}
        readers = tuple(sorted(alive, key=lambda process: (order[found.hosts[process]], process)))
    return Division(found.design, readers, found.hosts)
