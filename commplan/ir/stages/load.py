"""The stage `load`: batches of records of a source."""

import msgspec

from commplan.diagnostics import Span
from commplan.ir.hints import NO_HINTS, Hints
from commplan.ir.refs import Ref, base_name
from commplan.ir.roles import Meaning, Presentation
from commplan.ir.stages.base import BaseStage
from commplan.ir.stages.rules import Ranks, Violation, dropped_tail, even_batch, member_batches, short_tail
from commplan.ir.symbolic.deferred import Interpretation, steps
from commplan.ir.types import Batch, Tail, Visit


class LoadFields(msgspec.Struct, frozen=True):
    """The fields and semantics shared by the stage `load` and the op `read`.

    Attributes:
        result: The batch.
        source: The name of the source.
        batch: The global number of records per step: one number, or one per member of `clock`.
        visit: How often each record is visited in an epoch.
        seed: The seed of the order of records.
        span: The place of the load in the plan.
        count: The number of records of this rank's batch that are not padding, an i32 scalar; None if the
            plan does not name it.
        clock: The ensemble of `batch [..] over MEMBER`, whose members load at their own rates; None if
            all load at one rate.
        split: The axes over which a batch is split; empty if all ranks have the same records.
        per: The ensembles whose members have different batches.
        tail: The last batch of an epoch, if it is not full.
        hints: The options.
    """

    READS = ()
    WRITES = ("result", "count")
    AXES = ("split", "per", "clock")

    result: Meaning[Ref]
    source: Meaning[str]
    batch: Meaning[Batch]
    visit: Meaning[Visit]
    seed: Meaning[int]
    span: Presentation[Span]
    count: Meaning[Ref | None] = None
    clock: Meaning[str | None] = None
    split: Meaning[tuple[str, ...]] = ()
    per: Meaning[tuple[str, ...]] = ()
    tail: Meaning[Tail] = "pad"
    hints: Meaning[Hints] = NO_HINTS

    def meaning(self, env: Interpretation) -> None:
        """Define the batch and the count as new elements, which the arguments of the load determine."""
        hints, clock = self.hints, self.clock
        contract = (self.batch, self.visit, self.seed, self.tail, hints.on_error, hints.on_failure)
        words = ", ".join(map(str, (*contract, "per", *self.per, "by", clock)))
        label = f"{self.source}({base_name(self.result)}; {words})"
        varying = (*self.per, *((clock,) if clock and clock not in self.per else ()))
        steps.loaded(env, self.result, label, varying, self.split)
        if self.count is not None:
            value = env.values[self.count]
            number = env.fresh_elements(f"the number of {label}", value, (*varying, *self.split), ())
            env.put(self.count, number)


class Load(LoadFields, BaseStage, frozen=True, tag="load"):
    """A load of one batch per step."""

    FORM = "x [, n] = load SOURCE batch N [split AXES] [per MEMBER] visit KIND seed N [tail KIND]"

    def same_leaves(self) -> tuple[tuple[Ref, ...], ...]:
        return ()

    def violation(self, ranks: Ranks) -> Violation | None:
        return (
            dropped_tail(self.visit, self.tail)
            or short_tail(self.tail, self.split)
            or member_batches(self.batch, self.clock, ranks)
            or even_batch(self.batch, self.split, ranks)
        )

    def source_parts(self) -> tuple[str, ...]:
        first, *clauses = self.summary()
        return (first.replace("load", f"load {self.source}", 1), *clauses)

    def summary(self) -> tuple[str, ...]:
        batch = f"{list(self.batch)} over {self.clock}" if self.clock else str(self.batch[0])
        split = f"split {', '.join(self.split)}" if self.split else ""
        per = f"per {', '.join(self.per)}" if self.per else ""
        tail = f"tail {self.tail}" if self.tail != "pad" else ""
        visit = " ".join(text for text in (f"visit {self.visit}", f"seed {self.seed}", tail) if text)
        return (f"load batch {batch}", split, per, visit)
