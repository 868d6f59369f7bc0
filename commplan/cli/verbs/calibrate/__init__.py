"""`commplan calibrate`: measure this machine, the input of a plan, or a training step."""

from __future__ import annotations

import functools
import importlib
import operator
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from commplan.cli.console import STDIN, Console
from commplan.cli.jax_side import need, under_mpi
from commplan.cost.calibration import Calibration, load_calibration, write_calibration
from commplan.diagnostics import CommplanError
from commplan.input.measured_costs import InputCosts
from commplan.topology import Topology, assumed_hosts, load_topology

if TYPE_CHECKING:
    from commplan.runtime.calibrate.calibrate import Fabric

_Call = Callable[[Callable[[], Calibration]], Calibration]  # runs the measurement; see `_measure`
SECONDS = 120  # approximate default duration of measuring links and collectives, in seconds


def run(args: Namespace, console: Console) -> int:
    """Measure links and collectives on all ranks, or the input or step of a plan.

    The first rank writes the file.

    Raises:
        CommplanError: CP0755 if the ranks do not fit on the topology; CP1111 if JAX or MPI is not installed;
            CP0756, CP0759 or CP0849 of the measurement; or as `input_costs.measure` and `step_profile.run`.
    """
    if args.step:
        from commplan.cli.verbs.calibrate import step_profile

        return step_profile.run(args, console)
    if args.file is not None or args.source or args.fn:
        from commplan.cli.verbs.calibrate import input_costs

        measured = input_costs.measure(args, console)
        if measured is not None:
            _deliver(*measured, args.output, console)
        return 0
    if args.discover:
        from commplan.cli.verbs.calibrate import racks

        return racks.write(args, console)
    topology = load_topology(args.topology) if args.topology else None
    backend = args.backend or ("mpi" if under_mpi(os.environ) else "jax")
    fabric, first, call = _mpi() if backend == "mpi" else _jax(args.devices)
    return _measure(fabric, first, call, topology, args, console)


def _measure(
    fabric: Fabric, first: bool, call: _Call, topology: Topology | None, args: Namespace, console: Console
) -> int:
    """Measure links and collectives.

    Args:
        fabric: the ranks and their communication.
        first: whether this is the first rank, which prints and writes.
        call: runs the measurement such that a failing rank ends the others.
        topology: the machine, or None to infer it from hosts and ranks.
        args: the flags.
        console: the output.
    """
    from commplan.runtime.calibrate.calibrate import calibrate

    seconds = args.seconds or SECONDS
    if first:
        ranks = len(fabric.hosts)
        console.note(f"measuring {ranks} ranks on {len(set(fabric.hosts))} hosts, about {seconds} seconds")
        for text in assumed_hosts(topology, fabric.hosts) if topology is not None else ():
            console.note(text)
    calibration = call(functools.partial(calibrate, fabric, topology, seconds=seconds, largest=args.largest))
    if not first:
        return 0
    calibration = replace(calibration, input=_previous_input(args.output))
    _deliver(calibration, _lines(calibration), args.output, console)
    return 0


def _previous_input(path: str) -> InputCosts | None:
    """The input costs in an existing output file, to keep them; None if there are none."""
    if path == STDIN or not Path(path).is_file():
        return None
    try:
        return load_calibration(path).input
    except CommplanError:
        return None


def _lines(calibration: Calibration) -> list[str]:
    """Describe the measurements, one line for each level and one for constants."""
    lines = [
        f"level {level.name}: latency {level.latency * 1e6:.1f} us, {level.bandwidth / 1e6:.1f} MB/s"
        for level in calibration.levels
    ]
    lines.append(
        f"message {calibration.overhead * 1e6:.1f} us, call {calibration.call * 1e6:.1f} us, "
        f"reducing {1e-9 / calibration.gamma:.2g} GB/s, {len(calibration.curve_list)} curves"
    )
    return lines


def _deliver(calibration: Calibration, lines: Sequence[str], output: str, console: Console) -> None:
    """Write the calibration to the file `output` or stdout, and print a summary."""
    console.write(output, write_calibration(calibration).encode())
    if console.is_human and output != STDIN:
        for line in (f"wrote {output}", *lines):
            console.note(line)
    elif not console.is_human:
        plain: dict[str, Any] = msgspec.to_builtins(calibration)
        console.document(output=output, calibration=plain)


def _mpi() -> tuple[Fabric, bool, _Call]:
    """The first arguments of `_measure` for the ranks of `mpirun`. Raises CP1111."""
    need("jax", "'commplan[mpi]'")
    need("mpi4py", "'commplan[mpi]'")
    from commplan.runtime.calibrate.mpi import MpiFabric

    fabric = MpiFabric()
    return fabric, fabric.rank == 0, fabric.rendezvous


def _gpus_of_node() -> list[int] | None:
    """All GPUs of this node if Slurm started one process on it, otherwise None.

    In that case JAX would select only one GPU.
    """
    tasks = os.environ.get("SLURM_STEP_TASKS_PER_NODE") or os.environ.get("SLURM_TASKS_PER_NODE", "")
    gpus = os.environ.get("SLURM_GPUS_ON_NODE", "")
    return list(range(int(gpus))) if tasks.partition("(")[0] == "1" and gpus.isdecimal() else None


def _jax(devices: int | None) -> tuple[Fabric, bool, _Call]:
    """The first arguments of `_measure` for the devices of JAX. Raises CP1111.

    `devices` is a number of CPU devices; None for the devices of the machine or job.
    """
    need("jax", "'commplan[jax]'")
    jax: Any = importlib.import_module("jax")
    if devices:
        jax.config.update("jax_num_cpu_devices", devices)
    if "JAX_COORDINATOR_ADDRESS" in os.environ or "SLURM_JOB_ID" in os.environ:
        jax.distributed.initialize(local_device_ids=_gpus_of_node())
    from commplan.runtime.calibrate.jax import JaxFabric

    return JaxFabric(), jax.process_index() == 0, operator.call
