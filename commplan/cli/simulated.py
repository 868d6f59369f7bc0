"""What verbs simulate: a schedule, from a plan or saved, and its times on the machine of --topology."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from commplan.cli.argument_types import once
from commplan.cli.binding import checked, compiled, note_levels
from commplan.cli.console import Console, name_of
from commplan.cli.saved import is_saved, read_saved
from commplan.cost import (
    Calibration,
    Prediction,
    Predictor,
    StepComputation,
    check_step,
    load_calibration,
    predict,
    predictor_for,
)
from commplan.diagnostics import fail
from commplan.ir.plan import AxisKind, Plan
from commplan.ir.schedule import Schedule, topologies_text
from commplan.topology import Topology, load_topology, place, topology_of
from commplan.what_if import scaled, scaled_calibration, with_room

NAME_ONE = 'give one with --topology FILE, or write `topology "FILE"` in the plan'
NO_COSTS: Mapping[str, float] = {}


class Timed(NamedTuple):
    """What is known of a schedule with a topology."""

    predictor: Predictor
    prediction: Prediction


class Simulated(NamedTuple):
    """A schedule, and the lines of the plan where there is one. timed: None without a topology."""

    schedule: Schedule
    lines: list[str]
    timed: Timed | None


def machines(args: Namespace, console: Console) -> list[Namespace]:
    """`args` for each machine: those of --topology, else that of the plan, and behind each one what --scale
    makes of it.

    Each has its `topology` as a value, large enough for --ranks, and a `calibration` to match. None stands
    for that of the plan as it is. Raises CP0712 and CP0751 for their files, CP0714 for a level that a
    topology does not have, and CP0752 for --scale without a topology.
    """
    paths: list[str] = [args.topology] if isinstance(args.topology, str) else args.topology or []
    factors = once(args.scale, "--scale")
    named = [load_topology(path) for path in paths]
    if not named and (factors or args.ranks):
        named = [topology] if (topology := _declared(args, console)) is not None else []
        if factors and not named:
            fail("CP0752", "there is no topology whose links could be scaled", NAME_ONE)
    if not named:  # compiled for the plan's own, if it names one
        return [Namespace(**{**vars(args), "topology": None})]
    on: list[Namespace] = []
    for machine in named:
        topology = with_room(machine, args.ranks) if args.ranks else machine
        on.append(Namespace(**{**vars(args), "topology": topology}))
        if not factors:
            continue
        changed = {**vars(args), "topology": scaled(topology, factors)}
        if args.calibration:
            changed["calibration"] = scaled_calibration(load_calibration(args.calibration), factors)
            console.note("scaled links have no measured curves: the model predicts, by the scaled levels")
        on.append(Namespace(**changed))
    return on


def _declared(args: Namespace, console: Console) -> Topology | None:
    """The topology of the plan in `args.file`; None for a saved schedule."""
    if is_saved(args.file, console.read(args.file)):
        return None
    return topology_of(checked(args.file, console))


def simulated(args: Namespace, console: Console, first: Timed | None = None) -> Simulated:
    """The schedule of `args.file`, with what was measured and what --cost says, if the verb has it.

    first: of the machine that it is compared with, which the computation is assumed for.
    Raises CP0753 for a calibration of another backend, CP1108 for costs of what the plan does not have, and
    what reading and compiling raise.
    """
    schedule, lines, topology = _schedule(args, console)
    if topology is None:
        return Simulated(schedule, lines, None)
    costs = once(getattr(args, "cost", ()), "--cost")
    names = [declared.name for declared in (*schedule.fns, *schedule.sources)]
    for name in costs:
        if name not in names:
            message = f"--cost {name}: the plan has no function or source `{name}`"
            fail("CP1108", message, f"it declares: {', '.join(names) or 'none'}")
    return Simulated(schedule, lines, timed_on(schedule, topology, args, costs, first))


def timed_on(
    schedule: Schedule, topology: Topology, args: Namespace,
    compute: Mapping[str, float] = NO_COSTS, first: Timed | None = None,
) -> Timed:  # fmt: skip
    """The times of `schedule` on `topology`, by the `calibration` and beside the `computation` of `args`.

    first: of the machine that the computation is assumed for, if that is another.
    Raises CP0751 for a file that cannot be read, CP0753 for a calibration of another backend, and CP0772 for
    a computation that makes other gradients.
    """
    measured: Calibration | str | None = args.calibration
    step: StepComputation | None = getattr(args, "computation", None)
    if step is not None:
        check_step(step, schedule)
    calibration = load_calibration(measured) if isinstance(measured, str) else measured
    if calibration is not None:
        calibration.check_backend(schedule.backend, measured if isinstance(measured, str) else "")
    predictor = predictor_for(schedule.axes, topology, calibration, schedule.backend)
    assert predictor is not None
    costs = calibration.input if calibration else None
    on = first.predictor if first else None
    return Timed(
        predictor, predict(schedule, predictor, step, compute=compute, measured=costs, assumed_on=on)
    )


def _schedule(args: Namespace, console: Console) -> tuple[Schedule, list[str], Topology | None]:
    """The schedule, the lines of its plan, and the topology of --topology or of the plan."""
    text = console.read(args.file)
    name = name_of(args.file)
    if is_saved(args.file, text):
        if args.ranks:
            fail("CP0754", "--ranks resizes plans, and a saved schedule has its sizes", "give the .plan file")
        topology = load_topology(args.topology) if isinstance(args.topology, str) else args.topology
        return placed(text, name, args, topology, console), [], topology

    def adapt(plan: Plan) -> Plan:
        return _scaled(plan, args.ranks, args.axis) if args.ranks else plan

    done = compiled(args.file, args, console, adapt=adapt)
    return done.schedule, text.splitlines(), topology_of(done.plan, args.topology)


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
    from commplan.verify import verify

    schedule = read_saved(text, name, verify)
    if topology is not None:
        names = topologies_text(schedule.topology, topology.compiled())
        if names is not None:
            console.note(f"{name} was compiled for {names[0]}; times are those of {names[1]}")
        mapping = dict(args.map)
        levels = {level.name for level in topology.levels}
        known = all({spread.level for spread in axis.levels} <= levels for axis in schedule.axes)
        lie = all(axis.levels or axis.size == 1 for axis in schedule.mesh_axes)
        if mapping or not (known and lie):
            axes = place(schedule.axes, topology, mapping, oversubscribe=args.oversubscribe)
            schedule = replace(schedule, axes=axes)
    note_levels(schedule, console)
    return schedule
