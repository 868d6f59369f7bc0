"""The schedule: what runs where and in what order, the same text for every rank.

`commplan.passes.lower` makes it from a plan, the other passes rewrite it, the lowerings run it.
Shapes are those of one rank: `per` dimensions stripped, `split` leaves cut and padded. An op
names its operands and results; results are in SSA form over the whole phase.

What a schedule has thousands of is `gc=False`: frozen structs of numbers, texts and tuples have no
cycles, and a collector that follows them all takes longer than the passes.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Literal

import msgspec

from commplan.diagnostics import Span
from commplan.ir.choice import Choice, Design
from commplan.ir.plan import Algorithm, AxisKind, Hints
from commplan.ir.types import (
    ArrayType,
    BytesType,
    Digest,
    DType,
    EntryRef,
    Name,
    Placement,
    Printed,
    Ref,
    TreeType,
)

SCHEMA_VERSION = 2

Kind = Literal["tree", "array", "records", "flat"]
CollectiveKind = Literal[
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "reduce"
]  # fmt: skip
ReduceOp = Literal["sum", "max", "min"]
Backend = Literal["jax", "mpi"]
# How a backend carries out a chunk program: one operation of its own for each round (`lax.ppermute`,
# `mpi4jax.sendrecv`), the whole program in one call, or a call that starts it and one that finishes it.
Form = Literal["rounds", "call", "split"]


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """One array of a value on one rank. `path` is its key path, parts joined by `/`; "" for an array."""

    path: str
    shape: tuple[int, ...]
    dtype: DType

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.nbytes


class Value(msgspec.Struct, frozen=True, gc=False):
    """A value of the schedule, as one rank holds it.

    kind: `tree` (a pytree, leaves in JAX's flattening order), `array` (one leaf), `records` (a
    loaded batch; its leaf has the local batch as leading dimension, none if it is `bytes`), `flat`
    (a contiguous one-dimensional buffer made by the compiler; one leaf).
    `whole` keeps, for a tree or array that is split, the leaves before the first cut.
    """

    id: Ref
    kind: Kind
    leaves: tuple[Leaf, ...]
    placement: Placement
    whole: tuple[Leaf, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's copy."""
        return sum(leaf.nbytes for leaf in self.leaves)


class Part(msgspec.Struct, frozen=True, gc=False):
    """A run of elements of leaf `leaf` of `value`, and where it lies in a buffer.

    Source and destination both have `ways` rows (see `Pack`); `start`, `size` and `offset` count
    elements within a row.
    """

    value: Ref
    leaf: int
    start: int
    size: int
    offset: int


class Read(msgspec.Struct, frozen=True, tag="read", gc=False):
    """Read a batch of records of a source. Lane: host read."""

    result: Ref
    source: str
    batch: tuple[int, ...]
    visit: Literal["exactly_once", "at_least_once", "at_most_once"]
    seed: int
    span: Span
    count: Ref | None = None
    clock: str | None = None
    split: tuple[str, ...] = ()
    per: tuple[str, ...] = ()
    tail: Literal["pad", "short", "drop"] = "pad"
    hints: Hints = Hints()
    after: tuple[Ref, ...] = ()
    lane: str = "host_read"


class Map(msgspec.Struct, frozen=True, tag="map", gc=False):
    """Apply a bound function. `per_record` on the device means `vmap` over the leading dimension.

    `per`: the ensembles between whose members a random function differs. `hints.overlap`: it is an update
    that may run in pieces, each beside the sums that others wait for.
    """

    results: tuple[Ref, ...]
    fn: str
    operands: tuple[Ref, ...]
    span: Span
    per: tuple[str, ...] = ()
    per_record: bool = False
    random: bool = False
    hints: Hints = Hints()
    after: tuple[Ref, ...] = ()
    lane: str = "device"  # or host_compute


class Share(msgspec.Struct, frozen=True, tag="share", gc=False):
    """How a loaded value that is the same over ensembles is made so, between processes.

    design: duplicate (each computes it), all_shared (each computes 1/n and all see all),
    single_broadcast or multi_broadcast (`readers` compute).
    """

    result: Ref
    operand: Ref
    over: tuple[str, ...]
    design: Design
    span: Span
    readers: int | None = None
    hints: Hints = Hints()
    after: tuple[Ref, ...] = ()
    lane: str = "host_compute"


class Pack(msgspec.Struct, frozen=True, tag="pack", gc=False):
    """Copy parts of leaves into one flat buffer of `ways` equal rows, zero where no part lies.

    A leaf is flattened, zero-padded to a multiple of `ways`, and seen as `ways` rows; each part
    is a run of columns. With ways = 1 that is plain concatenation. A reduce-scatter of a buffer
    packed `ways` = ranks leaves each rank the row that holds its shard of every leaf.
    For an array (not a tree) that is cut along its leading dimension, the leading dimension is
    padded instead, so that a row is a whole number of its rows.
    """

    result: Ref
    parts: tuple[Part, ...]
    span: Span
    ways: int = 1
    after: tuple[Ref, ...] = ()
    lane: str = "device"


class Unpack(msgspec.Struct, frozen=True, tag="unpack", gc=False):
    """The way back: make `result` from parts of flat buffers.

    Part.value names the buffer and Part.leaf the leaf of `result`; `ways` rows as in `Pack`,
    padding dropped.
    """

    result: Ref
    parts: tuple[Part, ...]
    span: Span
    ways: int = 1
    after: tuple[Ref, ...] = ()
    lane: str = "device"


class Cast(msgspec.Struct, frozen=True, tag="cast", gc=False):
    """Convert every leaf to `dtype`."""

    result: Ref
    operand: Ref
    dtype: DType
    span: Span
    after: tuple[Ref, ...] = ()
    lane: str = "device"


class Collective(msgspec.Struct, frozen=True, tag="collective", gc=False):
    """One collective over `axes`, leaf by leaf.

    `algorithm`: `native`, a chunk program of `commplan.collectives`, or `hierarchical` with one per level:
    the keys of its levels are axes of `axes`, or, of one axis, the levels of the topology that it spans
    (`Axis.levels`). `hints.chunk` is the number of bytes of a message, where programs are cut into slices.
    all_reduce: same shape out. reduce_scatter: a flat [n*k] in, this rank's [k] out.
    all_gather: [k] in, [n*k] out in rank order. all_to_all: flat [n*k] in and out, row i to rank
    i. broadcast: from `root`, counted row-major over `axes`, first major. reduce: the result on `root`, and
    zeros elsewhere.
    """

    kind: CollectiveKind
    result: Ref
    operand: Ref
    axes: tuple[str, ...]
    dtype: DType  # of the widest leaf that moves
    nbytes: int  # of one rank's operand
    span: Span
    op: ReduceOp | None = None
    root: int | None = None
    algorithm: Algorithm = Algorithm("native")
    hints: Hints = Hints()
    after: tuple[Ref, ...] = ()
    lane: str = "network"
    form: Form | None = None  # None: the backend's usual one
    pinned: bool = False  # the plan says `via`: no pass takes another algorithm


class LocalSum(msgspec.Struct, frozen=True, tag="local_sum", gc=False):
    """Sum the `ways` rows of a flat buffer [ways*k] -> [k], in the operand's dtype."""

    result: Ref
    operand: Ref
    ways: int
    span: Span
    after: tuple[Ref, ...] = ()
    lane: str = "device"


class Scale(msgspec.Struct, frozen=True, tag="scale", gc=False):
    """Multiply or divide every leaf by a number or by a scalar value. Integers are left alone by 1.

    A scalar value is converted to each leaf's dtype; a division by a zero scalar gives zero
    (a weighted mean over no records is zero, not NaN).
    """

    result: Ref
    operand: Ref
    how: Literal["mul", "div"]
    by: float | Ref
    span: Span
    after: tuple[Ref, ...] = ()
    lane: str = "device"


class Slice(msgspec.Struct, frozen=True, tag="slice", gc=False):
    """Keep this rank's cut along `axis`. Each tree leaf is flattened, zero-padded and cut; scalars
    stay. An array is cut along its leading dimension.

    minor: further axes, whose ranks count faster than those of `axis`: one cut among the ranks of all of
    them, as a reduce-scatter over them makes it, and not one cut after another, each with its own padding.
    owners: the ranks that keep a part where not all do, counted over all axes: of len(owners) parts rank
    owners[j] keeps the j-th, and all others the first.
    """

    result: Ref
    operand: Ref
    axis: str
    span: Span
    after: tuple[Ref, ...] = ()
    lane: str = "device"
    minor: tuple[str, ...] = ()
    owners: tuple[int, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All axes along which it cuts, major first."""
        return (self.axis, *self.minor)


class Elastic(msgspec.Struct, frozen=True, tag="elastic", gc=False):
    """`pull` = eta * rho * (operand - center), leaf by leaf (Zhang et al. 2015).

    mode sync: local arithmetic; an all-reduce of `pull` and an `Update` follow. Any other mode
    is the whole exchange with a server, makes `result` too, and is run by the exchange runtime.
    """

    pull: Ref
    operand: Ref
    center: Ref
    mode: Literal["sync", "round_robin", "async", "hogwild"]
    eta: float | Ref
    rho: float | Ref
    over: tuple[str, ...]
    span: Span
    result: Ref | None = None
    hints: Hints = Hints()
    after: tuple[Ref, ...] = ()
    lane: str = "device"


class Update(msgspec.Struct, frozen=True, tag="update", gc=False):
    """`result` = operand + delta, leaf by leaf: the new centre."""

    result: Ref
    operand: Ref
    delta: Ref
    span: Span
    after: tuple[Ref, ...] = ()
    lane: str = "device"


class Exchange(msgspec.Struct, frozen=True, tag="exchange", gc=False):
    """A parameter-server step, run by the exchange runtime: results = fn(states, mean gradient)."""

    results: tuple[Ref, ...]
    gradient: Ref
    states: tuple[Ref, ...]
    fn: str
    over: tuple[str, ...]
    op: Literal["sum", "mean"]
    span: Span
    weight: Ref | None = None
    algorithm: Algorithm | None = None
    hints: Hints = Hints()
    after: tuple[Ref, ...] = ()
    lane: str = "network"


class _Moved(msgspec.Struct, frozen=True, gc=False):
    result: Ref
    operand: Ref
    span: Span
    after: tuple[Ref, ...] = ()
    lane: str = "network"


class Put(_Moved, frozen=True, tag="put", gc=False):
    """`result`, a state on a server, becomes the `operand` of the first worker of its group, which sends it
    to the owners; nobody waits. What is asked of the state later waits for it there.
    """


class Get(_Moved, frozen=True, tag="get", gc=False):
    """`result` is the state `operand` on a server, as it is when its owners are asked."""


Op = (
    Read | Map | Share | Pack | Unpack | Cast | Collective | LocalSum | Scale | Slice | Elastic
    | Update | Exchange | Put | Get
)  # fmt: skip


class Binding(msgspec.Struct, frozen=True, gc=False):
    """A name and its value. `source_only` is true where it depends on sources alone: then `batches`
    yields it, made on the host and by per-record device functions, and the phase does not."""

    name: Ref
    value: Ref
    source_only: bool = False


class Phase(msgspec.Struct, frozen=True):
    """One phase: its ops in the order in which every rank issues them."""

    name: Name
    kind: Literal["start", "step", "every", "named"]
    span: Span
    period: int
    ops: tuple[Op, ...]
    inputs: tuple[Ref, ...]  # inputs of the plan that it reads
    states: tuple[Ref, ...]  # states that it reads, as on entry
    outputs: tuple[Binding, ...]
    updates: tuple[Binding, ...]
    values: tuple[Value, ...]  # results of its ops
    takes: tuple[Binding, ...] = ()  # source-only values that its other ops need: arguments of the phase


class Spread(msgspec.Struct, frozen=True):
    """`count` members of an axis beside each other on one level of the topology."""

    level: Printed
    count: int


class Axis(msgspec.Struct, frozen=True):
    """An axis of the plan with the size that it was compiled for.

    levels: how it is spread over the topology, innermost first, or, where ranks are known to be dealt out
    otherwise, in the order in which its index counts through them; the counts multiply to `size` (more where
    the last one is not full). Empty without a topology.
    """

    name: Name
    kind: AxisKind
    size: int
    levels: tuple[Spread, ...] = ()

    @property
    def level(self) -> str | None:
        """The outermost level that it reaches: the one a collective along it waits for."""
        return self.levels[-1].level if self.levels else None


class FnType(msgspec.Struct, frozen=True):
    """A declared function as schedules keep it: what goes in and comes out, and where it runs.

    elementwise: it may be called on shards. random: it takes a source of random numbers as well.
    """

    name: Name
    operands: tuple[ArrayType | BytesType | TreeType, ...]
    results: tuple[ArrayType | BytesType | TreeType, ...]
    where: Literal["host", "device"]
    elementwise: bool = False
    random: bool = False


class SourceType(msgspec.Struct, frozen=True):
    """A declared source: `type` is that of one record."""

    name: Name
    type: ArrayType | BytesType | TreeType


class Schedule(msgspec.Struct, frozen=True, dict=True):
    """The whole compiled plan. `entry` holds the values of inputs and states (version 0).

    backend: what it was compiled for: its costs and forms. hosts: the names of the topology's hosts in the
    order of its places, where it lists them.
    """

    plan: Name
    plan_digest: Digest
    axes: tuple[Axis, ...]
    sources: tuple[SourceType, ...]
    fns: tuple[FnType, ...]
    inputs: tuple[EntryRef, ...]
    states: tuple[EntryRef, ...]
    entry: tuple[Value, ...]
    phases: tuple[Phase, ...]
    backend: Backend = "jax"
    hosts: tuple[Printed, ...] = ()
    pipeline: Printed = ""  # the passes that made it, as text
    choices: tuple[Choice, ...] = ()
    file: str = ""
    schema: int = SCHEMA_VERSION

    @property
    def mesh_axes(self) -> tuple[Axis, ...]:
        """The axes along which ranks lie. Servers are processes of their own and no part of a mesh."""
        return tuple(axis for axis in self.axes if axis.kind is not AxisKind.SERVER)

    @property
    def mesh_sizes(self) -> dict[str, int]:
        """The sizes of `mesh_axes` by name."""
        return {axis.name: axis.size for axis in self.mesh_axes}

    def axis(self, name: str) -> Axis:
        return next(axis for axis in self.axes if axis.name == name)

    def fn(self, name: str) -> FnType:
        return self.fn_types[name]

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)

    def size(self, axes: tuple[str, ...]) -> int:
        """The number of ranks along `axes`."""
        return math.prod(self.axis(name).size for name in axes)

    @cached_property
    def fn_types(self) -> dict[str, FnType]:
        return {fn.name: fn for fn in self.fns}

    @cached_property
    def values(self) -> dict[Ref, Value]:
        """The values on entry and those of all phases by name; of several of one name the last."""
        return {
            value.id: value for at in (self.entry, *(phase.values for phase in self.phases)) for value in at
        }


def widest(leaves: tuple[Leaf, ...]) -> DType:
    """The widest element type among `leaves`; f32 where there are none."""
    return max((leaf.dtype for leaf in leaves), key=lambda dtype: dtype.nbytes, default=DType.F32)


def operands(op: Op) -> tuple[Ref, ...]:
    """Every value that `op` reads, in a fixed order, `after` not included."""
    match op:
        case Collective() | Cast() | LocalSum() | Slice() | Share() | Put() | Get():
            return (op.operand,)
        case Pack() | Unpack():
            return tuple(dict.fromkeys([part.value for part in op.parts]))
        case Scale():
            return (op.operand, op.by) if isinstance(op.by, str) else (op.operand,)
        case Map():
            return op.operands
        case Read():
            return ()
        case Elastic():
            scalars = tuple(x for x in (op.eta, op.rho) if isinstance(x, str))
            return (op.operand, op.center, *scalars)
        case Update():
            return (op.operand, op.delta)
        case Exchange():
            return (op.gradient, *op.states, *((op.weight,) if op.weight else ()))


def results(op: Op) -> tuple[Ref, ...]:
    """Every value that `op` makes."""
    match op:
        case Map() | Exchange():
            return op.results
        case Read():
            return (op.result, op.count) if op.count else (op.result,)
        case Elastic():
            return (op.pull, op.result) if op.result else (op.pull,)
        case _:
            return (op.result,)
