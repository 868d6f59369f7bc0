"""The stage `map`: a call of a function of the user, or of a built-in one."""

import msgspec

from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Hints
from commplan.ir.refs import Ref, name_of
from commplan.ir.roles import Meaning, Presentation
from commplan.ir.stages.base import BaseStage
from commplan.ir.symbolic.deferred import Interpretation, steps
from commplan.ir.types import Refs


class MapFields(msgspec.Struct, frozen=True):
    """The fields and semantics shared by `map` in a plan and in a schedule.

    Attributes:
        results: The results, at least one.
        fn: The name of the function.
        operands: The operands; empty for a function without operands.
        span: The place of the call in the plan.
        per: The ensembles between whose members the random numbers of the function differ.
        per_record: Whether the function is called for each record: on the host, or by `vmap` on the device.
        hints: The options. `overlap` marks an update that may run in pieces, overlapping with the remaining
            reductions.
    """

    READS = ("operands",)
    WRITES = ("results",)
    AXES = ("per",)

    results: Meaning[Refs]
    fn: Meaning[str]
    operands: Meaning[tuple[Ref, ...]]
    span: Presentation[Span]
    per: Meaning[tuple[str, ...]] = ()
    per_record: Meaning[bool] = False
    hints: Meaning[Hints] = NO_HINTS

    def random_stream(self, env: Interpretation) -> int:
        """The index, from 1, of the random stream of this call among those of its function."""
        raise NotImplementedError

    def meaning(self, env: Interpretation) -> None:
        """Call the function on symbolic values.

        A random function draws different numbers in every call. On the device they differ for every result
        name and along `per`, and for whole values also for each shard and operand shape.
        """
        fn, operands, by_record = self.fn, env.each(self.operands), self.per_record
        marks: tuple[object, ...] = ("per", *self.per) if self.per else ()
        if self.hints.on_error is not None:
            marks = (*marks, "on error", self.hints.on_error)
        if fn not in env.random:
            env.call(fn, operands, self.results, marks, by_record=by_record)
            return
        differing = self.per
        marks = (*marks, "drawn from", self.random_stream(env))
        if env.random[fn] == "device":
            marks = (*marks, "for", self.results[0])
        if not by_record:
            split = operands[0].value.placement.split if operands else ()
            shapes = (tuple(leaf.shape for leaf in operand.value.leaves) for operand in operands)
            marks = (*marks, *split, *shapes)
            if fn not in env.elementwise:  # otherwise the position of an element identifies its shard
                differing += split
        random_arguments = [steps.random_argument(env, differing)]
        env.call(fn, operands, self.results, marks, by_record=by_record, random_arguments=random_arguments)


class MapStage(MapFields, BaseStage, frozen=True, tag="map"):
    """A call of a function."""

    FORM = "y, ... = map FN(x, ...) [per MEMBER]"

    def random_stream(self, env: Interpretation) -> int:
        """Streams are numbered in the order of the calls in the plan."""
        env.draws[self.fn] += 1
        return env.draws[self.fn]

    def same_leaves(self) -> tuple[tuple[Ref, ...], ...]:
        return ()

    def function_call(self) -> tuple[str, tuple[Ref, ...], tuple[Ref, ...]]:
        return self.fn, self.operands, self.results

    def source_parts(self) -> tuple[str, ...]:
        operands = ", ".join(map(name_of, self.operands))
        return (f"map {self.fn}({operands})", f"per {', '.join(self.per)}" if self.per else "")

    def summary(self) -> tuple[str, ...]:
        per = f"per {', '.join(self.per)}" if self.per else ""
        return (f"map {self.fn}", "record by record" if self.per_record else "", per)
