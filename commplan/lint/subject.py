"""What a lint looks at: a checked plan, and what is known beside it."""

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

NO_BINDINGS: Mapping[str, Any] = {}


class Given(msgspec.Struct, frozen=True):
    """What is known beside the plan.

    sizes: ranks along axes declared `?`; shapes: leaves by name, None where none are given; topology: the
    machine, which tells times; calibration: what was measured on it; options: what else `compile_plan` takes.
    records: how many records sources have. programs: the texts of the programs that run the plan, by file.
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
        """Whether the plan is to be compiled."""
        return self.shapes is not None or self.topology is not None or bool(self.sizes or self.options)


NOTHING = Given()


class Subject(msgspec.Struct, frozen=True, dict=True):
    """A plan without errors, as lints see it."""

    plan: Plan
    tree: ast.File
    given: Given = NOTHING

    @property
    def stages(self) -> tuple[Stage, ...]:
        """Every stage, phase by phase."""
        return tuple(stage for phase in self.plan.phases for stage in phase.stages)

    def compiled(self, plan: Plan | None = None) -> ir.Schedule:
        """The plan, or a variant of it, compiled for what is given. Raises CommplanError."""
        from commplan.compiler import compile_plan

        given = self.given
        return compile_plan(
            plan or self.plan,
            given.sizes,
            given.shapes or {},
            topology=given.topology,
            calibration=given.calibration,
            **given.options,
        )

    @cached_property
    def schedule(self) -> ir.Schedule | None:
        """The compiled plan, where there is something to say what it costs. Raises CommplanError."""
        given = self.given
        return self.compiled() if given.topology is not None or given.calibration is not None else None

    @cached_property
    def values(self) -> Mapping[str, ir.Value] | None:
        """Every value as one rank holds it, where all shapes are given. Raises CommplanError."""
        if self.given.shapes is None:
            return None
        from commplan.frontend.bind_axes import bind_axes
        from commplan.frontend.infer_shapes import infer

        axes = bind_axes(self.plan, self.given.sizes)
        return infer(self.plan, {axis.name: axis.size for axis in axes}, self.given.shapes)

    def output_span(self, phase: int, name: str) -> Span:
        """Where the output `name` of a phase, counted from 0, is written."""
        decl = [item for item in self.tree.items if isinstance(item, ast.PhaseDecl)][phase]
        outputs = (statement for statement in decl.body if isinstance(statement, ast.OutputStmt))
        return next(each.span for output in outputs for each in output.names if each.text == name)

    def warning(
        self, code: str, message: str, span: Span, *notes: Note | str, fix: Fix | None = None
    ) -> Diagnostic:
        """A warning of this plan."""
        remarks = tuple(Note(note) if isinstance(note, str) else note for note in notes)
        return Diagnostic(code, message, span, remarks, fix, Severity.WARNING, self.plan.file)


def with_declared(plan: Plan, given: Given) -> Given:
    """`given` with the topology that `plan` declares, if it is to be compiled.

    Raises CP0712 if that cannot be read, and CP0713 if the axes, whose sizes are known, do not fit there. A
    plan that is in no file is not checked until it is compiled.
    """
    from commplan.frontend.bind_axes import bind_axes
    from commplan.topology import declared_in, place, topology_of

    if not given.is_bound and not Path(plan.file).is_file():
        return given  # a text without a folder
    topology = topology_of(plan)
    assert topology is not None
    sizes = {axis.name: axis.size for axis in plan.axes if axis.size is not None} | dict(given.sizes)
    if len(sizes) == len(plan.axes) and not given.is_bound:
        with declared_in(plan):
            place(bind_axes(plan, given.sizes), topology, {})
    return replace(given, topology=topology) if given.is_bound else given


def with_stage(plan: Plan, stage: Stage, other: Stage) -> Plan:
    """`plan`, one of its stages written otherwise."""

    def stages(phase: Phase) -> tuple[Stage, ...]:
        return tuple(other if each is stage else each for each in phase.stages)

    return replace(plan, phases=tuple(replace(phase, stages=stages(phase)) for phase in plan.phases))
