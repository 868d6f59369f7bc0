"""The schedule: the ops that each device runs, in order. All ranks have the same schedule.

`commplan.frontend.lower.stages` creates it from a plan, the other passes rewrite it, and the lowerings run
it. Shapes are those of one rank: `per` dimensions are stripped, `split` leaves are cut and padded. Ops name
their operands and results; results are in SSA form over the whole phase.

Structs with thousands of instances are `gc=False`: frozen structs of numbers, strings and tuples have no
cycles, and traversing them all in the garbage collector would take longer than the passes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Literal

import msgspec

from commplan.diagnostics import Span, fail, near_note
from commplan.ir.ops import Cast as Cast
from commplan.ir.ops import Collective as Collective
from commplan.ir.ops import Elastic as Elastic
from commplan.ir.ops import Exchange as Exchange
from commplan.ir.ops import Get as Get
from commplan.ir.ops import LocalSum as LocalSum
from commplan.ir.ops import Map as Map
from commplan.ir.ops import Merge as Merge
from commplan.ir.ops import Op as Op
from commplan.ir.ops import Pack as Pack
from commplan.ir.ops import Pick as Pick
from commplan.ir.ops import Put as Put
from commplan.ir.ops import Read as Read
from commplan.ir.ops import Scale as Scale
from commplan.ir.ops import Share as Share
from commplan.ir.ops import Slice as Slice
from commplan.ir.ops import Unpack as Unpack
from commplan.ir.ops import Update as Update
from commplan.ir.ops import operands as operands
from commplan.ir.ops import rename_results as rename_results
from commplan.ir.ops import results as results
from commplan.ir.ops import substitute as substitute
from commplan.ir.ops.collective import CollectiveKind as CollectiveKind
from commplan.ir.ops.collective import Form as Form
from commplan.ir.ops.collective import ReduceOp as ReduceOp
from commplan.ir.plan import Builtin, Fn, Plan
from commplan.ir.refs import Ref, name_of
from commplan.ir.remark import Choice
from commplan.ir.roles import Execution, Meaning, Presentation, Structure
from commplan.ir.transfer import ValueTypes
from commplan.ir.types import (
    ArrayType,
    AxisKind,
    BytesType,
    Digest,
    EntryRef,
    FnElement,
    Name,
    Over,
    PhaseKind,
    Printed,
    Processor,
    TreeType,
)
from commplan.ir.values import Leaf as Leaf
from commplan.ir.values import Part as Part
from commplan.ir.values import Value as Value
from commplan.ir.values import widest as widest

# Raised when files of the version before would lack a field or have one of another meaning. Older files are
# refused (CP1002); plans are compiled again.
SCHEMA_VERSION = 8

Backend = Literal["jax", "mpi"]


class Binding(msgspec.Struct, frozen=True, gc=False):
    """A name bound to a value.

    If `source_only`, the value depends on sources alone, and `batches` yields it instead of the phase. It is
    computed on the host or by per-record device functions.
    """

    name: Meaning[Ref]
    value: Meaning[Ref]
    source_only: Structure[bool] = False


class Phase(msgspec.Struct, frozen=True):
    """A phase; every rank issues its ops in this order."""

    name: Meaning[Name]
    kind: Meaning[PhaseKind]
    span: Presentation[Span]
    period: Meaning[int]
    ops: Meaning[tuple[Op, ...]]
    inputs: Structure[tuple[Ref, ...]]  # inputs of the plan that the phase reads
    states: Structure[tuple[Ref, ...]]  # states that the phase reads, with their values on entry
    outputs: Meaning[tuple[Binding, ...]]
    updates: Meaning[tuple[Binding, ...]]
    values: Structure[tuple[Value, ...]]  # results of the ops
    # Source-only values that other ops read: the arguments of the phase.
    takes: Structure[tuple[Binding, ...]] = ()
    fragments: Meaning[int] = 1  # calls in `period` steps, each for one fragment of the trees
    hidden: Meaning[int] = 0  # steps of the program between the beginning and the end of a call

    @property
    def interval(self) -> int:
        """The number of steps from one call to the next."""
        return self.period // self.fragments


class Spread(msgspec.Struct, frozen=True):
    """`count` members of an axis next to each other on one level of the topology."""

    level: Execution[Printed]
    count: Execution[int]


class Axis(msgspec.Struct, frozen=True):
    """An axis of the plan with its size at compile time.

    `levels` is how the axis maps to the topology, innermost first, or in index order if ranks are assigned
    differently. The product of the counts is `size`, or more if the last level is not full. Empty without a
    topology.
    """

    name: Meaning[Name]
    kind: Meaning[AxisKind]
    size: Meaning[int]
    levels: Execution[tuple[Spread, ...]] = ()

    @property
    def level(self) -> str | None:
        """The outermost level that the axis reaches, which bounds the speed of collectives along it."""
        return self.levels[-1].level if self.levels else None


class FnType(msgspec.Struct, frozen=True):
    """The signature of a declared function, and the kind of processor it runs on.

    `elementwise` functions may be called on shards. `random` ones take a source of random numbers too. A
    function with a `body` is built in, and not bound.
    """

    name: Meaning[Name]
    operands: Meaning[tuple[FnElement, ...]]
    results: Meaning[tuple[FnElement, ...]]
    where: Meaning[Processor]
    elementwise: Meaning[bool] = False
    random: Meaning[bool] = False
    body: Meaning[Builtin | None] = None

    @classmethod
    def from_fn(cls, fn: Fn) -> FnType:
        """The type of a function of a plan."""
        return cls(fn.name, fn.operands, fn.results, fn.where, fn.elementwise, fn.random, fn.body)


class SourceType(msgspec.Struct, frozen=True):
    """A declared source; `type` is the type of one record."""

    name: Meaning[Name]
    type: Meaning[ArrayType | BytesType | TreeType]


class Origin(msgspec.Struct, frozen=True):
    """The plan that a schedule was compiled from.

    `values` are one rank's values before any pass, for the sizes and shapes of the compilation.
    """

    plan: Meaning[Plan]
    values: Meaning[tuple[Value, ...]]
    sizes: Meaning[tuple[int, ...]]  # of the plan's axes


class CompiledTopology(msgspec.Struct, frozen=True):
    """The topology that a schedule was compiled for: name, digest, and assumptions, one sentence each."""

    name: Presentation[Printed]
    digest: Presentation[Digest]
    assumed: Presentation[tuple[Printed, ...]] = ()


def topologies_text(
    first: CompiledTopology | None, second: CompiledTopology | None
) -> tuple[str, str] | None:
    """Descriptions of two topologies, with digests if the names are equal; None if they are the same."""
    if (first.digest if first else None) == (second.digest if second else None):
        return None
    has_one_name = first is not None and second is not None and first.name == second.name

    def text(topology: CompiledTopology | None) -> str:
        if topology is None:
            return "no topology"
        return f"topology `{topology.name}`" + (f" ({topology.digest[:8]})" if has_one_name else "")

    return text(first), text(second)


class Ownership(msgspec.Struct, frozen=True):
    """The owners of the shards of a value that is the same along `axes`.

    Each rank along `axes` (first major) owns one row. If `owners` is not empty, only these ranks, counted
    over all axes, own a row each, and the content on other ranks is undefined.
    """

    axes: Execution[Over]
    owners: Execution[tuple[int, ...]] = ()

    def part_of(self, value: Value, axes: Sequence[Axis]) -> Value:
        """The shard of `value` on one rank.

        `axes` are all axes of the plan, with sizes. If all ranks own a shard, the result is split; else it is
        `per` rank.
        """
        return ValueTypes(axes, {}).part(value, value.id, self.axes, self.owners)


class StateShard(msgspec.Struct, frozen=True):
    """A state that is stored in shards although its plan does not split it."""

    state: Execution[Ref]
    ownership: Execution[Ownership]


class Schedule(msgspec.Struct, frozen=True, dict=True):
    """A compiled plan.

    Attributes:
        plan: The name of the plan.
        entry: The values of inputs and states (version 0).
        origin: The source plan. A file without it is refused (CP1003).
        state_shards: The owners of states that are sharded beyond the plan.
        backend: The backend whose costs and forms were used.
        hosts: The host names of the topology in order of places, if it lists them.
        pipeline: The passes that made the schedule, as text.
    """

    plan: Meaning[Name]
    plan_digest: Structure[Digest]
    axes: Meaning[tuple[Axis, ...]]
    sources: Meaning[tuple[SourceType, ...]]
    fns: Meaning[tuple[FnType, ...]]
    inputs: Meaning[tuple[EntryRef, ...]]
    states: Meaning[tuple[EntryRef, ...]]
    entry: Structure[tuple[Value, ...]]
    phases: Meaning[tuple[Phase, ...]]
    origin: Meaning[Origin | None] = None
    state_shards: Execution[tuple[StateShard, ...]] = ()
    backend: Execution[Backend] = "jax"
    hosts: Execution[tuple[Printed, ...]] = ()
    pipeline: Execution[Printed] = ""  # the passes that made it, as text
    choices: Presentation[tuple[Choice, ...]] = ()
    topology: Presentation[CompiledTopology | None] = None
    file: Presentation[str] = ""
    schema: Structure[int] = SCHEMA_VERSION

    @property
    def mesh_axes(self) -> tuple[Axis, ...]:
        """The axes of the mesh. Servers are separate processes outside the mesh."""
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
        """The phase called `name`. Raises CP0817 if there is none."""
        phases = {phase.name: phase for phase in self.phases}
        if name not in phases:
            quoted = ", ".join(f"`{other}`" for other in phases) or "none"
            near = near_note(name, phases)
            fail("CP0817", f"the plan has no phase `{name}`", *near, f"it has: {quoted}", file=self.file)
        return phases[name]

    def size(self, axes: tuple[str, ...]) -> int:
        """The number of ranks along `axes`."""
        return math.prod(self.axis(name).size for name in axes)

    @cached_property
    def named(self) -> dict[str, Value]:
        """The meaning of names outside the plan.

        A name refers to the last output with this name, or else to the state or input, or else to the last
        source value that a phase takes as an argument.
        """
        outputs, arguments = dict[str, Value](), dict[str, Value]()
        for phase in self.phases:
            values = {value.id: value for value in (*self.entry, *phase.values)}
            outputs |= {binding.name: values[binding.value] for binding in phase.outputs}
            arguments |= {binding.name: values[binding.value] for binding in phase.takes}
        values = {value.id: value for value in self.entry}
        entry = {name_of(ref): values[ref] for ref in (*self.states, *self.inputs)}
        # The first occurrence sets the position, the last one the value.
        return {**outputs, **entry, **arguments, **entry, **outputs}

    @cached_property
    def fn_types(self) -> dict[str, FnType]:
        return {fn.name: fn for fn in self.fns}

    @cached_property
    def values(self) -> dict[Ref, Value]:
        """The values on entry and of all phases by name; later phases win."""
        groups = (self.entry, *(phase.values for phase in self.phases))
        return {value.id: value for group in groups for value in group}


def network_lane(axes: Sequence[Axis], over: Iterable[str]) -> str:
    """The lane of a collective: the levels of the topology that it crosses, if there is one."""
    inside = set(over)
    levels = dict.fromkeys(axis.level for axis in axes if axis.name in inside and axis.level)
    return f"network:{'+'.join(levels)}" if levels else "network"
