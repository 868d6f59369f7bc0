"""Starting ranks of a campaign on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

# An MPI that survives the death of a rank.
ULFM = ("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1")
PYTHON = [sys.executable]  # the first words of the command of a rank


def command(ranks: int, module: str, *words: object, options: tuple[str, ...] = ()) -> list[str]:
    """`module` on so many ranks."""
    mpirun = str(Path(sys.executable).parent / "mpirun")
    start = [mpirun, *options, "--oversubscribe", "--bind-to", "none", "-n", str(ranks)]
    return [*start, *PYTHON, "-m", module, *map(str, words)]


def environment() -> Mapping[str, str]:
    """The environment of ranks: one device each, idle ranks yield their core, and root may start them."""
    variables = {key: value for key, value in os.environ.items() if key != "JAX_NUM_CPU_DEVICES"}
    return variables | {
        "JAX_PLATFORMS": "cpu",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_mpi_yield_when_idle": "1",
    }
