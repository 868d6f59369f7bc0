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
    """Compile, bind and run a plan, and print the cost of every plan line."""
    if not under_mpi(os.environ):
        done = compile_with_flags(args.file, args, console)
        return _report(done, args, console, [_rehearse(done, args, console, None)], 1)
    return _on_ranks(args, console)


def _rehearse(done: Compiled, args: Namespace, console: Console, world: World | None) -> ProcessRehearsal:
    from commplan.cli.jax_side import bind, user_code

    bound = bind(done.schedule, done.shapes, args, sources=True, world=world)
    from commplan.runtime.rehearse.rehearse import rehearse_process

    metrics = bound.metrics(args.metrics) if args.metrics else nullcontext()
    title = "" if world is None or world.size == 1 else f"rank 0 of {world.size}"
    quiet = world is not None and world.rank > 0
    with metrics, live(console, bound.input.ledger.summaries, title, quiet=quiet) as progress, user_code():
        return rehearse_process(bound, steps=args.steps, seed=args.seed, progress=progress)


def _report(
    done: Compiled, args: Namespace, console: Console, parts: Sequence[ProcessRehearsal], processes: int
) -> int:
    """Print the costs.

    Args:
        done: the compiled plan.
        args: the flags.
        console: the output.
        parts: results of every live rank.
        processes: original number of ranks.
    """
    costs = costs_of(done, [part.phases for part in parts if part.server is None])
    device = next((part.device for part in parts if part.server is None), "cpu")
    served = [part.server for part in parts if part.server is not None]
    if console.is_human:
        console.show(lambda screen: print_tables(screen, done, costs, served, processes, device), 120)
        return 0
    sizes = {axis.name: axis.size for axis in done.schedule.axes}
    phases, servers = msgspec.to_builtins(costs), msgspec.to_builtins(served)
    console.document(
        plan=done.plan.name, steps=args.steps, axes=sizes, mapping=done.mapping,
        processes=processes, device=device, phases=phases, servers=servers,
    )  # fmt: skip
    return 0


def _on_ranks(args: Namespace, console: Console) -> int:
    """Rehearse on the ranks of MPI; the first one prints. A rank that fails aborts the others."""
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
        done = compile_with_flags(
            args.file, args, rank_console, adapt=lambda plan: _set_sizes(plan, args, world)
        )
        part = _rehearse(done, args, rank_console, world)
        if part.broken_off:  # workers have already reported the error
            return _report_failures(CommplanError(), console, world)
        parts = world.gather(part)
        return _report(done, args, console, parts, world.size) if parts else 0
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
    """Environment variables for MPI jobs that survive failed ranks (`mpirun --with-ft ulfm`).

    They skip the final barrier, since Open MPI would wait for dead ranks there.
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
