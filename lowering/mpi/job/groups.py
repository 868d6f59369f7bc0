"""The ranks of a communicator on the grid of a plan's axes, and the communicators that are made from it."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from commplan.diagnostics import fail
from commplan.ir.axes import coordinates, group, position
from commplan.lowering.mpi.job.rendezvous import Rendezvous
from commplan.lowering.mpi.typing_shim import MPI


class Groups:
    """This rank's place among the others.

    comm: an mpi4py communicator, never used itself for messages once this is made: `own` is a duplicate.
    sizes: the axes and their sizes, in the order of the plan, the last one innermost; None is one axis
    called `ranks`. meet: how the ranks wait for one another. Every rank of `comm` makes one alike. Raises
    CP0831 where the sizes do not multiply to the number of ranks, CP0849 where one does not come.
    """

    def __init__(
        self, comm: Any, sizes: Mapping[str, int] | None = None, meet: Rendezvous | None = None
    ) -> None:
        self.sizes = dict(sizes) if sizes is not None else {"ranks": comm.Get_size()}
        count = math.prod(self.sizes.values())
        if count != comm.Get_size():
            mesh = " x ".join(f"{name} = {size}" for name, size in self.sizes.items())
            fail("CP0831", f"{mesh} makes {count} ranks, and the communicator has {comm.Get_size()}")
        self.meet = meet or Rendezvous(comm, "make a channel")
        self.own = self.meet(comm.Dup)
        self.rank: int = self.own.Get_rank()
        self.place = coordinates(self.rank, self.sizes, self.sizes)
        self.hosts: tuple[str, ...] = tuple(self.meet(self.own.allgather, socket.gethostname()))
        self._others: dict[tuple[str, tuple[str, ...]], Any] = {}

    def ways(self, axes: Sequence[str]) -> int:
        """How many ranks there are along `axes`."""
        return math.prod(self.sizes[axis] for axis in axes)

    def index(self, axes: Sequence[str]) -> int:
        """This rank's place among the ranks along `axes`, row-major, first named major."""
        return position(self.place, axes, self.sizes)

    def along(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from this one along `axes` alone, this one among them, in row-major order."""
        for axis in axes:
            if axis not in self.sizes:
                fail("CP0831", f"there is no axis `{axis}`", f"the axes are {', '.join(self.sizes)}")
        return group(self.place, axes, self.sizes)

    def native(self, axes: tuple[str, ...]) -> Any:
        """The communicator of the ranks along `axes`, for MPI's own collectives.

        Made on first use by all of its ranks together, which therefore must ask for them in the same order.
        """
        return self._made("native", axes)

    def blocking(self, axes: tuple[str, ...]) -> Any:
        """The same for mpi4jax, which needs a communicator of its own."""
        return self._made("blocking", axes)

    def _made(self, use: str, axes: tuple[str, ...]) -> Any:
        if (use, axes) not in self._others:
            ranks = self.along(axes)
            group = self.own.Get_group().Incl(list(ranks))
            create = self.meet.among(ranks)
            self._others[use, axes] = create(self.own.Create_group, group, len(self._others))
        return self._others[use, axes]

    def made(self) -> tuple[Any, ...]:
        """All communicators that are its own."""
        return (self.own, *self._others.values())

    @property
    def concurrent(self) -> bool:
        """Whether MPI may be called by several threads at once: what the `split` form needs."""
        return MPI.Query_thread() == MPI.THREAD_MULTIPLE
