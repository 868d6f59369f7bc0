"""The predicted cost of sharing in one phase, for the pass `share`.

It applies the model of `commplan.input.costs` to the ops of a schedule and their measured costs.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from commplan.diagnostics import Span
from commplan.input.costs import (
    TIME_TOLERANCE,
    Predicted,
    Prefer,
    RecordWork,
    SharingCut,
    best,
    candidates,
    costs_per_design,
    limit,
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
from commplan.passes.base import PassContext
from commplan.passes.rewrite import Editor
from commplan.passes.share.machine import InputFlow, setting_of
from commplan.passes.share.proposals import cache_candidates, cache_proposal, worker_processes
from commplan.select.algorithm_search import rounded

MOST_CUTS = 16  # maximum number of combinations of cuts, if several values of one flow are shared


@dataclass(frozen=True)
class SharingChoice:
    """The model's decision for one flow.

    Attributes:
        prediction: The prediction of the chosen design.
        cuts: For each end of the shared work, the value that is shared.
        why: The reason, in words.
        proposal: A description of a cache that would shorten the step; "" if no cache would.
        source: The source of the measurements, in words.
        table: The costs of each design at its best cut, and of the chosen design also at other cuts.
    """

    prediction: Predicted
    cuts: dict[Ref, Ref]
    why: str
    proposal: str
    source: str
    table: tuple[SharingCost, ...]

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        return rounded(self.prediction.wall)

    @property
    def declines(self) -> bool:
        """Whether not sharing is predicted to be best."""
        return self.prediction.design == "duplicate"

    def choice(self, text: str, span: Span, *, first: bool, why: str = "") -> Choice:
        """The remark on one shared value of the flow.

        Args:
            text: The subject of the decision.
            span: The stage in the plan.
            first: Whether it is the first value of the flow. Its remark has the cost table and the proposal.
            why: The reason; "" for the model's reason.
        """
        if not first:
            why = why or "as for the other values of its flow"
            return Choice("share", text, why, span, seconds=self.seconds, source=self.source)
        why = (why or self.why) + self.proposal
        return Choice("share", text, why, span, seconds=self.seconds, source=self.source, sharing=self.table)


class SharingCostModel:
    """Predicts the cost of sharing the flows of one phase.

    Attributes:
        editor: The phase during the rewrite.
        phase: The phase before it.
        context: The context of the pass.
        measured: Measured costs of the input; None if there are none.
    """

    def __init__(self, editor: Editor, phase: Phase, context: PassContext) -> None:
        self.editor, self.phase, self.context = editor, phase, context
        self.measured = context.calibration.input if context.calibration else None

    def choose(
        self, flow: InputFlow, prefer: Prefer, requested: tuple[Design, int | None] | None = None
    ) -> SharingChoice | None:
        """Choose the best of all designs, or the best cut for a requested design.

        Args:
            flow: The flow.
            prefer: See `SharePass.prefer`. Among the cuts of a requested design, `cpu` is used.
            requested: The design and its number of readers; None for the best design.

        Returns:
            The choice. None if a cost of the flow is not measured, members have independent clocks or read
            different records, or a batch has no records.
        """
        measured, ops = self.measured, flow.ops
        if measured is None or not self._is_measured(ops, measured):
            return None
        rows = self.editor.values[next(iter(flow.ends))].leaves[0].shape[0]
        if not rows:
            return None

        # By cut: the value at which each end of the flow is cut.
        cuts: dict[SharingCut, dict[Ref, Ref]] = {}
        for refs in itertools.islice(itertools.product(*flow.ends.values()), MOST_CUTS):
            cuts.setdefault(self._cut(ops, refs, measured), dict(zip(flow.ends, refs, strict=True)))
        setting, links = setting_of(self.editor.schedule, self.phase.name, flow, rows, measured, self.context)
        predictions = candidates(setting, list(cuts), links)
        if requested is None:
            best_design = best(predictions, prefer)
            reason = _reason(predictions, best_design) + worker_processes(setting, best_design, links)
        else:
            lower_bound = limit(setting, cuts)
            requested_cuts = [predict(setting, cut, *requested, links, lower_bound) for cut in cuts]
            best_design = best(requested_cuts, "cpu")
            alternatives = [other for other in predictions if (other.design, other.readers) != requested]
            predictions = [*alternatives, *requested_cuts]
            reason = _reason(predictions, best_design)

        shown = costs_per_design(predictions, best_design, prefer if requested is None else "cpu")
        table = tuple(_table_row(row, is_taken=row is best_design) for row in shown)
        refs = cuts[best_design.cut]
        caches = cache_candidates(
            self.editor.schedule, ops, self.editor.bound, self.record_size, measured.copy
        )
        cut_of = functools.partial(self._cut, ops, tuple(refs.values()), measured)
        proposal = cache_proposal(caches, cut_of, setting, best_design, links, prefer)
        return SharingChoice(best_design, refs, reason, proposal, self._source(measured), table)

    def _is_measured(self, ops: Sequence[Op], measured: InputCosts) -> bool:
        """Whether all ops of the flow are measured and advance with the common clock of the members."""
        if any(isinstance(op, Read) and (op.clock or op.per) for op in ops):
            return False
        has_sources = all(measured.source_named(op.source) for op in ops if isinstance(op, Read))
        return has_sources and all(measured.fn_named(op.fn) for op in ops if isinstance(op, Map))

    def _cut(
        self, ops: Sequence[Op], shared: Sequence[Ref], measured: InputCosts,
        works: Mapping[Ref, RecordWork] = {},
    ) -> SharingCut:  # fmt: skip
        """The work before and after a cut, and the bytes of a record that cross it.

        Args:
            ops: The ops of the flow.
            shared: The values that are shared. The ops that compute them are before the cut.
            measured: The costs of the ops.
            works: Replaces the measured work of some ops, by their first results.
        """
        before = DefUse(ops).ancestors(shared)
        after = [op for op in ops if op not in before]
        made_before = {ref for op in before for ref in results_of(op)}
        crossing = {ref for op in after for ref in operands_of(op)} & made_before | set(shared)
        # Records of variable length are not shared: each member that needs them reads them.
        after += [
            op
            for op in before
            if isinstance(op, Read) and op.result in crossing and not self.record_size(op.result)
        ]
        makers = [
            op.fn if isinstance(op, Map) else "read" for op in before if set(results_of(op)) & set(shared)
        ]
        name = f"after {', '.join(f'`{maker}`' for maker in dict.fromkeys(makers))}"

        def total(ops: Iterable[Op]) -> RecordWork:
            return sum((works.get(results_of(op)[0]) or self._work(op, measured) for op in ops), RecordWork())

        return SharingCut(name, total(before), total(after), sum(self.record_size(ref) for ref in crossing))

    def record_size(self, ref: Ref) -> int:
        """Bytes of one record of a loaded value; 0 if their length varies, and for other values."""
        value = self.editor.values[ref]
        if not value.leaves or value.kind != "records":
            return 0
        return value.leaves[0].nbytes // max(1, value.leaves[0].shape[0])

    def _work(self, op: Op, measured: InputCosts) -> RecordWork:
        """The measured work of an op on one record, including writing its result; none for other ops."""
        if isinstance(op, Read):
            source = measured.source_named(op.source)
            return RecordWork(source.cpu, 0.0, source.wait, 1) if source else RecordWork()
        fn = measured.fn_named(op.fn) if isinstance(op, Map) else None
        return RecordWork(fn.cpu, fn.cpu * (fn.held or 0.0), 0.0, 1) if fn else RecordWork()

    def _source(self, measured: InputCosts) -> str:
        """The source of the measurements, in words."""
        host_text = f" on {measured.host}" if measured.host else ""
        consumer = measured.consumer_of(self.editor.schedule.plan, self.phase.name)
        missing = "" if consumer else "; no consumer measured: a step is assumed to wait for its input only"
        return f"input measured {measured.date}{host_text}{missing}"


def _reason(predictions: Sequence[Predicted], selected: Predicted) -> str:
    """The reason for `selected`, one of `predictions`, in words and numbers."""
    duplicate = next(prediction for prediction in predictions if prediction.design == "duplicate")
    if selected.design == "duplicate":
        shared = [prediction for prediction in predictions if prediction.design != "duplicate"]
        least = min((prediction.cpu for prediction in shared), default=selected.cpu)
        return (
            f"preprocessing is not the bottleneck: a step takes {timed(selected.wall)}, waiting for "
            f"{selected.waits_for}, and sharing would save at most {TIME_TOLERANCE:.0%} of it, and "
            f"{max(0.0, 1 - least / selected.cpu) if selected.cpu else 0:.0%} of the CPU time of the input"
        )
    return (
        f"a step takes {timed(selected.wall)}, waiting for {selected.waits_for}, and "
        f"{timed(duplicate.wall)} without sharing; {timed(selected.cpu)} of CPU per record "
        f"and member instead of {timed(duplicate.cpu)}, {selected.distance:.2f} times the limit"
    )


def _table_row(prediction: Predicted, *, is_taken: bool) -> SharingCost:
    """The costs of one design for `explain`, rounded."""
    names = ("cpu", "wall", "nbytes", "memory", "limit", "distance")
    numbers = {name: rounded(getattr(prediction, name)) for name in names}
    cut = "" if prediction.design == "duplicate" else prediction.cut.name
    return assemble(SharingCost, prediction, cut=cut, taken=is_taken, **numbers)
