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
    """A declared axis, ensemble or group of servers.

    Attributes:
        name: The name.
        kind: The kind.
        size: The number of ranks, members or servers; None if it is declared `?` and bound at compile time.
        span: The place of the declaration.
    """

    name: Meaning[Name]
    kind: Meaning[AxisKind]
    size: Meaning[int | None]
    span: Presentation[Span]


class Source(msgspec.Struct, frozen=True):
    """A declared source of records.

    Attributes:
        name: The name.
        type: The type of one record. The leaves of a tree are bound at compile time.
        span: The place of the declaration.
    """

    name: Meaning[Name]
    type: Meaning[ArrayType | BytesType | TreeType]
    span: Presentation[Span]


class Fn(msgspec.Struct, frozen=True):
    """A function that the user binds by name, or a built-in one.

    Attributes:
        name: The name.
        operands: The types of the operands. Those of a host function are types of one record.
        results: The types of the results, as those of the operands.
        where: The processor that runs it.
        span: The place of the declaration.
        elementwise: Whether each element of a result depends on the same element of the operands alone, and
            on scalars, so that the function may be called on shards.
        linear: Whether it commutes with sums, so that it may be called on terms of a sum.
        random: Whether it takes a source of random numbers too.
        body: The built-in function that `name` stands for; None if the user binds the function.
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
    """An SSA value.

    Attributes:
        id: `NAME.VERSION`.
        type: The global type, before any placement splits or repeats it.
        placement: The placement over the axes.
        span: The place in the plan that makes the value.
    """

    id: Meaning[Ref]
    type: Meaning[Type]
    placement: Meaning[Placement]
    span: Presentation[Span]

    @property
    def name(self) -> str:
        """The name without the version."""
        return name_of(self.id)


class Binding(msgspec.Struct, frozen=True):
    """A name bound to a value: an output of a phase, or the new value of a state.

    Attributes:
        name: The name of the output or state.
        value: The value.
    """

    name: Meaning[Name]
    value: Meaning[Ref]


class Phase(msgspec.Struct, frozen=True):
    """A phase: `at start`, `each step`, `every N steps` or `phase NAME`.

    Attributes:
        name: `start`, `step`, `every_N`, or the name in the plan.
        kind: The kind of phase.
        span: The place of the phase.
        period: N of `every N steps`; 1 for other kinds.
        stages: The stages, in the order of the plan.
        outputs: The values that the phase returns, by name.
        updates: The states that the phase binds, with their final values.
        fragments: The number of calls in `period` steps, each for one fragment of the trees; 1 if values are
            whole.
        hidden: The number of further steps of the program during which the phase exchanges values; 0 if a
            call ends before the next step.
    """

    name: Meaning[Name]
    kind: Meaning[PhaseKind]
    span: Presentation[Span]
    period: Meaning[int] = 1
    stages: Meaning[tuple[Stage, ...]] = ()
    outputs: Meaning[tuple[Binding, ...]] = ()
    updates: Meaning[tuple[Binding, ...]] = ()
    fragments: Meaning[int] = 1
    hidden: Meaning[int] = 0


class DeclaredTopology(msgspec.Struct, frozen=True):
    """`topology "FILE"`: the default machine of a plan.

    Attributes:
        path: The path of the topology file, relative to the plan's folder.
        span: The place of the declaration.
    """

    path: Presentation[Printed]
    span: Presentation[Span]


class Plan(msgspec.Struct, frozen=True, dict=True):
    """A checked plan.

    Attributes:
        name: The name.
        axes: The axes, ensembles and servers, in the order of their declarations.
        sources: The sources.
        fns: The functions that the plan declares or uses.
        inputs: The values of the inputs, version 0.
        states: The values of the states on entry to a phase, version 0.
        values: All values: inputs, states and results of stages.
        phases: The phases, in the order of the plan.
        file: The file of the plan, for errors; empty if it was not read from a file.
        topology: The declared topology; None if there is none.
    """

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
        """The value `ref`. Raises KeyError if there is none."""
        return self._values[ref]

    def fn(self, name: str) -> Fn:
        """The function `name`. Raises KeyError if there is none."""
        return self._fns[name]

    def phase(self, name: str) -> Phase:
        """The phase `name`. Raises StopIteration if there is none."""
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
