"""The plan graph: typed SSA values and the stages that make them, symbolic over axis sizes.

The checker (`commplan.dsl.check`) makes it; passes, explain and the drawings read it. A value is
named `NAME.VERSION`: binding a name again makes the next version. Inputs and states have version
0 and are the same value in every phase that reads them.
"""

from __future__ import annotations

import enum
from functools import cached_property
from typing import Literal

import msgspec

from commplan.diagnostics import Span
from commplan.ir.types import ArrayType, BytesType, DType, Placement, Ref, TreeType, Type


def name_of(ref: Ref) -> str:
    """`grads` of `grads.1`."""
    return ref.rpartition(".")[0]


class AxisKind(enum.StrEnum):
    """What stands along an axis: replicas, the members of an ensemble, or servers, which hold no ranks."""

    REPLICA = "axis"
    ENSEMBLE = "ensemble"
    SERVER = "server"


class Axis(msgspec.Struct, frozen=True):
    """A declared axis, ensemble or group of servers. `size` None is `?`: bound at compile time."""

    name: str
    kind: AxisKind
    size: int | None
    span: Span


class Source(msgspec.Struct, frozen=True):
    """A declared source of records: `type` is that of one record."""

    name: str
    type: ArrayType | BytesType | TreeType
    span: Span


class Fn(msgspec.Struct, frozen=True):
    """A function that the user binds by name. Operand and result types are per record on the host."""

    name: str
    operands: tuple[ArrayType | BytesType | TreeType, ...]
    results: tuple[ArrayType | BytesType | TreeType, ...]
    where: Literal["host", "device"]
    span: Span
    elementwise: bool = False
    linear: bool = False
    random: bool = False


class Value(msgspec.Struct, frozen=True):
    """One SSA value. `id` is `NAME.VERSION`."""

    id: Ref
    type: Type
    placement: Placement
    span: Span

    @property
    def name(self) -> str:
        return name_of(self.id)


class Arg(msgspec.Struct, frozen=True, gc=False):
    """An argument of an algorithm: `readers = 2`, or without a key `gpu` in `hierarchical(gpu, node)`."""

    value: int | float | str
    key: str | None = None

    def __str__(self) -> str:
        return f"{self.key} = {self.value}" if self.key else str(self.value)


class Algorithm(msgspec.Struct, frozen=True, gc=False):
    """What stands behind `via`: how a stage is carried out."""

    name: str
    args: tuple[Arg, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.args))})" if self.args else self.name

    def get(self, key: str) -> int | float | str | None:
        return next((arg.value for arg in self.args if arg.key == key), None)

    @property
    def levels(self) -> tuple[tuple[str, Algorithm], ...]:
        """Axis and algorithm of each level of `hierarchical(..)`, innermost first; none of any other."""
        if self.name != "hierarchical":
            return ()
        return tuple(
            (arg.key, Algorithm(str(arg.value))) if arg.key else (str(arg.value), Algorithm("native"))
            for arg in self.args
        )


class Hints(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Hints and limits of one stage, as written in its braces. Sizes are bytes.

    overlap: what it runs beside: `backward`, and, where the compiler says so, `update`.
    """

    bucket: int | None = None
    overlap: str | None = None
    wire: DType | None = None
    accumulate: DType | None = None
    chunk: int | None = None
    staleness: int | None = None
    on_error: Literal["stop", "skip"] | None = None
    on_failure: Literal["stop", "continue"] | None = None
    cores: int | None = None
    prefetch: int | None = None


NO_HINTS = Hints()


class Op(msgspec.Struct, frozen=True):
    """The mathematics of a reduction. `weight` is the numeric scalar of a weighted mean."""

    name: Literal["sum", "mean", "max", "min"]
    weight: Ref | None = None


class Load(msgspec.Struct, frozen=True, tag="load"):
    """`result [, count] = load source batch N ...`; `batch` has one number, or one per member."""

    result: Ref
    source: str
    batch: tuple[int, ...]
    visit: Literal["exactly_once", "at_least_once", "at_most_once"]
    seed: int
    span: Span
    count: Ref | None = None
    clock: str | None = None  # the ensemble of `batch [..] over MEMBER`
    split: tuple[str, ...] = ()
    per: tuple[str, ...] = ()
    tail: Literal["pad", "short", "drop"] = "pad"
    hints: Hints = NO_HINTS


class Map(msgspec.Struct, frozen=True, tag="map"):
    """`results = map fn(operands) [per MEMBER]`."""

    results: tuple[Ref, ...]
    fn: str
    operands: tuple[Ref, ...]
    span: Span
    per: tuple[str, ...] = ()
    per_record: bool = False  # applied record by record: on the host, or vmapped on the device
    hints: Hints = NO_HINTS


class Broadcast(msgspec.Struct, frozen=True, tag="broadcast"):
    """per -> same. `root` counts the `over` axes row-major, first named major."""

    result: Ref
    operand: Ref
    over: tuple[str, ...]
    root: int
    span: Span
    via: Algorithm | None = None
    hints: Hints = NO_HINTS


class Share(msgspec.Struct, frozen=True, tag="share"):
    """same -> same: pins how sameness over `over` is made."""

    result: Ref
    operand: Ref
    over: tuple[str, ...]
    via: Algorithm
    span: Span
    hints: Hints = NO_HINTS


class Reduce(msgspec.Struct, frozen=True, tag="reduce"):
    """partial or per -> same. `across` is set where the axes are ensembles."""

    result: Ref
    operand: Ref
    over: tuple[str, ...]
    op: Op
    span: Span
    across: bool = False
    via: Algorithm | None = None
    hints: Hints = NO_HINTS


class Scatter(msgspec.Struct, frozen=True, tag="scatter"):
    """partial -> split: reduce-scatter."""

    result: Ref
    operand: Ref
    over: str
    op: Op
    span: Span
    via: Algorithm | None = None
    hints: Hints = NO_HINTS


class Slice(msgspec.Struct, frozen=True, tag="slice"):
    """same -> split, without communication."""

    result: Ref
    operand: Ref
    over: str
    span: Span


class Gather(msgspec.Struct, frozen=True, tag="gather"):
    """split -> same: all-gather."""

    result: Ref
    operand: Ref
    over: str
    span: Span
    via: Algorithm | None = None
    hints: Hints = NO_HINTS


class Exchange(msgspec.Struct, frozen=True, tag="exchange"):
    """A parameter server: `results = fn(states, reduced gradient)`, one result per state."""

    results: tuple[Ref, ...]
    gradient: Ref
    states: tuple[Ref, ...]
    fn: str
    over: tuple[str, ...]
    op: Op
    span: Span
    via: Algorithm | None = None
    hints: Hints = NO_HINTS


class Elastic(msgspec.Struct, frozen=True, tag="elastic"):
    """Elastic averaging of `operand` with `center`. `eta` and `rho` are numbers or scalar values."""

    pull: Ref
    result: Ref
    operand: Ref
    center: Ref
    over: tuple[str, ...]
    mode: Literal["sync", "round_robin", "async", "hogwild"]
    eta: float | Ref
    rho: float | Ref
    span: Span
    via: Algorithm | None = None
    hints: Hints = NO_HINTS


Stage = Load | Map | Broadcast | Share | Reduce | Scatter | Slice | Gather | Exchange | Elastic


class Binding(msgspec.Struct, frozen=True):
    """A name and the value it stands for: an output of a phase, or the new value of a state."""

    name: str
    value: Ref


class Phase(msgspec.Struct, frozen=True):
    """`at start`, `each step`, `every N steps` or `phase NAME`, in plan order.

    `name` is `start`, `step`, `every_N` or the user's.
    """

    name: str
    kind: Literal["start", "step", "every", "named"]
    span: Span
    period: int = 1
    stages: tuple[Stage, ...] = ()
    outputs: tuple[Binding, ...] = ()
    updates: tuple[Binding, ...] = ()  # states bound in this phase, and their value at its end


class Plan(msgspec.Struct, frozen=True, dict=True):
    """A checked plan."""

    name: str
    axes: tuple[Axis, ...]
    sources: tuple[Source, ...]
    fns: tuple[Fn, ...]
    inputs: tuple[Ref, ...]
    states: tuple[Ref, ...]
    values: tuple[Value, ...]
    phases: tuple[Phase, ...]
    file: str = ""

    def value(self, ref: Ref) -> Value:
        return self._values[ref]

    def axis(self, name: str) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)

    def fn(self, name: str) -> Fn:
        return self._fns[name]

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)

    @cached_property
    def _values(self) -> dict[Ref, Value]:
        return {value.id: value for value in self.values}

    @cached_property
    def _fns(self) -> dict[str, Fn]:
        return {fn.name: fn for fn in self.fns}


def operands(stage: Stage) -> tuple[Ref, ...]:
    """Every value that `stage` reads, each once, in the order written."""
    match stage:
        case Load():
            refs: tuple[Ref | None, ...] = ()
        case Map():
            refs = stage.operands
        case Exchange():
            refs = (stage.gradient, *stage.states, stage.op.weight)
        case Elastic():
            scalars = tuple(x for x in (stage.eta, stage.rho) if isinstance(x, str))
            refs = (stage.operand, stage.center, *scalars)
        case Reduce() | Scatter():
            refs = (stage.operand, stage.op.weight)
        case Broadcast() | Share() | Slice() | Gather():
            refs = (stage.operand,)
    return tuple(dict.fromkeys(ref for ref in refs if ref is not None))


def results(stage: Stage) -> tuple[Ref, ...]:
    """Every value that `stage` makes."""
    match stage:
        case Load():
            return (stage.result, stage.count) if stage.count else (stage.result,)
        case Map() | Exchange():
            return stage.results
        case Elastic():
            return (stage.pull, stage.result)
        case _:
            return (stage.result,)
