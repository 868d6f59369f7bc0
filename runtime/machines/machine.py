"""The interface of the machine on which a bound program runs: a mesh, or the ranks of a communicator.

`mesh` and `ranks` implement it. Everything else in this package is the same for both.
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
from commplan.runtime.observe.abort_hook import common
from commplan.runtime.observe.calls import Calls
from commplan.runtime.observe.joint_calls import JointCalls

Host = npt.NDArray[Any]
Local = Mapping[str, tuple[int, ...]]
_LONG = 80  # The most characters of a list of ranks in a message.
# Parts of the text of an operation that are not compared.
_LEFT_OUT = re.compile(r"span=Span\([^)]*\), |\w+=(None|\(\)), ")


@dataclass(frozen=True)
class Peers:
    """Processes that share the data they load, in the order of their shards.

    Attributes:
        run_id: A name that no other run has.
        index: The index of this process.
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
    """The plan's line in an operation's name, or the name without function names if it has no line."""
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
        """An array in `layout` from this process's part: dimensions of the `per` axes, then its rows."""
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
    def backend(self) -> Backend: ...

    @property
    def input(self) -> MachineInput: ...

    @property
    def layout(self) -> Layout:
        """The layout of arrays outside `run.spmd`: `global`, or `local`, as inside."""
        ...

    @property
    def role(self) -> Literal["worker", "server"]:
        """The role of this process: a server of the plan's states, or a worker."""
        ...

    def serve(self, context: Any, **options: Any) -> Any:
        """Serve the workers of the bound program `context` on a server; return None on a worker."""
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
        """The sizes of the current trace's Manual axes: the caller sees one rank's arrays along them."""
        ...

    def spread(
        self, body: Callable[..., Any], in_specs: Any, out_specs: Any, *, check_vma: bool = True
    ) -> Callable[..., Any]:
        """Map `body`, a function of one rank's arrays, over the plan's axes.

        Args:
            body: The function to map.
            in_specs: The specs of its arguments.
            out_specs: The specs of its results.
            check_vma: Whether JAX types arrays by the axes over which they vary.

        Returns:
            A function of arrays in `layout`.
        """
        ...

    def zeros(self, value: ir.Value, leaf: ir.Leaf) -> Array:
        """A leaf of zeros in `layout`."""
        ...

    def process(self) -> tuple[int, int]:
        """The index of this process and the number of processes."""
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
            notice: Printed once if others are late.

        Returns:
            The text of each participant that arrived in time, by its number. None for a participant whose
            text is unknown, because the process that collects the texts has not answered.
        """
        ...

    def issues(self, traced: Any, compiled: Any | None = None) -> tuple[Issue, ...]:
        """The collectives of a step in the order of issue.

        Args:
            traced: The step as a `jax.stages.Traced`.
            compiled: Its `jax.stages.Compiled`; if None, the collectives of the trace are returned.
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
            For each piece that has several copies: the numbers of the processes that hold one, and this
            process's arrays by device.
        """
        ...

    def member(self, schedule: ir.Schedule, axis: str, place: int) -> Machine:
        """The part of the machine that belongs to member `place` of `axis`, for the member's schedule."""
        ...

    def part(self, name: str, tree: Any, placement: Placement, axis: str, member: Machine) -> Any:
        """The part of arrays in `layout` on `member`, a member's machine; nothing is sent."""
        ...

    def join(self, parts: Mapping[int, Any], placement: Placement, axis: str) -> Any:
        """Join the parts of this process's members, the inverse of `part`."""
        ...


class PeerHello(NamedTuple):
    """A process as a possible sharer of the data that it loads.

    Attributes:
        key, host: Digests of the name of the data, and of its host.
        place: The first index along the shared axes.
        token: A name that no other run has.
    """

    key: bytes
    host: bytes
    place: int
    token: str


def peers_of(me: int, hellos: Mapping[int, PeerHello]) -> Peers | None:
    """The peers of rank `me`. hellos: of all ranks."""
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
        alike: Its values of the properties in `ALIKE`.
        wrong: The reason why it cannot bind, or "".
    """

    alike: Mapping[str, str] = {}
    wrong: str = ""


class BindRequest(NamedTuple):
    """A program that a process binds.

    Attributes:
        program: The digest of the schedule.
        check: Raises the errors of this process's machine.
        limits, timeout_s: See `Program.bind`.
        mesh: The axes and devices of the mesh, which must be the same in all processes.
    """

    schedule: ir.Schedule
    program: str
    seed: SupportsIndex
    check: Callable[[], None]
    limits: HangLimits
    timeout_s: float
    mesh: str = ""


def agree(who: str, request: BindRequest, exchange: Callable[[Any], Mapping[int, Any]]) -> None:
    """Check that all processes bind the same program with the same seed.

    Args:
        who: The kind of the participants, "rank" or "process".
        request: The program of this process.
        exchange: Returns the values of all participants by their numbers. Values have a `msgspec` type. All
            participants call it in the same order.

    Raises:
        CommplanError: the error of this process, after the others received it; CP0845 if another process
            cannot bind the program, or if the programs differ.
    """
    file = request.schedule.file
    try:
        request.check()
        seed = f"seed {operator.index(request.seed)}"
    except Exception as error:
        answers: Mapping[int, BindReport] = {}
        with contextlib.suppress(CommplanError):
            answers = exchange(BindReport(wrong=reason(error)))
        if {answer.wrong for answer in answers.values()} == {reason(error)}:
            common(error)
        raise
    program = f"plan `{request.schedule.plan}`, schedule {request.program}"
    facts = {**environment(request.schedule), "mesh": request.mesh, "program": program, "seed": seed}
    answers = exchange(BindReport(facts))
    failed = [
        f"{who} {n} cannot bind the program: {answers[n].wrong}" for n in sorted(answers) if answers[n].wrong
    ]
    if failed:
        fail("CP0845", *failed[:4], file=file)
    for name, (subject, fix) in ALIKE.items():
        values = {number: answers[number].alike.get(name, "") for number in sorted(answers)}
        usual = Counter(values.values()).most_common(1)[0][0]  # The earliest of equally frequent ones.
        first = next(number for number in values if values[number] == usual)
        other = [number for number in values if values[number] != usual]
        if not other:
            continue
        lines = first_difference(_lines(request.schedule), exchange) if name == "program" else {}
        fail(
            "CP0845",
            f"not every {who} binds {subject}: {who} {other[0]} differs from {who} {first}",
            *(f"{who} {number}: {lines.get(number, values[number])}" for number in (first, *other[:3])),
            fix.format(who=who),
            file=file,
        )


def _lines(schedule: ir.Schedule) -> list[str]:
    """Describe `schedule` for a comparison: entry leaves, axis sizes, the plan's stages, operations."""
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
    """A short description of an error, for the processes that it stops."""
    if isinstance(error, CommplanError):
        return f"{error.diagnostics[0].code} {error.diagnostics[0].message}"
    return f"{type(error).__name__} {error}"


def digest(text: str) -> bytes:
    """An 8-byte digest of `text`."""
    return hashlib.sha256(text.encode()).digest()[:8]


def shortened(text: str) -> str:
    """Return `text`, or its beginning and a digest of all of it if it is long."""
    return text if len(text) <= _LONG else f"{text[:_LONG]}... ({digest(text).hex()})"
