"""Processes that share loaded values: their indices and hosts, and the carrier between hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from commplan.diagnostics import Span, fail
from commplan.wait import check_seconds

if TYPE_CHECKING:
    from commplan.runtime.input.transport.transport import Carrier


class Blame(NamedTuple):
    """The place in the plan that errors refer to.

    Attributes:
        line: the statement, in the syntax of the plan; "" in the ring of a single process.
        span: the position of the statement in the file.
        file: the file of the plan.
    """

    line: str
    span: Span
    file: str

    def fail(self, code: str, message: str, *notes: str) -> NoReturn:
        """Raise a `CommplanError` about this place, with its line as the first note."""
        fail(code, message, f"the line: {self.line}", *notes, span=self.span, file=self.file)


@dataclass(frozen=True)
class Group:
    """Processes that share loaded values. `group` creates it from checked arguments.

    Attributes:
        run_id: the id of the run, equal in all processes and different from concurrent runs.
        index: this process, 0 <= index < count.
        count: the number of processes.
        timeout: seconds to wait for a live but silent peer.
        hosts: [count], the host of each process.
        carrier: moves rows between hosts; None on a single host.
        readers: the number of processes that make rows; None for the number in the plan.
        ranks: [count], the rank of each process in the job; () if ranks equal processes.
    """

    run_id: str
    index: int
    count: int
    timeout: float
    hosts: tuple[int, ...]
    carrier: Carrier | None = None
    readers: int | None = None
    ranks: tuple[int, ...] = ()

    def rank(self, process: int) -> int:
        """The rank of `process` in the job."""
        return self.ranks[process] if self.ranks else process

    @property
    def host(self) -> int:
        """The index of the host of this process."""
        return self.hosts[self.index]

    @property
    def local(self) -> tuple[int, ...]:
        """The processes on this host in ascending order, which map the same memory."""
        return tuple(process for process, host in enumerate(self.hosts) if host == self.host)


def group(
    run_id: str,
    index: int,
    count: int,
    *,
    timeout: float = 1800.0,
    hosts: Sequence[int] | None = None,
    carrier: Carrier | None = None,
    readers: int | None = None,
) -> Group:
    """Describe the processes that share values, as seen by one of them.

    Args:
        run_id: letters, digits, `-`, `_` and `.`; equal in all processes of the group and different from all
            concurrent runs (processes can agree on one through a key-value store).
        index: this process, 0 <= index < count.
        count: the number of processes.
        timeout: seconds to wait for a live but silent peer, including compilation and start-up.
        hosts: [count], the host of each process; None for one host.
        carrier: moves rows between hosts; required if there are several.
        readers: the number of processes that make rows (a plan counts members, and a process may hold
            several); None for the number in the plan.

    Raises:
        CommplanError: CP0924 for invalid arguments.
    """
    if not isinstance(run_id, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", run_id):  # pyright: ignore[reportUnnecessaryIsInstance]
        fail("CP0924", f"a run id is made of letters, digits and `-_.`, up to 100 of them, not {run_id!r}")
    if not 0 <= index < count:
        fail("CP0924", f"process {index} of {count} does not exist", f"expected: 0 to {count - 1}")
    check_seconds("CP0924", "timeout", timeout)
    places = tuple(hosts) if hosts is not None else (0,) * count
    if len(places) != count:
        fail("CP0924", f"{len(places)} hosts were named for {count} processes", "expected: one for each")
    if len(set(places)) > 1 and carrier is None:
        fail(
            "CP0924",
            f"a group on {len(set(places))} hosts has no carrier of rows between them",
            "expected: a carrier, such as `run.batches` creates over the mesh or the communicator",
        )
    if readers is not None and not 1 <= readers <= count:
        fail("CP0924", f"{readers} of {count} processes cannot be readers", f"expected: 1 to {count}")
    return Group(run_id, index, count, timeout, places, carrier, readers)
