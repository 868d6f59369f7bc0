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
from commplan.ir.ops import Decode as Decode
from commplan.ir.ops import Elastic as Elastic
from commplan.ir.ops import Encode as Encode
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

# The version of the file format. It is increased if files of the version before lack a field, or have one of
# another meaning. Files of other versions are refused (CP1002), and their plans must be compiled again.
SCHEMA_VERSION = 9

# The backend that a schedule is compiled for.
Backend = Literal["jax", "mpi"]


class Binding(msgspec.Struct, frozen=True, gc=False):
    """A name bound to a value: an output, the new value of a state, or an argument of a phase.

    Attributes:
        name: The name.
        value: The value.
        source_only: Whether the value depends on sources alone. The input pipeline computes such a value, on
            the host or by per-record device functions, and `batches` yields it instead of the phase.
    """

    name: Meaning[Ref]
    value: Meaning[Ref]
    source_only: Structure[bool] = False


class Phase(msgspec.Struct, frozen=True):
    """A phase; every rank issues its ops in this order.

    Attributes:
        name: `start`, `step`, `every_N`, or the name in the plan.
        kind: The kind of phase.
        span: The place of the phase in the plan.
        period: N of `every N steps`; 1 for other kinds.
        ops: The ops, in order. Results are in SSA form over the whole phase.
        inputs: The inputs of the plan that the phase reads.
        states: The states that the phase reads, with their values on entry.
        outputs: The values that the phase returns, by name.
        updates: The states that the phase sets, with their new values.
        values: The results of the ops.
        takes: The source-only values that other ops or the states need: the arguments of the phase.
        fragments: The number of calls in `period` steps, each for one fragment of the trees; 1 if values are
            whole.
        hidden: The number of steps of the program between the beginning and the end of a call; 0 if a call
            ends before the next step.
    """

    name: Meaning[Name]
    kind: Meaning[PhaseKind]
    span: Presentation[Span]
    period: Meaning[int]
    ops: Meaning[tuple[Op, ...]]
    inputs: Structure[tuple[Ref, ...]]
    states: Structure[tuple[Ref, ...]]
    outputs: Meaning[tuple[Binding, ...]]
    updates: Meaning[tuple[Binding, ...]]
    values: Structure[tuple[Value, ...]]
    takes: Structure[tuple[Binding, ...]] = ()
    fragments: Meaning[int] = 1
    hidden: Meaning[int] = 0

    @property
    def interval(self) -> int:
        """The number of steps from one call to the next."""
        return self.period // self.fragments


class Spread(msgspec.Struct, frozen=True):
    """The extent of an axis on one level of the topology.

    Attributes:
        level: The name of the level.
        count: The number of members of the axis next to each other on this level.
    """

    level: Execution[Printed]
    count: Execution[int]


class Axis(msgspec.Struct, frozen=True):
    """An axis of the plan with its size at compile time.

    Attributes:
        name: The name.
        kind: The kind.
        size: The number of ranks, members or servers, at least 1.
        levels: How the axis maps to the topology, innermost level first, or in index order if ranks are
            assigned differently. The product of the counts is `size`, or more if the last level is not full.
            Empty without a topology.
    """

    name: Meaning[Name]
    kind: Meaning[AxisKind]
    size: Meaning[int]
    levels: Execution[tuple[Spread, ...]] = ()

    @property
    def level(self) -> str | None:
        """The outermost level that the axis reaches, which bounds the speed of collectives along it.

        None without a topology.
        """
        return self.levels[-1].level if self.levels else None


class FnType(msgspec.Struct, frozen=True):
    """The signature of a function.

    Attributes:
        name: The name.
        operands: The types of the operands. Those of a host function are types of one record.
        results: The types of the results, as those of the operands.
        where: The processor that runs it.
        elementwise: Whether it may be called on shards.
        random: Whether it takes a source of random numbers too.
        body: The built-in function that `name` stands for; None if the user binds the function.
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
    """A declared source.

    Attributes:
        name: The name.
        type: The type of one record.
    """

    name: Meaning[Name]
    type: Meaning[ArrayType | BytesType | TreeType]


class Origin(msgspec.Struct, frozen=True):
    """The plan that a schedule was compiled from, and the arguments of the compilation.

    Attributes:
        plan: The plan.
        values: The values of the plan as held by one rank, before any pass, in the order of `Plan.values`.
        sizes: The sizes of the plan's axes, in the order of `Plan.axes`.
    """

    plan: Meaning[Plan]
    values: Meaning[tuple[Value, ...]]
    sizes: Meaning[tuple[int, ...]]


class CompiledTopology(msgspec.Struct, frozen=True):
    """The topology that a schedule was compiled for.

    Attributes:
        name: The name.
        digest: The digest of its description.
        assumed: The assumptions about it, one sentence each.
    """

    name: Presentation[Printed]
    digest: Presentation[Digest]
    assumed: Presentation[tuple[Printed, ...]] = ()


def topologies_text(
    first: CompiledTopology | None, second: CompiledTopology | None
) -> tuple[str, str] | None:
    """Descriptions of two different topologies, for errors.

    Args:
        first: The first topology; None if there is none.
        second: The second topology; None if there is none.

    Returns:
        A text for each, with the beginning of the digest if the names are equal; None if both are the same.
    """
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

    Attributes:
        axes: The axes, the first one major. Each rank along them owns one row of every leaf.
        owners: If it is not empty, only these ranks, counted row-major over `axes`, own a row each, and the
            content on other ranks is undefined.
    """

    axes: Execution[Over]
    owners: Execution[tuple[int, ...]] = ()

    def part_of(self, value: Value, axes: Sequence[Axis]) -> Value:
        """The shard of `value` on one rank. It is split if all ranks own a shard, else `per` rank.

        Args:
            value: The whole value.
            axes: All axes of the plan, with sizes.
        """
        return ValueTypes(axes, {}).part(value, value.id, self.axes, self.owners)


class StateShard(msgspec.Struct, frozen=True):
    """A state that is stored in shards although its plan does not split it.

    Attributes:
        state: The value of the state on entry, version 0.
        ownership: The owners of the shards.
    """

    state: Execution[Ref]
    ownership: Execution[Ownership]


class Schedule(msgspec.Struct, frozen=True, dict=True):
    """A compiled plan.

    Attributes:
        plan: The name of the plan.
        plan_digest: The digest of the plan (`serialization.canonical_json.plan_digest`).
        axes: The axes with sizes.
        sources: The sources.
        fns: The signatures of the functions.
        inputs: The values of the inputs (version 0).
        states: The values of the states on entry to a phase (version 0).
        entry: The values of `inputs`, then `states`, as held by one rank.
        phases: The phases.
        origin: The source plan. A file without it is refused (CP1003).
        state_shards: The owners of states that are sharded although the plan does not split them.
        backend: The backend whose costs and forms were used.
        hosts: The host names of the topology in order of places; empty if it does not list them.
        pipeline: The passes that made the schedule, as text.
        choices: The decisions of the passes, for `explain`.
        topology: The topology; None without one.
        file: The file of the plan, for errors; empty if it was not read from a file.
        schema: The version of the file format.
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
    pipeline: Execution[Printed] = ""
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
        """The axis `name`. Raises StopIteration if there is none."""
        return next(axis for axis in self.axes if axis.name == name)

    def fn(self, name: str) -> FnType:
        """The function `name`. Raises KeyError if there is none."""
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
        """The number of ranks along `axes`; 1 if there are none."""
        return math.prod(self.axis(name).size for name in axes)

    @cached_property
    def named(self) -> dict[str, Value]:
        """The values that the program refers to by name.

        A name refers to the first of these that exists:

        1. the last output with this name,
        2. the state or input,
        3. the last source-only value that a phase takes as an argument.
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
        """The functions by name."""
        return {fn.name: fn for fn in self.fns}

    @cached_property
    def values(self) -> dict[Ref, Value]:
        """The values on entry and of all phases by name; later phases win."""
        groups = (self.entry, *(phase.values for phase in self.phases))
        return {value.id: value for group in groups for value in group}


def network_lane(axes: Sequence[Axis], over: Iterable[str]) -> str:
    """The lane of a collective over the axes `over`: `network:LEVEL`, with all levels that these reach.

    Without a topology it is `network`.
    """
    inside = set(over)
    levels = dict.fromkeys(axis.level for axis in axes if axis.name in inside and axis.level)
    return f"network:{'+'.join(levels)}" if levels else "network"
