"""The schedule: what runs where and in what order, the same text for every rank.

`commplan.frontend.lower.stages` makes it from a plan, the other passes rewrite it, the lowerings run it.
Shapes are those of one rank: `per` dimensions stripped, `split` leaves cut and padded. An op
names its operands and results; results are in SSA form over the whole phase.

What a schedule has thousands of is `gc=False`: frozen structs of numbers, texts and tuples have no
cycles, and a collector that follows them all takes longer than the passes.
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
from commplan.ir.ops import Op as Op
from commplan.ir.ops import Pack as Pack
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
from commplan.ir.plan import Fn, Plan
from commplan.ir.refs import Ref, name_of
from commplan.ir.remark import Choice
from commplan.ir.roles import Execution, Meaning, Presentation, Structure
from commplan.ir.transfer import ValueTypes
from commplan.ir.types import ArrayType, AxisKind, BytesType, Digest, EntryRef, Name, Over, Printed, TreeType
from commplan.ir.values import Leaf as Leaf
from commplan.ir.values import Part as Part
from commplan.ir.values import Value as Value
from commplan.ir.values import widest as widest

SCHEMA_VERSION = 5

Backend = Literal["jax", "mpi"]


class Binding(msgspec.Struct, frozen=True, gc=False):
    """A name and its value. `source_only` is true where it depends on sources alone: then `batches`
    yields it, made on the host and by per-record device functions, and the phase does not."""

    name: Meaning[Ref]
    value: Meaning[Ref]
    source_only: Structure[bool] = False


class Phase(msgspec.Struct, frozen=True):
    """One phase: its ops in the order in which every rank issues them."""

    name: Meaning[Name]
    kind: Meaning[Literal["start", "step", "every", "named"]]
    span: Presentation[Span]
    period: Meaning[int]
    ops: Meaning[tuple[Op, ...]]
    inputs: Structure[tuple[Ref, ...]]  # inputs of the plan that it reads
    states: Structure[tuple[Ref, ...]]  # states that it reads, as on entry
    outputs: Meaning[tuple[Binding, ...]]
    updates: Meaning[tuple[Binding, ...]]
    values: Structure[tuple[Value, ...]]  # results of its ops
    takes: Structure[
        tuple[Binding, ...]
    ] = ()  # source-only values that its other ops need: arguments of the phase


class Spread(msgspec.Struct, frozen=True):
    """`count` members of an axis beside each other on one level of the topology."""

    level: Execution[Printed]
    count: Execution[int]


class Axis(msgspec.Struct, frozen=True):
    """An axis of the plan with the size that it was compiled for.

    levels: how it is spread over the topology, innermost first, or, where ranks are known to be dealt out
    otherwise, in the order in which its index counts through them; the counts multiply to `size` (more where
    the last one is not full). Empty without a topology.
    """

    name: Meaning[Name]
    kind: Meaning[AxisKind]
    size: Meaning[int]
    levels: Execution[tuple[Spread, ...]] = ()

    @property
    def level(self) -> str | None:
        """The outermost level that it reaches: the one a collective along it waits for."""
        return self.levels[-1].level if self.levels else None


class FnType(msgspec.Struct, frozen=True):
    """A declared function as schedules keep it: what goes in and comes out, and where it runs.

    elementwise: it may be called on shards. random: it takes a source of random numbers as well.
    """

    name: Meaning[Name]
    operands: Meaning[tuple[ArrayType | BytesType | TreeType, ...]]
    results: Meaning[tuple[ArrayType | BytesType | TreeType, ...]]
    where: Meaning[Literal["host", "device"]]
    elementwise: Meaning[bool] = False
    random: Meaning[bool] = False

    @classmethod
    def of(cls, fn: Fn) -> FnType:
        """`fn` of a plan."""
        return cls(fn.name, fn.operands, fn.results, fn.where, elementwise=fn.elementwise, random=fn.random)


class SourceType(msgspec.Struct, frozen=True):
    """A declared source: `type` is that of one record."""

    name: Meaning[Name]
    type: Meaning[ArrayType | BytesType | TreeType]


class Origin(msgspec.Struct, frozen=True):
    """The plan that a schedule was compiled from; `values`: what one rank holds of each of its values before
    any pass, for the sizes and shapes that it was compiled for."""

    plan: Meaning[Plan]
    values: Meaning[tuple[Value, ...]]
    sizes: Meaning[tuple[int, ...]]  # of the plan's axes


class CompiledTopology(msgspec.Struct, frozen=True):
    """The topology that a schedule was compiled for: its name and digest, and what was assumed of it, a
    sentence each."""

    name: Presentation[Printed]
    digest: Presentation[Digest]
    assumed: Presentation[tuple[Printed, ...]] = ()


def topologies_text(
    first: CompiledTopology | None, second: CompiledTopology | None
) -> tuple[str, str] | None:
    """Both topologies in words, with their digests if they have one name; None if they are the same."""
    if (first.digest if first else None) == (second.digest if second else None):
        return None
    has_one_name = first is not None and second is not None and first.name == second.name

    def text(topology: CompiledTopology | None) -> str:
        if topology is None:
            return "no topology"
        return f"topology `{topology.name}`" + (f" ({topology.digest[:8]})" if has_one_name else "")

    return text(first), text(second)


class Ownership(msgspec.Struct, frozen=True):
    """Who keeps the parts of a value that is the same along `axes`: each rank along them, first major, its
    row; or `owners` alone, counted over all axes, one row each, and what other ranks hold is undefined."""

    axes: Execution[Over]
    owners: Execution[tuple[int, ...]] = ()

    def part_of(self, value: Value, axes: Sequence[Axis]) -> Value:
        """What one rank holds of `value`; `axes`: all of the plan, with sizes. All ranks own: it is split.
        Some: ranks hold different things."""
        return ValueTypes(axes, {}).part(value, value.id, self.axes, self.owners)


class StateShard(msgspec.Struct, frozen=True):
    """A state that lies in parts though its plan does not cut it."""

    state: Execution[Ref]
    ownership: Execution[Ownership]


class Schedule(msgspec.Struct, frozen=True, dict=True):
    """The whole compiled plan. `entry` holds the values of inputs and states (version 0).

    origin: the plan that it was compiled from; None of files that earlier versions wrote. state_shards: who
    keeps the parts of states that lie otherwise than the plan says. backend: what it was compiled for: its
    costs and forms. hosts: the names of the topology's hosts in the order of its places, where it lists
    them.
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
        """Raises CP0817 where there is none so called."""
        known = {phase.name: phase for phase in self.phases}
        if name not in known:
            quoted = ", ".join(f"`{other}`" for other in known) or "none"
            near = near_note(name, known)
            fail("CP0817", f"the plan has no phase `{name}`", *near, f"it has: {quoted}", file=self.file)
        return known[name]

    def size(self, axes: tuple[str, ...]) -> int:
        """The number of ranks along `axes`."""
        return math.prod(self.axis(name).size for name in axes)

    @cached_property
    def named(self) -> dict[str, Value]:
        """What names mean outside the plan: the last output so called, else the state or input, else the last
        source value that a phase takes as an argument. In this order."""
        outputs, taken = dict[str, Value](), dict[str, Value]()
        for phase in self.phases:
            values = {value.id: value for value in (*self.entry, *phase.values)}
            outputs |= {binding.name: values[binding.value] for binding in phase.outputs}
            taken |= {binding.name: values[binding.value] for binding in phase.takes}
        values = {value.id: value for value in self.entry}
        entry = {name_of(ref): values[ref] for ref in (*self.states, *self.inputs)}
        return {**outputs, **entry, **taken, **entry, **outputs}  # where the first stand, as the last say

    @cached_property
    def fn_types(self) -> dict[str, FnType]:
        return {fn.name: fn for fn in self.fns}

    @cached_property
    def values(self) -> dict[Ref, Value]:
        """The values on entry and those of all phases by name; of several of one name the last."""
        rooms = (self.entry, *(phase.values for phase in self.phases))
        return {value.id: value for room in rooms for value in room}


def network_lane(axes: Sequence[Axis], over: Iterable[str]) -> str:
    """The lane of a collective: the levels of the topology that it crosses, where they are known."""
    inside = set(over)
    levels = dict.fromkeys(axis.level for axis in axes if axis.name in inside and axis.level)
    return f"network:{'+'.join(levels)}" if levels else "network"
