"""What a program is compiled for and bound to: devices by name, or the ranks of a communicator."""

from __future__ import annotations

from typing import Any


def is_communicator(mesh: Any) -> bool:
    """Whether `mesh` is an `mpi4py` communicator; MPI need not be loaded to say no."""
    return all(hasattr(mesh, name) for name in ("Get_size", "Get_rank", "Split"))
