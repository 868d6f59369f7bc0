"""What sharing costs in one phase: `commplan.input.costs` on a schedule, a machine and measurements."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from commplan.diagnostics import Span
from commplan.input.costs import (
    TIME_TOLERANCE,
    Links,
    Predicted,
    Prefer,
    RecordWork,
    Setting,
    SharingCut,
    best,
    candidates,
    limit,
    of_each_design,
    predict,
)
from commplan.input.measured_costs import InputCosts
from commplan.ir.analysis.def_use import DefUse
from commplan.ir.assemble import assemble
from commplan.ir.plan import Ref
from commplan.ir.remark import Choice, Design, SharingCost
from commplan.ir.schedule import Map, Op, Phase, Read
from commplan.ir.schedule import operands as operands_of
from commplan.ir.schedule import results as results_of
from commplan.ir.types import timed
from commplan.passes.pipeline.base import Context
from commplan.passes.rewrite import Editor
from commplan.passes.share.machine import Flow, setting_of
from commplan.select.algorithm_search import rounded

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

    def choice(self, text: str, span: Span, *, first: bool, why: str = "") -> Choice:
        """What is told of one value; the costs of a flow stand with the first of its values."""
        why = why or (self.why if first else "as the values that are made with it")
        table = self.table if first else ()
        return Choice("share", text, why, span, (), self.seconds, self.source, (), table)


class SharingCostModel:
    """Prices the flows of one phase. None everywhere where nothing was measured of it."""

    def __init__(self, editor: Editor, phase: Phase, context: Context) -> None:
        self.editor, self.phase, self.context = editor, phase, context
        self.measured = context.calibration.input if context.calibration else None

    def choose(
        self, flow: Flow, prefer: Prefer, settled: tuple[Design, int | None] | None = None
    ) -> Chosen | None:
        """The best of all designs; or of the design and the readers that are `settled` the best cut."""
        measured, ops = self.measured, flow.ops
        if measured is None or not self._known(ops, measured):
            return None
        rows = self.editor.values[next(iter(flow.ends))].leaves[0].shape[0]
        if not rows:
            return None
        cuts: dict[SharingCut, dict[Ref, Ref]] = {}
        for refs in itertools.islice(itertools.product(*flow.ends.values()), MOST_CUTS):
            cuts.setdefault(self._cut(ops, refs, measured), dict(zip(flow.ends, refs, strict=True)))
        setting, links = setting_of(self.editor.schedule, self.phase.name, flow, rows, measured, self.context)
        predictions = candidates(setting, list(cuts), links)
        if settled is None:
            taken = best(predictions, prefer)
            reason = _why(predictions, taken) + _worker_processes(setting, taken, links)
        else:
            bound, prefer = limit(setting, cuts), "cpu"
            own = [predict(setting, cut, *settled, links, bound) for cut in cuts]
            taken = best(own, prefer)
            predictions = [
                *(
                    prediction
                    for prediction in predictions
                    if (prediction.design, prediction.readers) != settled
                ),
                *own,
            ]
            reason = _why(predictions, taken)
        shown = of_each_design(predictions, taken, prefer)
        table = tuple(_row(row, taken=row is taken) for row in shown)
        return Chosen(taken, cuts[taken.cut], reason, self._source(measured), table)

    def _known(self, ops: Sequence[Op], measured: InputCosts) -> bool:
        """Whether everything of the flow was measured, and goes by the members' common clock."""
        if any(isinstance(op, Read) and (op.clock or op.per) for op in ops):
            return False
        sources = all(measured.source_named(op.source) for op in ops if isinstance(op, Read))
        return sources and all(measured.fn_named(op.fn) for op in ops if isinstance(op, Map))

    def _cut(self, ops: Sequence[Op], shared: Sequence[Ref], measured: InputCosts) -> SharingCut:
        before = DefUse(ops).ancestors(shared)
        after = [op for op in ops if op not in before]
        moved = {ref for op in before for ref in results_of(op)}
        asked = {ref for op in after for ref in operands_of(op)} & moved | set(shared)
        # Bytes have no size: a member that needs them reads the record again.
        after += [
            op
            for op in before
            if isinstance(op, Read) and op.result in asked and not self.record_size(op.result)
        ]
        makers = [
            op.fn if isinstance(op, Map) else "read" for op in before if set(results_of(op)) & set(shared)
        ]
        name = f"after {', '.join(f'`{maker}`' for maker in dict.fromkeys(makers))}"
        joint, own = (sum((self._work(op, measured) for op in ops), RecordWork()) for ops in (before, after))
        return SharingCut(name, joint, own, sum(self.record_size(ref) for ref in asked))

    def record_size(self, ref: Ref) -> int:
        """Bytes of one record; 0 where they vary."""
        value = self.editor.values[ref]
        if not value.leaves or value.kind != "records":
            return 0
        return value.leaves[0].nbytes // max(1, value.leaves[0].shape[0])

    def _work(self, op: Op, measured: InputCosts) -> RecordWork:
        """One op on one record, its result written where it belongs, as it was measured."""
        if isinstance(op, Read):
            source = measured.source_named(op.source)
            return RecordWork(source.cpu, 0.0, source.wait, 1) if source else RecordWork()
        fn = measured.fn_named(op.fn) if isinstance(op, Map) else None
        return RecordWork(fn.cpu, fn.cpu * (fn.held or 0.0), 0.0, 1) if fn else RecordWork()

    def _source(self, measured: InputCosts) -> str:
        where = f" on {measured.host}" if measured.host else ""
        consumer = measured.consumer_of(self.editor.schedule.plan, self.phase.name)
        missing = "" if consumer else "; no consumer measured: a step is taken to wait for its input alone"
        return f"input measured {measured.date}{where}{missing}"


def _why(predictions: Sequence[Predicted], taken: Predicted) -> str:
    """The reason, in numbers."""
    alone = next(each for each in predictions if each.design == "duplicate")
    if taken.design == "duplicate":
        others = [each for each in predictions if each.design != "duplicate"]
        least = min((each.cpu for each in others), default=taken.cpu)
        return (
            f"preprocessing is not the bottleneck: a step takes {timed(taken.wall)}, waiting for "
            f"{taken.waits_for}, and sharing would save at most {TIME_TOLERANCE:.0%} of it, and "
            f"{max(0.0, 1 - least / taken.cpu) if taken.cpu else 0:.0%} of the CPU time of the input"
        )
    return (
        f"a step takes {timed(taken.wall)}, waiting for {taken.waits_for}, and "
        f"{timed(alone.wall)} where nothing is shared; {timed(taken.cpu)} of CPU per record "
        f"and member instead of {timed(alone.cpu)}, {taken.distance:.2f} times the limit"
    )


def _worker_processes(setting: Setting, taken: Predicted, links: Links | None) -> str:
    """What worker processes would do for a step that waits for the interpreter's lock."""
    apart = replace(setting, processes=True)
    other = predict(apart, taken.cut, taken.design, taken.readers, links, taken.limit)
    if other.wall * (1 + TIME_TOLERANCE) >= taken.wall:
        return ""
    how = '`run.batches(workers="processes")`'
    return f"; {timed(other.wall)} with worker processes, which do not wait for one lock: {how}"


def _row(prediction: Predicted, *, taken: bool) -> SharingCost:
    names = ("cpu", "wall", "nbytes", "memory", "limit", "distance")
    numbers = {name: rounded(getattr(prediction, name)) for name in names}
    cut = "" if prediction.design == "duplicate" else prediction.cut.name
    return assemble(SharingCost, prediction, cut=cut, taken=taken, **numbers)
