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

    Attributes:
        name: The name of the job. Other jobs may have it, too, see `Observer.add`.
        table: Its processes on this host.
        hosts: The sidecars of its other hosts.

    Args:
        send: Sends a message to the sidecars of other hosts.
        address: The address of this sidecar.
        noun: See `ProcessTable`.
    """

    def __init__(self, name: str, send: Send, address: Address, noun: str = "rank") -> None:
        self.name, self.table = name, ProcessTable(noun)
        self.hosts = OtherHosts(name, self.table, send, address)
        self._detector = HangDetector(self.table, self.hosts)
        self._ended: set[int] = set()  # ranks here that have died, or whose program has ended
        self._is_reported = False  # whether a message was printed that the job cannot be evaluated

    def absorb(self, other: Job) -> None:
        """Take over the records, the hosts and the verdict of a job that has turned out to be this one."""
        self.table += other.table
        self.hosts.absorb(other.hosts)
        self._detector.absorb(other._detector)

    def poll(self, now: float) -> None:
        """Evaluate the job if a rank waits for too long. `now` is on `time.monotonic`. Called repeatedly."""
        if text := self.hosts.greet_unheard(now):
            self.write_stderr(text)
        self.table.refresh()
        ended = {
            n.rank for n in self.table if n.process.seconds or (self.table.noun == "process" and n.live.left)
        }
        if ended - self._ended:
            self._ended |= ended
            self.hosts.broadcast("gone")  # the other sidecars evaluate waits soon
        self._detector.poll(now)

    def write_stderr(self, text: str) -> None:
        """Print `text` on the first process that runs; on none if all have ended."""
        for process in [each.process for each in self.table if not each.process.seconds][:1]:
            process.write_stderr(f"commplan: {text}\n")

    def report(self, error: Exception) -> None:
        """Print once that an evaluation has failed, with the traceback of `error`."""
        if not self._is_reported:
            self._is_reported = True
            self.write_stderr(
                "".join(["ranks that block others are not reported: ", *traceback.format_exception(error)])
            )

    def receive(self, message: SidecarMessage) -> None:
        """Handle a message of another host's sidecar. Messages of unknown senders are ignored."""
        if message.sender not in self.hosts.addresses:
            return
        self.hosts.receive(message)
        if message.kind == "ask" and self.table:
            self.hosts.answer(message, self.table.recent_states(time.monotonic()))
        elif message.kind == "verdict":
            self._detector.write(message.text, message.line, time.monotonic(), abandoned=message.abandoned)


class Observer:
    """The jobs of all processes that are watched.

    Attributes:
        jobs: The jobs with at least one record.

    Args:
        send: Sends a message to sidecars of other hosts.
        address: The address of this sidecar.
    """

    def __init__(self, send: Send, address: Address) -> None:
        self.jobs: list[Job] = []
        self._send, self._address = send, address

    def add(
        self, name: str, path: Path, process: AttendedProcess, noun: str, members: tuple[int, ...] = (),
        descriptor: int = -1,
    ) -> None:  # fmt: skip
        """Add a record to the job of this name, or to a new one. A record that cannot be read is ignored.

        Jobs of the same name are one job if they share ranks, and are merged.

        Args:
            name: The name of the job.
            path, process, members, descriptor: See `states.OpenRecord`.
            noun: See `ProcessTable`.
        """
        new = Job(name, self._send, self._address, noun)
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

    def poll(self) -> None:
        """Evaluate all jobs, see `Job.poll`. Errors are printed."""
        for job in self.jobs:
            try:
                job.poll(time.monotonic())
            except Exception as error:  # noqa: BLE001  one job must not end the sidecar of all
                job.report(error)

    def receive(self, messages: Iterable[SidecarMessage]) -> None:
        """Handle messages of other sidecars, see `Job.receive`."""
        for message in messages:
            for job in (job for job in self.jobs if job.name == message.job):
                with contextlib.suppress(Exception):  # a message of another host must not end this sidecar
                    job.receive(message)

    def add_hosts(self, path: Path, hosts: Mapping[tuple[int, ...], Address]) -> None:
        """Add sidecars of other hosts, by the ranks of their hosts, to the job of the record at `path`."""
        for job in self.jobs:
            if any(each.path == path for each in job.table):
                job.hosts.add(hosts)

    def remove(self, path: Path) -> None:
        """Close the record at `path`, which is no longer watched. A job without records is removed."""
        for job in self.jobs.copy():
            job.table.close(path)
            if not job.table:
                self.jobs.remove(job)

    def drop(self, running: Sequence[AttendedProcess]) -> None:
        """Remove the jobs without a process in `running`, and close their records."""
        for job in self.jobs.copy():
            if not any(each.process in running for each in job.table):
                self.jobs.remove(job)
                job.table.close()
