"""`commplan run`: rehearse a plan on real input, on this machine's devices or the ranks of `mpirun`."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING

import msgspec

from commplan.cli import INTERRUPTED
from commplan.cli.argument_types import once
from commplan.cli.binding import Compiled, compile_with_flags
from commplan.cli.console import Console
from commplan.cli.jax_side import need, under_mpi
from commplan.cli.verbs.run.tables import costs_of, print_tables
from commplan.cli.verbs.run.view import live
from commplan.diagnostics import CommplanError, fail, text_of

if TYPE_CHECKING:
    from commplan.ir.plan import Plan
    from commplan.runtime.rehearse.mpi import World
    from commplan.runtime.rehearse.rehearse import ProcessRehearsal


def run(args: Namespace, console: Console) -> int:
    """Compile, bind and run a plan, and print the cost of every plan line.

    Raises:
        CommplanError: an error of the plan, its bindings or its execution. Under `mpirun`, errors of the run
            are printed instead, and 1 is returned.
    """
    if not under_mpi(os.environ):
        compiled = compile_with_flags(args.file, args, console)
        return _report(compiled, args, console, [_rehearse(compiled, args, console, None)], 1)
    return _on_ranks(args, console)


def _rehearse(compiled: Compiled, args: Namespace, console: Console, world: World | None) -> ProcessRehearsal:
    """Bind and run the plan in this process; `world` is the MPI job, or None without `mpirun`."""
    from commplan.cli.jax_side import bind, user_code

    bound = bind(compiled.schedule, compiled.shapes, args, sources=True, world=world)
    from commplan.runtime.rehearse.rehearse import rehearse_process

    metrics = bound.metrics(args.metrics) if args.metrics else nullcontext()
    title = "" if world is None or world.size == 1 else f"rank 0 of {world.size}"
    quiet = world is not None and world.rank > 0
    with metrics, live(console, bound.input.ledger.summaries, title, quiet=quiet) as progress, user_code():
        return rehearse_process(bound, steps=args.steps, seed=args.seed, progress=progress)


def _report(
    compiled: Compiled, args: Namespace, console: Console, parts: Sequence[ProcessRehearsal], processes: int
) -> int:
    """Print the costs, and return the exit code 0.

    Args:
        compiled: the compiled plan.
        args: the flags.
        console: the output.
        parts: results of every live process, servers included.
        processes: original number of processes.
    """
    costs = costs_of(compiled, [part.phases for part in parts if part.server is None])
    device = next((part.device for part in parts if part.server is None), "cpu")
    served = [part.server for part in parts if part.server is not None]
    if console.is_human:
        console.show(lambda screen: print_tables(screen, compiled, costs, served, processes, device), 120)
        return 0
    sizes = {axis.name: axis.size for axis in compiled.schedule.axes}
    phases, servers = msgspec.to_builtins(costs), msgspec.to_builtins(served)
    console.document(
        plan=compiled.plan.name, steps=args.steps, axes=sizes, mapping=compiled.mapping,
        processes=processes, device=device, phases=phases, servers=servers,
    )  # fmt: skip
    return 0


def _on_ranks(args: Namespace, console: Console) -> int:
    """Rehearse on the ranks of MPI; the first one prints. A rank that fails aborts the others.

    Sets `args.device`, `args.backend` and `args.axis`, and environment variables of JAX and Open MPI.

    Returns:
        0, or 1 after an error, on every rank.

    Raises:
        CommplanError: CP1107 for GPUs, or if JAX, mpi4py or mpi4jax is not installed.
    """
    if args.device == "gpu":
        fix = "omit --device, or start without mpirun"
        fail("CP1107", "ranks of MPI exchange arrays of the CPU", fix)
    args.device = "cpu"
    for module in ("jax", "mpi4py", "mpi4jax"):
        need(module, "'commplan[mpi]'", "CP1107", "under mpirun this")
    if "jax" not in sys.modules:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_NUM_CPU_DEVICES"] = "1"
    os.environ |= fault_tolerance(os.environ)
    from commplan.runtime.rehearse.mpi import World

    world = World()
    rank_console = console if world.rank == 0 else Console("never", "json")
    try:
        compiled = compile_with_flags(
            args.file, args, rank_console, adapt=lambda plan: _set_sizes(plan, args, world)
        )
        part = _rehearse(compiled, args, rank_console, world)
        if part.broken_off:  # workers have already reported the error
            return _report_failures(CommplanError(), console, world)
        parts = world.gather(part)
        return _report(compiled, args, console, parts, world.size) if parts else 0
    except CommplanError as error:
        return _report_failures(error, console, world)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:  # other ranks were not interrupted and may wait for this one
        console.say(f"rank {world.rank}: interrupted")
        world.abort(INTERRUPTED)
        raise
    except Exception as error:  # other ranks may wait for this one
        if (reason := world.reason(error)) is not None:
            return _report_failures(CommplanError(reason), console, world)
        console.say(f"rank {world.rank}: internal failure: {text_of(error)}")
        world.abort(2)
        raise


def fault_tolerance(environment: Mapping[str, str]) -> dict[str, str]:
    """Environment variables to add for MPI jobs that survive failed ranks (`mpirun --with-ft ulfm`).

    They skip the final barrier, since Open MPI would wait for dead ranks there. Other jobs need none.
    """
    is_fault_tolerant = environment.get("OMPI_MCA_mpi_ft_enable", "0").lower() in ("1", "true")
    variable = "OMPI_MCA_async_mpi_finalize"
    return {variable: "1"} if is_fault_tolerant and variable not in environment else {}


def _set_sizes(plan: Plan, args: Namespace, world: World) -> Plan:
    """Set the flags to compile for the ranks of MPI; the plan is returned unchanged."""
    args.backend = "mpi"
    args.axis = list(world.sizes(plan, once(args.axis, "--axis")).items())
    return plan


def _report_failures(error: CommplanError, console: Console, world: World) -> int:
    """Print errors common to ranks once. If other ranks continue, abort them, since they would hang."""
    diagnostics, everyone = world.failed(error.diagnostics)
    if diagnostics:
        console.refuse(diagnostics)
        console.flush()
        sys.stderr.flush()
    if not everyone:
        world.abort(1)
    return 1
