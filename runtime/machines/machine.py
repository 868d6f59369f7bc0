"""What a bound program asks of the machine that it runs on, a mesh of devices or the ranks of a communicator.

`mesh` and `ranks` answer; everything else in this room is the same for both.
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

from commplan.diagnostics import CommplanError, fail
from commplan.input.work_partition import Division
from commplan.ir import schedule as ir
from commplan.ir.types import Placement
from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.check import Layout
from commplan.runtime.input.device.pinned import Pinning
from commplan.runtime.input.group import Blame
from commplan.runtime.input.transport.transport import Carrier
from commplan.runtime.machines.difference import first_difference
from commplan.runtime.machines.environment import ALIKE, environment
from commplan.runtime.observe.abort_hook import common
from commplan.runtime.observe.calls import Calls
from commplan.runtime.observe.joint_calls import JointCalls
from commplan.wait import BUSY_S

Array = Any
Host = npt.NDArray[Any]
Local = Mapping[str, tuple[int, ...]]
OnFailure = Literal["stop", "continue"]
_LONG = 80  # characters of a list of ranks
_LEFT_OUT = re.compile(r"span=Span\([^)]*\), |\w+=(None|\(\)), ")  # of the text of an operation


@dataclass(frozen=True)
class Peers:
    """Processes that share what they load, in the order of what they hold.

    run_id: a name that no other run has. index: this process's place among them. hosts: the host of each,
    numbered as they first appear. ranks: the number of each on the machine (of the process, or of the rank).
    places: the first place along the shared axes that each holds.
    """

    run_id: str
    index: int
    hosts: tuple[int, ...]
    ranks: tuple[int, ...]
    places: tuple[int, ...]


class Issue(msgspec.Struct, frozen=True, array_like=True):
    """A collective that a compiled step issues.

    text: what it moves, over what. place: who asks for it: a line of the plan, or a scope of the program.
    ranks: who takes part, by their numbers on the machine; empty where all do.
    """

    text: str
    place: str
    ranks: tuple[int, ...] = ()


def place_of(scope: str) -> str:
    """The plan's line that JAX's name of an operation tells, else that name without those of functions."""
    line = re.search(r"commplan/(\w+)/line(\d+)", scope)
    if line is not None:
        return f"line {line[2]} of the plan, in phase `{line[1]}`"
    return re.sub(r"jit\([^)]*\)/?", "", scope)


class Machine(Protocol):
    """The machine of one schedule."""

    @property
    def mesh(self) -> Any:
        """What the user bound the program to."""
        ...

    @property
    def backend(self) -> Backend: ...

    @property
    def layout(self) -> Layout:
        """How arrays lie outside of `run.spmd`: `global`, or `local` as inside."""
        ...

    @property
    def calls(self) -> Calls | None:
        """Where compiled steps are counted, so that a watchdog sees them; None where nobody is awaited in
        them, or an engine watches its collectives itself."""
        ...

    def context(self) -> contextlib.AbstractContextManager[Any]:
        """The context in which functions of global arrays are compiled and called: JAX's mesh is this one."""
        ...

    def manual(self) -> dict[str, int]:
        """The axes, and their sizes, along which the code around us sees one rank's arrays."""
        ...

    def spread(
        self, body: Callable[..., Any], in_specs: Any, out_specs: Any, *, check_vma: bool = True
    ) -> Callable[..., Any]:
        """`body`, a function of one rank's arrays, as a function of the arrays outside.

        check_vma: whether JAX types arrays by the axes over which they vary."""
        ...

    def zeros(self, value: ir.Value, leaf: ir.Leaf) -> Array:
        """A leaf of zeros as it lies outside."""
        ...

    def process(self) -> tuple[int, int]:
        """The number of this process, and how many there are."""
        ...

    def participants(self) -> tuple[int, ...]:
        """The numbers of the processes that run steps here; only this one's where no other one takes part."""
        ...

    @property
    def joint(self) -> JointCalls:
        """The calls of steps that the participants make together."""
        ...

    def gather(self, text: str, timeout_s: float, look: Callable[[float], None]) -> dict[int, str]:
        """The text of each participant. All call it alike; those that do not come in time are missing.

        look: called now and then with the seconds waited, unless another thread watches the wait."""
        ...

    def issues(self, traced: Any, compiled: Any | None = None) -> tuple[Issue, ...]:
        """The collectives of a step, a `jax.stages.Traced` and its `Compiled`, in the order of issue; without
        `compiled` those that were traced."""
        ...

    def copies(
        self, leaf: Any, placement: Placement | None
    ) -> Iterable[tuple[tuple[int, ...], Mapping[str, Any]]]:
        """The copies that this process holds of an argument, or of pieces of it, if there are several in all:
        the numbers of the processes that hold one, and arrays by device. placement: as declared, if it is."""
        ...

    def local(self) -> dict[str, tuple[int, ...]]:
        """For each axis of the plan the indices that this process holds."""
        ...

    def array(self, host: Host, placement: Placement, local: Local) -> Array:
        """This process's part of a value (dimensions for `per` axes, then its rows) as it lies outside."""
        ...

    def pinning(self) -> Pinning | None:
        """What registers memory of this process with its devices; None where they use it as it is."""
        ...

    def peers(self, key: str, host: str, place: int, timeout: float) -> Peers | None:
        """The processes that give the same key; None where this one is alone. Every process calls it alike.

        host: the name of this process's host. place: the first place along the shared axes that it holds.
        timeout: seconds to wait for the others, which may still compile.
        """
        ...

    def carrier(
        self, peers: Peers, division: Division, *, blame: Blame, on_failure: OnFailure, timeout: float
    ) -> Carrier | None:
        """What moves the rows of `division` between the hosts of `peers`, all of which call this alike.

        None where nothing moves between them. blame: what the plan says there, its place, and the file.
        timeout: seconds to wait for a host that lives but is silent.
        """
        ...

    def member(self, schedule: ir.Schedule, axis: str, place: int) -> Machine:
        """The part of the machine that belongs to member `place` of `axis`, for its own schedule."""
        ...

    def part(self, name: str, tree: Any, placement: Placement, axis: str, own: Machine) -> Any:
        """The part of outside arrays that lies on `own`, a member's machine; nothing moves."""
        ...

    def join(self, parts: Mapping[int, Any], placement: Placement, axis: str) -> Any:
        """The way back, from the parts of the members that this process holds."""
        ...


def peers_of(me: int, seen: Mapping[int, tuple[bytes, bytes, int, str]]) -> Peers | None:
    """The peers of rank `me`, of what every rank said: digests of its key and host, its place, a token."""
    key = seen[me][0]
    alike = sorted((place, rank) for rank, (other, _, place, _) in seen.items() if other == key)
    if len(alike) == 1:
        return None
    ranks = tuple(rank for _, rank in alike)
    order = list(dict.fromkeys(seen[rank][1] for rank in ranks))
    hosts = tuple(order.index(seen[rank][1]) for rank in ranks)
    return Peers(seen[ranks[0]][3], ranks.index(me), hosts, ranks, tuple(place for place, _ in alike))


class Said(NamedTuple):
    """What a process says of the program that it binds: what all must have alike, under the names of `ALIKE`;
    `wrong` where it cannot, and why."""

    alike: Mapping[str, str] = {}
    wrong: str = ""


class Binding(NamedTuple):
    """What a process binds. program: the digest of the schedule. check: raises what is wrong with it here.
    watchdog_s, timeout_s, busy_s: see `Program.bind`."""

    schedule: ir.Schedule
    program: str
    seed: SupportsIndex
    check: Callable[[], None]
    watchdog_s: float | None
    timeout_s: float
    busy_s: float = BUSY_S


def agree(who: str, mine: Binding, exchange: Callable[[Any], Mapping[int, Any]]) -> None:
    """Raises what is wrong here, once the others know, and CP0845 where one of them cannot bind, or not all
    bind the same with the same seed.

    who: what they are, a rank or a process. exchange: returns the values of all, by their numbers, of a
    `msgspec` type; all of them call it.
    """
    file = mine.schedule.file
    try:
        mine.check()
        seed = f"seed {operator.index(mine.seed)}"
    except Exception as error:
        answers: Mapping[int, Said] = {}
        with contextlib.suppress(CommplanError):
            answers = exchange(Said(wrong=reason(error)))
        if {answer.wrong for answer in answers.values()} == {reason(error)}:
            common(error)
        raise
    program = f"plan `{mine.schedule.plan}`, schedule {mine.program}"
    answers = exchange(Said({**environment(mine.schedule), "program": program, "seed": seed}))
    failed = [
        f"{who} {n} cannot bind the program: {answers[n].wrong}" for n in sorted(answers) if answers[n].wrong
    ]
    if failed:
        fail("CP0845", *failed[:4], file=file)
    for name, (subject, fix) in ALIKE.items():
        values = {number: answers[number].alike.get(name, "") for number in sorted(answers)}
        usual = Counter(values.values()).most_common(1)[0][0]  # of as many, that of the first
        first = next(number for number in values if values[number] == usual)
        other = [number for number in values if values[number] != usual]
        if not other:
            continue
        lines = first_difference(_lines(mine.schedule), exchange) if name == "program" else {}
        fail(
            "CP0845",
            f"not every {who} binds {subject}: {who} {other[0]} another one than {who} {first}",
            *(f"{who} {number}: {lines.get(number, values[number])}" for number in (first, *other[:3])),
            fix.format(who=who),
            file=file,
        )


def _lines(schedule: ir.Schedule) -> list[str]:
    """The leaves of inputs and states of `schedule`, its sizes, its plan's stages, then its operations."""
    leaves = [
        f"{leaf.label(value.id)}: {leaf.dtype}[{', '.join(map(str, leaf.shape))}]"
        for value in schedule.entry
        for leaf in value.leaves
    ]
    sizes = [f"axis `{axis.name}` has {axis.size} places" for axis in schedule.axes]
    ops = [
        f"line {op.span.line} of the plan, in phase `{phase.name}`: {_LEFT_OUT.sub('', str(op))}"
        for phase, own in (
            *((phase, phase.stages) for phase in (schedule.origin.plan.phases if schedule.origin else ())),
            *((phase, phase.ops) for phase in schedule.phases),
        )
        for op in own
    ]
    return [*leaves, *sizes, *ops]


def reason(error: Exception) -> str:
    """An error in a few words, for those that it keeps from going on."""
    if isinstance(error, CommplanError):
        return f"{error.diagnostics[0].code} {error.diagnostics[0].message}"
    return f"{type(error).__name__} {error}"


def digest(text: str) -> bytes:
    """8 bytes that stand for `text`."""
    return hashlib.sha256(text.encode()).digest()[:8]


def shortened(text: str) -> str:
    """`text` if it is short, else its beginning, and a digest that stands for all of it."""
    return text if len(text) <= _LONG else f"{text[:_LONG]}... ({digest(text).hex()})"
