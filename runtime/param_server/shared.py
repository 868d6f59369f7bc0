"""States in memory that workers on the server's host update themselves (Hogwild)."""

from __future__ import annotations

import json
import mmap
import os
import secrets
import socket
from collections.abc import Sequence

import numpy as np

from commplan.lowering.mpi.shared import CLOSED, GROUPS, HEADER, PUTS, REQUESTS, offsets
from commplan.protocol.server import Machine
from commplan.protocol.sites import Site, Sites
from commplan.runtime.input.sources.record_convert import numpy_dtype
from commplan.runtime.param_server.store import Array, StateCell, Store


def uses_shared_memory(sites: Sites) -> bool:
    """Whether workers wait for a message about shared memory: for any `hogwild` request of the plan."""
    return any(site.kind == "elastic" and site.mode == "hogwild" for site in sites.all)


class SharedStates:
    """The shared memory of one server. It has no file name, so it vanishes with the process.

    Each state has one block of memory: a header of counters, and then the state of each group.

    Args:
        sites: The calls to servers in the plan.
        store: The states of the server. Those that can be shared are moved into the memory.
    """

    def __init__(self, sites: Sites, store: Store) -> None:
        # By state: the descriptor of the memory, its token, and its header.
        self._files: dict[str, tuple[int, int, Array]] = {}
        for site in sites.all:
            cells = [cell for cell in store.cells.values() if cell.name == site.states[0]]
            if _can_share(site) and 0 < len(cells) <= GROUPS and site.states[0] not in self._files:
                self._share(site.states[0], cells)

    def _share(self, name: str, cells: Sequence[StateCell]) -> None:
        """Move a state, by its cells of all groups, into shared memory.

        If there is no memory, the state stays, and workers use messages.
        """
        layout = cells[0].layout
        begins = offsets(layout)
        try:
            descriptor = os.memfd_create(f"commplan-{name}", os.MFD_CLOEXEC)
            os.posix_fallocate(descriptor, 0, HEADER + len(cells) * begins[-1])
        except OSError:
            return
        memory = mmap.mmap(descriptor, 0)
        token = secrets.randbits(62) | 1  # Not 0. Workers compare it with the token of the offer.
        counters: Array = np.frombuffer(memory, np.int64, HEADER // 8)
        counters[0] = token
        for cell in cells:
            cell.shared = True
            block = HEADER + cell.group * begins[-1]
            for shard in cell.units.values():
                unit, dtype = shard.unit, numpy_dtype(shard.dtypes[0])
                start = block + begins[unit.part] + unit.start * dtype.itemsize
                shard.slots[0] = np.frombuffer(memory, dtype, unit.size, start)
        self._files[name] = descriptor, token, counters

    def offer(self) -> bytes:
        """The message that offers the memory to workers, JSON; see `lowering.mpi.shared`."""
        shared = {
            name: {"path": f"/proc/{os.getpid()}/fd/{descriptor}", "token": token}
            for name, (descriptor, token, _) in self._files.items()
        }
        return json.dumps({"host": socket.gethostname(), "shared": shared}).encode()

    def update_counts(self, machine: Machine) -> None:
        """Publish how often each group's state has been set."""
        for (name, group), state in machine.group_states.items():
            if name in self._files:
                self._files[name][2][PUTS + group] = state.puts

    @property
    def requests(self) -> int:
        """The number of requests that workers have carried out themselves; 0 after `close`."""
        return sum(int(counters[REQUESTS]) for _, _, counters in self._files.values())

    def close(self) -> None:
        """Mark the memory as closed, for the workers that have mapped it, and close its descriptors."""
        for descriptor, _, counters in self._files.values():
            counters[CLOSED] = 1
            os.close(descriptor)
        self._files.clear()


def _can_share(site: Site) -> bool:
    """Whether workers may update the state of `site` directly.

    They may not in two cases. With a staleness bound, the server must count requests. If answers have another
    dtype than the state, values must be rounded.
    """
    if site.kind != "elastic" or site.mode != "hogwild" or site.staleness is not None:
        return False
    return [buffer.dtype for buffer in site.down] == [part.dtype for part in site.layout.parts]
