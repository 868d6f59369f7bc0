"""The context used by the verifier's rules, and the report that collects diagnostics."""

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
    """Collects diagnostics with their plan lines."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.diagnostics: list[Diagnostic] = []

    def add(self, code: str, message: str, span: Span | None = None) -> None:
        self.diagnostics.append(Diagnostic(code, message, span, file=self.file))

    def unique(self, noun: str, names: Iterable[str]) -> None:
        """Report each name that occurs more than once."""
        unique_names: set[str] = set()
        for name in names:
            if name in unique_names:
                self.add("CP0730", f"two {noun} are called `{name}`")
            unique_names.add(name)

    def refuse(self, code: str, broken: Violation | None, span: Span | None = None) -> bool:
        """Report a violated rule; returns whether it is violated."""
        if broken is not None:
            self.diagnostics.append(broken.diagnostic(code, span, self.file))
        return broken is not None


class Axes:
    """The axes of a schedule, its functions and states by name, and the placements already checked."""

    def __init__(self, schedule: Schedule) -> None:
        self.sizes = {axis.name: axis.size for axis in schedule.axes}
        self.kinds = {axis.name: axis.kind for axis in schedule.axes}
        self.fns = schedule.fn_types
        self.states = {name_of(ref): ref for ref in schedule.states}
        self.good: set[Placement] = set()


class OpScope:
    """The context of the ops of one phase: values by name, axes, functions and sources.

    `before` is the phase in an earlier schedule that passed verification.
    """

    def __init__(
        self,
        schedule: Schedule,
        phase: Phase,
        axes: Axes,
        report: DiagnosticReport,
        before: Phase | None = None,
    ) -> None:
        self.schedule, self.phase, self.axes, self.report = schedule, phase, axes, report
        self.sizes, self.kinds = axes.sizes, axes.kinds
        self.values = {value.id: value for value in (*schedule.entry, *phase.values)}
        self.types = ValueTypes(schedule.axes, self.values, axes.fns, schedule.sources)
        self._values: dict[Ref, Value] = {}
        self._ops: dict[Ref, Op] = {}
        if before is not None:
            self._values = {value.id: value for value in (*schedule.entry, *before.values)}
            self._ops = {ref: op for op in before.ops for ref in results(op)}

    def has_seen(self, value: Value) -> bool:
        """Whether this value object passed verification before."""
        return self._values.get(value.id) is value

    def has_seen_op(self, op: Op) -> bool:
        """Whether this op object passed verification before with the same value objects."""
        refs = results(op)
        if not refs or self._ops.get(refs[0]) is not op:
            return False
        return all(self._values.get(ref) is self.values[ref] for ref in (*refs, *operands(op)))

    def ranks(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes.get(axis, 1) for axis in axes)
