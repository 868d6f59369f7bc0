"""What a program is compiled for and bound to: devices by name, or the ranks of a communicator."""

from __future__ import annotations

from typing import Any


def is_communicator(mesh: Any) -> bool:
    """Whether `mesh` is an `mpi4py` communicator; MPI need not be loaded to say no."""
    return all(hasattr(mesh, name) for name in ("Get_size", "Get_rank", "Split"))


def shares_memory(mesh: Any) -> bool:
    """Whether all devices of `mesh` are CPU devices of one process: nothing between them crosses a link."""
    devices = list(getattr(getattr(mesh, "devices", None), "flat", ()))
    processes = {getattr(device, "process_index", None) for device in devices}
    return len(processes) == 1 and all(getattr(device, "platform", "") == "cpu" for device in devices)
