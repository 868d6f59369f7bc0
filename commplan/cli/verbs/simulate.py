"""`commplan simulate`: predict the time of a plan on a topology, its bottlenecks, and a trace."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from commplan.cli.console import STDIN, Console, fold_table
from commplan.cli.simulated import NAME_ONE, MachineTimes, Simulated, machines, simulate
from commplan.cli.user_step import with_step
from commplan.cost import Prediction
from commplan.cost.schedule.prediction import OpTime, PhaseTime
from commplan.cost.schedule.server_traffic import elastic_of
from commplan.diagnostics import fail
from commplan.explain.servers import every, mode_lines, one_mode, server_time_lines, state_line, title
from commplan.explain.times import basis, phase_times, rows
from commplan.ir.schedule import Elastic, Schedule
from commplan.ir.types import sized, timed
from commplan.protocol.build_sites import sites

SHOWN = 40  # most rows of a table; others are summed up


def run(args: Namespace, console: Console) -> int:
    """Simulate, print, and write the trace. Raises CP0752 without a topology, or an error of compiling."""
    args = with_step(args, args.file, console)
    machine, *variants = machines(args, console)
    schedule, lines, timed = simulate(machine, console)
    if timed is None:
        fail("CP0752", "there is no topology to simulate on", NAME_ONE)
    if variants:
        more = [simulate(other, console, timed) for other in variants]
        return _side_by_side([Simulated(schedule, lines, timed), *more], args, console)
    prediction = timed.prediction
    if args.trace:
        from commplan.cost.schedule.trace import trace

        console.write(args.trace, trace(prediction) + b"\n")
        if args.trace != STDIN:
            console.note(f"wrote {args.trace}: open it at https://ui.perfetto.dev")
    more = _Servers(schedule, timed, args.step_seconds)
    if console.is_human and args.trace != STDIN:
        console.show(lambda rich: _print(rich, prediction, lines, more), 110)
    elif not console.is_human:
        console.document(**_data(prediction, schedule), modes=more.data())
    return 0


def _side_by_side(on: Sequence[Simulated], args: Namespace, console: Console) -> int:
    """Compare machines: as a table, or as a JSON document with the report of each."""
    schedules = [machine.schedule for machine in on]
    timed_machines = [machine.timed for machine in on if machine.timed is not None]
    predictions = [timed.prediction for timed in timed_machines]
    if console.is_human:
        console.show(lambda rich: _compare(rich, predictions), 140)
        return 0
    pairs = zip(schedules, timed_machines, strict=True)
    document = [
        {**_data(timed.prediction, schedule), "modes": _Servers(schedule, timed, args.step_seconds).data()}
        for schedule, timed in pairs
    ]
    console.document(plan=schedules[0].plan, machines=document)
    return 0


def _compare(rich: Any, predictions: Sequence[Prediction]) -> None:
    first = predictions[0]
    ranks = f"{first.ranks} rank{'s' * (first.ranks != 1)}"
    rich.print(f"{first.plan}, {ranks}, {first.backend}, compared with {first.topology}", markup=False)
    for phase in first.phases:
        rich.print(f"\nphase {phase.name}", markup=False, style="bold")
        table = fold_table("", *(prediction.topology for prediction in predictions))
        for measure, values in rows(predictions, phase.name):
            table.add_row(measure, *values)
        rich.print(table, markup=False)
    rich.print("")
    for prediction in predictions:
        rich.print(f"{prediction.topology}: {basis(prediction)}", markup=False, soft_wrap=True)


def _data(prediction: Prediction, schedule: Schedule) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(prediction)
    for phase, times in zip(plain["phases"], prediction.phases, strict=True):
        phase |= {"seconds": times.seconds, "distance": times.distance, "nbytes": dict(times.nbytes)}
        phase["times"] = phase_times(times)
        for op, timed_op in zip(phase["ops"], times.ops, strict=True):
            op["nbytes"] = dict(timed_op.nbytes)
    plain["mapping"] = {axis.name: [[s.level, s.count] for s in axis.levels] for axis in schedule.axes}
    return plain


class _Servers:
    """The report on servers and elastic averaging.

    Args:
        step: the seconds of computation in a step, if known.
    """

    def __init__(self, schedule: Schedule, timed: MachineTimes, step: float | None) -> None:
        predictor, self.prediction = timed
        self.topology, self.step = predictor.network.topology, step
        surveyed = sites(schedule)
        self.sites, count = surveyed.all, surveyed.servers
        self.server_count_text = f" and {count} server{'s' * (count != 1)}" if count else ""
        self.met = {
            (phase.name, op.pull): (op, phase.period, elastic_of(schedule, phase, op, predictor))
            for phase in schedule.phases
            for op in phase.ops
            if isinstance(op, Elastic)
        }

    def data(self) -> list[dict[str, Any]]:
        return [
            {
                "phase": phase, "line": op.span.line, "mode": op.mode, "period": period,
                "modes": [one_mode(mode, period, self.step) for mode in modes],
            }
            for (phase, _), (op, period, modes) in self.met.items()
        ]  # fmt: skip

    def text(self, phase: str) -> list[str]:
        """The lines of one phase."""
        lines: list[str] = []
        sites = [site for site in self.sites if site.phase == phase]
        talks = [timing for timing in self.prediction.talks if timing.phase == phase]
        for site, timing in zip(sites, talks, strict=True):
            lines.append(f"  line {timing.line}: {title(site)}")
            details = (*map(state_line, timing.distributions), *server_time_lines(timing, self.topology))
            lines += [f"    {line}" for line in details]
        for (name, _), (op, period, modes) in self.met.items():
            if name == phase:
                lines.append(f"  line {op.span.line}: modes of elastic averaging, {every(period)}")
                lines += [f"    {line}" for line in mode_lines(modes, op.mode, period, self.step)]
        return lines


def _print(rich: Any, prediction: Prediction, lines: Sequence[str], servers: _Servers) -> None:
    ranks = f"{prediction.ranks} rank{'s' * (prediction.ranks != 1)}{servers.server_count_text}"
    machine = f"{prediction.topology}: {ranks}, {prediction.backend}"
    rich.print(f"{prediction.plan} on {machine}; {basis(prediction)}", markup=False)
    for phase in prediction.phases:
        _phase(rich, phase, lines)
        for line in servers.text(phase.name):
            rich.print(line, markup=False, soft_wrap=True)
    if prediction.unknown:
        rich.print(f"\nassumed to take no time, costs unknown: {', '.join(prediction.unknown)}", markup=False)


def _phase(rich: Any, phase: PhaseTime, lines: Sequence[str]) -> None:
    rich.print(f"\nphase {phase.name}", markup=False, style="bold")
    for line in phase_times(phase):
        rich.print(f"  {line}", markup=False)
    rich.print(f"  communication {timed(phase.network)}; other work {timed(phase.compute)}", markup=False)
    moved = ", ".join(f"{level} {sized(nbytes)}" for level, nbytes in phase.nbytes if nbytes)
    if moved:
        rich.print(f"  busiest links {moved} in one direction", markup=False)
    rows = _rows(phase.ops)
    if rows:
        rich.print(_table(rows))
    if phase.critical:
        rich.print("  critical path, summed over buckets")
    totals = defaultdict[tuple[int, str], float](float)
    for part in phase.critical:
        totals[part.line, part.what] += part.seconds
    for (line, label), seconds in totals.items():
        text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        rich.print(f"    {timed(seconds):>9}  line {line:<4} {label:<32} {text[:50]}", markup=False)


class _OpRow(NamedTuple):
    """Equal ops of one plan line."""

    line: int
    label: str
    times: int
    start: float
    seconds: float
    bound: float
    source: str


def _rows(ops: Sequence[OpTime]) -> list[_OpRow]:
    rows: dict[tuple[int, str], _OpRow] = {}
    for op in ops:
        if op.seconds <= 0:
            continue
        form = f" ({op.form})" if op.form else ""
        label = f"{op.op} via {op.algorithm}{form}" if op.algorithm else op.op
        row = rows.get((op.line, label), _OpRow(op.line, label, 0, op.start, 0.0, 0.0, op.source))
        rows[op.line, label] = row._replace(
            times=row.times + 1, seconds=row.seconds + op.seconds, bound=row.bound + op.bound
        )
    return list(rows.values())


def _table(rows: Sequence[_OpRow]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=True)
    table.add_column("line", justify="right")
    table.add_column("what", overflow="fold")
    for head in ("times", "starts", "takes", "bound"):
        table.add_column(head, justify="right")
    table.add_column("from")
    for row in rows[:SHOWN]:
        bound = timed(row.bound) if row.bound else ""
        table.add_row(
            str(row.line), row.label, str(row.times), timed(row.start), timed(row.seconds), bound, row.source
        )
    if len(rows) > SHOWN:
        remaining = sum(row.seconds for row in rows[SHOWN:])
        table.add_row("", f"and {len(rows) - SHOWN} more", "", "", timed(remaining), "", "")
    return table
