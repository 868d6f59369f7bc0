"""`commplan audit`: compare a compiled training step, or each phase separately, with the schedule."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from commplan.cli.binding import compile_with_flags, load_plan
from commplan.cli.console import Console, name_of
from commplan.cli.jax_side import bind, choose_devices, device_mesh, user_code
from commplan.cli.saved import is_saved
from commplan.cli.user_step import computation_of, naming_step, step_at, with_step
from commplan.cost import Prediction, StepComputation, load_calibration
from commplan.diagnostics import fail, plural
from commplan.explain.times import basis, phase_times
from commplan.ir.schedule import Schedule
from commplan.lowering.gpu.targets import Target, machine_topology, target
from commplan.topology import Topology, load_topology, topology_of

if TYPE_CHECKING:
    from commplan.lowering.audit import Audit


def run(args: Namespace, console: Console) -> int:
    """Compile for the devices of --target or for CPUs, and report differences; returns 1 if there are any.

    Raises:
        CommplanError: CP1150 to CP1154, CP1156 for --pgle without GPUs, CP0850 without the compiler for GPUs,
            or an error of compiling the plan.
    """
    machine = None if args.target is None else target(args.target)
    if args.pgle and machine is None:
        fail(
            "CP1156",
            "--pgle needs target GPUs",
            "name the target GPUs, which need not be installed: --target h100:4x8",
        )
    args = with_step(args, args.file, console, estimate=False)
    schedule, shapes, topology = _load_or_compile(args, console, machine)
    with user_code(), naming_step(args.step):
        mesh = _mesh(schedule, machine)
        audits, computation = _audits(schedule, shapes, args, mesh, machine, topology)
    planned = _predict(schedule, topology, args, computation)
    devices = str(machine) if machine else plural(mesh.size, "CPU device")
    with_profiled = [
        part for audit in audits.values() for part in (audit, audit.profiled and audit.profiled.audit)
    ]
    wrong = [
        difference
        for audit in with_profiled
        if audit is not None
        for difference in audit.differences
        if not (args.allow_extra and difference.is_additional)
    ]
    if console.is_human:
        if not audits:
            console.note(f"plan `{schedule.plan}` has no phase that computes anything: nothing was compiled")
        texts = (f"{name} on {devices}: {audit}\n" for name, audit in audits.items())
        phases = dict.fromkeys(phase for audit in audits.values() for phase in audit.phases)
        planning = "".join(_planned_text(planned, [*phases]))
        console.put("\n".join([*texts, *([planning] if planning else [])]))
        if machine is None and audits:
            console.note("waiting times need a target machine: --target h100:HOSTSxDEVICES")
    else:
        steps = [{"name": name, **audit.data()} for name, audit in audits.items()]
        fields = ("name", "alone", "computation", "exposed", "after")
        times = planned and [{field: getattr(phase, field) for field in fields} for phase in planned.phases]
        console.document(plan=schedule.plan, devices=devices, ok=not wrong, steps=steps, planned=times)
    return int(bool(wrong))


def _load_or_compile(
    args: Namespace, console: Console, machine: Target | None
) -> tuple[Schedule, dict[str, Any], Topology | None]:
    """Load a saved schedule or compile the plan; returns the schedule, the shapes and the topology.

    Without a topology the plan is compiled for `machine`, as `compile` does for a mesh of its devices.

    Raises:
        CommplanError: CP0841 for a schedule of the MPI backend.
    """
    text = console.read(args.file)
    shapes: dict[str, Any] = {}
    if is_saved(args.file, text):
        from commplan.cli.simulated import place_schedule

        topology = load_topology(args.topology) if args.topology else None
        schedule = place_schedule(text, name_of(args.file), args, topology, console)
    else:
        topology = topology_of(load_plan(args.file, console), args.topology)
        if topology is None and machine is not None and machine.hosts * machine.per_host > 1:
            assumed = machine_topology(machine.name, machine.hosts, machine.per_host)
            console.note(f"no topology; assumed: {machine} with the links of data sheets")
            args = Namespace(**{**vars(args), "topology": assumed, "oversubscribe": True})
        _, schedule, shapes = compile_with_flags(args.file, args, console)
    if schedule.backend != "jax":
        message = "the plan is compiled for the backend `mpi`, whose collectives XLA does not compile"
        fail("CP0841", message, "omit --backend", file=schedule.file)
    return schedule, shapes, topology


def _mesh(schedule: Schedule, machine: Target | None) -> Any:
    """A mesh of the devices of `machine`, which need not be installed, or of this machine's CPUs."""
    if machine is None:
        return device_mesh(schedule.mesh_sizes)
    choose_devices(1)
    from commplan.lowering.jax.aot import mesh_on

    return mesh_on(machine, schedule.mesh_sizes)


def _audits(
    schedule: Schedule, shapes: dict[str, Any], args: Namespace, mesh: Any, machine: Target | None,
    topology: Topology | None,
) -> tuple[Mapping[str, Audit], StepComputation | None]:  # fmt: skip
    """The audits of the step or of each phase by name, and the computation of the step, if known.

    The computation is estimated for `machine` unless there is a profile.
    """
    from commplan.lowering.audit.report import audit, check_phases
    from commplan.lowering.jax.aot import compile_step

    check_phases(schedule, args.phase)
    rates = machine.machine if machine else None
    if rates is not None and topology is not None:
        from commplan.explain.links import links_of

        calibration = load_calibration(args.calibration) if args.calibration else None
        rates = replace(rates, links=links_of(schedule, topology, calibration))
    profiled_for = rates if args.pgle else None
    if args.step:
        from commplan.lowering.jax.gradient_times import gradient_times

        step, arguments = step_at(args.step, mesh)
        times = gradient_times(step, arguments)
        text = compile_step(step, *arguments, profiled_for=profiled_for)
        result = audit(schedule, text, phases=args.phase, machine=rates)
        computation = args.computation
        if machine is not None and times is not None and result.estimate is not None:
            computation = computation or computation_of(result.estimate, times, machine)
        return {args.step: result}, computation
    from commplan.runtime.rehearse.rehearse import phase_steps

    bound = bind(schedule, shapes, args, sources=False, mesh=mesh)
    audits: dict[str, Audit] = {}
    for name, function, values in phase_steps(bound, args.phase):
        text = compile_step(function, *values, profiled_for=profiled_for)
        audits[f"phase {name}"] = audit(schedule, text, phases=[name], machine=rates)
    return audits, args.computation


def _predict(
    schedule: Schedule, topology: Topology | None, args: Namespace, computation: StepComputation | None
) -> Prediction | None:
    """The times of the schedule on `topology`, overlapped with the step; None without a topology."""
    if topology is None:
        return None
    from commplan.cli.simulated import timed_on

    with_computation = Namespace(**{**vars(args), "computation": computation})
    return timed_on(schedule, topology, with_computation).prediction


def _planned_text(prediction: Prediction | None, phases: Sequence[str]) -> Iterator[str]:
    """The predicted times of `phases`, as formatted by `explain` and `simulate`."""
    if prediction is None:
        return
    yield f"as planned on {prediction.topology}; {basis(prediction)}\n"
    for phase in (phase for phase in prediction.phases if phase.name in phases):
        yield f"  phase {phase.name}\n"
        yield from (f"    {line}\n" for line in phase_times(phase))
