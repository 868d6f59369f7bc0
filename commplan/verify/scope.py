"""What the rules of the verifier see of a schedule, and where they say what is wrong."""

from __future__ import annotations

import math
from collections.abc import Iterable

from commplan.diagnostics import Diagnostic, Span
from commplan.ir.plan import Ref, name_of
from commplan.ir.schedule import Op, Phase, Schedule, Value, operands, results
from commplan.ir.stages.rules import Violation
from commplan.ir.transfer import ValueTypes
from commplan.ir.types import Placement


class Report:
    """Collects what is wrong, with the place in the plan."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.found: list[Diagnostic] = []

    def add(self, code: str, message: str, span: Span | None = None) -> None:
        self.found.append(Diagnostic(code, message, span, file=self.file))

    def unique(self, noun: str, names: Iterable[str]) -> None:
        """Say of every name that comes twice that it does."""
        seen: set[str] = set()
        for name in names:
            if name in seen:
                self.add("CP0730", f"two {noun} are called `{name}`")
            seen.add(name)

    def refuse(self, code: str, broken: Violation | None, span: Span | None = None) -> bool:
        """Whether a rule is broken, and then it is said."""
        if broken is not None:
            self.found.append(broken.diagnostic(code, span, self.file))
        return broken is not None


class Axes:
    """The axes of a schedule, and the placements that were found to lie well on them; functions and states by
    name."""

    def __init__(self, schedule: Schedule) -> None:
        self.sizes = {axis.name: axis.size for axis in schedule.axes}
        self.kinds = {axis.name: axis.kind for axis in schedule.axes}
        self.fns = schedule.fn_types
        self.states = {name_of(ref): ref for ref in schedule.states}
        self.good: set[Placement] = set()


class Scope:
    """What an op of one phase can see: values by name, axes, functions, sources.

    `before` is the phase in an earlier schedule that was found sound.
    """

    def __init__(
        self, schedule: Schedule, phase: Phase, axes: Axes, report: Report, before: Phase | None = None
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
        """Whether this very value was found sound before."""
        return self._values.get(value.id) is value

    def has_seen_op(self, op: Op) -> bool:
        """Whether this very op, on the very same values, was found sound before."""
        refs = results(op)
        if not refs or self._ops.get(refs[0]) is not op:
            return False
        return all(self._values.get(ref) is self.values[ref] for ref in (*refs, *operands(op)))

    def ranks(self, axes: Iterable[str]) -> int:
        return math.prod(self.sizes.get(axis, 1) for axis in axes)
