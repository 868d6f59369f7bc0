"""What sharing costs in one phase: `commplan.input.costs` on a schedule, a machine and measurements."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from commplan.diagnostics import Span
from commplan.input.costs import (
    Cut,
    Links,
    Predicted,
    Prefer,
    Setting,
    Work,
    best,
    candidates,
    limit,
    of_each_design,
    predict,
)
from commplan.input.measured import InputCosts
from commplan.ir.choice import Choice, Design, SharingCost
from commplan.ir.def_use import DefUse
from commplan.ir.plan import Ref
from commplan.ir.schedule import Map, Op, Phase, Read
from commplan.ir.schedule import operands as operands_of
from commplan.ir.schedule import results as results_of
from commplan.passes.base import Context
from commplan.passes.choosing import rounded
from commplan.passes.rewrite import Editor
from commplan.passes.sharing_machine import setting_of
from commplan.passes.sharing_words import row_of, why, worker_processes

MOST_CUTS = 16  # combinations, where several values of one flow are shared


@dataclass(frozen=True)
class Chosen:
    """What the model takes for one flow. cuts: for each end of the shared work the value that is shared."""

    taken: Predicted
    cuts: dict[Ref, Ref]
    why: str
    source: str
    table: tuple[SharingCost, ...]

    @property
    def seconds(self) -> float:
        """The predicted time of a step."""
        return rounded(self.taken.wall)

    @property
    def declines(self) -> bool:
        """Whether every process is better off by itself."""
        return self.taken.design == "duplicate"

    def choice(self, what: str, span: Span, *, first: bool, why: str = "") -> Choice:
        """What is told of one value; the costs of a flow stand with the first of its values."""
        why = why or (self.why if first else "as the values that are made with it")
        table = self.table if first else ()
        return Choice("share", what, why, span, (), self.seconds, self.source, (), table)


class Flow(NamedTuple):
    """Host work that hangs together. ends: for each of its ends the values at which it may be cut; what is
    before the cut is shared by the members along `over`."""

    ops: Sequence[Op]
    ends: dict[Ref, list[Ref]]
    over: tuple[str, ...]


class Pricer:
    """Prices the flows of one phase. None everywhere where nothing was measured of it."""

    def __init__(self, editor: Editor, phase: Phase, context: Context) -> None:
        self.editor, self.phase, self.context = editor, phase, context
        self.measured = context.calibration.input if context.calibration else None

    def has_size(self, ref: Ref) -> bool:
        return self._size(ref) > 0

    def choose(self, flow: Flow, prefer: Prefer) -> Chosen | None:
        """The best of all designs."""
        priced = self._priced(flow)
        if priced is None:
            return None
        setting, cuts, links = priced
        found = candidates(setting, list(cuts), links)
        taken = best(found, prefer)
        chosen = self._chosen(found, taken, cuts, prefer)
        return dataclasses.replace(chosen, why=chosen.why + worker_processes(setting, taken, links))

    def given(self, flow: Flow, design: Design, readers: int | None) -> Chosen | None:
        """As `choose`, where design and readers are settled; the cut is chosen."""
        priced = self._priced(flow)
        if priced is None:
            return None
        setting, cuts, links = priced
        found = candidates(setting, list(cuts), links)
        bound = limit(setting, cuts)
        own = [predict(setting, cut, design, readers, links, bound) for cut in cuts]
        taken = best(own, "cpu")
        others = [one for one in found if (one.design, one.readers) != (design, readers)]
        return self._chosen([*others, *own], taken, cuts, "cpu")

    def _priced(self, flow: Flow) -> tuple[Setting, dict[Cut, dict[Ref, Ref]], Links | None] | None:
        ops, ends, over = flow
        if self.measured is None or not self._known(ops):
            return None
        combined = list(itertools.islice(itertools.product(*ends.values()), MOST_CUTS))
        cuts: dict[Cut, dict[Ref, Ref]] = {}
        for refs in combined:
            cuts.setdefault(self._cut(ops, refs, self.measured), dict(zip(ends, refs, strict=True)))
        rows = self.editor.values[next(iter(ends))].leaves[0].shape[0]
        if not rows:
            return None
        setting, links = setting_of(self.editor, self.phase.name, ops, over, rows, self.context)
        return setting, cuts, links

    def _known(self, ops: Sequence[Op]) -> bool:
        """Whether everything of the flow was measured, and goes by the members' common clock."""
        if self.measured is None or any(isinstance(op, Read) and (op.clock or op.per) for op in ops):
            return False
        sources = all(self.measured.source_named(op.source) for op in ops if isinstance(op, Read))
        return sources and all(self.measured.fn_named(op.fn) for op in ops if isinstance(op, Map))

    def _cut(self, ops: Sequence[Op], shared: Sequence[Ref], measured: InputCosts) -> Cut:
        before = DefUse(ops).behind(shared)
        after = [op for op in ops if op not in before]
        moved = {ref for op in before for ref in results_of(op)}
        asked = {ref for op in after for ref in operands_of(op)} & moved | set(shared)
        # Bytes have no size: a member that needs them reads the record again.
        after += [
            op for op in before if isinstance(op, Read) and op.result in asked and not self._size(op.result)
        ]
        makers = [
            op.fn if isinstance(op, Map) else "read" for op in before if set(results_of(op)) & set(shared)
        ]
        return Cut(
            f"after {', '.join(f'`{maker}`' for maker in dict.fromkeys(makers))}",
            sum((self._work(op, measured) for op in before), Work()),
            sum((self._work(op, measured) for op in after), Work()),
            sum(self._size(ref) for ref in asked),
        )

    def _size(self, ref: Ref) -> int:
        """Bytes of one record; 0 where they vary."""
        value = self.editor.values[ref]
        if not value.leaves or value.kind != "records":
            return 0
        return value.leaves[0].nbytes // max(1, value.leaves[0].shape[0])

    def _work(self, op: Op, measured: InputCosts) -> Work:
        """One op on one record, its result written where it belongs, as it was measured."""
        if isinstance(op, Read):
            source = measured.source_named(op.source)
            return Work(source.cpu, 0.0, source.wait, 1) if source else Work()
        fn = measured.fn_named(op.fn) if isinstance(op, Map) else None
        return Work(fn.cpu, fn.cpu * (fn.held or 0.0), 0.0, 1) if fn else Work()

    def _chosen(
        self, found: Sequence[Predicted], taken: Predicted, cuts: dict[Cut, dict[Ref, Ref]], prefer: Prefer
    ) -> Chosen:
        shown = of_each_design(found, taken, prefer)
        table = tuple(row_of(one, taken=one is taken) for one in shown)
        return Chosen(taken, cuts[taken.cut], why(found, taken), self._source(), table)

    def _source(self) -> str:
        measured = self.measured
        if measured is None:
            return ""
        where = f" on {measured.host}" if measured.host else ""
        consumer = measured.consumer_of(self.editor.schedule.plan, self.phase.name)
        missing = "" if consumer else "; no consumer measured: a step is taken to wait for its input alone"
        return f"input measured {measured.date}{where}{missing}"
