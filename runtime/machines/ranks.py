"""The ranks of an `mpi4py` communicator as a machine: each has one device, and arrays of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import secrets
import socket
import time
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from commplan.diagnostics import CommplanError, Diagnostic, Note, fail
from commplan.input.work_partition import Division
from commplan.ir import schedule as ir
from commplan.ir.plan import AxisKind, Plan
from commplan.ir.types import Placement
from commplan.lowering.jax.check import Layout
from commplan.lowering.jax.typing_shim import jax, jnp
from commplan.lowering.mpi.backend import MpiBackend, backend_of, server_names
from commplan.lowering.mpi.job.rendezvous import Rendezvous
from commplan.lowering.mpi.listing import collectives_of
from commplan.lowering.mpi.service import requests_of
from commplan.lowering.mpi.typing_shim import MPI
from commplan.protocol.build_sites import sites
from commplan.recorder.file import machine as machine_name
from commplan.runtime.input.device.pinned import Pinning, pinning_of
from commplan.runtime.input.group import Blame
from commplan.runtime.input.transport.mpi import MpiCarrier
from commplan.runtime.input.transport.mpi_group import goes_on
from commplan.runtime.input.transport.ulfm import LOSSES
from commplan.runtime.machines.machine import (
    Binding,
    Host,
    Issue,
    Local,
    Machine,
    OnFailure,
    Peers,
    agree,
    digest,
    peers_of,
    place_of,
    shortened,
)
from commplan.runtime.machines.rank_calls import RankCalls
from commplan.runtime.observe.abort_hook import alike, watch
from commplan.runtime.observe.calls import Calls
from commplan.runtime.observe.peers import Peer
from commplan.runtime.param_server.server_rank import Serving
from commplan.runtime.param_server.startup_guard import expect
from commplan.wait import TIMEOUT_S

Array = Any
_LOOK_S = 0.0005  # between two looks for messages
_unread: list[Any] = []  # sends to ranks that did not come: what they send must stay


@dataclasses.dataclass(frozen=True, eq=False)
class Ranks:
    """See `machine.Machine`.

    mesh: the communicator that the program was bound to. own: one of the same ranks without servers, for what
    is said outside of compiled phases. processes: of its ranks. gathers: how often each set of ranks has
    gathered. joints: by the same sets, the steps that they call together.
    """

    mesh: Any
    own: Any
    backend: MpiBackend
    file: str = ""
    processes: Mapping[int, Peer] = dataclasses.field(default_factory=dict[int, Peer])
    gathers: Counter[tuple[int, ...]] = dataclasses.field(default_factory=Counter[tuple[int, ...]])
    joints: dict[tuple[int, ...], RankCalls] = dataclasses.field(default_factory=dict[Any, Any])

    @property
    def layout(self) -> Layout:
        return "local"

    @property
    def calls(self) -> Calls | None:
        return None

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def manual(self) -> dict[str, int]:
        return dict(self.backend.sizes)

    def spread(
        self, body: Callable[..., Any], in_specs: Any, out_specs: Any, *, check_vma: bool = True
    ) -> Callable[..., Any]:
        del in_specs, out_specs, check_vma
        return body

    def zeros(self, value: ir.Value, leaf: ir.Leaf) -> Array:
        del value
        return jax.device_put(np.zeros(leaf.shape, jnp.dtype(leaf.dtype.numpy_name)))

    def process(self) -> tuple[int, int]:
        return int(self.own.Get_rank()), int(self.own.Get_size())

    def participants(self) -> tuple[int, ...]:
        return self.backend.channel.groups.along(tuple(self.backend.sizes))

    @property
    def joint(self) -> RankCalls:
        ranks = self.participants()
        if ranks not in self.joints:
            processes = [self.processes[rank] for rank in ranks]
            self.joints[ranks] = RankCalls(self.own, processes, self.backend.channel.is_busy)
        return self.joints[ranks]

    def gather(self, text: str, timeout_s: float, look: Callable[[float], None]) -> dict[int, str]:
        """Through the first rank. The others wait for it twice as long: it may come last, and wait itself."""
        ranks = self.participants()
        self.gathers[ranks] += 1
        tag = int.from_bytes(digest(f"{ranks} {self.gathers[ranks]}")[:2]) >> 1  # MPI has 2**15 of them
        with deaths(self.mesh, self.file):
            if self.own.Get_rank() == ranks[0]:
                return self._collect(text, ranks, tag, timeout_s, look)
            _unread.append(self.own.isend(text, ranks[0], tag))
            for _, ranks_of in self._messages(ranks[0], tag, 2 * timeout_s, look):
                return {rank: answer for answer, own in ranks_of.items() for rank in own}
        return dict.fromkeys(ranks[1:], "")

    def _collect(
        self, text: str, ranks: tuple[int, ...], tag: int, timeout_s: float, look: Callable[[float], None]
    ) -> dict[int, str]:
        answers = {ranks[0]: text}
        if len(answers) < len(ranks):
            for rank, answer in self._messages(MPI.ANY_SOURCE, tag, timeout_s, look):
                answers[rank] = answer
                if len(answers) == len(ranks):
                    break
        ranks_of: dict[str, list[int]] = {}  # most say the same, and all are told all of it
        for rank, answer in answers.items():
            ranks_of.setdefault(answer, []).append(rank)
        sends = [self.own.isend(ranks_of, rank, tag) for rank in list(answers)[1:]]
        until = time.monotonic() + timeout_s
        while not MPI.Request.Testall(sends) and time.monotonic() < until:
            time.sleep(_LOOK_S)
        _unread.extend(sends)
        return answers

    def _messages(
        self, source: int, tag: int, timeout_s: float, look: Callable[[float], None]
    ) -> Generator[tuple[int, Any]]:
        """The messages of this time, each with the rank that sent it."""
        begun, status = time.monotonic(), MPI.Status()
        while (waited := time.monotonic() - begun) < timeout_s:
            look(waited)
            _unread[:] = [request for request in _unread if not request.Test()]
            message = self.own.improbe(source, tag, status)
            if message is None:
                time.sleep(_LOOK_S)
            else:
                yield int(status.Get_source()), message.recv()

    def issues(self, traced: Any, compiled: Any | None = None) -> tuple[Issue, ...]:
        """Calls of engine and mpi4jax, in the order of the program; messages between two ranks are none."""
        del compiled
        own, listed = self.own.Get_group(), list(collectives_of(traced.jaxpr.jaxpr, self.backend.channel))
        numbers = [entry.comm.Get_group().Translate_ranks(list(entry.ranks), own) for entry in listed]
        return tuple(
            Issue(
                entry.text if entry.planned else f"{entry.text} between ranks {shortened(str(ranks))}",
                place_of(entry.scope),
                tuple(rank for rank in ranks if rank >= 0),
            )
            for entry, ranks in zip(listed, numbers, strict=True)
        )

    def copies(self, leaf: Any, placement: Placement | None) -> list[tuple[tuple[int, ...], dict[str, Any]]]:
        """Of arguments that are declared: each rank has arrays of its own."""
        if placement is None:
            return []
        cut = placement.split if np.ndim(leaf) else ()
        differs = (*placement.per, *placement.partial, *cut)
        along = self.backend.channel.groups.along(
            tuple(axis for axis in self.backend.sizes if axis not in differs)
        )
        return [(along, {"": leaf})] if len(along) > 1 else []

    def local(self) -> dict[str, tuple[int, ...]]:
        return {axis: (self.backend.place[axis],) for axis in self.backend.sizes}

    def array(self, host: Host, placement: Placement, local: Local) -> Array:
        """This rank's part on its device, without the dimensions of `per` axes."""
        del local
        return jax.device_put(host.reshape(host.shape[len(placement.per) :]))

    def pinning(self) -> Pinning | None:
        return pinning_of(jax.local_devices()[:1])

    def peers(self, key: str, host: str, place: int, timeout: float) -> Peers | None:
        hello = (digest(key), digest(host), place, secrets.token_hex(8))
        meet = self._meet("share what they load", timeout)
        seen: list[tuple[bytes, bytes, int, str]] = meet(self.own.allgather, hello)
        return peers_of(self.own.Get_rank(), dict(enumerate(seen)))

    def _meet(self, purpose: str, timeout: float, ranks: Sequence[int] | None = None) -> Rendezvous:
        option = "run.batches(timeout=SECONDS)"
        return Rendezvous(self.own, purpose, timeout, ranks=ranks, option=option, file=self.file)

    def carrier(
        self, peers: Peers, division: Division, *, blame: Blame, on_failure: OnFailure, timeout: float
    ) -> MpiCarrier | None:
        """On a communicator of its own, of exactly these processes."""
        if not division.moves():
            return None
        meet = self._meet("exchange what they load", timeout, peers.ranks)
        comm = meet(self.own.Create_group, self.own.Get_group().Incl(list(peers.ranks)))
        return MpiCarrier(comm, division, blame=blame, on_failure=on_failure, timeout=timeout)

    def member(self, schedule: ir.Schedule, axis: str, place: int) -> Ranks:
        """The ranks of this rank's own member. Raises CP0842 for another one."""
        place_here = self.backend.place[axis]
        if place != place_here:
            fail(
                "CP0842",
                f"this rank belongs to member {place_here} of `{axis}`, not to member {place}",
                f"under MPI a rank has the arrays of its own member alone: run.member({place_here})",
                file=self.file,
            )
        sizes = schedule.mesh_sizes
        return dataclasses.replace(self, backend=dataclasses.replace(self.backend, sizes=sizes))

    def part(self, name: str, tree: Any, placement: Placement, axis: str, own: Machine) -> Any:
        """A rank's arrays are those of its member already."""
        del name, placement, axis, own
        return tree

    def join(self, parts: Mapping[int, Any], placement: Placement, axis: str) -> Any:
        """Raises CP0842 for parts of other members."""
        del placement
        place = self.backend.place[axis]
        if list(parts) != [place]:
            owners = ", ".join(map(str, parts)) or "none"
            fail(
                "CP0842",
                f"this rank belongs to member {place} of `{axis}`, and got the parts of members {owners}",
                f"under MPI a rank has the arrays of its own member alone: {{{place}: part}}",
                file=self.file,
            )
        return parts[place]


def ranks(binding: Binding, comm: Any) -> Ranks | Serving:
    """The machine of `comm` for what is bound to it: of a worker, or of a server.

    All ranks of `comm` call this alike. The first ones, as many as the axes make, are workers, the others the
    plan's servers in their order.

    Raises CP0834 where a rank has died, CP0840 for another number of ranks than compiled for, CP0841 for a
    program that was compiled for a mesh, CP0843 for a communicator that cannot be used, CP0844 where MPI
    allows too few threads, CP0845 where another rank cannot bind or binds another program, CP0846
    where arrays are made on another device than the CPU, CP0849 where a rank does not come.
    """
    schedule = binding.schedule
    check_communicator(comm, schedule.file)

    def check() -> None:
        binding.check()
        check_size(schedule, comm)
        check_backend(schedule)

    with deaths(comm, schedule.file):
        return _bound(binding._replace(check=check), comm)


def check_backend(schedule: ir.Schedule) -> None:
    """Raises CP0841 and CP0846, see `ranks`."""
    if schedule.backend != "mpi":
        fail(
            "CP0841",
            f"program `{schedule.plan}` was compiled for a mesh of devices, and is bound to a communicator",
            'compile it with the communicator, plan.compile(comm), or with plan.compile(backend="mpi", ...)',
            file=schedule.file,
        )
    if jax.default_backend() != "cpu":
        fail(
            "CP0846",
            f"arrays are made on `{jax.default_backend()}`, and ranks exchange those of the CPU",
            "set JAX_PLATFORMS=cpu, or bind to a mesh of the devices",
            file=schedule.file,
        )


def _bound(binding: Binding, comm: Any) -> Ranks | Serving:
    schedule, bound_s, busy_s = binding.schedule, binding.watchdog_s, binding.busy_s
    purpose, option = f"bind plan `{schedule.plan}`", "program.bind(comm, timeout=SECONDS)"
    meet = Rendezvous(comm, purpose, binding.timeout_s, option=option, file=schedule.file)
    own = meet(comm.Dup)
    exchange = cast("Callable[[Any], list[Any]]", functools.partial(meet, own.allgather))
    with alike("rank", int(own.Get_rank()), 0):
        agree("rank", binding, lambda mine: dict(enumerate(exchange(mine))))
    roles = sites(schedule)
    watch(schedule, int(MPI.COMM_WORLD.Get_size()), serves=int(own.Get_rank()) >= roles.workers > 0)
    if not roles.servers:
        backend = backend_of(schedule, own, roles, watchdog_s=bound_s, meet=meet, busy_s=busy_s)
        return _worker(comm, own, backend, schedule.file, bound_s, meet)
    rank = int(own.Get_rank())
    server = rank - roles.workers
    part = meet(own.Split, int(server >= 0), rank)
    requests = requests_of(own, bound_s, busy_s, meet, schedule.plan, roles.workers)
    if server < 0:
        workers = meet.among(range(roles.workers))
        backend = backend_of(schedule, part, roles, own, requests, bound_s, workers, busy_s)
        return _worker(comm, part, backend, schedule.file, bound_s, workers)
    expect(own, roles)
    name = server_names(schedule)[server]
    return Serving(comm, own, roles, server, name, schedule.file, requests and requests.watch)


def _worker(
    comm: Any, own: Any, backend: MpiBackend, file: str, bound_s: float | None, meet: Rendezvous
) -> Ranks:
    process = Peer(int(own.Get_rank()), "", 0, "", os.getpid(), socket.gethostname(), machine_name(), bound_s)
    processes: list[Peer] = meet(own.allgather, process)
    if backend.channel.resources is not None:
        backend.channel.resources.communicators.append(own)
    return Ranks(comm, own, backend, file, dict(enumerate(processes)))


@contextlib.contextmanager
def deaths(comm: Any, file: str = "") -> Generator[None]:
    """Raises CP0834 where MPI finds that a rank of `comm` has died."""
    try:
        yield
    except MPI.Exception as error:
        diagnostic = death(comm, error, file)
        if diagnostic is None:
            raise
        raise CommplanError(diagnostic) from error


def host_names(comm: Any, plan: str = "", timeout_s: float = TIMEOUT_S) -> list[str]:
    """The name of the host of each rank. Warns where one name stands for several machines or networks: ranks
    are then placed as if they were on one host. Raises CP0849 where a rank does not come."""
    option = "plan.compile(comm, timeout=SECONDS)"
    meet = Rendezvous(comm, f"compile plan `{plan}`", timeout_s, option=option)
    answers: list[tuple[str, str]] = meet(comm.allgather, (socket.gethostname(), _network()))
    machines = {name: {other for known, other in answers if known == name} for name, _ in answers}
    for name, own in machines.items():
        if len(own) > 1:
            warnings.warn(
                f"{len(own)} machines are called `{name}`: their ranks are placed on one host of the"
                " topology; give each a host name of its own",
                RuntimeWarning,
                4,
            )
    return [name for name, _ in answers]


def _network() -> str:
    """What tells this machine's network from others', of containers too."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return boot + str(Path("/proc/self/ns/net").readlink())
    return ""


def death(comm: Any, error: Any, file: str = "") -> Diagnostic | None:
    """What is said of an error of MPI where that outlives its dead; None for other errors."""
    if not goes_on() or not isinstance(error, MPI.Exception) or error.Get_error_class() not in LOSSES:
        return None
    failed = comm.Get_failed()
    dead: list[int] = failed.Translate_ranks(range(failed.Get_size()), comm.Get_group())
    who = " and ".join(f"rank {rank} of {comm.Get_size()}" for rank in sorted(dead)) or "another rank"
    notes = (Note("all ranks of the communicator are needed"), Note(f"MPI says: {error}"))
    return Diagnostic("CP0834", f"{who} has died", None, notes, file=file)


def check_communicator(comm: Any, file: str) -> None:
    """Raises CP0843 for a communicator that is no more or has two sides, CP0844 for too few threads."""
    expected = "expected a communicator such as mpi4py.MPI.COMM_WORLD"
    if MPI.Is_finalized() or not MPI.Is_initialized():
        state = "has been finalized" if MPI.Is_finalized() else "is not initialized"
        fail("CP0843", f"MPI {state}", "bind programs between MPI's beginning and its end", file=file)
    if comm == MPI.COMM_NULL:
        fail("CP0843", "the communicator is null: it was freed, or never made", expected, file=file)
    if comm.Is_inter():
        fail("CP0843", "an inter-communicator has two groups of ranks", expected, file=file)
    level = MPI.Query_thread()
    if level < MPI.THREAD_MULTIPLE:
        names = {
            MPI.THREAD_SINGLE: "SINGLE",
            MPI.THREAD_FUNNELED: "FUNNELED",
            MPI.THREAD_SERIALIZED: "SERIALIZED",
        }
        fail(
            "CP0844",
            f"MPI was initialized for MPI_THREAD_{names[level]}: compiled phases call it from threads of JAX",
            "MPI_THREAD_MULTIPLE is what mpi4py asks for unless told otherwise (mpi4py.rc.thread_level)",
            file=file,
        )


def check_size(schedule: ir.Schedule, comm: Any) -> None:
    """Raises CP0840 where `comm` has another number of ranks than the plan's axes and servers make."""
    sizes, actual = schedule.mesh_sizes, comm.Get_size()
    servers = {axis.name: axis.size for axis in schedule.axes if axis.kind is AxisKind.SERVER}
    wanted = math.prod(sizes.values()) + sum(servers.values())
    if wanted == actual:
        return
    workers = str(math.prod(sizes.values()))
    fail(
        "CP0840",
        f"the plan has {wanted} ranks, and the communicator {actual}",
        *_made_of(workers, sizes, servers, "no axes"),
        f"start it with mpirun -n {wanted}, or split the communicator",
        file=schedule.file,
    )


def _made_of(
    workers: str, sizes: Mapping[str, int], servers: Mapping[str, int], none: str
) -> tuple[str, ...]:
    """Remarks that say of what the ranks of a plan are made."""
    axes = " x ".join(f"{name} = {size}" for name, size in sizes.items()) or none
    if not servers:
        return (f"its axes: {axes}",)
    named = ", ".join(f"{name} = {size}" for name, size in servers.items())
    after = f"and for its servers, after them: {sum(servers.values())} ({named})"
    return f"ranks for its workers: {workers} ({axes})", after


def sizes_of(plan: Plan, comm: Any, given: Mapping[str, int]) -> dict[str, int]:
    """`given`, and the size of the one axis that is declared `?` and not given: the ranks that are left.

    Servers are ranks of their own, after all others. Raises CP0840 where the sizes do not make up the ranks
    of `comm`, CP0843 and CP0844 for a communicator that cannot be used.
    """
    check_communicator(comm, plan.file)
    count = int(comm.Get_size())
    sizes = dict(given)
    known: dict[str, int] = {}
    unknown: list[str] = []
    servers: dict[str, int] = {}
    for axis in plan.axes:
        size = sizes.get(axis.name, axis.size)
        if axis.kind is AxisKind.SERVER:
            servers[axis.name] = size if type(size) is int and size > 0 else 1  # else the compiler names it
            continue
        if size is None:
            unknown.append(axis.name)
        else:
            known[axis.name] = size
    whole = all(type(size) is int and size > 0 for size in known.values())
    if len(unknown) > 1 or not whole:
        return sizes  # which the compiler names, axis by axis
    product, serving = math.prod(known.values()), sum(servers.values())
    workers = count - serving
    if unknown and workers > 0 and workers % product == 0:
        return sizes | {unknown[0]: workers // product}
    if product != workers or unknown:
        more = f" and {serving} for servers" if serving and unknown else ""
        wanted = f"a multiple of {product}" if unknown else str(product + serving)
        many = f"a multiple of {product}" if unknown else f"{product}"
        fail(
            "CP0840",
            f"the plan needs {wanted} ranks{more}, and the communicator has {count}",
            *_made_of(many, known, servers, "no axes of known size"),
            f"start {wanted}{more}: mpirun -n {product + serving}; or split the communicator",
            file=plan.file,
        )
    return sizes
