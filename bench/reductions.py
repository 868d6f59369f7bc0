"""Reductions against NumPy: every op, type and way of carrying it out, with NaN, infinities and denormals.

    python -m bench.reductions                    # on 8 CPU devices: all systematic cases and 275 random ones
    python -m bench.reductions --mpi 3            # on three ranks under mpirun
    python -m bench.reductions --random 2000 --seed 1000

A random case is a pure function of its seed and of the number of ranks. Ends with one summary line; exit 1
if a result is not what docs/reductions.md says.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if options.mpi and "OMPI_COMM_WORLD_SIZE" not in os.environ:
        return _under_mpi(options)
    if not options.mpi:
        os.environ.setdefault("JAX_NUM_CPU_DEVICES", "8")
    from tests.support import reductions  # noqa: PLC0415 - after the settings that JAX reads
    from tests.support.embedding import mesh_of  # noqa: PLC0415

    comm: Any = None
    if options.mpi:
        from mpi4py import MPI  # noqa: PLC0415 - only under mpirun

        comm = MPI.COMM_WORLD
    ranks = comm.size if comm is not None else 8
    shapes = (
        ((1, ranks), (ranks, 1)) if comm is not None else ((2, 4), (4, 2), (2, 2), (1, 8), (3, 2), (5, 1))
    )
    failed, counts = list[str](), Counter[str]()

    def check(kind: str, case: reductions.Case) -> None:
        try:
            reductions.check(case, comm if comm is not None else mesh_of(**case.axes))
        except Exception as error:  # noqa: BLE001 - whatever a case raises is a finding
            if reductions.refused(error):
                return
            failed.append(case.name)
            if comm is None or comm.rank == 0:
                print(f"--- {kind}: {type(error).__name__}: {str(error)[:1500]}", file=sys.stderr)
        counts[kind] += 1

    for case in reductions.systematic((1, ranks) if comm is not None else (2, 4)):
        check("systematic", case)
    for seed in itertools.count(options.seed):  # a plan with an option that changes nothing is not counted
        if counts["random"] >= options.random:
            break
        check("random", reductions.drawn(seed, shapes))
    if comm is not None and comm.rank:
        return bool(failed)
    where = f"{ranks} ranks over MPI" if comm is not None else "8 CPU devices"
    plans = " and ".join(f"{count} {kind}" for kind, count in counts.items())
    print(f"reductions on {where}: {plans} plans, {len(failed)} failed")
    return bool(failed)


def _under_mpi(options: argparse.Namespace) -> int:
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
    environment.pop("JAX_NUM_CPU_DEVICES", None)
    mpirun = [str(Path(sys.executable).parent / "mpirun"), "--oversubscribe", "-n", str(options.mpi)]
    words = ["--mpi", options.mpi, "--random", options.random, "--seed", options.seed]
    python = [sys.executable, "-m", "mpi4py", "-m", "bench.reductions"]
    return subprocess.run([*mpirun, *python, *map(str, words)], env=environment, check=False).returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.reductions", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--random", type=int, default=275, help="how many random plans (275)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (0)")
    parser.add_argument(
        "--mpi", type=int, default=0, help="run on so many ranks under mpirun; 0: on devices (0)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
