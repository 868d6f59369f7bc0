"""The ranks of a communicator as a grid of the plan's axes, and the communicators along these axes."""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from typing import Any

from mpi4py import MPI

from commplan.diagnostics import fail
from commplan.ir.axes import coordinates, group, position
from commplan.lowering.mpi.job.rendezvous import Rendezvous, highest_tag

_USES = ("native", "blocking")  # of a communicator: see the methods of these names


class Groups:
    """This rank's position in the grid of ranks. All ranks of `comm` must create it together.

    Args:
        comm: An mpi4py communicator. It is not used for messages after construction.
        sizes: The axes and their sizes, in the order of the plan, the last one innermost. None for one axis
            called `ranks`.
        rendezvous: Runs blocking calls with a timeout; None for one with the default timeout.

    Attributes:
        sizes: The axes and their sizes, in order.
        rendezvous: Runs blocking calls with a timeout.
        comm: A duplicate of the given communicator, which carries all messages.
        rank: This rank in `comm`.
        place: This rank's index along each axis.
        hosts: The host name of each rank.

    Raises:
        CommplanError: CP0831 if the product of the sizes is not the number of ranks, CP0849 if a rank does
            not join.
    """

    def __init__(
        self, comm: Any, sizes: Mapping[str, int] | None = None, rendezvous: Rendezvous | None = None
    ) -> None:
        self.sizes = dict(sizes) if sizes is not None else {"ranks": comm.Get_size()}
        count = math.prod(self.sizes.values())
        if count != comm.Get_size():
            mesh = " x ".join(f"{name} = {size}" for name, size in self.sizes.items())
            fail("CP0831", f"{mesh} is {count} ranks, but the communicator has {comm.Get_size()}")
        self.rendezvous = rendezvous or Rendezvous(comm, "make a channel")
        self.comm = self.rendezvous(comm.Dup)
        self.rank: int = self.comm.Get_rank()
        self.place = coordinates(self.rank, self.sizes, self.sizes)
        self.hosts: tuple[str, ...] = tuple(self.rendezvous(self.comm.allgather, socket.gethostname()))
        self._communicators: dict[tuple[str, tuple[str, ...]], Any] = {}
        self._is_sealed = False

    def ways(self, axes: Sequence[str]) -> int:
        """The number of ranks along `axes`."""
        return math.prod(self.sizes[axis] for axis in axes)

    def index(self, axes: Sequence[str]) -> int:
        """This rank's index among the ranks along `axes`, row-major, the first axis major."""
        return position(self.place, axes, self.sizes)

    def along(self, axes: Sequence[str]) -> tuple[int, ...]:
        """The ranks that differ from this one only along `axes`, including this one, in row-major order.

        Raises:
            CommplanError: CP0831 for an unknown axis.
        """
        for axis in axes:
            if axis not in self.sizes:
                fail("CP0831", f"there is no axis `{axis}`", f"the axes are {', '.join(self.sizes)}")
        return group(self.place, axes, self.sizes)

    def native(self, axes: tuple[str, ...]) -> Any:
        """The communicator of the ranks along `axes`, for MPI's own collectives.

        It is created on first use, which is collective over its ranks.

        Raises:
            CommplanError: CP0831 if it does not exist after `seal`, CP0849 if a rank does not join.
        """
        return self._create("native", axes)

    def blocking(self, axes: tuple[str, ...]) -> Any:
        """A second communicator of the ranks along `axes`, for mpi4jax; see `native`."""
        return self._create("blocking", axes)

    def seal(self) -> None:
        """Create no further communicators.

        Ranks trace programs at different times. A trace that created a communicator would block until its
        other ranks trace the same program.
        """
        self._is_sealed = True

    def _create(self, use: str, axes: tuple[str, ...]) -> Any:
        if (use, axes) not in self._communicators:
            ranks = self.along(axes)
            if self._is_sealed:
                axes_text = "; ".join(sorted({", ".join(key) for _, key in self._communicators})) or "none"
                problem = f"there is no communicator of the ranks along {', '.join(axes)}"
                note = f"a bound program has communicators along the axes of its collectives: {axes_text}"
                fail("CP0831", problem, note)
            members = self.comm.Get_group().Incl(list(ranks))
            create = self.rendezvous.among(ranks)
            self._communicators[use, axes] = create(self.comm.Create_group, members, self._tag(use, axes))
        return self._communicators[use, axes]

    def _tag(self, use: str, axes: tuple[str, ...]) -> int:
        """The tag of `Create_group`: equal on all ranks, in whatever order they create communicators."""
        names, number = list(self.sizes), 0
        for axis in axes:
            number = number * (len(names) + 1) + names.index(axis) + 1
        return (number * len(_USES) + _USES.index(use)) % highest_tag()

    def communicators(self) -> tuple[Any, ...]:
        """All communicators that belong to this object."""
        return (self.comm, *self._communicators.values())

    @property
    def concurrent(self) -> bool:
        """Whether several threads may call MPI at the same time, which the form `split` needs."""
        return MPI.Query_thread() == MPI.THREAD_MULTIPLE
