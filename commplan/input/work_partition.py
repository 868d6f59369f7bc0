"""The division of preprocessing among processes, and the resulting transfers between hosts.

The processes that share a value are numbered 0 to n - 1, and `readers` of them make it. The rows of each
batch are divided into as many parts, whose sizes differ by at most one row. Processes of a host write to
shared memory, so only whole hosts exchange data: readers are sorted by host, and the parts of a host are
contiguous.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from commplan.ir.remark import Design

MOST_PARTS = 8  # the maximum number of parts of a batch that the processes of one host make


@dataclass(frozen=True)
class HostTransfer:
    """One collective between hosts.

    Attributes:
        kind: The kind of collective.
        hosts: The participating hosts, in an order that is the same on all of them.
        parts: The numbers of the parts that each host contributes: one entry per host for an all-gather, and
            the root's alone for a broadcast.
        root: The index in `hosts` of the root of a broadcast.
    """

    kind: Literal["all_gather", "broadcast"]
    hosts: tuple[int, ...]
    parts: tuple[tuple[int, ...], ...]
    root: int = 0

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """`parts` as ranges [low, high); parts are contiguous unless hosts took over parts of dead ones."""
        return tuple(_run(parts) for parts in self.parts)


@dataclass(frozen=True)
class Division:
    """The division of work for one shared value.

    Attributes:
        design: The design in the schedule.
        readers: [parts], the process that makes each part.
        hosts: [processes], the host of each process.
    """

    design: Design
    readers: tuple[int, ...]
    hosts: tuple[int, ...]

    @property
    def parts(self) -> int:
        """The number of parts of a batch."""
        return len(self.readers)

    def part(self, rows: int, number: int) -> tuple[int, int]:
        """The rows [low, high) of part `number` in a batch of `rows`."""
        return number * rows // self.parts, (number + 1) * rows // self.parts

    def parts_of(self, process: int) -> tuple[int, ...]:
        """The parts that `process` makes; all parts in the design `duplicate`."""
        if self.design == "duplicate":
            return tuple(range(self.parts))
        return tuple(number for number, reader in enumerate(self.readers) if reader == process)

    def parts_on(self, host: int) -> tuple[int, ...]:
        """The parts that are made on `host`; all parts in the design `duplicate`."""
        if self.design == "duplicate":
            return tuple(range(self.parts))
        return tuple(number for number, reader in enumerate(self.readers) if self.hosts[reader] == host)

    def part_range(self, host: int) -> tuple[int, int]:
        """The parts [low, high) that are made on `host`, or (0, 0) if there are none.

        Parts of a host are contiguous in the result of `division`. After a failover they may not be; use
        `parts_on`.
        """
        return _run(self.parts_on(host))

    def leader(self, host: int) -> int:
        """The process that communicates for `host`: its first one. Raises ValueError if there is none."""
        return self.hosts.index(host)

    def successor(self, process: int, alive: Collection[int]) -> int | None:
        """The next live process on the host of a dead `process`, cyclically, which takes over its part.

        Returns None if the host has no live process. Any process of a host can access every part of its
        memory, even if it is not a reader.
        """
        peers = [other for other, host in enumerate(self.hosts) if host == self.hosts[process]]
        index = peers.index(process)
        return next((other for other in (*peers[index + 1 :], *peers[:index]) if other in alive), None)

    def moves(self, alive: Collection[int] | None = None) -> tuple[HostTransfer, ...]:
        """The transfers between hosts after each host has made its parts, in order.

        With several makers and receivers, the makers gather first, and the last of them then broadcasts. In
        the design `multi_broadcast` each maker broadcasts instead, along a chain of hosts that begins at it:
        all links then carry equal loads.

        Args:
            alive: The live processes; None for all of them. Hosts without one do not participate.

        Returns:
            The transfers; none for a single live host, or in the design `duplicate`.
        """
        processes = range(len(self.hosts)) if alive is None else sorted(alive)
        live_hosts = tuple(dict.fromkeys(self.hosts[process] for process in processes))
        if len(live_hosts) < 2 or self.design == "duplicate":
            return ()
        makers = tuple(host for host in live_hosts if self.parts_on(host))
        receivers = tuple(host for host in live_hosts if host not in makers)
        if self.design == "multi_broadcast":
            return tuple(
                HostTransfer("broadcast", _rotated(live_hosts, host), (self.parts_on(host),))
                for host in makers
            )
        gathered = HostTransfer("all_gather", makers, tuple(self.parts_on(host) for host in makers))
        spread = HostTransfer("broadcast", (makers[-1], *receivers), (tuple(range(self.parts)),))
        return (*((gathered,) if len(makers) > 1 else ()), *((spread,) if receivers else ()))


def dealt(unit: int, part: int, parts: int, makers: Sequence[int]) -> int:
    """The maker of one part of a batch. Parts are dealt to the makers in turn, from batch to batch.

    Over `len(makers)` consecutive batches, all makers make equally many parts. With fewer parts than makers,
    a process makes many rows of a few batches instead of a few rows of each, and is scheduled less often.

    Args:
        unit: The number of the batch.
        part: The number of the part, 0 <= part < parts.
        parts: The number of parts of a batch.
        makers: The places in a ring of the processes that make parts, at least one.
    """
    return makers[(unit * parts + part) % len(makers)]


def _run(parts: Sequence[int]) -> tuple[int, int]:
    """The range [low, high) from the first to the last of `parts`; (0, 0) without parts."""
    return (parts[0], parts[-1] + 1) if parts else (0, 0)


def _rotated(hosts: tuple[int, ...], first: int) -> tuple[int, ...]:
    """`hosts` in cyclic order from `first` on."""
    index = hosts.index(first)
    return (*hosts[index:], *hosts[:index])


def division(design: Design, hosts: Sequence[int], readers: int | None = None) -> Division:
    """The division of work between processes on `hosts`.

    Args:
        design: The design.
        hosts: The host of each process.
        readers: The number of readers, processes 0 to readers - 1; None for all processes. Ignored in the
            design `all_shared`.

    Returns:
        The division, with one part per reader. Readers are sorted by the first appearance of their hosts.
    """
    count = len(hosts) if readers is None or design == "all_shared" else min(readers, len(hosts))
    order = {host: index for index, host in enumerate(dict.fromkeys(hosts))}
    chosen = sorted(range(count), key=lambda process: (order[hosts[process]], process))
    return Division(design, tuple(chosen), tuple(hosts))


def failover(whole: Division, alive: Collection[int]) -> Division:
    """The division of the same parts among the `alive` processes.

    Parts of dead processes go to their successors on the same host. If a whole host is dead, the readers of
    other hosts take its parts in turn, or any processes if no reader is alive. The result depends only on the
    set of live processes, and a part changes its maker only if the maker dies.

    Raises:
        ValueError: If no process is alive.
    """
    if not alive:
        raise ValueError("no process is left")
    makers = tuple(_maker(whole, part, alive) for part in range(whole.parts))
    return Division(whole.design, makers, whole.hosts)


def _maker(whole: Division, part: int, alive: Collection[int]) -> int:
    """The process that makes a part: its reader, else a successor on its host, else one on another host."""
    reader = whole.readers[part]
    if reader in alive:
        return reader
    successor = whole.successor(reader, alive)
    if successor is not None:
        return successor
    host = whole.hosts[reader]
    # Count the earlier parts of the dead host: consecutive parts go to consecutive processes of other hosts.
    turn = sum(whole.hosts[other] == host for other in whole.readers[:part])
    for candidates in (whole.readers, range(len(whole.hosts))):
        remote = [other for other in candidates if whole.hosts[other] != host]
        chosen = next((other for other in (*remote[turn:], *remote[:turn]) if other in alive), None)
        if chosen is not None:
            return chosen
    raise ValueError("no process is left")
