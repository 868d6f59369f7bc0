"""`commplan calibrate --discover`: find racks from the bandwidth between hosts, and write a topology file."""

from __future__ import annotations

import functools
import os
from argparse import Namespace
from pathlib import Path

import msgspec

from commplan.cli.console import STDIN, Console
from commplan.cli.jax_side import need, under_mpi
from commplan.diagnostics import fail
from commplan.topology import topology_text


def write(args: Namespace, console: Console) -> int:
    """Measure on all ranks; the first one prints the table and writes the topology.

    Raises:
        CommplanError: CP0759 with a topology, without MPI, or without several hosts of equal numbers of
            ranks; CP1111 if JAX or MPI is not installed; CP0849 if a rank does not join.
    """
    if args.topology or not under_mpi(os.environ) or args.backend == "jax":
        fail(
            "CP0759",
            "racks are found between hosts by ranks of MPI, without a topology",
            "mpirun --map-by ppr:1:node commplan calibrate --discover -o cluster.toml",
        )
    need("jax", "'commplan[mpi]'")
    need("mpi4py", "'commplan[mpi]'")
    from commplan.runtime.calibrate.discover import discover
    from commplan.runtime.calibrate.mpi import MpiFabric

    fabric = MpiFabric()
    if fabric.rank == 0:
        console.note(f"measuring pairs of {len(set(fabric.hosts))} hosts")
    name = "cluster" if args.output == STDIN else Path(args.output).stem
    discovery = fabric.rendezvous(functools.partial(discover, fabric, name))
    if fabric.rank != 0:
        return 0
    console.write(args.output, topology_text(discovery.topology).encode())
    if not console.is_human:
        console.document(output=args.output, topology=msgspec.to_builtins(discovery.topology))
    elif args.output != STDIN:
        for line in (*discovery.lines(), f"wrote {args.output}"):
            console.note(line)
    return 0
