"""Host arrays onto the devices of a mesh: what is cut how is worked out once for all batches of a shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from commplan.lowering.jax import _compat
from commplan.lowering.jax.untyped import jax
from commplan.runtime.data.layout import ALIGNMENT, aligned

Array = Any
Host = npt.NDArray[Any]
Cut = tuple[slice, ...]


@dataclass(frozen=True)
class Placing:
    """sharding: of the global array. cuts: the parts of the host's array that devices hold, each once. which:
    for each of this process's devices, in the order of the sharding, the place of its part among them.
    on_cpu: devices use the memory of the host as it is, where it is aligned. type: JAX's, of the result."""

    sharding: Any
    devices: tuple[Any, ...]
    cuts: tuple[Cut, ...]
    which: tuple[int, ...]
    on_cpu: bool
    type: Any

    def put(self, host: Host) -> Array:
        """The global array; devices that hold the same see one memory."""
        pieces = pieces_of(host, self.cuts, on_cpu=self.on_cpu)
        return _compat.put(self.type, self.sharding, [pieces[place] for place in self.which], self.devices)


def first(
    host: Host, shape: tuple[int, ...], sharding: Any, cut: Any, *, on_cpu: bool
) -> tuple[Array, Placing | None]:
    """The first array of a kind, and how to place all others like it; None where JAX changes their dtype.

    cut: from a device's index into the global array to that into `host`.
    """
    indices: dict[Any, Cut] = sharding.addressable_devices_indices_map(shape)
    keys = [
        tuple(one.indices(size)[:2] for one, size in zip(i, shape, strict=True)) for i in indices.values()
    ]
    found = dict(zip(keys, indices.values(), strict=True))
    cuts = tuple(cut(index) for index in found.values())
    pieces = dict(zip(found, pieces_of(host, cuts, on_cpu=on_cpu), strict=True))

    def part(index: Cut) -> Host:
        return pieces[_key(index, shape)]

    made = jax.make_array_from_callback(shape, sharding, part)
    if made.dtype != host.dtype:
        return made, None
    which = tuple(list(found).index(key) for key in keys)
    return made, Placing(sharding, tuple(indices), cuts, which, on_cpu, made.aval)


def _key(index: Cut, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Where an index begins and ends, along each dimension: slices cannot be looked up."""
    return tuple(one.indices(size)[:2] for one, size in zip(index, shape, strict=True))


def pieces_of(host: Host, cuts: tuple[Cut, ...], *, on_cpu: bool) -> list[Host]:
    pieces = [host[(*cut, ...)] for cut in cuts]  # arrays, of no dimension too
    return [_aligned(piece) for piece in pieces] if on_cpu else pieces


def _aligned(piece: Host) -> Host:
    """`piece` as JAX on CPUs takes it without a copy; itself a copy where it does not lie so."""
    if piece.flags.c_contiguous and piece.__array_interface__["data"][0] % ALIGNMENT == 0:
        return piece
    made = aligned(piece.shape, piece.dtype)
    np.copyto(made, piece)
    return made
