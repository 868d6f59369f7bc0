"""The interface of the machine on which a bound program runs, and the agreement of processes at `bind`.

`mesh`, `ranks` and `server` implement `Machine`. Their inputs, in `mesh_input` and `ranks_input`, implement
`MachineInput`. The rest of `runtime` uses only these interfaces.
"""

from __future__ import annotations

import contextlib
import hashlib
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, SupportsIndex

import msgspec
import numpy.typing as npt
from jax import Array

from commplan.diagnostics import CommplanError, fail
from commplan.hang_limits import HangLimits
from commplan.input.work_partition import Division
from commplan.ir import schedule as ir
from commplan.ir.types import OnFailure, Placement
from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.check import Layout
from commplan.recorder.notice import Notice
from commplan.runtime.input.group import Blame
from commplan.runtime.input.transport.transport import Carrier
from commplan.runtime.machines.difference import first_difference
from commplan.runtime.machines.environment import ALIKE, environment
from commplan.runtime.machines.pinned import Pinning
from commplan.runtime.observe.abort_hook import mark_common
from commplan.runtime.observe.calls import Calls
from commplan.runtime.observe.joint_calls import JointCalls

Host = npt.NDArray[Any]
# The indices of a process along each axis of the plan, in increasing order.
Local = Mapping[str, tuple[int, ...]]
_LONG = 80  # The most characters of a list of ranks or devices in a message.
_LISTED_FAILURES = 4  # The most processes whose errors a message lists.
_LISTED_OTHERS = 3  # The most processes with other values that a message lists.
# Parts of the text of an operation that are not shown: its place in the plan, and empty attributes.
_LEFT_OUT = re.compile(r"span=Span\([^)]*\), |\w+=(None|\(\)), ")


@dataclass(frozen=True)
class Peers:
    """Processes that share the data they load, at least two, in the order of `places`.

    Attributes:
        run_id: A name that no other run has.
        index: The index of this process in the tuples below.
        hosts: The host index of each process, numbered by first appearance.
        ranks: The number of each process on the machine (its process index or its rank).
        places: The first index of each process along the shared axes.
    """

    run_id: str
    index: int
    hosts: tuple[int, ...]
    ranks: tuple[int, ...]
    places: tuple[int, ...]


class Issue(msgspec.Struct, frozen=True, array_like=True):
    """A collective that a compiled step issues.

    Attributes:
        text: The operation, its arguments and its axes.
        place: Its origin, a line of the plan or a scope of the program.
        ranks: The participants by their numbers on the machine; empty if all take part.
    """

    text: str
    place: str
    ranks: tuple[int, ...] = ()


def place_of(scope: str) -> str:
    """Describe the origin of an operation.

    Args:
        scope: The name of the operation: its scopes, separated by slashes.

    Returns:
        The line of the plan, or `scope` without the names of jitted functions if it contains no line.
    """
    line = re.search(r"commplan/(\w+)/line(\d+)", scope)
    if line is not None:
        return f"line {line[2]} of the plan, in phase `{line[1]}`"
    return re.sub(r"jit\([^)]*\)/?", "", scope)


class MachineInput(Protocol):
    """The input of a program: its place on this process's devices, and the processes that share it."""

    def local(self) -> dict[str, tuple[int, ...]]:
        """The indices of this process along each axis of the plan."""
        ...

    def array(self, host: Host, placement: Placement, local: Local) -> Array:
        """Put this process's part of an array on its devices.

        Args:
            host: The part: one dimension per `per` axis, then the rows of this process.
            placement: The placement of the array.
            local: The result of `local`.

        Returns:
            The array in `Machine.layout`.
        """
        ...

    def pinning(self) -> Pinning | None:
        """The registrar of host memory with this process's devices, or None if they need none."""
        ...

    def peers(self, key: str, host: str, place: int, timeout: float) -> Peers | None:
        """Find the processes that pass the same key. Every process of the machine calls this.

        Args:
            key: The name of the shared data.
            host: The name of this process's host.
            place: The first index of this process along the shared axes.
            timeout: Seconds to wait for the others, which may still compile.

        Returns:
            The processes with this key, or None if this process is the only one.

        Raises:
            CommplanError: CP0849 if a process does not arrive.
        """
        ...

    def carrier(
        self, peers: Peers, division: Division, *, blame: Blame, on_failure: OnFailure, timeout: float
    ) -> Carrier | None:
        """Open the transport that moves rows of `division` between hosts; all of `peers` call this.

        Args:
            peers: The processes that share the data.
            division: The rows that each host loads and those that it needs.
            blame: The plan's text, its place and its file, for errors.
            on_failure: Whether the run stops or continues if a host fails.
            timeout: Seconds to wait for a host that is alive but does not answer.

        Returns:
            The transport, or None if no rows move between hosts.
        """
        ...


class Machine(Protocol):
    """The machine of one schedule: its devices, and the input of the program on them."""

    @property
    def mesh(self) -> Any:
        """The mesh or communicator to which the user bound the program."""
        ...

    @property
    def backend(self) -> Backend:
        """The operations that phases are lowered to."""
        ...

    @property
    def input(self) -> MachineInput:
        """The input of the program on this machine."""
        ...

    @property
    def layout(self) -> Layout:
        """The layout of arrays outside `run.spmd`: "global", or "local" if they are one rank's, as inside."""
        ...

    @property
    def role(self) -> Literal["worker", "server"]:
        """The role of this process: a server of the plan's states, or a worker."""
        ...

    def serve(self, context: Any, **options: Any) -> Any:
        """Serve the workers of the bound program `context` on a server; return None on a worker.

        `options` are the fields of `param_server.serve.ServeOptions`.
        """
        ...

    @property
    def calls(self) -> Calls | None:
        """The counter of compiled steps that the watchdog reads.

        None if steps wait for no other process, or if the engine watches its own collectives.
        """
        ...

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """The context that makes this mesh JAX's while functions of global arrays are compiled and run."""
        ...

    def manual(self) -> dict[str, int]:
        """The sizes of the axes along which the caller sees one rank's arrays: under MPI all axes."""
        ...

    def spread(
        self, body: Callable[..., Any], in_specs: Any, out_specs: Any, *, check_vma: bool = True
    ) -> Callable[..., Any]:
        """Map `body`, a function of one rank's arrays, over the plan's axes.

        Args:
            body: The function to map.
            in_specs: A `PartitionSpec`, or a pytree of them, for each argument.
            out_specs: The same for the result.
            check_vma: Whether JAX types arrays by the axes over which they vary.

        Returns:
            A function of arrays in `layout`.
        """
        ...

    def zeros(self, value: ir.Value, leaf: ir.Leaf) -> Array:
        """A new array of zeros in `layout` for one leaf of `value`."""
        ...

    def process(self) -> tuple[int, int]:
        """The index of this process and the number of processes of the job; under MPI, those of ranks."""
        ...

    def participants(self) -> tuple[int, ...]:
        """The numbers of the processes that run steps here, this process included."""
        ...

    @property
    def joint(self) -> JointCalls:
        """The calls of steps that all participants make together."""
        ...

    def gather(self, text: str, timeout_s: float, notice: Notice | None = None) -> Mapping[int, str | None]:
        """Exchange a text between the participants, which all call this in the same order.

        Args:
            text: The text of this process.
            timeout_s: Seconds to wait for the others.
            notice: Printed once if others are late; None to print nothing.

        Returns:
            The text of each participant that arrived in time, by its number. None for a participant whose
            text is unknown, because the process that collects the texts has not answered.
        """
        ...

    def issues(self, traced: Any, compiled: Any | None = None) -> tuple[Issue, ...]:
        """The collectives of a step in the order of issue.

        Args:
            traced: The step as a `jax.stages.Traced`.
            compiled: Its `jax.stages.Compiled`, whose collectives a mesh returns. If None, or under MPI,
                those of the trace are returned.
        """
        ...

    def copies(
        self, leaf: Any, placement: Placement | None
    ) -> Iterable[tuple[tuple[int, ...], Mapping[str, Any]]]:
        """The copies of an argument, or of its pieces, that this process holds.

        Args:
            leaf: One array of the argument.
            placement: Its declared placement, or None if the argument is not declared.

        Returns:
            For each piece with several copies, if this process holds one: the numbers of the processes that
            hold one, and this process's arrays, by the name of the device. The name is "" for
            an array of the host, and under MPI.
        """
        ...

    def member(self, schedule: ir.Schedule, axis: str, place: int) -> Machine:
        """The part of the machine that belongs to one member of the ensemble.

        Args:
            schedule: The member's schedule, without `axis`.
            axis: The axis of the ensemble.
            place: The index of the member.
        """
        ...

    def part(self, name: str, tree: Any, placement: Placement, axis: str, member: Machine) -> Any:
        """The part of arrays in `layout` on one member's machine; nothing is sent.

        Args:
            name: The name of the value, for errors.
            tree: A pytree of arrays.
            placement: The placement of the value.
            axis: The axis of the ensemble.
            member: The member's machine.
        """
        ...

    def join(self, parts: Mapping[int, Any], placement: Placement, axis: str) -> Any:
        """Join the parts of this process's members, the inverse of `part`.

        Args:
            parts: A pytree of arrays by member.
            placement: The placement of the whole value, which is `per` over `axis`.
            axis: The axis of the ensemble.
        """
        ...


class PeerHello(NamedTuple):
    """The message of a process that looks for others to share the data it loads.

    Attributes:
        key: The digest of the name of the data.
        host: The digest of the name of the host.
        place: The first index of the process along the shared axes.
        token: A random name, which becomes `Peers.run_id` if the process is the first.
    """

    key: bytes
    host: bytes
    place: int
    token: str


def peers_of(me: int, hellos: Mapping[int, PeerHello]) -> Peers | None:
    """Find the processes with the key of this one.

    Args:
        me: The number of this process.
        hellos: The messages of all processes, this one included, by number.

    Returns:
        The processes in the order of `place` and then of their numbers; None if there is only this one.
    """
    key = hellos[me].key
    matching = sorted((hello.place, rank) for rank, hello in hellos.items() if hello.key == key)
    if len(matching) == 1:
        return None
    ranks = tuple(rank for _, rank in matching)
    order = list(dict.fromkeys(hellos[rank].host for rank in ranks))
    hosts = tuple(order.index(hellos[rank].host) for rank in ranks)
    return Peers(hellos[ranks[0]].token, ranks.index(me), hosts, ranks, tuple(place for place, _ in matching))


class BindReport(NamedTuple):
    """A process's answer about the program that it binds.

    Attributes:
        alike: Its values of the properties in `ALIKE`; empty if it cannot bind.
        wrong: The reason why it cannot bind, or "".
    """

    alike: Mapping[str, str] = {}
    wrong: str = ""


class BindRequest(NamedTuple):
    """A program that a process binds.

    Attributes:
        schedule: The schedule of the program.
        program: The digest of the schedule.
        seed: The seed of random functions.
        check: Raises the errors of this process's machine, sources and functions.
        limits: See `Program.bind`.
        timeout_s: Seconds to wait for other processes.
        mesh: The axes and devices of the mesh, which must be the same in all processes; "" under MPI.
    """

    schedule: ir.Schedule
    program: str
    seed: SupportsIndex
    check: Callable[[], None]
    limits: HangLimits
    timeout_s: float
    mesh: str = ""


def agree(noun: str, request: BindRequest, exchange: Callable[[Any], Mapping[int, Any]]) -> None:
    """Check that all processes bind the same program with the same seed.

    Args:
        noun: The kind of the participants, "rank" or "process".
        request: The program of this process.
        exchange: Returns the values of all participants by their numbers. Values have a `msgspec` type. All
            participants call it in the same order.

    Raises:
        CommplanError: CP0845 if another process cannot bind the program, or if a property in `ALIKE`
            differs; the errors of `exchange`.
        Exception: the error of `request.check`, after the others received its text.
    """
    file = request.schedule.file
    try:
        request.check()
        seed = f"seed {operator.index(request.seed)}"
    except Exception as error:
        # Report the error, and then raise it even if the others do not arrive.
        answers: Mapping[int, BindReport] = {}
        with contextlib.suppress(CommplanError):
            answers = exchange(BindReport(wrong=reason(error)))
        if {answer.wrong for answer in answers.values()} == {reason(error)}:
            mark_common(error)
        raise
    program = f"plan `{request.schedule.plan}`, schedule {request.program}"
    facts = {**environment(request.schedule), "mesh": request.mesh, "program": program, "seed": seed}
    answers = exchange(BindReport(facts))
    failed = [
        f"{noun} {n} cannot bind the program: {answers[n].wrong}" for n in sorted(answers) if answers[n].wrong
    ]
    if failed:
        fail("CP0845", *failed[:_LISTED_FAILURES], file=file)
    for name, (subject, fix) in ALIKE.items():
        values = {number: answers[number].alike.get(name, "") for number in sorted(answers)}
        usual = Counter(values.values()).most_common(1)[0][0]  # The earliest of equally frequent ones.
        first = next(number for number in values if values[number] == usual)
        differing = [number for number in values if values[number] != usual]
        if not differing:
            continue
        lines = first_difference(_lines(request.schedule), exchange) if name == "program" else {}
        fail(
            "CP0845",
            f"not every {noun} binds {subject}: {noun} {differing[0]} differs from {noun} {first}",
            *(f"{noun} {n}: {lines.get(n, values[n])}" for n in (first, *differing[:_LISTED_OTHERS])),
            fix.format(noun=noun),
            file=file,
        )


def _lines(schedule: ir.Schedule) -> list[str]:
    """Describe `schedule` line by line for a comparison: entry leaves, axis sizes, the plan's stages, ops.

    Causes come before their effects, because only the first line that differs is reported.
    """
    leaves = [
        f"{leaf.label(value.id)}: {leaf.dtype}[{', '.join(map(str, leaf.shape))}]"
        for value in schedule.entry
        for leaf in value.leaves
    ]
    sizes = [f"axis `{axis.name}` has {axis.size} places" for axis in schedule.axes]
    ops = [
        f"line {op.span.line} of the plan, in phase `{phase.name}`: {_LEFT_OUT.sub('', str(op))}"
        for phase, items in (
            *((phase, phase.stages) for phase in (schedule.origin.plan.phases if schedule.origin else ())),
            *((phase, phase.ops) for phase in schedule.phases),
        )
        for op in items
    ]
    return [*leaves, *sizes, *ops]


def reason(error: Exception) -> str:
    """Describe an error for the processes that it stops; of a `CommplanError` only the first message."""
    if isinstance(error, CommplanError):
        return f"{error.diagnostics[0].code} {error.diagnostics[0].message}"
    return f"{type(error).__name__} {error}"


def digest(text: str) -> bytes:
    """An 8-byte digest of `text`."""
    return hashlib.sha256(text.encode()).digest()[:8]


def shortened(text: str) -> str:
    """`text`, or its beginning and a digest of all of it if it is longer than `_LONG` characters."""
    return text if len(text) <= _LONG else f"{text[:_LONG]}... ({digest(text).hex()})"
