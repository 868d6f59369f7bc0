"""The ranks of an `mpi4py` communicator as a machine: each rank has one device and its own arrays.

`ranks` makes the machine of a rank, and `host_names` finds the hosts for a topology.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from mpi4py import MPI

from commplan.diagnostics import CommplanError, Diagnostic, Note, fail
from commplan.ir import schedule as ir
from commplan.ir.types import Placement
from commplan.lowering.jax.check import Layout
from commplan.lowering.mpi.backend import MpiBackend, ServerLink, backend_of, server_names
from commplan.lowering.mpi.job.rendezvous import Rendezvous
from commplan.lowering.mpi.listing import collectives_of
from commplan.lowering.mpi.service import open_requests
from commplan.protocol.build_sites import sites
from commplan.recorder.notice import NOTICE_S, Notice
from commplan.runtime.input.transport.mpi_group import goes_on
from commplan.runtime.input.transport.ulfm import LOSSES
from commplan.runtime.machines.communicator import check_communicator, check_size
from commplan.runtime.machines.machine import BindRequest, Issue, Machine, agree, digest, place_of, shortened
from commplan.runtime.machines.ranks_input import RanksInput
from commplan.runtime.machines.server import ServerMachine, ServerRank
from commplan.runtime.observe.abort_hook import report_once, watch
from commplan.runtime.observe.calls import Calls
from commplan.runtime.observe.joint_calls import JointCalls
from commplan.runtime.param_server.startup_guard import expect_serving
from commplan.wait import TIMEOUT_S

# The distance between the tag of an exchange and that of a report in it. MPI guarantees 2**15 tags: the lower
# half is for exchanges, the upper half for ranks that report the first one.
_REPORTED = 1 << 14
_LOOK_S = 0.0005  # Seconds between two polls for messages.
_unread: list[Any] = []  # Sends to ranks that have not arrived; their buffers must stay alive.


@dataclasses.dataclass(frozen=True, eq=False)
class Ranks:
    """The machine of workers under MPI. `machine.Machine` documents the methods.

    Attributes:
        mesh: The communicator to which the user bound the program.
        comm: A duplicate of it without servers, for messages outside compiled phases.
        backend: The operations that phases are lowered to. Its `sizes` are those of the run, or of a member.
        file: The plan's file, for errors.
        gathers: The number of exchanges so far, by the ranks that take part.
        joints: The joint calls, by the ranks that make them.
    """

    mesh: Any
    comm: Any
    backend: MpiBackend
    file: str = ""
    gathers: Counter[tuple[int, ...]] = dataclasses.field(default_factory=Counter[tuple[int, ...]])
    joints: dict[tuple[int, ...], JointCalls] = dataclasses.field(default_factory=dict[Any, Any])

    @property
    def layout(self) -> Layout:
        return "local"

    @property
    def role(self) -> Literal["worker"]:
        return "worker"

    def serve(self, context: Any, **options: Any) -> None:
        """Return None: the plan's servers are other ranks."""

    @property
    def calls(self) -> Calls | None:
        return None

    @property
    def input(self) -> RanksInput:
        return self._input

    @functools.cached_property
    def _input(self) -> RanksInput:
        return RanksInput(self.comm, self.backend.place, self.file)

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def manual(self) -> dict[str, int]:
        return dict(self.backend.sizes)

    def spread(
        self, body: Callable[..., Any], in_specs: Any, out_specs: Any, *, check_vma: bool = True
    ) -> Callable[..., Any]:
        """Return `body`: the arrays of a rank are its own, outside as inside."""
        del in_specs, out_specs, check_vma
        return body

    def zeros(self, value: ir.Value, leaf: ir.Leaf) -> Array:
        del value
        return jax.device_put(np.zeros(leaf.shape, jnp.dtype(leaf.dtype.numpy_name)))

    def process(self) -> tuple[int, int]:
        return int(self.comm.Get_rank()), int(self.comm.Get_size())

    def participants(self) -> tuple[int, ...]:
        return self.backend.channel.groups.along(tuple(self.backend.sizes))

    @property
    def joint(self) -> JointCalls:
        ranks = self.participants()
        if ranks not in self.joints:
            # Bit i stands for axis i of the record; a member's `sizes` lack the axis of the ensemble.
            channel, sizes = self.backend.channel, self.backend.sizes
            group = sum(1 << place for place, axis in enumerate(channel.groups.sizes) if axis in sizes)
            self.joints[ranks] = JointCalls(channel.recording, group)
        return self.joints[ranks]

    def gather(self, text: str, timeout_s: float, notice: Notice | None = None) -> Mapping[int, str | None]:
        """Gather through the first rank. The others wait twice as long: it may arrive last and wait.

        Raises CP0834 if MPI reports that a rank has died.
        """
        ranks, me = self.participants(), int(self.comm.Get_rank())
        self.gathers[ranks] += 1
        tag = int.from_bytes(digest(f"{ranks} {self.gathers[ranks]}")[:2]) % _REPORTED
        with deaths(self.mesh, self.file):
            if me == ranks[0]:
                return self._collect(text, ranks, tag, timeout_s, notice)
            # Completes when the first rank arrives, which reports the others.
            sent = self.comm.issend(text, ranks[0], tag)
            _unread.append(sent)
            if notice is not None:  # Ranks do not know which others wait: one after another may report it.
                notice = dataclasses.replace(notice, after_s=notice.after_s * ranks.index(me))
            wait = ranks[0], tag, 2 * timeout_s, notice
            # The first message is the answer, as `_collect` sends it.
            for _, ranks_of in self._messages(
                *wait, lambda: () if sent.Test() else self._first_to_report(ranks, tag)
            ):
                return {rank: answer for answer, senders in ranks_of.items() for rank in senders}
        return dict.fromkeys(ranks[1:])  # The first rank is missing, and the others are unknown.

    def _first_to_report(self, ranks: tuple[int, ...], tag: int) -> tuple[int, ...]:
        """The first rank, which has not arrived, unless another rank has reported it in this exchange."""
        if self.comm.improbe(MPI.ANY_SOURCE, tag + _REPORTED) is not None:
            return ()
        peers = [rank for rank in ranks[1:] if rank != self.comm.Get_rank()]
        _unread.extend(self.comm.isend(None, rank, tag + _REPORTED) for rank in peers)
        return ranks[:1]

    def _collect(
        self, text: str, ranks: tuple[int, ...], tag: int, timeout_s: float, notice: Notice | None
    ) -> dict[int, str]:
        """Receive the texts on the first rank, and send all of them to the ranks that arrived in time."""
        answers, wait = {ranks[0]: text}, (MPI.ANY_SOURCE, tag, timeout_s, notice)
        if len(answers) < len(ranks):
            for rank, answer in self._messages(*wait, lambda: [n for n in ranks if n not in answers]):
                answers[rank] = answer
                if len(answers) == len(ranks):
                    break
        ranks_of: dict[str, list[int]] = {}  # Most answers are equal, and every rank gets all of them.
        for rank, answer in answers.items():
            ranks_of.setdefault(answer, []).append(rank)
        sends = [self.comm.isend(ranks_of, rank, tag) for rank in list(answers)[1:]]
        # A rank that ended the wait does not receive.
        deadline = time.monotonic() + timeout_s
        while not MPI.Request.Testall(sends) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        _unread.extend(sends)
        return answers

    def _messages(
        self,
        source: int,
        tag: int,
        timeout_s: float,
        notice: Notice | None,
        missing: Callable[[], Sequence[int]],
    ) -> Generator[tuple[int, Any]]:
        """Receive the messages that arrive within `timeout_s` seconds, each with the rank that sent it.

        While it waits, it raises the verdict of the sidecar; see `JointCalls.look`.

        Args:
            source: The sender, or `MPI.ANY_SOURCE`.
            tag: The tag of the messages.
            timeout_s: Seconds after which it ends.
            notice: Printed once if ranks are late; None to print nothing.
            missing: Returns the ranks that `notice` reports.
        """
        begun, joint, status = time.monotonic(), self.joint, MPI.Status()
        while (waited := time.monotonic() - begun) < timeout_s:
            joint.look()
            if notice is not None:
                notice.poll(waited, missing)
            _unread[:] = [send for send in _unread if not send.Test()]
            message = self.comm.improbe(source, tag, status)
            if message is None:
                time.sleep(_LOOK_S)
            else:
                yield int(status.Get_source()), message.recv()

    def issues(self, traced: Any, compiled: Any | None = None) -> tuple[Issue, ...]:
        """The calls of the engine and of mpi4jax in program order, without messages between two ranks.

        The collectives of an MPI program are those of its trace, whether it is compiled or not.
        """
        del compiled
        group, listed = self.comm.Get_group(), list(collectives_of(traced.jaxpr.jaxpr, self.backend.channel))
        numbers = [entry.comm.Get_group().Translate_ranks(list(entry.ranks), group) for entry in listed]
        return tuple(
            Issue(
                entry.text if entry.planned else f"{entry.text} between ranks {shortened(str(ranks))}",
                place_of(entry.scope),
                tuple(rank for rank in ranks if rank >= 0),
            )
            for entry, ranks in zip(listed, numbers, strict=True)
        )

    def copies(self, leaf: Any, placement: Placement | None) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        """The copies of declared arguments; the ranks' other arrays may differ."""
        if placement is None:
            return []
        split = placement.split if np.ndim(leaf) else ()
        differs = (*placement.per, *placement.partial, *split)
        along = self.backend.channel.groups.along(
            tuple(axis for axis in self.backend.sizes if axis not in differs)
        )
        return [(along, {"": leaf})] if len(along) > 1 else []

    def member(self, schedule: ir.Schedule, axis: str, place: int) -> Ranks:
        """The ranks of this rank's member; raises CP0842 for another member."""
        place_here = self.backend.place[axis]
        if place != place_here:
            fail(
                "CP0842",
                f"this rank belongs to member {place_here} of `{axis}`, not to member {place}",
                f"under MPI a rank has only the arrays of its member: call run.member({place_here})",
                file=self.file,
            )
        sizes = schedule.mesh_sizes
        return dataclasses.replace(self, backend=dataclasses.replace(self.backend, sizes=sizes))

    def part(self, name: str, tree: Any, placement: Placement, axis: str, member: Machine) -> Any:
        """The arrays of a rank are those of its member already."""
        del name, placement, axis, member
        return tree

    def join(self, parts: Mapping[int, Any], placement: Placement, axis: str) -> Any:
        """Return this member's part; raises CP0842 for parts of other members."""
        del placement
        place = self.backend.place[axis]
        if list(parts) != [place]:
            owners = ", ".join(map(str, parts)) or "none"
            fail(
                "CP0842",
                f"this rank belongs to member {place} of `{axis}`, and got the parts of members {owners}",
                f"under MPI a rank has only the arrays of its member: pass {{{place}: part}}",
                file=self.file,
            )
        return parts[place]


def ranks(request: BindRequest, comm: Any) -> Ranks | ServerMachine:
    """The machine of `comm` for a program, of a worker or of a server.

    All ranks of `comm` call this. The first ranks, as many as the plan's axes need, are workers. The others
    are the plan's servers in their order.

    Args:
        request: The program and its checks.
        comm: An mpi4py communicator.

    Raises:
        CommplanError: CP0834 if a rank has died; CP0840 if `comm` has another number of ranks than the
            program; CP0841 if the program was compiled for a mesh; CP0843 if the communicator cannot be used;
            CP0844 if MPI allows too few threads; CP0845 if another rank cannot bind, or binds another
            program; CP0846 if arrays are not on the CPU; CP0849 if a rank does not arrive.
    """
    schedule = request.schedule
    check_communicator(comm, schedule.file)

    def check() -> None:
        request.check()
        check_size(schedule, comm)
        check_backend(schedule)

    with deaths(comm, schedule.file):
        return _bound(request._replace(check=check), comm)


def check_backend(schedule: ir.Schedule) -> None:
    """Raise CP0841 or CP0846; see `ranks`."""
    if schedule.backend != "mpi":
        fail(
            "CP0841",
            f"program `{schedule.plan}` was compiled for a mesh of devices, but bound to a communicator",
            'compile it with the communicator, plan.compile(comm), or with plan.compile(backend="mpi", ...)',
            file=schedule.file,
        )
    if jax.default_backend() != "cpu":
        fail(
            "CP0846",
            f"JAX makes arrays on `{jax.default_backend()}`, but ranks exchange arrays of the CPU",
            "set JAX_PLATFORMS=cpu, or bind to a mesh of the devices",
            file=schedule.file,
        )


def _bound(request: BindRequest, comm: Any) -> Ranks | ServerMachine:
    """Agree with the other ranks, and open the communicators and channels of this rank's role."""
    schedule, limits = request.schedule, request.limits
    purpose, option = f"bind plan `{schedule.plan}`", "program.bind(comm, timeout=SECONDS)"
    waits = f"rank {comm.Get_rank()} waits in `program.bind` of `{schedule.plan}`"
    notice = Notice([waits], limits.watchdog_s or NOTICE_S, "rank")
    rendezvous = Rendezvous(
        comm, purpose, request.timeout_s, option=option, file=schedule.file, notice=notice
    )

    # Messages go over a duplicate, so they cannot match receives of the program.
    duplicate = rendezvous(comm.Dup)
    exchange = cast("Callable[[Any], list[Any]]", functools.partial(rendezvous, duplicate.allgather))
    with report_once("rank", int(duplicate.Get_rank()), 0):
        agree("rank", request, lambda report: dict(enumerate(exchange(report))))

    roles = sites(schedule)
    watch(schedule, int(MPI.COMM_WORLD.Get_size()), serves=int(duplicate.Get_rank()) >= roles.workers > 0)
    if not roles.servers:
        backend = backend_of(schedule, duplicate, ServerLink(roles), rendezvous=rendezvous, limits=limits)
        return _worker(comm, duplicate, backend, schedule.file)

    # The first ranks are workers. Workers and servers get separate communicators.
    rank = int(duplicate.Get_rank())
    server = rank - roles.workers
    part = rendezvous(duplicate.Split, int(server >= 0), rank)
    requests = open_requests(duplicate, limits, rendezvous, schedule.plan, roles.workers)
    if server < 0:
        workers = rendezvous.among(range(roles.workers))
        link = ServerLink(roles, duplicate, requests)
        backend = backend_of(schedule, part, link, rendezvous=workers, limits=limits)
        return _worker(comm, part, backend, schedule.file)

    expect_serving(duplicate, roles)
    name = server_names(schedule)[server]
    this_server = ServerRank(duplicate, roles, server, name, requests, part)
    return ServerMachine(comm, this_server, schedule.file)


def _worker(comm: Any, workers: Any, backend: MpiBackend, file: str) -> Ranks:
    """The machine of a worker; the backend's resources free `workers`, a communicator, at the end."""
    if backend.channel.resources is not None:
        backend.channel.resources.communicators.append(workers)
    return Ranks(comm, workers, backend, file)


@contextlib.contextmanager
def deaths(comm: Any, file: str = "") -> Generator[None]:
    """Raise CP0834 if MPI reports that a rank of `comm` has died."""
    try:
        yield
    except MPI.Exception as error:
        diagnostic = death(comm, error, file)
        if diagnostic is None:
            raise
        raise CommplanError(diagnostic) from error


def host_names(comm: Any, plan: str = "", timeout_s: float = TIMEOUT_S) -> list[str]:
    """The host name of each rank of `comm`; all of its ranks call this.

    Warns if several machines or containers have one name: their ranks then count as one host.

    Args:
        comm: An mpi4py communicator.
        plan: The name of the plan that is compiled, for messages.
        timeout_s: Seconds to wait for the other ranks.

    Raises:
        CommplanError: CP0849 if a rank does not arrive.
    """
    option = "plan.compile(comm, timeout=SECONDS)"
    notice = Notice([f"rank {comm.Get_rank()} waits in `plan.compile` of `{plan}`"], NOTICE_S, "rank")
    rendezvous = Rendezvous(comm, f"compile plan `{plan}`", timeout_s, option=option, notice=notice)
    answers: list[tuple[str, str]] = rendezvous(comm.allgather, (socket.gethostname(), _network()))
    machines = {name: {network for host, network in answers if host == name} for name, _ in answers}
    for name, networks in machines.items():
        if len(networks) > 1:
            warnings.warn(
                f"{len(networks)} machines have the host name `{name}`: the topology places their ranks on"
                " one host; give each machine its own host name",
                RuntimeWarning,
                4,
            )
    return [name for name, _ in answers]


def _network() -> str:
    """An identity of this machine's network namespace, which containers do not share; "" if unknown."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return boot + str(Path("/proc/self/ns/net").readlink())
    return ""


def death(comm: Any, error: Any, file: str = "") -> Diagnostic | None:
    """The diagnostic CP0834 of an MPI error for ranks that died; None for other errors.

    Always None if MPI does not continue after the death of a rank.
    """
    if not goes_on() or not isinstance(error, MPI.Exception) or error.Get_error_class() not in LOSSES:
        return None
    failed = comm.Get_failed()
    dead: list[int] = failed.Translate_ranks(range(failed.Get_size()), comm.Get_group())
    dead_ranks = " and ".join(f"rank {rank} of {comm.Get_size()}" for rank in sorted(dead)) or "another rank"
    notes = (Note("the program needs all ranks of the communicator"), Note(f"MPI says: {error}"))
    return Diagnostic("CP0834", f"{dead_ranks} has died", None, notes, file=file)
