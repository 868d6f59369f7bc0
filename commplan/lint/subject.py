"""The input of a lint: a checked plan, and further information from flags."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from commplan.diagnostics import Diagnostic, Fix, Note, Severity, Span
from commplan.dsl import ast
from commplan.ir.plan import Phase, Plan, Stage

if TYPE_CHECKING:
    from commplan.cost import Calibration
    from commplan.ir import schedule as ir
    from commplan.topology import Topology

NO_BINDINGS: Mapping[str, Any] = {}  # an empty default


class LintInputs(msgspec.Struct, frozen=True):
    """Information beyond the plan's text. Lints that need missing information report nothing.

    Attributes:
        sizes: sizes of axes declared `?`, by name.
        shapes: leaves by name, as `compile_plan` takes them; None if unknown.
        topology: the machine, which is required for times; None if unknown.
        calibration: measurements of the machine; None for the topology's own numbers.
        options: further arguments of `compile_plan`.
        records: numbers of records, by source.
        programs: texts of the programs that run the plan, by file.
    """

    sizes: Mapping[str, int] = NO_BINDINGS
    shapes: Mapping[str, tuple[ir.Leaf, ...]] | None = None
    topology: Topology | None = None
    calibration: Calibration | None = None
    options: Mapping[str, Any] = NO_BINDINGS
    records: Mapping[str, int] = NO_BINDINGS
    programs: Mapping[str, str] = NO_BINDINGS

    @property
    def is_bound(self) -> bool:
        """Whether the plan is to be compiled, since there is information for it."""
        return self.shapes is not None or self.topology is not None or bool(self.sizes or self.options)


NOTHING = LintInputs()  # no information beyond the plan's text


class Subject(msgspec.Struct, frozen=True, dict=True):
    """A plan without errors.

    Attributes:
        plan: the typed plan.
        tree: its syntax tree, for locations.
        inputs: further information.
    """

    plan: Plan
    tree: ast.File
    inputs: LintInputs = NOTHING

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages of all phases."""
        return tuple(stage for phase in self.plan.phases for stage in phase.stages)

    def compiled(self, plan: Plan | None = None) -> ir.Schedule:
        """Compile the plan, or a variant of it, for `inputs`. Raises CommplanError if they do not fit."""
        from commplan.compiler import compile_plan

        inputs = self.inputs
        return compile_plan(
            plan or self.plan,
            inputs.shapes or {},
            inputs.topology,
            axes=inputs.sizes,
            calibration=inputs.calibration,
            **inputs.options,
        )

    @cached_property
    def schedule(self) -> ir.Schedule | None:
        """The compiled plan; None without a topology and a calibration. Raises as `compiled`."""
        inputs = self.inputs
        return self.compiled() if inputs.topology is not None or inputs.calibration is not None else None

    @cached_property
    def values(self) -> Mapping[str, ir.Value] | None:
        """All values of one rank, by name; None without shapes. Raises CommplanError if shapes do not fit."""
        if self.inputs.shapes is None:
            return None
        from commplan.frontend.bind_axes import bind_axes
        from commplan.frontend.infer_shapes import infer

        axes = bind_axes(self.plan, self.inputs.sizes)
        return infer(self.plan, {axis.name: axis.size for axis in axes}, self.inputs.shapes)

    def output_span(self, phase: int, name: str) -> Span:
        """The location of output `name` of the phase with index `phase`, which must have it."""
        decl = [item for item in self.tree.items if isinstance(item, ast.PhaseDecl)][phase]
        outputs = (statement for statement in decl.body if isinstance(statement, ast.OutputStmt))
        return next(
            name_node.span for output in outputs for name_node in output.names if name_node.text == name
        )

    def warning(
        self, code: str, message: str, span: Span, *notes: Note | str, fix: Fix | None = None
    ) -> Diagnostic:
        """Create a warning for this plan."""
        remarks = tuple(Note(note) if isinstance(note, str) else note for note in notes)
        return Diagnostic(code, message, span, remarks, fix, Severity.WARNING, self.plan.file)


def with_declared(plan: Plan, inputs: LintInputs) -> LintInputs:
    """Add the topology that `plan` declares to `inputs`, if the plan will be compiled.

    If it will not be compiled, the topology is only checked, unless the plan is not in a file.

    Args:
        plan: a plan that declares a topology.
        inputs: information without a topology.

    Raises:
        CommplanError: CP0712 if the topology cannot be read, CP0713 if axes of known sizes do not fit.
    """
    from commplan.frontend.bind_axes import bind_axes
    from commplan.topology import assign_levels, declared_in, topology_of

    if not inputs.is_bound and not Path(plan.file).is_file():
        return inputs  # the text has no folder for relative paths
    topology = topology_of(plan)
    assert topology is not None
    sizes = {axis.name: axis.size for axis in plan.axes if axis.size is not None} | dict(inputs.sizes)
    if len(sizes) == len(plan.axes) and not inputs.is_bound:
        with declared_in(plan):
            assign_levels(bind_axes(plan, inputs.sizes), topology, {})
    return replace(inputs, topology=topology) if inputs.is_bound else inputs


def with_stage(plan: Plan, stage: Stage, other: Stage) -> Plan:
    """Replace one stage of `plan` with `other`."""

    def stages(phase: Phase) -> tuple[Stage, ...]:
        return tuple(other if candidate is stage else candidate for candidate in phase.stages)

    return replace(plan, phases=tuple(replace(phase, stages=stages(phase)) for phase in plan.phases))
