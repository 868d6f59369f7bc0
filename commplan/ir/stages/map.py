import msgspec

from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Hints
from commplan.ir.refs import Ref, name_of
from commplan.ir.roles import Meaning, Presentation
from commplan.ir.stages.base import BaseStage
from commplan.ir.symbolic.deferred import Interpretation, steps
from commplan.ir.types import Refs


class Call(msgspec.Struct, frozen=True):
    """What a `map` of a plan and one of a schedule say alike."""

    READS = ("operands",)
    WRITES = ("results",)
    AXES = ("per",)

    results: Meaning[Refs]
    fn: Meaning[str]
    operands: Meaning[tuple[Ref, ...]]
    span: Presentation[Span]
    per: Meaning[tuple[str, ...]] = ()
    per_record: Meaning[bool] = False  # applied record by record: on the host, or vmapped on the device
    hints: Meaning[Hints] = NO_HINTS

    def drawn_from(self, env: Interpretation) -> int:
        """The number of the random stream that the call draws from, among those of its function."""
        raise NotImplementedError

    def meaning(self, env: Interpretation) -> None:
        """A random function draws other numbers in every call, on the device for every name of a result,
        along `per` and, of whole values, for each part and each shape of what it is given."""
        fn, operands, by_record = self.fn, env.each(self.operands), self.per_record
        marks: tuple[object, ...] = ("per", *self.per) if self.per else ()
        if self.hints.on_error is not None:
            marks = (*marks, "on error", self.hints.on_error)
        if fn not in env.random:
            env.call(fn, operands, self.results, marks, by_record=by_record)
            return
        differing = self.per
        marks = (*marks, "drawn from", self.drawn_from(env))
        if env.random[fn] == "device":
            marks = (*marks, "for", self.results[0])
        if not by_record:
            split = operands[0].value.placement.split if operands else ()
            shapes = (tuple(leaf.shape for leaf in held.value.leaves) for held in operands)
            marks = (*marks, *split, *shapes)
            if fn not in env.elementwise:  # else where an element stands says of which part it is
                differing += split
        drawn = [steps.drawn(env, differing)]
        env.call(fn, operands, self.results, marks, by_record=by_record, drawn=drawn)


class Map(Call, BaseStage, frozen=True, tag="map"):
    """`results = map fn(operands) [per MEMBER]`."""

    FORM = "y, ... = map FN(x, ...) [per MEMBER]"

    def drawn_from(self, env: Interpretation) -> int:
        """Streams are numbered in the order in which the plan writes the calls."""
        env.draws[self.fn] += 1
        return env.draws[self.fn]

    def alike(self) -> tuple[tuple[Ref, ...], ...]:
        return ()

    def called(self) -> tuple[str, tuple[Ref, ...], tuple[Ref, ...]]:
        return self.fn, self.operands, self.results

    def written(self) -> tuple[str, ...]:
        operands = ", ".join(map(name_of, self.operands))
        return (f"map {self.fn}({operands})", f"per {', '.join(self.per)}" if self.per else "")

    def said(self) -> tuple[str, ...]:
        per = f"per {', '.join(self.per)}" if self.per else ""
        return (f"map {self.fn}", "record by record" if self.per_record else "", per)
