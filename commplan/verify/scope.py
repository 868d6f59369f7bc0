"""The report that collects diagnostics of the verifier, and the context that its rules receive."""

from __future__ import annotations

import math
from collections.abc import Iterable

from commplan.diagnostics import Diagnostic, Span
from commplan.ir.plan import Ref, name_of
from commplan.ir.schedule import Op, Phase, Schedule, Value, operands, results
from commplan.ir.stages.rules import Violation
from commplan.ir.transfer import ValueTypes
from commplan.ir.types import Placement


class DiagnosticReport:
    """Collects diagnostics with their plan lines.

    Attributes:
        file: name of the plan's file, which all diagnostics have.
        diagnostics: the diagnostics so far, in the order of the checks.
    """

    def __init__(self, file: str) -> None:
        self.file = file
        self.diagnostics: list[Diagnostic] = []

    def add(self, code: str, message: str, span: Span | None = None) -> None:
        """Report an error."""
        self.diagnostics.append(Diagnostic(code, message, span, file=self.file))

    def unique(self, noun: str, names: Iterable[str]) -> None:
        """Report each repetition of a name. `noun` is a plural, such as `axes`, for the message."""
        unique_names: set[str] = set()
        for name in names:
            if name in unique_names:
                self.add("CP0730", f"two {noun} are called `{name}`")
            unique_names.add(name)

    def refuse(self, code: str, broken: Violation | None, span: Span | None = None) -> bool:
        """Report the violation `broken` of a rule, unless it is None; returns whether there is one."""
        if broken is not None:
            self.diagnostics.append(broken.diagnostic(code, span, self.file))
        return broken is not None


class Declarations:
    """The axes of a schedule, its functions and states by name, and the placements already checked.

    Attributes:
        sizes: size of each axis.
        kinds: kind of each axis.
        fns: types of the functions.
        states: the reference of each state on entry, by name of the state.
        valid_placements: placements without errors; `verify.structural` adds them.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.sizes = {axis.name: axis.size for axis in schedule.axes}
        self.kinds = {axis.name: axis.kind for axis in schedule.axes}
        self.fns = schedule.fn_types
        self.states = {name_of(ref): ref for ref in schedule.states}
        self.valid_placements: set[Placement] = set()


class OpScope:
    """The context of the ops of one phase: values by name, axes, functions and sources.

    Args:
        schedule: the schedule.
        phase: one of its phases.
        declarations: axes, functions and states of the schedule.
        report: receives the diagnostics.
        before: the phase of this name in an earlier schedule that passed verification and has the same axes,
            functions and entry values; None if there is none.

    Attributes:
        sizes: size of each axis.
        kinds: kind of each axis.
        values: values on entry and of the phase, by name.
        types: the same values with axes, functions and sources, for the rules of ops.
    """

    def __init__(
        self,
        schedule: Schedule,
        phase: Phase,
        declarations: Declarations,
        report: DiagnosticReport,
        before: Phase | None = None,
    ) -> None:
        self.schedule, self.phase = schedule, phase
        self.declarations, self.report = declarations, report
        self.sizes, self.kinds = declarations.sizes, declarations.kinds
        self.values = {value.id: value for value in (*schedule.entry, *phase.values)}
        self.types = ValueTypes(schedule.axes, self.values, declarations.fns, schedule.sources)
        self._seen_values: dict[Ref, Value] = {}
        self._seen_ops: dict[Ref, Op] = {}
        if before is not None:
            self._seen_values = {value.id: value for value in (*schedule.entry, *before.values)}
            self._seen_ops = {ref: op for op in before.ops for ref in results(op)}

    def has_seen(self, value: Value) -> bool:
        """Whether this value object passed verification before."""
        return self._seen_values.get(value.id) is value

    def has_seen_op(self, op: Op) -> bool:
        """Whether this op object passed verification before with the same value objects."""
        refs = results(op)
        if not refs or self._seen_ops.get(refs[0]) is not op:
            return False
        return all(self._seen_values.get(ref) is self.values[ref] for ref in (*refs, *operands(op)))

    def ranks(self, axes: Iterable[str]) -> int:
        """The number of ranks along `axes`. Unknown axes, which are reported elsewhere, have size 1."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)
