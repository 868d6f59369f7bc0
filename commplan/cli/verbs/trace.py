"""`commplan trace`: convert flight records to a Perfetto trace, or summarize them."""

from __future__ import annotations

import math
from argparse import Namespace
from typing import Any

import msgspec

from commplan.cli.console import STDIN, Console, fold_table
from commplan.cli.records import run_in, totals
from commplan.cli.simulated import simulate
from commplan.cost import Prediction
from commplan.diagnostics import plural
from commplan.ir.schedule import Schedule
from commplan.ir.types import sized, timed
from commplan.recorder.collectives import Run
from commplan.recorder.summary import Line, Summary, Waits
from commplan.recorder.trace import head, trace
from commplan.recorder.verdict import step_of

SHOWN = 3  # the number of late ranks that are listed for a line


def run(args: Namespace, console: Console) -> int:
    """Write the trace, or print the summary.

    Raises:
        CommplanError: CP1114 if files are not records, or are of several runs or another plan, or if there is
            no collective to summarize; or an error of compiling or simulating.
    """
    schedule, simulation = _plan(args, console)
    recorded = run_in(args.records, schedule, simulation)
    if args.summarize:
        return _summarize(recorded, console)
    console.write(args.output, trace(recorded))
    ranks, events = len(recorded.records), sum(len(record.events) for record in recorded.records)
    if args.output != STDIN:
        counts = f"{plural(ranks, 'rank')}, {plural(events, 'event')}"
        console.note(f"wrote {args.output}: {counts}; open it at ui.perfetto.dev")
        _remark(recorded, console)
        if not console.is_human:
            console.document(output=args.output, ranks=ranks, events=events, lost=recorded.lost)
    return 0


def _plan(args: Namespace, console: Console) -> tuple[Schedule | None, Prediction | None]:
    """The schedule of --plan, and its times with --topology."""
    if not args.plan:
        return None, None
    args.file, args.ranks = args.plan, None
    schedule, _, times = simulate(args, console)
    return schedule, times and times.prediction


def _summarize(recorded: Run, console: Console) -> int:
    """Print the totals of a run, as text or JSON. Raises CP1114 if nothing is recorded."""
    summary = totals(recorded)
    if not console.is_human:
        data: dict[str, Any] = msgspec.to_builtins(summary)
        for line, record in zip(data["lines"], summary.lines, strict=True):
            line |= {"drift": record.drift, "last": dict(record.last)}
        for step, record in zip(data["steps"], summary.steps, strict=True):
            step["hidden"] = record.hidden
        for waits, awaited in zip(data["waits"], summary.waits, strict=True):
            waits["last"] = dict(awaited.last)
        console.document(**data, clocks=head(recorded)["clocks"], missing=head(recorded)["missing"])
        return 0
    _show(summary, recorded, console)
    return 0


def _show(summary: Summary, recorded: Run, console: Console) -> None:
    """Print the totals of a run: phases, a table of plan lines, and waits for batches and servers."""
    hosts = len({record.host for record in recorded.records})
    extent = f"{summary.recorded} of {summary.ranks} ranks on {plural(hosts, 'host')}"
    console.put(f"plan {summary.plan or '(without a name)'}: {extent}, {timed(summary.seconds)} recorded\n")
    for steps in summary.steps:
        duration = f"{timed(steps.seconds)} each (p95 {timed(steps.p95)})"
        share = f"communication {steps.communicating:.1%} of it, {steps.hidden:.0%} of that hidden"
        console.put(f"phase {steps.phase}: {steps.count} runs, {duration}; {share}\n")
    predicted = any(line.predicted is not None for line in summary.lines)
    extra = ("predicted", "ratio") if predicted else ()
    table = fold_table(
        "line", "bytes", "count", "median", "p95", "transfer", "bandwidth", "waiting", "last rank", *extra
    )
    for line in summary.lines:
        table.add_row(*_row(line), *(_prediction_cells(line) if predicted else ()))
    if summary.lines:
        console.show(lambda screen: screen.print(table), 150)
    for waits in summary.waits:
        console.put(f"{_describe_waits(waits)}\n")
    _remark(recorded, console)


def _describe_waits(waits: Waits) -> str:
    """Describe waits, for example `line 9: 30 waits for a batch, 1.2 ms each (p95 3 ms), ..`."""
    if waits.lane == "input":
        text, verb = f"{waits.name}: {plural(waits.count, 'wait')} for a batch", "made"
    else:
        text, verb = f"{waits.name}: {plural(waits.count, 'request')}", "answered"
    text += f" ({waits.unfinished} unfinished)" if waits.unfinished else ""
    text += f", {timed(waits.seconds)} each (p95 {timed(waits.p95)}), {waits.share:.1%} of the time"
    text += f"; {verb} in {timed(waits.making)}" if waits.making else ""
    last = ", ".join(f"rank {rank} {count}x" for rank, count in waits.last[:SHOWN])
    return f"{text}; the last part was made by {last}" if last else text


def _row(line: Line) -> tuple[str, ...]:
    """The cells of a plan line in the table, without the prediction."""
    step = f", in `{step_of(line.name)}`" if line.name else ""
    location = f"line {line.line}{step}" if line.line else line.name
    name = f"{location}: {line.kind} {line.algorithm}" if line.kind else location
    last = [f"rank {rank} {count}x" for rank, count in line.last[:SHOWN]]
    last += [f"{len(line.last) - SHOWN} others"] if len(line.last) > SHOWN else []
    last += [f"unsure {line.unsure}x"] if line.unsure else []
    times = f"{line.count:,}" + (f" ({line.unfinished} unfinished)" if line.unfinished else "")
    # The bytes of whole steps are unknown.
    nbytes, bandwidth = (sized(line.nbytes), f"{sized(line.bandwidth)}/s") if line.nbytes else ("", "")
    return (
        name, nbytes, times, timed(line.seconds), timed(line.p95), timed(line.transfer), bandwidth,
        timed(line.waited), ", ".join(last),
    )  # fmt: skip


def _prediction_cells(line: Line) -> tuple[str, str]:
    """The predicted time of a line, and the ratio of the recorded to it."""
    if line.predicted is None:
        return "", ""
    return timed(line.predicted), f"{line.drift:.3g}" if line.drift else ""


def _remark(recorded: Run, console: Console) -> None:
    """Print notes about missing records and the accuracy of clocks."""
    written = sum(record.lost + len(record.events) for record in recorded.records)
    if recorded.lost:
        share = recorded.lost / written
        console.note(f"the first {recorded.lost:,} of {written:,} events ({share:.0%}) have been overwritten")
    if missing := head(recorded)["missing"]:
        console.note(f"no record of ranks {', '.join(map(str, missing[:20]))}: their events are missing")
    if len(recorded.clocks) > 1:
        unsure = max(clock.uncertainty for clock in recorded.clocks)
        accuracy = (
            f"agree within {timed(unsure)}" if math.isfinite(unsure) else "cannot be compared: no collective"
        )
        console.note(f"the clocks of {len(recorded.clocks)} hosts {accuracy}")
