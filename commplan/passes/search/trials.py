"""Compiles a phase with a table of choices, and predicts its exposed time, within a budget."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from commplan.cost.schedule.prediction import predict_exposed
from commplan.cost.schedule.predictor import Predictor
from commplan.cost.schedule.step import readiness
from commplan.ir.schedule import Collective, Phase, Schedule
from commplan.passes.base import NO_CHOICES, OPEN, Choices, Pass, PassContext, StageChoice
from commplan.passes.bucket.bucket import BucketPass
from commplan.passes.search.remarks import Searched
from commplan.passes.search.units import stages_separate, units

SCHEDULES = 480  # maximum number of schedules to predict for a phase
WORK = 90_000  # approximate maximum of the ops and leaves in all of these schedules
HALF = 0.5  # fraction of the budget for schedules whose stages share buckets; the rest is for separate ones
FEWEST = 4  # number of schedules to predict even if they exceed `WORK`


class Trials:
    """The schedules of one phase that were tried.

    Args:
        schedule: The schedule.
        phase: The phase.
        passes: The remaining passes.
        context: Their context.
        predictor: The machine.
        start: The initial table.

    Attributes:
        schedule: The schedule with this phase only, and without choices.
        phase: The phase before the passes.
        phases: All phases of the schedule, since predictions of servers depend on all.
        units: The open choices.
        separate: A start table with separate buckets for stages; empty if stages share none.
        leaves: The number of leaves of all values of the packed phase.
        predictions: Predictions of the tables that were tried, by the choices for each unit.
        packed: The phase before algorithms are chosen, by the bucket size of each unit.
        elsewhere: The number of schedules of this phase that other trials have predicted.
        work: The number of ops and leaves of all schedules that were predicted.
        share: The fraction of the budget that these trials may spend.
        measured: Measured costs of the input; None if there are none.
        ready: When the inputs of the phase are available.
    """

    def __init__(
        self,
        schedule: Schedule,
        phase: Phase,
        passes: Sequence[Pass],
        context: PassContext,
        predictor: Predictor,
        start: Choices = NO_CHOICES,
    ) -> None:
        self.schedule, self.phase = replace(schedule, phases=(phase,), choices=()), phase
        self.phases, self.passes, self.context, self.predictor = schedule.phases, passes, context, predictor
        self.start = start
        packs = [pass_ for pass_ in passes if isinstance(pass_, BucketPass)]
        packed = self._after(self.schedule, packs, start)
        self.units = units(packed, packed.phases[0], passes)
        self.separate = stages_separate(phase, packed.phases[0]) if self.units else NO_CHOICES
        self.leaves = sum(len(value.leaves) for value in packed.phases[0].values)
        self.elsewhere = self.work = 0
        self.share = HALF if self.separate else 1.0
        self.predictions: dict[tuple[StageChoice, ...], Searched] = {}
        self.packed: dict[tuple[int | None, ...], Schedule] = {}
        self.measured = context.calibration.input if context.calibration else None
        self.ready = readiness(schedule, phase, predictor, context.step, context.order)

    @property
    def count(self) -> int:
        """The number of schedules that were predicted, here and by other trials of the phase."""
        return len(self.predictions) + self.elsewhere

    @property
    def is_spent(self) -> bool:
        """Whether the budget is spent."""
        is_over = self.count >= SCHEDULES * self.share or self.work >= WORK * self.share
        return is_over and self.count >= FEWEST

    def key(self, table: Choices) -> tuple[StageChoice, ...]:
        """The choice for each unit in `table`."""
        return tuple(table.get(unit.key, OPEN) for unit in self.units)

    def predicted(self, table: Choices) -> Searched | None:
        """The prediction for the choices of `table`; None if the table is new and the budget is spent.

        Its `order` and `choice` are not set.
        """
        key = self.key(table)
        if key not in self.predictions:
            if self.is_spent:
                return None
            after = self._compile_phase(table)
            (phase,) = after.phases
            whole = replace(after, phases=tuple(phase if p is self.phase else p for p in self.phases))
            exposed, nbytes = predict_exposed(whole, phase, self.predictor, self.ready, self.measured)
            count = sum(isinstance(op, Collective) for op in phase.ops)
            self.work += len(phase.ops) + self.leaves
            self.predictions[key] = Searched(_digits(exposed), count, _digits(nbytes), 0, OPEN)
        return self.predictions[key]

    def _compile_phase(self, table: Choices) -> Schedule:
        """The schedule of the phase after all passes.

        The passes before `decompose` depend only on the bucket sizes, and their result is cached.
        """
        names = [pass_.name for pass_ in self.passes]
        first = names.index("decompose") if "decompose" in names else 0
        sizes = tuple(choice.bucket for choice in self.key(table))
        if sizes not in self.packed:
            self.packed[sizes] = self._after(self.schedule, self.passes[:first], table)
        return self._after(self.packed[sizes], self.passes[first:], table)

    def _after(self, schedule: Schedule, passes: Sequence[Pass], table: Choices) -> Schedule:
        """The schedule after `passes` with the choices of `table`."""
        context = replace(self.context, choices=table, explains=False)
        for pass_ in passes:
            schedule = pass_.run(schedule, context)
        return schedule


def _digits(number: float) -> float:
    """Round to six significant digits: rounding errors of the machine must not decide."""
    return float(f"{number:.5e}")
