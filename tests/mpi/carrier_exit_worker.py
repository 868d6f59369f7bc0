"""A host whose thread still waits for rows of the other host in the engine when its interpreter ends."""

from __future__ import annotations

import threading

import numpy as np
from mpi4py import MPI

from commplan.diagnostics import Span
from commplan.input.work_partition import division
from commplan.runtime.input.group import Blame
from commplan.runtime.input.transport.mpi import MpiCarrier
from commplan.runtime.input.transport.transport import RowSlices

comm, waits = MPI.COMM_WORLD, threading.Event()
carrier = MpiCarrier(comm.Dup(), division("all_shared", (0, 1)), blame=Blame("", Span(7, 5, 7, 40), ""))


def carry() -> None:
    run = carrier._waits
    carrier._waits = lambda waited, rank: (waits.set(), run(waited, rank))[1]
    carrier.carry(0, [RowSlices(np.zeros((1, 2, 1 << 16), np.uint8), (0, 1, 2))])


if comm.rank == 0:
    threading.Thread(target=carry, daemon=True).start()
    waits.wait(60)
comm.Barrier()
if comm.rank == 1:
    carrier.close()
print(f"rank {comm.rank} ends", flush=True)
