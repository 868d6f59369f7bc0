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

SHOWN = 40  # most rows of a table; the others are added up in one row


def run(args: Namespace, console: Console) -> int:
    """Simulate, print, and write the trace.

    Raises:
        CommplanError: CP0752 without a topology, CP1101 if the trace cannot be written, or an error of
            compiling or simulating.
    """
    args = with_step(args, args.file, console)
    machine, *variants = machines(args, console)
    schedule, lines, times = simulate(machine, console)
    if times is None:
        fail("CP0752", "there is no topology to simulate on", NAME_ONE)
    if variants:
        simulated_variants = [simulate(variant, console, times) for variant in variants]
        return _side_by_side([Simulated(schedule, lines, times), *simulated_variants], args, console)
    prediction = times.prediction
    if args.trace:
        from commplan.cost.schedule.trace import trace

        console.write(args.trace, trace(prediction) + b"\n")
        if args.trace != STDIN:
            console.note(f"wrote {args.trace}: open it at https://ui.perfetto.dev")
    servers = _Servers(schedule, times, args.step_seconds)
    if console.is_human and args.trace != STDIN:
        console.show(lambda rich: _print(rich, prediction, lines, servers), 110)
    elif not console.is_human:
        console.document(**_data(prediction, schedule), modes=servers.data())
    return 0


def _side_by_side(simulations: Sequence[Simulated], args: Namespace, console: Console) -> int:
    """Compare machines, all with times: as a table, or as a JSON document with the report of each."""
    schedules = [simulated.schedule for simulated in simulations]
    machine_times = [simulated.timed for simulated in simulations if simulated.timed is not None]
    predictions = [times.prediction for times in machine_times]
    if console.is_human:
        console.show(lambda rich: _compare(rich, predictions), 140)
        return 0
    pairs = zip(schedules, machine_times, strict=True)
    document = [
        {**_data(times.prediction, schedule), "modes": _Servers(schedule, times, args.step_seconds).data()}
        for schedule, times in pairs
    ]
    console.document(plan=schedules[0].plan, machines=document)
    return 0


def _compare(rich: Any, predictions: Sequence[Prediction]) -> None:
    """Print a table for each phase, with one column for each machine."""
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
    """The JSON document of a prediction."""
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
        schedule: the schedule.
        times: its predicted times.
        step: the seconds of computation in a step; None if unknown.

    Attributes:
        sites: the call sites of servers.
        server_count_text: the number of servers, to be added to the number of ranks; empty without servers.
        met: each elastic op with the period of its phase and the times of its modes, by phase and pull.
    """

    def __init__(self, schedule: Schedule, times: MachineTimes, step: float | None) -> None:
        predictor, self.prediction = times
        self.topology, self.step = predictor.network.topology, step
        call_sites = sites(schedule)
        self.sites, count = call_sites.all, call_sites.servers
        self.server_count_text = f" and {count} server{'s' * (count != 1)}" if count else ""
        self.met = {
            (phase.name, op.pull): (op, phase.period, elastic_of(schedule, phase, op, predictor))
            for phase in schedule.phases
            for op in phase.ops
            if isinstance(op, Elastic)
        }

    def data(self) -> list[dict[str, Any]]:
        """The modes of each elastic op, as JSON data."""
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
        phase_sites = [site for site in self.sites if site.phase == phase]
        timings = [timing for timing in self.prediction.server_timings if timing.phase == phase]
        for site, timing in zip(phase_sites, timings, strict=True):
            lines.append(f"  line {timing.line}: {title(site)}")
            details = (*map(state_line, timing.distributions), *server_time_lines(timing, self.topology))
            lines += [f"    {line}" for line in details]
        for (name, _), (op, period, modes) in self.met.items():
            if name == phase:
                lines.append(f"  line {op.span.line}: modes of elastic averaging, {every(period)}")
                lines += [f"    {line}" for line in mode_lines(modes, op.mode, period, self.step)]
        return lines


def _print(rich: Any, prediction: Prediction, lines: Sequence[str], servers: _Servers) -> None:
    """Print the prediction for one machine; `lines` is the plan's text, or empty."""
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
    """Print the times, the ops and the critical path of a phase."""
    rich.print(f"\nphase {phase.name}", markup=False, style="bold")
    for line in phase_times(phase):
        rich.print(f"  {line}", markup=False)
    rich.print(f"  communication {timed(phase.network)}; other work {timed(phase.compute)}", markup=False)
    moved = ", ".join(f"{level} {sized(nbytes)}" for level, nbytes in phase.nbytes if nbytes)
    if moved:
        rich.print(f"  busiest links {moved} in one direction", markup=False)
    op_rows = _rows(phase.ops)
    if op_rows:
        rich.print(_table(op_rows))
    if phase.critical:
        rich.print("  critical path, summed over buckets")
    totals = defaultdict[tuple[int, str], float](float)
    for part in phase.critical:
        totals[part.line, part.label] += part.seconds
    for (line, label), seconds in totals.items():
        text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        rich.print(f"    {timed(seconds):>9}  line {line:<4} {label:<32} {text[:50]}", markup=False)


class _OpRow(NamedTuple):
    """Equal ops of one plan line.

    Attributes:
        line: the line in the plan.
        label: the op, with its algorithm.
        times: the number of ops.
        start: the start of the first op, in seconds.
        seconds: the time of all ops.
        bound: a lower bound on `seconds` for all algorithms; 0 if there is none.
        source: the origin of the costs, such as a calibration.
    """

    line: int
    label: str
    times: int
    start: float
    seconds: float
    bound: float
    source: str


def _rows(ops: Sequence[OpTime]) -> list[_OpRow]:
    """Add up equal ops of a line; ops that take no time are omitted."""
    row_of_label: dict[tuple[int, str], _OpRow] = {}
    for op in ops:
        if op.seconds <= 0:
            continue
        form = f" ({op.form})" if op.form else ""
        label = f"{op.op} via {op.algorithm}{form}" if op.algorithm else op.op
        row = row_of_label.get((op.line, label), _OpRow(op.line, label, 0, op.start, 0.0, 0.0, op.source))
        row_of_label[op.line, label] = row._replace(
            times=row.times + 1, seconds=row.seconds + op.seconds, bound=row.bound + op.bound
        )
    return list(row_of_label.values())


def _table(op_rows: Sequence[_OpRow]) -> Any:
    """A rich table of ops. Rows after the first `SHOWN` are added up."""
    from rich.table import Table

    table = Table(box=None, pad_edge=True)
    table.add_column("line", justify="right")
    table.add_column("what", overflow="fold")
    for head in ("times", "starts", "takes", "bound"):
        table.add_column(head, justify="right")
    table.add_column("from")
    for row in op_rows[:SHOWN]:
        bound = timed(row.bound) if row.bound else ""
        table.add_row(
            str(row.line), row.label, str(row.times), timed(row.start), timed(row.seconds), bound, row.source
        )
    if len(op_rows) > SHOWN:
        remaining = sum(row.seconds for row in op_rows[SHOWN:])
        table.add_row("", f"and {len(op_rows) - SHOWN} more", "", "", timed(remaining), "", "")
    return table
