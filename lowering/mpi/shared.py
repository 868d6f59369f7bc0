"""States of a server in memory that workers on its host can access: no messages, and no lock.

A server sends one message with the tag `HELLO`: {"host": its host, "shared": {state: {"path": a file,
"token": the random number at the beginning of the file}}}. The file has `HEADER` bytes of counters and then,
for each group, the flat parts of the state, each aligned to `ALIGNED` bytes. The counters are i64:

    0   the token
    1   whether the state had a value when the server began
    3   the number of requests that workers served themselves
    4   whether the server has ended
    8.. for each group, how often its state was set
"""

from __future__ import annotations

import json
import mmap
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from mpi4py import MPI

from commplan import io
from commplan.diagnostics import fail
from commplan.ir.types import DType
from commplan.lowering.mpi.instructions import DTYPES
from commplan.protocol.sites import Site
from commplan.protocol.units import StateLayout
from commplan.wait import TIMEOUT_S, Wait, until

HELLO = 2  # the tag of a server's message
HEADER = 4096  # bytes of counters at the beginning of the file
ALIGNED = 64  # bytes to which each part of the state is aligned
# Indices of the counters.
READY = 1
REQUESTS = 3
CLOSED = 4
PUTS = 8  # of the first group
GROUPS = HEADER // 8 - PUTS  # maximum number of groups
_LOOK_S = 1e-3  # seconds between two checks for a server's message


class Region(NamedTuple):
    """A server's state, mapped into this process.

    Attributes:
        bytes: The whole file as a NumPy array of u8.
        mapping: The `mmap` object that keeps `bytes` valid.
    """

    bytes: Any
    mapping: Any

    @property
    def address(self) -> int:
        """The address of the first byte of the file in this process."""
        return int(self.bytes.ctypes.data)


def offsets(layout: StateLayout) -> tuple[int, ...]:
    """The offset in bytes of each part in a group's block, and the size of the block."""
    ends = [0]
    for part in layout.parts:
        nbytes = part.size * part.dtype.nbytes
        ends.append(ends[-1] + -(-nbytes // ALIGNED) * ALIGNED)
    return tuple(ends)


def regions(comm: Any, rank: int, name: str) -> dict[str, Region]:
    """The memory that a server shares with this process, by state. Waits for the server's message.

    Args:
        comm: The communicator of workers and servers.
        rank: The rank of the server in `comm`.
        name: The name of the server, for errors.

    Returns:
        The memory; empty if the server is on another host. States whose file cannot be mapped are missing.

    Raises:
        CommplanError: CP0852 if the server has died, or has not called `run.serve()` within ten minutes.
    """
    offer = json.loads(_receive_offer(comm, rank, name))
    if offer["host"] != socket.gethostname():
        return {}
    mapped: dict[str, Region] = {}
    for state, file in offer["shared"].items():
        region = _map(Path(file["path"]), int(file["token"]))
        if region is not None:
            mapped[state] = region
    return mapped


def _receive_offer(comm: Any, rank: int, name: str) -> bytes:
    """The content of the server's message `HELLO`. Raises CP0852 if none arrives."""

    def refuse(reason: object) -> NoReturn:
        fail("CP0852", f"{name} (rank {rank}) does not serve: {reason}", "did it call run.serve()?")

    def receive(seconds: float) -> bytes:
        message = comm.Improbe(source=rank, tag=HELLO, status=(status := MPI.Status()))
        if message is None:
            time.sleep(seconds)
            return b""
        payload = np.zeros(status.Get_count(MPI.BYTE), np.uint8)
        message.Recv([payload, MPI.BYTE])
        return payload.tobytes()

    def refuse_timeout(waited: float) -> NoReturn:
        refuse(f"nothing was received from it within {waited:.0f} s")

    try:
        return until(receive, Wait(TIMEOUT_S, refuse_timeout, slice_s=_LOOK_S))
    except MPI.Exception as error:
        refuse(error)


def _map(path: Path, token: int) -> Region | None:
    """Map the file if it begins with `token`, otherwise return None.

    The token distinguishes hosts of the same name, which may have other files at this path.
    """
    try:
        with os.fdopen(io.open_file(path, os.O_RDWR), "r+b") as file:
            mapping = mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):
        return None
    whole = np.frombuffer(mapping, np.uint8)
    if whole.size < HEADER or int(whole[:8].view(np.int64)[0]) != token:
        return None
    return Region(whole, mapping)


def set_shared_units(
    library: Any, number: int, site: Site, mapped: Mapping[int, Region], group: int, counter: Any
) -> None:
    """Pass the engine the addresses of the units that request `number` updates in the memory of servers.

    Args:
        library: The engine.
        number: The request.
        site: The site of the request.
        mapped: The memory of each server that shares the state with this process, by the index of the server.
        group: The group of this worker.
        counter: The number of times that this worker has put the state, an array of one element.
    """
    begins = offsets(site.layout)
    headers: list[tuple[int, ...]] = []  # see `commplan_request_shares` of ffi.cpp
    updates: list[tuple[int, ...]] = []
    ups = {b.part: index for index, b in enumerate(site.up) if b.content == "data"}
    downs = {b.part: index for index, b in enumerate(site.down) if b.content == "data"}
    for state, (server, region) in enumerate(sorted(mapped.items())):
        counters = [region.address + 8 * word for word in (READY, PUTS + group, REQUESTS, CLOSED)]
        headers.append((server, *counters, counter.ctypes.data))
        block = region.address + HEADER + group * begins[-1]
        for unit in site.layout.owned(server):
            dtype = DTYPES.index(site.layout.parts[unit.part].dtype.numpy_name)
            center = block + begins[unit.part]
            updates.append((state, ups[unit.part], downs[unit.part], unit.start, unit.size, dtype, center))
    factors, literals = _factors(site)
    tables = [np.array(rows, np.int64) for rows in (headers, updates, factors)]
    numbers = np.array(literals, np.float64)
    library.commplan_request_shares(
        number, tables[0].ctypes.data, len(headers), tables[1].ctypes.data, len(updates),
        tables[2].ctypes.data, numbers.ctypes.data,
    )  # fmt: skip


def _factors(site: Site) -> tuple[list[int], list[float]]:
    """For eta and rho: the index of the input with the value and its dtype, or -1 and the literal value."""
    table: list[int] = []
    literals: list[float] = []
    for factor in (site.eta, site.rho):
        if isinstance(factor, str):
            index = next(i for i, b in enumerate(site.up) if b.content == "scalar" and b.value == factor)
            table += [index, DTYPES.index(DType(site.up[index].dtype).numpy_name)]
            literals.append(0.0)
        else:
            table += [-1, 0]
            literals.append(float(factor))
    return table, literals
