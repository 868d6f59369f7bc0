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
    """The fields and semantics shared by `load` and `read`; `batch` has one size, or one per member."""

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
    clock: Meaning[str | None] = None  # the ensemble of `batch [..] over MEMBER`
    split: Meaning[tuple[str, ...]] = ()
    per: Meaning[tuple[str, ...]] = ()
    tail: Meaning[Tail] = "pad"
    hints: Meaning[Hints] = NO_HINTS

    def meaning(self, env: Interpretation) -> None:
        """The arguments of the load determine its records."""
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
    """`result [, count] = load source batch N ...`."""

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
