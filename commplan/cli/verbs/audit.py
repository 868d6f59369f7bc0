"""`commplan audit`: what XLA makes of a training step, or of each phase alone, against the schedule."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from commplan.cli.binding import checked, compiled
from commplan.cli.console import Console, name_of
from commplan.cli.jax_side import bind, choose_devices, device_mesh, user_code
from commplan.cli.saved import is_saved
from commplan.cli.user_step import naming_step, step_at
from commplan.diagnostics import fail, plural
from commplan.ir.schedule import Schedule
from commplan.lowering.audit.targets import Target, machine_topology, target

if TYPE_CHECKING:
    from commplan.lowering.audit import Audit


def run(args: Namespace, console: Console) -> int:
    """Compile for the devices of --target or for CPUs, compare, and say what differs; 1 where something does.

    Raises CP1150 to CP1154, CP1156 for --pgle without GPUs, CP0850 without the compiler for GPUs, and what
    compiling raises.
    """
    machine = None if args.target is None else target(args.target)
    if args.pgle and machine is None:
        fail(
            "CP1156",
            "--pgle needs GPUs to compile for",
            "name them, they need not be there: --target h100:4x8",
        )
    schedule, shapes = _compiled(args, console, machine)
    with user_code(), naming_step(args.step):
        mesh = _mesh(schedule, machine)
        audits = _audits(schedule, shapes, args, mesh, machine)
    devices = str(machine) if machine else plural(mesh.size, "CPU device")
    every = [part for audit in audits.values() for part in (audit, audit.profiled and audit.profiled.audit)]
    wrong = [d for part in every if part for d in part.differences if not (args.allow_extra and d.beside)]
    if console.human:
        if not audits:
            console.note(f"plan `{schedule.plan}` has no phase that computes something: nothing was compiled")
        console.put("\n".join(f"{name} on {devices}: {audit}\n" for name, audit in audits.items()))
        if machine is None and audits:
            console.note("what is exposed is estimated for a machine: --target h100:HOSTSxDEVICES")
    else:
        steps = [{"name": name, **audit.data()} for name, audit in audits.items()]
        console.document(plan=schedule.plan, devices=devices, ok=not wrong, steps=steps)
    return int(bool(wrong))


def _compiled(args: Namespace, console: Console, machine: Target | None) -> tuple[Schedule, dict[str, Any]]:
    """A saved schedule, or the plan compiled as the flags say, and its shapes.

    Without a topology the plan is compiled for `machine`, as `compile` does with a mesh of its devices.

    Raises CP0841 for one of the MPI backend.
    """
    text, shapes = console.read(args.file), dict[str, Any]()
    if is_saved(args.file, text):
        from commplan.cli.simulated import placed

        schedule = placed(text, name_of(args.file), args, None, console)
    else:
        undescribed = args.topology is None and checked(args.file, console).topology is None
        if undescribed and machine is not None and machine.hosts * machine.per_host > 1:
            topology = machine_topology(machine.name, machine.hosts, machine.per_host)
            console.note(f"no topology is given; assumed: {machine} with the links of data sheets")
            args = Namespace(**{**vars(args), "topology": topology, "oversubscribe": True})
        _, schedule, shapes = compiled(args.file, args, console)
    if schedule.backend != "jax":
        message = "the plan is compiled for the backend `mpi`, whose collectives are none of XLA's"
        fail("CP0841", message, "leave --backend out", file=schedule.file)
    return schedule, shapes


def _mesh(schedule: Schedule, machine: Target | None) -> Any:
    if machine is None:
        return device_mesh(schedule.mesh_sizes)
    choose_devices(1)
    from commplan.lowering.jax.aot import mesh_on

    return mesh_on(machine, schedule.mesh_sizes)


def _audits(
    schedule: Schedule, shapes: dict[str, Any], args: Namespace, mesh: Any, machine: Target | None
) -> Mapping[str, Audit]:
    """The audit of the step, or one of each phase alone, by name."""
    from commplan.lowering.audit.report import audit, check_phases
    from commplan.lowering.jax.aot import compile_step

    check_phases(schedule, args.phase)
    rates = machine.machine if machine else None
    profiled_for = rates if args.pgle else None
    if args.step:
        step, arguments = step_at(args.step, mesh)
        text = compile_step(step, *arguments, profiled_for=profiled_for)
        return {args.step: audit(schedule, *text, phases=args.phase, machine=rates)}
    from commplan.runtime.rehearse.rehearse import phase_steps

    bound = bind(schedule, shapes, args, sources=False, mesh=mesh)
    audits: dict[str, Audit] = {}
    for name, function, values in phase_steps(bound, args.phase):
        text = compile_step(function, *values, profiled_for=profiled_for)
        audits[f"phase {name}"] = audit(schedule, *text, phases=[name], machine=rates)
    return audits
