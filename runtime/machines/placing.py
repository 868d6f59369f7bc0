"""Put host arrays on the devices of a mesh.

`first_placed` puts the first array of a kind and computes a `Placing`, which puts all others faster.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax import Array

from commplan.lowering.jax import _compat, _context
from commplan.runtime.input.layout import ALIGNMENT, aligned
from commplan.runtime.machines.machine import Host

# A part of an array: one slice per dimension. Dimensions after the last slice are whole.
Cut = tuple[slice, ...]


@dataclasses.dataclass(frozen=True)
class Placing:
    """How host arrays of one shape are put on the devices, computed once.

    Attributes:
        sharding: The sharding of the global array.
        devices: The devices of this process that hold a part of the array.
        cuts: The distinct parts of the host array that devices hold.
        cut_indices: For each device the index of its part in `cuts`.
        on_cpu: Whether devices use aligned host memory without a copy.
        type: The JAX type of the result.
    """

    sharding: Any
    devices: tuple[Any, ...]
    cuts: tuple[Cut, ...]
    cut_indices: tuple[int, ...]
    on_cpu: bool
    type: Any

    def put(self, host: Host) -> Array:
        """Put `host` on the devices: of the shape and dtype for which this was computed.

        Returns:
            The global array. On CPUs devices with the same part share its memory, which may be that of
            `host`.
        """
        pieces = _pieces_of(host, self.cuts, on_cpu=self.on_cpu)
        with _context.explicit():
            return _compat.put(
                self.type, self.sharding, [pieces[index] for index in self.cut_indices], self.devices
            )


def first_placed(
    host: Host, shape: tuple[int, ...], sharding: Any, cut: Any, *, on_cpu: bool
) -> tuple[Array, Placing | None]:
    """Put the first array of a kind on the devices.

    Args:
        host: This process's part of the array.
        shape: The shape of the global array.
        sharding: Its sharding.
        cut: Maps a device's index into the global array to its index into `host`.
        on_cpu: Whether devices use aligned host memory without a copy.

    Returns:
        The global array, and the `Placing` for all arrays like it, or None if JAX changes their dtype.
    """
    indices: dict[Any, Cut] = sharding.addressable_devices_indices_map(shape)
    keys = [bounds(index, shape) for index in indices.values()]
    index_of_key = dict(zip(keys, indices.values(), strict=True))
    cuts = tuple(cut(index) for index in index_of_key.values())
    pieces = dict(zip(index_of_key, _pieces_of(host, cuts, on_cpu=on_cpu), strict=True))

    def part(index: Any) -> Host:
        return pieces[bounds(index, shape)]

    with _context.explicit():
        array = jax.make_array_from_callback(shape, sharding, part)
    if array.dtype != host.dtype:
        return array, None
    cut_indices = tuple(list(index_of_key).index(key) for key in keys)
    return array, Placing(sharding, tuple(indices), cuts, cut_indices, on_cpu, array.aval)


def bounds(index: Cut, shape: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The bounds of an index along each dimension, which are hashable; slices are not."""
    return tuple(piece.indices(size)[:2] for piece, size in zip(index, shape, strict=True))


def _pieces_of(host: Host, cuts: tuple[Cut, ...], *, on_cpu: bool) -> list[Host]:
    """The parts `cuts` of `host`, as JAX gets them."""
    pieces = [host[(*cut, ...)] for cut in cuts]  # The ellipsis makes a scalar an array, too.
    return [_aligned(piece) for piece in pieces] if on_cpu else pieces


def _aligned(piece: Host) -> Host:
    """`piece` itself if JAX on CPUs takes it without a copy; else an aligned copy."""
    if piece.flags.c_contiguous and piece.__array_interface__["data"][0] % ALIGNMENT == 0:
        return piece
    copy = aligned(piece.shape, piece.dtype)
    np.copyto(copy, piece)
    return copy
