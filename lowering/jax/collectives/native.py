"""XLA's own collectives, with ranks counted row-major over the axes in the order of the plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np
from jax import Array, lax
from jax.experimental import xla_metadata as _xla_metadata

from commplan.lowering.jax import _compat
from commplan.lowering.jax.primitives import assume_same


def permute(x: Array, axes: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> Array:
    """`lax.ppermute` between ranks counted row-major over `axes`, the first axis major.

    JAX counts ranks in the order of the mesh's axes, regardless of the order in which they are passed.

    Args:
        x: The array that this rank sends.
        axes: The axes of the plan, which may be in another order than in the mesh.
        pairs: (source, destination); a rank is at most one source and one destination.

    Returns:
        The array that this rank receives; zeros if it is no destination.
    """
    mesh: Any = jax.sharding.get_abstract_mesh()
    sizes = {name: int(size) for name, size in dict(mesh.shape).items() if name in axes}
    ways = [sizes[axis] for axis in axes]
    order = [axes.index(name) for name in sizes]
    # JAX's number of each rank of the plan.
    places = np.arange(math.prod(ways)).reshape([ways[i] for i in order]).transpose(np.argsort(order))
    number = places.reshape(-1).tolist()
    return lax.ppermute(x, tuple(sizes), [(number[src], number[dst]) for src, dst in pairs])


def all_gather_same(x: Array, axes: tuple[str, ...]) -> Array:
    """`lax.all_gather` along the leading dimension, typed as the same over `axes`.

    With `check_vma=False` nothing is typed, and the derivative sums over ranks. Otherwise the derivative does
    not sum, because JAX has already summed over ranks for each use of the result that is typed as varying.
    """
    typed = any(map(_compat.tracks_varying, axes))
    return lax.all_gather(x, axes, tiled=True, to="invarying" if typed else "varying")


def broadcast(x: Array, axes: tuple[str, ...], root: int) -> Array:
    """XLA's collective broadcast, typed as the same over `axes`. GPUs only.

    Args:
        x: This rank's array.
        axes: The axes of the collective.
        root: The index of the root along `axes`, row-major, the first axis major.
    """
    return assume_same(lax.pbroadcast(x, axes, root), axes)


def combiner_scope(key: str) -> Any:
    """A context whose collectives XLA combines only with those of the same `key`."""
    return cast("Any", _xla_metadata).set_xla_metadata(combiner_key=key)
