"""Observes jobs while they run, and finds the ranks that block others, from the records of the processes.

A job has the table of its processes on this host (`process_table`), the sidecars of its other hosts (`hosts`)
and the decision (`decision`). The observer reads the `Live` block of each record, which needs no lock of a
process, and whole records only if a rank has waited for longer than its bound.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from commplan.sidecar.decision import HangDetector
from commplan.sidecar.hosts import OtherHosts, Send
from commplan.sidecar.mail import Address, SidecarMessage
from commplan.sidecar.process import AttendedProcess
from commplan.sidecar.process_table import ProcessTable


class Job:
    """A job with processes on this host.

    Args:
        send: Sends a message to the sidecars of other hosts.
        address: The address of this sidecar.
        who: See `ProcessTable`.
    """

    def __init__(self, name: str, send: Send, address: Address, who: str = "rank") -> None:
        self.name, self.table = name, ProcessTable(who)
        self.hosts = OtherHosts(name, self.table, send, address)
        self._detector = HangDetector(self.table, self.hosts)
        self._ended: set[int] = set()  # ranks here that have died, or whose program has ended
        self._is_reported = False  # that the job cannot be evaluated

    def absorb(self, other: Job) -> None:
        """Take the records of a job that has turned out to be this one."""
        self.table += other.table
        self.hosts.absorb(other.hosts)
        self._detector.absorb(other._detector)

    def look(self, now: float) -> None:
        """Evaluate the job if a rank waits for too long."""
        if text := self.hosts.greet_unheard(now):
            self.say(text)
        self.table.refresh()
        ended = {
            n.rank for n in self.table if n.process.seconds or (self.table.who == "process" and n.live.left)
        }
        if ended - self._ended:
            self._ended |= ended
            self.hosts.tell("gone")  # the other sidecars evaluate waits soon
        self._detector.look(now)

    def say(self, text: str) -> None:
        """Print `text` on the first process that runs."""
        for process in [each.process for each in self.table if not each.process.seconds][:1]:
            process.say(f"commplan: {text}\n")

    def report(self, error: Exception) -> None:
        """Print once that an evaluation fails."""
        if not self._is_reported:
            self._is_reported = True
            self.say(
                "".join(["ranks that block others are not reported: ", *traceback.format_exception(error)])
            )

    def take(self, message: SidecarMessage) -> None:
        """Take a message of another host's sidecar."""
        if message.sender not in self.hosts.addresses:
            return
        self.hosts.take(message)
        if message.kind == "ask" and self.table:
            self.hosts.answer(message, self.table.recent_states(time.monotonic()))
        elif message.kind == "verdict":
            self._detector.write(message.text, message.line, time.monotonic(), abandoned=message.abandoned)


class Observer:
    """The jobs of all processes that the sidecar attends."""

    def __init__(self, send: Send, address: Address) -> None:
        self.jobs: list[Job] = []
        self._send, self._address = send, address

    def add(
        self, name: str, path: Path, process: AttendedProcess, who: str, members: tuple[int, ...] = (),
        descriptor: int = -1,
    ) -> None:  # fmt: skip
        """Add a record to a job.

        Jobs of the same name are one job if they share processes.
        """
        new = Job(name, self._send, self._address, who)
        new.table.track(path, process, members, descriptor)
        same = [job for job in self.jobs if job.name == name and job.table.ranks & new.table.ranks]
        if not same:
            self.jobs += [new] if new.table else []
            return
        job, *duplicates = same
        job.absorb(new)
        for other in duplicates:
            job.absorb(other)
            self.jobs.remove(other)

    def look(self) -> None:
        for job in self.jobs:
            try:
                job.look(time.monotonic())
            except Exception as error:  # noqa: BLE001  one job must not end the sidecar of all
                job.report(error)

    def take(self, messages: Iterable[SidecarMessage]) -> None:
        for message in messages:
            for job in (job for job in self.jobs if job.name == message.job):
                with contextlib.suppress(Exception):
                    job.take(message)

    def add_hosts(self, path: Path, hosts: Mapping[tuple[int, ...], Address]) -> None:
        """Add the sidecars of other hosts, by their ranks, to the job of a record."""
        for job in self.jobs:
            if any(each.path == path for each in job.table):
                job.hosts.add(hosts)

    def remove(self, path: Path) -> None:
        """Close a record to which its process no longer writes."""
        for job in self.jobs.copy():
            job.table.close(path)
            if not job.table:
                self.jobs.remove(job)

    def drop(self, running: Sequence[AttendedProcess]) -> None:
        """Close the records of jobs without running processes."""
        for job in self.jobs.copy():
            if not any(each.process in running for each in job.table):
                self.jobs.remove(job)
                job.table.close()
