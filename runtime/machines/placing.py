"""How arrays of the host go onto the devices of a mesh."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from commplan.lowering.jax import _compat, _context
from commplan.lowering.jax.typing_shim import jax
from commplan.runtime.input.layout import ALIGNMENT, aligned
from commplan.runtime.machines.machine import Host

Array = Any
Cut = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Placing:
    """How host arrays of one shape go onto the devices: what is cut how is worked out once for all of them.

    sharding: of the global array. cuts: the parts of the host's array that devices hold, each once. which:
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
        pieces = _pieces_of(host, self.cuts, on_cpu=self.on_cpu)
        with _context.explicit():
            return _compat.put(
                self.type, self.sharding, [pieces[place] for place in self.which], self.devices
            )


def first_placed(
    host: Host, shape: tuple[int, ...], sharding: Any, cut: Any, *, on_cpu: bool
) -> tuple[Array, Placing | None]:
    """The first array of a kind, and how to place all others like it; None where JAX changes their dtype.

    cut: from a device's index into the global array to that into `host`.
    """
    indices: dict[Any, Cut] = sharding.addressable_devices_indices_map(shape)
    keys = [bounds(index, shape) for index in indices.values()]
    index_of_key = dict(zip(keys, indices.values(), strict=True))
    cuts = tuple(cut(index) for index in index_of_key.values())
    pieces = dict(zip(index_of_key, _pieces_of(host, cuts, on_cpu=on_cpu), strict=True))

    def part(index: Cut) -> Host:
        return pieces[bounds(index, shape)]

    with _context.explicit():
        array = jax.make_array_from_callback(shape, sharding, part)
    if array.dtype != host.dtype:
        return array, None
    which = tuple(list(index_of_key).index(key) for key in keys)
    return array, Placing(sharding, tuple(indices), cuts, which, on_cpu, array.aval)


def bounds(index: Cut, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Where an index begins and ends, along each dimension: slices cannot be looked up."""
    return tuple(piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))


def _pieces_of(host: Host, cuts: tuple[Cut, ...], *, on_cpu: bool) -> list[Host]:
    pieces = [host[(*cut, ...)] for cut in cuts]  # arrays, of no dimension too
    return [_aligned(piece) for piece in pieces] if on_cpu else pieces


def _aligned(piece: Host) -> Host:
    """`piece` as JAX on CPUs takes it without a copy; itself a copy where it does not lie so."""
    if piece.flags.c_contiguous and piece.__array_interface__["data"][0] % ALIGNMENT == 0:
        return piece
    copy = aligned(piece.shape, piece.dtype)
    np.copyto(copy, piece)
    return copy
