"""Conversion between ranks and their coordinates, and the groups of ranks along axes.

Ranks are row-major over axes everywhere, with the first axis as the major one.
"""

import itertools
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

Axis = TypeVar("Axis", bound=Hashable)  # an axis or level, by name or index


def coordinates(rank: int, axes: Iterable[Axis], sizes: Mapping[Axis, int]) -> dict[Axis, int]:
    """The coordinates of `rank`, which is row-major over `axes`.

    Args:
        rank: The rank, 0 to the product of the sizes of `axes` - 1.
        axes: The axes, the major one first.
        sizes: The sizes of at least these axes.

    >>> coordinates(5, ("rack", "worker"), {"rack": 2, "worker": 4})
    {'worker': 1, 'rack': 1}
    """
    coords: dict[Axis, int] = {}
    for axis in reversed(tuple(axes)):
        rank, coords[axis] = divmod(rank, sizes[axis])
    return coords


def position(coords: Mapping[Axis, int], axes: Iterable[Axis], sizes: Mapping[Axis, int]) -> int:
    """The inverse of `coordinates`: the rank at `coords`, row-major over `axes`.

    >>> position({"worker": 1, "rack": 1}, ("worker", "rack"), {"rack": 2, "worker": 4})
    3
    """
    rank = 0
    for axis in axes:
        rank = rank * sizes[axis] + coords[axis]
    return rank


def group(coords: Mapping[str, int], along: Sequence[str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The ranks that differ from the one at `coords` only along the axes `along`.

    They are in row-major order of `along`. `coords` needs only the coordinates along the other axes, and
    `sizes` has all axes.

    >>> group({"rack": 1, "worker": 2}, ("worker",), {"rack": 2, "worker": 4})
    (4, 5, 6, 7)
    """
    points = itertools.product(*(range(sizes[axis]) for axis in along))
    return tuple(
        position({**coords, **dict(zip(along, point, strict=True))}, sizes, sizes) for point in points
    )


def groups(along: Sequence[str], sizes: Mapping[str, int]) -> Iterator[tuple[int, ...]]:
    """All groups of ranks that differ only along `along` (see `group`), row-major over the other axes."""
    other_axes = [axis for axis in sizes if axis not in along]
    for point in itertools.product(*(range(sizes[axis]) for axis in other_axes)):
        yield group(dict(zip(other_axes, point, strict=True)), along, sizes)
