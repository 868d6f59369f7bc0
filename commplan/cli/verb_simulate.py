"""`commplan simulate`: how long a plan takes on a topology, what bounds it, and a trace of it."""

from __future__ import annotations

import math
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from commplan.cli.console import STDIN, Console, in_bytes, name_of
from commplan.cli.saved import is_saved, read_saved
from commplan.cost import Calibration, Predictor, Simulation, load_calibration, simulate
from commplan.cost.schedule.timeline import OpTime, PhaseTime
from commplan.cost.servers.server_traffic import elastic_of
from commplan.diagnostics import fail
from commplan.explain.servers import every, held_line, mode_lines, one_mode, talk_lines, title
from commplan.ir.plan import AxisKind, Plan
from commplan.ir.schedule import Elastic, Schedule
from commplan.protocol.build_sites import sites
from commplan.topology import Topology, load_topology, place

SHOWN = 40  # rows of a table; the rest is summed


def run(args: Namespace, console: Console) -> int:
    """Simulate, print, and write the trace. Raises CP0752 without a topology, and what compiling raises."""
    if not args.topology:
        fail("CP0752", "there is no topology to simulate on", "give one with --topology FILE")
    calibration = load_calibration(args.calibration) if args.calibration else None
    topology = load_topology(args.topology)
    schedule, lines = schedule_of(args, topology, console)
    predictor, simulation = simulated(schedule, topology, calibration, args)
    if args.trace:
        from commplan.cost.schedule.trace import trace

        console.write(args.trace, trace(simulation) + b"\n")
        if args.trace != STDIN:
            console.note(f"wrote {args.trace}: open it at https://ui.perfetto.dev")
    more = _Servers(schedule, predictor, simulation, args.step_seconds)
    if console.human and args.trace != STDIN:
        console.show(lambda rich: _print(rich, simulation, lines, more), 110)
    elif not console.human:
        console.document(**_data(simulation, schedule), modes=more.data())
    return 0


def simulated(
    schedule: Schedule, topology: Topology, calibration: Calibration | None, args: Namespace
) -> tuple[Predictor, Simulation]:
    """The schedule on `topology`, with what was measured there and what --cost says, if the verb has it.

    Raises CP0753 for a calibration of another backend, CP1108 for costs of what the plan does not have.
    """
    costs = dict[str, float](getattr(args, "cost", ()))
    names = [declared.name for declared in (*schedule.fns, *schedule.sources)]
    for name in costs:
        if name not in names:
            message = f"--cost {name}: the plan has no function or source `{name}`"
            fail("CP1108", message, f"it declares: {', '.join(names) or 'none'}")
    if calibration is not None:
        calibration.check_backend(schedule.backend, args.calibration or "")
    links = calibration.links if calibration else None
    predictor = Predictor(topology, schedule.axes, calibration=links, backend=schedule.backend)
    measured = calibration.input if calibration else None
    return predictor, simulate(schedule, predictor, costs, measured)


def schedule_of(args: Namespace, topology: Topology | None, console: Console) -> tuple[Schedule, list[str]]:
    """The schedule, on `topology` if there is one, and the lines of the plan where there is one."""
    text = console.read(args.file)
    name = name_of(args.file)
    if is_saved(args.file, text):
        if args.ranks:
            fail("CP0754", "--ranks resizes plans, and a saved schedule has its sizes", "give the .plan file")
        return placed(text, name, args, topology, console), []
    from commplan.cli.binding import compiled

    def adapt(plan: Plan) -> Plan:
        return _scaled(plan, args.ranks, args.axis) if args.ranks else plan

    done = compiled(args.file, args, console, adapt=adapt)
    return done.schedule, text.splitlines()


def _scaled(plan: Plan, ranks: int, sizes: Iterable[tuple[str, int]]) -> Plan:
    """`plan` with its first axis resized to give `ranks` ranks. Raises CP0754 where that is impossible."""
    given = dict(sizes)
    ranked = [axis for axis in plan.axes if axis.kind is not AxisKind.SERVER]
    if not ranked:
        fail("CP0754", f"plan `{plan.name}` has no axis that could hold {ranks} ranks", file=plan.file)
    first = next((axis for axis in ranked if axis.kind is AxisKind.REPLICA), ranked[0])
    others = [given.get(axis.name, axis.size) for axis in ranked if axis is not first]
    if None in others:
        fail("CP0754", "--ranks needs the sizes of all axes but the first", "give them with --axis NAME=N")
    inside = math.prod(size for size in others if size is not None)
    if ranks % inside:
        message = f"{ranks} ranks cannot be laid out: the other axes of plan `{plan.name}` have {inside}"
        note = f"give a multiple of {inside}, or their sizes with --axis NAME=N"
        fail("CP0754", message, note, file=plan.file)
    longer = replace(first, size=ranks // inside)
    return replace(plan, axes=tuple(longer if a is first else a for a in plan.axes))


def placed(text: str, name: str, args: Namespace, topology: Topology | None, console: Console) -> Schedule:
    """A saved schedule, its axes placed as the flags say, else as it was compiled, else by name."""
    from commplan.cli.binding import note_levels
    from commplan.verify import verify

    schedule = read_saved(text, name, verify)
    if topology is not None:
        mapping = dict(args.map)
        levels = {level.name for level in topology.levels}
        known = all({spread.level for spread in axis.levels} <= levels for axis in schedule.axes)
        lie = all(axis.levels or axis.size == 1 for axis in schedule.mesh_axes)
        if mapping or not (known and lie):
            axes = place(schedule.axes, topology, mapping, oversubscribe=args.oversubscribe)
            schedule = replace(schedule, axes=axes)
    note_levels(schedule, console)
    return schedule


def _data(simulation: Simulation, schedule: Schedule) -> dict[str, Any]:
    plain: dict[str, Any] = msgspec.to_builtins(simulation)
    for phase, simulated in zip(plain["phases"], simulation.phases, strict=True):
        phase["distance"] = simulated.distance
        phase["nbytes"] = dict(simulated.nbytes)
        for op, time in zip(phase["ops"], simulated.ops, strict=True):
            op["nbytes"] = dict(time.nbytes)
    plain["mapping"] = {axis.name: [[s.level, s.count] for s in axis.levels] for axis in schedule.axes}
    return plain


class _Servers:
    """What is said of servers and averaging. step: seconds of work in a step, where they are known."""

    def __init__(
        self, schedule: Schedule, predictor: Predictor, simulation: Simulation, step: float | None
    ) -> None:
        self.simulation, self.topology, self.step = simulation, predictor.network.topology, step
        surveyed = sites(schedule)
        self.sites, count = surveyed.all, surveyed.servers
        self.beside = f" and {count} server{'s' * (count != 1)}" if count else ""
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
        talks = [timing for timing in self.simulation.talks if timing.phase == phase]
        for site, timing in zip(sites, talks, strict=True):
            lines.append(f"  line {timing.line}: {title(site)}")
            details = (*map(held_line, timing.held), *talk_lines(timing, self.topology))
            lines += [f"    {line}" for line in details]
        for (name, _), (op, period, modes) in self.met.items():
            if name == phase:
                lines.append(f"  line {op.span.line}: modes of elastic averaging, {every(period)}")
                lines += [f"    {line}" for line in mode_lines(modes, op.mode, period, self.step)]
        return lines


def _print(rich: Any, simulation: Simulation, lines: Sequence[str], servers: _Servers) -> None:
    calibrated = f"calibrated {simulation.calibrated}"
    source = calibrated if simulation.calibrated else "costs of the topology file, not measured"
    ranks = f"{simulation.ranks} rank{'s' * (simulation.ranks != 1)}{servers.beside}"
    machine = f"{simulation.topology}: {ranks}, {simulation.backend}"
    rich.print(f"{simulation.plan} on {machine}; {source}", markup=False)
    for phase in simulation.phases:
        _phase(rich, phase, lines)
        for line in servers.text(phase.name):
            rich.print(line, markup=False, soft_wrap=True)
    if simulation.unknown:
        rich.print(f"\ncharged nothing, costs unknown: {', '.join(simulation.unknown)}", markup=False)


def _phase(rich: Any, phase: PhaseTime, lines: Sequence[str]) -> None:
    rich.print(f"\nphase {phase.name}: {time(phase.seconds)}", markup=False, style="bold")
    if phase.bound > 0:
        rich.print(f"  lower bound        {time(phase.bound)}; simulated is {phase.distance:.2f} times that")
    rich.print(f"  communication      {time(phase.network)}; other work {time(phase.compute)}")
    moved = ", ".join(f"{level} {size(nbytes)}" for level, nbytes in phase.nbytes if nbytes)
    if moved:
        rich.print(f"  busiest links      {moved} in one direction", markup=False)
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
        rich.print(f"    {time(seconds):>9}  line {line:<4} {label:<32} {text[:50]}", markup=False)


class _Row(NamedTuple):
    """Ops of one line that do the same."""

    line: int
    what: str
    times: int
    start: float
    seconds: float
    bound: float
    source: str


def _rows(ops: Sequence[OpTime]) -> list[_Row]:
    rows: dict[tuple[int, str], _Row] = {}
    for op in ops:
        if op.seconds <= 0:
            continue
        form = f" ({op.form})" if op.form else ""
        label = f"{op.op} via {op.algorithm}{form}" if op.algorithm else op.op
        row = rows.get((op.line, label), _Row(op.line, label, 0, op.start, 0.0, 0.0, op.source))
        rows[op.line, label] = row._replace(
            times=row.times + 1, seconds=row.seconds + op.seconds, bound=row.bound + op.bound
        )
    return list(rows.values())


def _table(rows: Sequence[_Row]) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=True)
    table.add_column("line", justify="right")
    table.add_column("what", overflow="fold")
    for head in ("times", "starts", "takes", "bound"):
        table.add_column(head, justify="right")
    table.add_column("from")
    for row in rows[:SHOWN]:
        bound = time(row.bound) if row.bound else ""
        table.add_row(
            str(row.line), row.what, str(row.times), time(row.start), time(row.seconds), bound, row.source
        )
    if len(rows) > SHOWN:
        rest = sum(row.seconds for row in rows[SHOWN:])
        table.add_row("", f"and {len(rows) - SHOWN} more", "", "", time(rest), "", "")
    return table


def time(seconds: float) -> str:
    """`3.14 ms`: three digits and a unit."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:{'.3g' if seconds < 1000 * scale else '.0f'}} {unit}"
    return f"{seconds / 1e-9:.3g} ns" if seconds else "0"


def size(nbytes: float) -> str:
    """`12.5 MiB`."""
    return in_bytes(nbytes, ".4g")
