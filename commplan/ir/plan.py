"""The plan graph: typed SSA values and the stages that make them, symbolic over axis sizes.

The checker (`commplan.dsl.check`) builds it; passes, `explain` and diagrams read it. A value is named
`NAME.VERSION`, and binding a name again makes the next version. Inputs and states have version 0 and are the
same value in every phase that reads them.
"""

from __future__ import annotations

from functools import cached_property

import msgspec

from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS as NO_HINTS
from commplan.ir.hints import Algorithm as Algorithm
from commplan.ir.hints import Arg as Arg
from commplan.ir.hints import Cache as Cache
from commplan.ir.hints import Hints as Hints
from commplan.ir.hints import Reduction as Reduction
from commplan.ir.hints import weight_type as weight_type
from commplan.ir.refs import Ref as Ref
from commplan.ir.refs import name_of as name_of
from commplan.ir.roles import Meaning, Presentation
from commplan.ir.stages import Broadcast as Broadcast
from commplan.ir.stages import ElasticStage as ElasticStage
from commplan.ir.stages import ExchangeStage as ExchangeStage
from commplan.ir.stages import Gather as Gather
from commplan.ir.stages import Load as Load
from commplan.ir.stages import MapStage as MapStage
from commplan.ir.stages import MergeStage as MergeStage
from commplan.ir.stages import PickStage as PickStage
from commplan.ir.stages import Reduce as Reduce
from commplan.ir.stages import Scatter as Scatter
from commplan.ir.stages import ShareStage as ShareStage
from commplan.ir.stages import SliceStage as SliceStage
from commplan.ir.stages import Stage as Stage
from commplan.ir.stages import operands as operands
from commplan.ir.stages import results as results
from commplan.ir.stages.builtins import Builtin as Builtin
from commplan.ir.types import (
    ArrayType,
    BytesType,
    FnElement,
    Name,
    PhaseKind,
    Placement,
    Printed,
    Processor,
    TreeType,
    Type,
)
from commplan.ir.types import AxisKind as AxisKind


class Axis(msgspec.Struct, frozen=True):
    """A declared axis, ensemble or group of servers. A `size` of None is `?`: bound at compile time."""

    name: Meaning[Name]
    kind: Meaning[AxisKind]
    size: Meaning[int | None]
    span: Presentation[Span]


class Source(msgspec.Struct, frozen=True):
    """A declared source; `type` is the type of one record."""

    name: Meaning[Name]
    type: Meaning[ArrayType | BytesType | TreeType]
    span: Presentation[Span]


class Fn(msgspec.Struct, frozen=True):
    """A function that the user binds by name, or a built-in one. Types are per record on the host.

    `body` is the built-in function that it names, if any.
    """

    name: Meaning[Name]
    operands: Meaning[tuple[FnElement, ...]]
    results: Meaning[tuple[FnElement, ...]]
    where: Meaning[Processor]
    span: Presentation[Span]
    elementwise: Meaning[bool] = False
    linear: Meaning[bool] = False
    random: Meaning[bool] = False
    body: Meaning[Builtin | None] = None


class Value(msgspec.Struct, frozen=True):
    """An SSA value. `id` is `NAME.VERSION`."""

    id: Meaning[Ref]
    type: Meaning[Type]
    placement: Meaning[Placement]
    span: Presentation[Span]

    @property
    def name(self) -> str:
        return name_of(self.id)


class Binding(msgspec.Struct, frozen=True):
    """A name bound to a value: an output of a phase, or the new value of a state."""

    name: Meaning[Name]
    value: Meaning[Ref]


class Phase(msgspec.Struct, frozen=True):
    """`at start`, `each step`, `every N steps` or `phase NAME`, in plan order.

    `name` is `start`, `step`, `every_N` or the name in the plan. A phase in `fragments` is called that many
    times in `period` steps, for one fragment after another. A `hidden` one exchanges values while the program
    does that many further steps.
    """

    name: Meaning[Name]
    kind: Meaning[PhaseKind]
    span: Presentation[Span]
    period: Meaning[int] = 1
    stages: Meaning[tuple[Stage, ...]] = ()
    outputs: Meaning[tuple[Binding, ...]] = ()
    updates: Meaning[tuple[Binding, ...]] = ()  # states that the phase binds, with their final values
    fragments: Meaning[int] = 1
    hidden: Meaning[int] = 0


class DeclaredTopology(msgspec.Struct, frozen=True):
    """`topology "FILE"`: the default machine of a plan. `path` is relative to the plan's folder."""

    path: Presentation[Printed]
    span: Presentation[Span]


class Plan(msgspec.Struct, frozen=True, dict=True):
    """A checked plan."""

    name: Meaning[Name]
    axes: Meaning[tuple[Axis, ...]]
    sources: Meaning[tuple[Source, ...]]
    fns: Meaning[tuple[Fn, ...]]
    inputs: Meaning[tuple[Ref, ...]]
    states: Meaning[tuple[Ref, ...]]
    values: Meaning[tuple[Value, ...]]
    phases: Meaning[tuple[Phase, ...]]
    file: Presentation[str] = ""
    topology: Presentation[DeclaredTopology | None] = None

    def value(self, ref: Ref) -> Value:
        return self._values[ref]

    def fn(self, name: str) -> Fn:
        return self._fns[name]

    def phase(self, name: str) -> Phase:
        return next(phase for phase in self.phases if phase.name == name)

    def stage(self, ref: Ref) -> Stage | None:
        """The stage that makes the value `ref`; None for inputs, states and unknown names."""
        return self._stages.get(ref)

    @cached_property
    def _stages(self) -> dict[Ref, Stage]:
        return {ref: stage for phase in self.phases for stage in phase.stages for ref in results(stage)}

    @cached_property
    def _values(self) -> dict[Ref, Value]:
        return {value.id: value for value in self.values}

    @cached_property
    def _fns(self) -> dict[str, Fn]:
        return {fn.name: fn for fn in self.fns}
