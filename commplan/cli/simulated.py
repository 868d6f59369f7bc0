"""Load or compile a schedule, and predict its times on the machine of --topology."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec.structs import replace

from commplan.cli.argument_types import once
from commplan.cli.binding import compile_with_flags, load_plan, note_levels
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
from commplan.topology import Topology, assign_levels, load_topology, topology_of
from commplan.what_if import scaled, scaled_calibration, with_room

NAME_ONE = 'give one with --topology FILE, or write `topology "FILE"` in the plan'  # note of CP0752
NO_COSTS: Mapping[str, float] = {}  # no costs of functions and sources


class MachineTimes(NamedTuple):
    """Predicted times on a topology.

    Attributes:
        predictor: the cost model of the topology.
        prediction: the times of the schedule.
    """

    predictor: Predictor
    prediction: Prediction


class Simulated(NamedTuple):
    """A schedule and its predicted times.

    Attributes:
        schedule: the schedule.
        lines: the lines of the plan's text; empty for a saved schedule.
        timed: the times; None without a topology.
    """

    schedule: Schedule
    lines: list[str]
    timed: MachineTimes | None


def machines(args: Namespace, console: Console) -> list[Namespace]:
    """Create arguments for each machine, followed by its variant with --scale.

    The machines are those of --topology, or else that of the plan.

    Returns:
        Copies of `args`, at least one. `topology` is a `Topology` that is large enough for --ranks; None if
        the plan's topology, if any, is used unchanged. `calibration` of a variant is scaled.

    Raises:
        CommplanError: CP0712 and CP0751 for invalid files, CP0714 for an unknown level, and CP0752 for
            --scale without a topology.
    """
    paths: list[str] = [args.topology] if isinstance(args.topology, str) else args.topology or []
    factors = once(args.scale, "--scale")
    topologies = [load_topology(path) for path in paths]
    if not topologies and (factors or args.ranks):
        topologies = [topology] if (topology := _declared_topology(args, console)) is not None else []
        if factors and not topologies:
            fail("CP0752", "there is no topology whose links could be scaled", NAME_ONE)
    if not topologies:  # compile for the topology of the plan, if any
        return [Namespace(**{**vars(args), "topology": None})]
    variants: list[Namespace] = []
    for machine in topologies:
        topology = with_room(machine, args.ranks) if args.ranks else machine
        variants.append(Namespace(**{**vars(args), "topology": topology}))
        if not factors:
            continue
        changed = {**vars(args), "topology": scaled(topology, factors)}
        if args.calibration:
            changed["calibration"] = scaled_calibration(load_calibration(args.calibration), factors)
            console.note("scaled links have no measured curves: the model predicts, by the scaled levels")
        variants.append(Namespace(**changed))
    return variants


def _declared_topology(args: Namespace, console: Console) -> Topology | None:
    """The topology that the plan in `args.file` declares; None without one, and for a saved schedule."""
    if is_saved(args.file, console.read(args.file)):
        return None
    return topology_of(load_plan(args.file, console))


def simulate(args: Namespace, console: Console, first: MachineTimes | None = None) -> Simulated:
    """Load or compile the schedule of `args.file` and predict its times.

    Args:
        args: the flags, including --cost if the verb has it. `topology` may be a `Topology`.
        console: the output.
        first: times on the machine that the step was measured on or estimated for; None if that is the
            machine of `args`.

    Raises:
        CommplanError: CP0753 for a calibration of another backend, CP1108 for costs of unknown functions, or
            an error of reading or compiling.
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
    compute: Mapping[str, float] = NO_COSTS, first: MachineTimes | None = None,
) -> MachineTimes:  # fmt: skip
    """Predict the times of `schedule` on `topology`, using the calibration and the step of `args`.

    Args:
        schedule: the schedule.
        topology: the machine.
        args: the flags.
        compute: seconds of a call of a function or a read of a source, by name.
        first: as in `simulate`.

    Raises:
        CommplanError: CP0751 for an unreadable file, CP0753 for a calibration of another backend, and CP0772
            for a step with other gradients.
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
    return MachineTimes(
        predictor, predict(schedule, predictor, step, compute=compute, measured=costs, assumed_on=on)
    )


def _schedule(args: Namespace, console: Console) -> tuple[Schedule, list[str], Topology | None]:
    """The schedule, the lines of its plan, and the topology, as in `Simulated`.

    Raises CP0754 if --ranks does not fit.
    """
    text = console.read(args.file)
    name = name_of(args.file)
    if is_saved(args.file, text):
        if args.ranks:
            fail("CP0754", "--ranks resizes plans, and a saved schedule has its sizes", "give the .plan file")
        topology = load_topology(args.topology) if isinstance(args.topology, str) else args.topology
        return place_schedule(text, name, args, topology, console), [], topology

    def adapt(plan: Plan) -> Plan:
        return _resize(plan, args.ranks, args.axis) if args.ranks else plan

    compiled = compile_with_flags(args.file, args, console, adapt=adapt)
    return compiled.schedule, text.splitlines(), topology_of(compiled.plan, args.topology)


def _resize(plan: Plan, ranks: int, sizes: Iterable[tuple[str, int]]) -> Plan:
    """Resize the plan's first replica axis for `ranks` ranks; if it has none, its first axis.

    Args:
        plan: the plan.
        ranks: the number of ranks, without servers.
        sizes: sizes of axes from --axis.

    Raises:
        CommplanError: CP0754 if there is no axis, if another axis is open, or if the ranks are not divisible.
    """
    axis_sizes = dict(sizes)
    ranked = [axis for axis in plan.axes if axis.kind is not AxisKind.SERVER]
    if not ranked:
        fail("CP0754", f"plan `{plan.name}` has no axis that could hold {ranks} ranks", file=plan.file)
    first = next((axis for axis in ranked if axis.kind is AxisKind.REPLICA), ranked[0])
    other_sizes = [axis_sizes.get(axis.name, axis.size) for axis in ranked if axis is not first]
    if None in other_sizes:
        fail("CP0754", "--ranks needs the sizes of all axes but the first", "give them with --axis NAME=N")
    inside = math.prod(size for size in other_sizes if size is not None)
    if ranks % inside:
        message = f"{ranks} ranks cannot be laid out: the other axes of plan `{plan.name}` have {inside}"
        note = f"give a multiple of {inside}, or their sizes with --axis NAME=N"
        fail("CP0754", message, note, file=plan.file)
    resized = replace(first, size=ranks // inside)
    return replace(plan, axes=tuple(resized if axis is first else axis for axis in plan.axes))


def place_schedule(
    text: str, name: str, args: Namespace, topology: Topology | None, console: Console
) -> Schedule:
    """Load a saved schedule, and place its axes on `topology`.

    Axes are placed as --map specifies, or else as compiled if `topology` has these levels, or else by name.

    Args:
        text: the content of the file.
        name: its name, for messages.
        args: the flags.
        topology: the machine; None: axes remain as compiled.
        console: the output.
    """
    from commplan.verify import verify

    schedule = read_saved(text, name, verify)
    if topology is not None:
        names = topologies_text(schedule.topology, topology.compiled())
        if names is not None:
            console.note(f"{name} was compiled for {names[0]}; times are those of {names[1]}")
        mapping = dict(args.map)
        levels = {level.name for level in topology.levels}
        has_all_levels = all({spread.level for spread in axis.levels} <= levels for axis in schedule.axes)
        is_placed = all(axis.levels or axis.size == 1 for axis in schedule.mesh_axes)
        if mapping or not (has_all_levels and is_placed):
            axes = assign_levels(schedule.axes, topology, mapping, oversubscribe=args.oversubscribe)
            schedule = replace(schedule, axes=axes)
    note_levels(schedule, console)
    return schedule
