"""Who makes which rows of a batch, and what then moves between hosts.

The processes that share a value are counted 0 to n - 1. `readers` of them make it; the rows of each batch are
cut into as many parts, which differ by one row at most. Inside a host all write to the same memory, so only
whole hosts exchange anything: readers are put in the order of their hosts, and a host's parts lie in one run
of rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from commplan.ir.remark import Design


@dataclass(frozen=True)
class Move:
    """One collective between hosts.

    kind: what it is. hosts: those that take part, in order; all of them call it alike. parts: for each of
    them the parts that it brings; of a broadcast there is one entry, the root's. root: the place in `hosts`
    that a broadcast comes from.
    """

    kind: Literal["all_gather", "broadcast"]
    hosts: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    root: int = 0

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """`parts` as [low, high), which they are unless hosts make parts of dead ones elsewhere."""
        return tuple(_run(parts) for parts in self.parts)


@dataclass(frozen=True)
class Division:
    """The work of one shared value.

    design: the schedule's. readers: the processes that make rows, part by part. hosts: the host of each
    process.
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
        """The parts that `process` makes; all of them where each process makes everything for itself."""
        if self.design == "duplicate":
            return tuple(range(self.parts))
        return tuple(number for number, reader in enumerate(self.readers) if reader == process)

    def made(self, host: int) -> tuple[int, ...]:
        """The parts that are made on `host`."""
        if self.design == "duplicate":
            return tuple(range(self.parts))
        return tuple(number for number, reader in enumerate(self.readers) if self.hosts[reader] == host)

    def run(self, host: int) -> tuple[int, int]:
        """The parts [low, high) that are made on `host`; (0, 0) where none are.

        They are a run as `division` gives them; where hosts make parts of dead ones elsewhere `made`
        tells."""
        return _run(self.made(host))

    def leader(self, host: int) -> int:
        """The process that speaks for `host`: its first."""
        return self.hosts.index(host)

    def heir(self, process: int, alive: Collection[int]) -> int | None:
        """Who makes the part of a dead `process`: the next living one of its host, in a ring; None: nobody
        lives there.

        Every process of a host sees every part of its memory, a mere consumer too.
        """
        peers = [other for other, host in enumerate(self.hosts) if host == self.hosts[process]]
        at = peers.index(process)
        return next((other for other in (*peers[at + 1 :], *peers[:at]) if other in alive), None)

    def moves(self, alive: Collection[int] | None = None) -> tuple[Move, ...]:
        """What goes between hosts once every host has its own parts, in order; none inside one host.

        alive: the processes that live, all of them where None; hosts without one have no part in it. Of
        several broadcasts at once each goes round from its root, so that a chain of hosts loads all of them
        alike.
        """
        processes = range(len(self.hosts)) if alive is None else sorted(alive)
        everyone = tuple(dict.fromkeys(self.hosts[process] for process in processes))
        if len(everyone) < 2 or self.design == "duplicate":
            return ()
        makers = tuple(host for host in everyone if self.made(host))
        others = tuple(host for host in everyone if host not in makers)
        if self.design == "multi_broadcast":
            return tuple(Move("broadcast", _from(everyone, host), (self.made(host),)) for host in makers)
        gathered = Move("all_gather", makers, tuple(self.made(host) for host in makers))
        spread = Move("broadcast", (makers[-1], *others), (tuple(range(self.parts)),))
        return (*((gathered,) if len(makers) > 1 else ()), *((spread,) if others else ()))


@dataclass(frozen=True)
class Turns:
    """Readers of one host that take turns: `width` of them make a batch, those that follow make the next.

    A process that makes ten times the rows of every tenth batch goes to work a tenth as often. Each of
    `division.readers` makes as much as every other over `period` batches. width: 1 to `division.parts`, which
    is everybody in each batch.
    """

    division: Division
    width: int

    @property
    def period(self) -> int:
        """Batches after which the turns begin anew."""
        return len(self._divisions)

    def at(self, number: int) -> Division:
        """The work of batch `number`, counted from the first that the processes make."""
        return self._divisions[number % self.period]

    def next(self, process: int, number: int) -> int | None:
        """The first batch from `number` on of which `process` makes a part; None where it makes none."""
        coming = (n for n in range(number, number + self.period) if self.at(n).of(process))
        return next(coming, None)

    @functools.cached_property
    def _divisions(self) -> tuple[Division, ...]:
        whole, count = self.division, self.division.parts
        firsts = range(0, math.lcm(count, self.width), self.width)
        chosen = (tuple(whole.readers[(at + turn) % count] for turn in range(self.width)) for at in firsts)
        return tuple(Division(whole.design, readers, whole.hosts) for readers in chosen)


def width(readers: int, cores: int, ahead: int) -> int:
    """How many of `readers` make a batch together, so that the batches in the making keep all cores busy.

    cores: that the processes may run on, all together. ahead: batches in the making at a time, at most.
    """
    return max(1, min(readers, -(-cores // max(ahead, 1))))


def _run(parts: Sequence[int]) -> tuple[int, int]:
    return (parts[0], parts[-1] + 1) if parts else (0, 0)


def _from(hosts: tuple[int, ...], first: int) -> tuple[int, ...]:
    at = hosts.index(first)
    return (*hosts[at:], *hosts[:at])


def division(design: Design, hosts: Sequence[int], readers: int | None = None) -> Division:
    """The division of work between processes on `hosts`.

    readers: how many make rows (`single_broadcast`, `multi_broadcast`): processes 0 to readers - 1; all of
    them where None. They are put in the order in which their hosts first appear.
    """
    count = len(hosts) if readers is None or design == "all_shared" else min(readers, len(hosts))
    order = {host: place for place, host in enumerate(dict.fromkeys(hosts))}
    chosen = sorted(range(count), key=lambda process: (order[hosts[process]], process))
    return Division(design, tuple(chosen), tuple(hosts))


def adopted(whole: Division, alive: Collection[int]) -> Division:
    """The division that holds when only `alive` processes are left: the same parts, and those of the dead are
    made by others besides their own.

    First the heirs of their hosts; where a whole host is gone, the readers of the other hosts take its parts
    in turn, or all their processes, where no reader lives. It depends on who is alive alone, and a part
    changes hands only when its maker dies. Raises ValueError where nobody lives.
    """
    if not alive:
        raise ValueError("no process is left")
    makers = tuple(_maker(whole, part, alive) for part in range(whole.parts))
    return Division(whole.design, makers, whole.hosts)


def _maker(whole: Division, part: int, alive: Collection[int]) -> int:
    reader = whole.readers[part]
    if reader in alive:
        return reader
    heir = whole.heir(reader, alive)
    if heir is not None:
        return heir
    host = whole.hosts[reader]
    turn = sum(whole.hosts[other] == host for other in whole.readers[:part])
    for candidates in (whole.readers, range(len(whole.hosts))):
        others = [other for other in candidates if whole.hosts[other] != host]
        chosen = next((other for other in (*others[turn:], *others[:turn]) if other in alive), None)
        if chosen is not None:
            return chosen
    raise ValueError("no process is left")
