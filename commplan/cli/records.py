"""Load flight records of one run, and match them with the plan's prediction."""

from __future__ import annotations

import math
from itertools import pairwise

from commplan.cost import Prediction
from commplan.diagnostics import fail
from commplan.ir.schedule import Schedule
from commplan.recorder.blame import state
from commplan.recorder.collectives import Predicted, Run, read_run
from commplan.recorder.file import Record, folder
from commplan.recorder.reading import read_records
from commplan.recorder.summary import Summary, summary
from commplan.recorder.tasks import line_of


def runs(paths: list[str]) -> list[list[Record]]:
    """Load records, grouped by run.

    Args:
        paths: files or folders. If empty, use the live runs of this host, or else its last run.

    Returns:
        The records of each run, at least one run.

    Raises:
        CommplanError: CP1114 if there are no records, or if files are not records.
    """
    locations = paths or [str(folder())]
    jobs: dict[str, list[Record]] = {}
    for record in read_records(locations):
        job = record.path.rpartition("/")[2].split(".")[0]  # files are called JOB.*.rec
        jobs.setdefault(job, []).append(record)
    if not jobs:
        fail(
            "CP1114",
            f"there are no records in {', '.join(locations)}",
            "each process keeps a file commplan-*.rec while it runs, and after a failure",
        )
    if paths:
        return list(jobs.values())
    alive = [records for records in jobs.values() if any(state(record) != "dead" for record in records)]
    return alive or [max(jobs.values(), key=lambda records: records[0].started)]


def run_in(paths: list[str], schedule: Schedule | None = None, prediction: Prediction | None = None) -> Run:
    """Load the records of a single run, on one time scale.

    Args:
        paths: files or folders, as in `runs`.
        schedule: the expected schedule; None to accept records of any plan.
        prediction: predicted times, to compare with the recorded ones.

    Raises:
        CommplanError: CP1114 if files are not records, are of several runs or of another plan than
            `schedule`, or if two are of one rank.
    """
    records, *other_runs = runs(paths)
    if other_runs:
        examples = ", ".join(run_records[0].path for run_records in (records, *other_runs[:3]))
        fail(
            "CP1114",
            f"these are records of {1 + len(other_runs)} runs: {examples}",
            "pass the records of one run: JOB.*.rec",
        )
    for before, record in pairwise(records):
        if (before.rank, before.lane) == (record.rank, record.lane):
            fail(
                "CP1114",
                f"{before.path} and {record.path} are both records of rank {record.rank}",
                "pass one of them",
            )
    if schedule is not None:
        _check(records, schedule)
    return read_run(records, _predict(prediction) if prediction else None)


def totals(run: Run) -> Summary:
    """Summarize a run. Raises CP1114 if no collective, batch or request is recorded."""
    if not run.collectives and not run.tasks:
        paths = ", ".join(record.path for record in run.records[:3])
        fail("CP1114", f"there is no collective in {paths}", "the run has not reached its first one yet")
    return summary(run)


def _check(records: list[Record], schedule: Schedule) -> None:
    """Raise CP1114 if the plan's name, the number of ranks or a recorded line does not fit `schedule`."""
    first, ranks = records[0], math.prod(schedule.mesh_sizes.values())
    if first.plan != schedule.plan:
        message = f"{first.path} is a record of plan `{first.plan}`, not of `{schedule.plan}`"
        fail("CP1114", message, "pass the plan of the recorded run", file=first.path)
    # JAX processes record whole steps by name, and each may contain several ranks.
    steps = any("`" in event.name for event in first.events)
    if first.ranks != ranks and not steps:
        message = f"{first.path} is a record of {first.ranks} ranks, but the plan was compiled for {ranks}"
        fail("CP1114", message, "pass the sizes of the run with --axis NAME=N", file=first.path)
    lines = {op.span.line for phase in schedule.phases for op in phase.ops}
    for record in records:
        for event in record.events:
            line = line_of(event.name)
            if line and line not in lines:
                message = (
                    f"the run has communicated on line {line}, but {schedule.file} does not communicate there"
                )
                fail("CP1114", message, "pass the version of the plan that ran", file=record.path)


def _predict(prediction: Prediction) -> Predicted:
    """The predicted seconds of collectives, in order, by phase, plan line and kind."""
    seconds: dict[tuple[str, int, str], list[float]] = {}
    for phase in prediction.phases:
        for op in phase.ops:
            if op.algorithm:
                seconds.setdefault((phase.name, op.line, op.op), []).append(op.seconds)
    return seconds
