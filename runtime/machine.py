"""What a bound program asks of the machine that it runs on, a mesh of devices or the ranks of a communicator.

`runtime.mesh` and `runtime.ranks` answer; everything else in this room is the same for both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy.typing as npt

from commplan.ir import schedule as ir
from commplan.ir.types import Placement
from commplan.lowering.jax.backend import Backend
from commplan.lowering.jax.check import Layout

Array = Any
Host = npt.NDArray[Any]
Local = Mapping[str, tuple[int, ...]]


class Machine(Protocol):
    """The machine of one schedule."""

    @property
    def mesh(self) -> Any:
        """What the user bound the program to."""
        ...

    @property
    def backend(self) -> Backend: ...

    @property
    def layout(self) -> Layout:
        """How arrays lie outside of `run.spmd`: `global`, or `local` as inside."""
        ...

    def manual(self) -> dict[str, int]:
        """The axes, and their sizes, along which the code around us sees one rank's arrays."""
        ...

    def spread(self, body: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """`body`, a function of one rank's arrays, as a function of the arrays outside."""
        ...

    def zeros(self, value: ir.Value, leaf: ir.Leaf) -> Array:
        """A leaf of zeros as it lies outside."""
        ...

    def local(self) -> dict[str, tuple[int, ...]]:
        """For each axis of the plan the indices that this process holds."""
        ...

    def array(self, host: Host, placement: Placement, local: Local) -> Array:
        """This process's part of a value (dimensions for `per` axes, then its rows) as it lies outside."""
        ...

    def peers(self, key: str) -> tuple[str, int, int] | None:
        """A name, this process's place and the number of processes: those that give the same key.

        Every process calls it alike. None where this one is alone.
        """
        ...

    def member(self, schedule: ir.Schedule, axis: str, place: int) -> Machine:
        """The part of the machine that belongs to member `place` of `axis`, for its own schedule."""
        ...

    def part(self, name: str, tree: Any, placement: Placement, axis: str, own: Machine) -> Any:
        """The part of outside arrays that lies on `own`, a member's machine; nothing moves."""
        ...

    def join(self, parts: Mapping[int, Any], placement: Placement, axis: str) -> Any:
        """The way back, from the parts of the members that this process holds."""
        ...


def digest(text: str) -> bytes:
    """8 bytes that stand for `text`."""
    return hashlib.sha256(text.encode()).digest()[:8]
