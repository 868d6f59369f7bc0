"""The layout of values in a checkpoint, and their redistribution for another number of ranks.

A checkpoint contains global arrays, padding included, with the layout of the mesh that wrote them
(`lowering.jax.layout`), and this record. If a leaf has another layout now, it is joined, which removes the
padding, and cut again. `commplan.orbax` saves and restores with it: first `check`, then for each leaf
`is_as_saved`, `is_resized` or `cut_again`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from commplan.diagnostics import fail
from commplan.ir.types import Placement

Host = npt.NDArray[Any]
Shape = tuple[int, ...]
_LISTED_PATHS = 8  # The most paths in a message.


class SavedLayout(msgspec.Struct, frozen=True):
    """The layout of all leaves of a value.

    Attributes:
        per: The sizes of the axes with a leading dimension, by name, in the order of the dimensions.
        split: The sizes of the axes along which the next dimension is cut, by name, major first.
        owners: If ranks own different rows of the value, the places of the owners, in the order of their
            rows. A place is an index into the `per` dimensions, flattened in row-major order. The rows of
            other places are not used. Empty for other values.
    """

    per: dict[str, int] = {}
    split: dict[str, int] = {}
    owners: tuple[int, ...] = ()

    @classmethod
    def of_placement(
        cls, placement: Placement, sizes: Mapping[str, int], owners: Sequence[int] = ()
    ) -> SavedLayout:
        """The layout of a value with `placement` on a mesh with the axes `sizes`; owners: see the class."""
        per, split = ({axis: sizes[axis] for axis in names} for names in (placement.per, placement.split))
        return cls(per, split, tuple(owners))

    def is_equal(self, other: SavedLayout) -> bool:
        """Whether the layouts are the same: axes of equal sizes in another order are another layout."""
        return self == other and self.has_pers_of(other) and list(self.split) == list(other.split)

    def has_pers_of(self, other: SavedLayout) -> bool:
        """Whether the leading dimensions of both are of the same axes, in the same order."""
        return list(self.per.items()) == list(other.per.items())

    def __str__(self) -> str:
        words = [
            f"{word} {', '.join(f'{axis} = {size}' for axis, size in axes.items())}"
            for word, axes in (("per", self.per), ("split", self.split))
            if axes
        ]
        if self.owners:
            words.append(f"kept by ranks {', '.join(map(str, self.owners))}")
        return ", ".join(words) or "same"


class SavedLeaf(msgspec.Struct, frozen=True):
    """A leaf of a checkpoint, or a leaf as a run expects it.

    Attributes:
        path: The path of the leaf in its pytree, such as "layers/0/w"; "" for a value that is an array.
        shape: The shape of the global array, padding included.
        dtype: The name of the dtype.
        whole: The shape on one rank before any cut, without padding, or None if it is unknown.
    """

    path: str
    shape: Shape
    dtype: str
    whole: Shape | None = None


class SavedValue(msgspec.Struct, frozen=True):
    """A value of a checkpoint, or the value that a run expects.

    Attributes:
        layout: The layout of all leaves.
        leaves: The leaves, in the order of the pytree.
    """

    layout: SavedLayout
    leaves: tuple[SavedLeaf, ...]


def check(name: str, saved: SavedValue, expected: SavedValue, file: str) -> None:
    """Check that a value of a checkpoint can be restored in this run.

    Args:
        name: The name of the value, for errors.
        saved: The value in the checkpoint.
        expected: The value in this run.
        file: The plan's file, for errors.

    Raises:
        CommplanError: CP0870 if it has other leaves, or a leaf another dtype or shape; CP0871 if a leaf
            cannot be redistributed.
    """
    before, current = ({leaf.path: leaf for leaf in value.leaves} for value in (saved, expected))
    missing = [path for path in current if path not in before]
    extra = [path for path in before if path not in current]
    if missing or extra:
        notes = [f"it lacks {_paths(missing)}"] if missing else []
        notes += [f"it has {_paths(extra)}, which this run does not have"] if extra else []
        fail(
            "CP0870", f"`{name}` of the checkpoint has other leaves than that of this run", *notes, file=file
        )
    for path, leaf in current.items():
        _check_leaf(_at(name, path), before[path], leaf, saved.layout, expected.layout, file)


def is_as_saved(saved: SavedLeaf, leaf: SavedLeaf, before: SavedLayout, current: SavedLayout) -> bool:
    """Whether every element of the leaf is at its place already, padding included.

    Args:
        saved: The leaf in the checkpoint.
        leaf: The leaf in this run.
        before: The layout in the checkpoint.
        current: The layout in this run.
    """
    # A scalar is not cut, so its `split` axes may differ.
    is_scalar = len(saved.shape) == len(before.per) and before.has_pers_of(current) and not before.owners
    return saved.shape == leaf.shape and (before.is_equal(current) or (is_scalar and not current.owners))


def is_resized(saved: SavedLeaf, leaf: SavedLeaf, before: SavedLayout, current: SavedLayout) -> bool:
    """Whether the leaf can differ only in its padding at the end: both layouts cut along one axis.

    The arguments are those of `is_as_saved`.
    """
    alike = before.has_pers_of(current) and not (before.owners or current.owners)
    cut_once = len(before.split) == len(current.split) == 1
    return alike and cut_once and len(saved.shape) == len(leaf.shape) > len(current.per)


def cut_again(
    array: Host, saved: SavedLeaf, leaf: SavedLeaf, before: SavedLayout, current: SavedLayout
) -> Host:
    """Redistribute a global array from layout `before` to layout `current`.

    `check` must have accepted the value, and `saved` or `leaf` must have a whole shape. The other arguments
    are those of `is_as_saved`.

    Args:
        array: The array in the checkpoint, of the shape `saved.shape`.

    Returns:
        An array of the shape `leaf.shape`.
    """
    whole = saved.whole if saved.whole is not None else leaf.whole
    assert whole is not None
    lead = () if before.owners else tuple(before.per.values())
    if before.owners:
        array = _join_rows(array, before)

    # One piece per place along the `per` axes. Join each, which removes the padding.
    pieces = array.reshape((math.prod(lead), *array.shape[len(lead) :]))
    ways = [len(before.owners)] if before.owners else list(before.split.values())
    if whole and ways:
        flat = pieces.ndim == 2  # Leaves of trees are flattened before they are cut.
        rows = math.prod(whole) if flat else whole[0]
        pieces = np.stack([_join_shards(piece, rows, ways) for piece in pieces])
    pieces = pieces.reshape((math.prod(lead), *whole))

    # Cut each piece for the current layout.
    ways = [len(current.owners)] if current.owners else list(current.split.values())
    if whole and ways:
        flat = len(leaf.shape) - len(current.per) == 1
        pieces = pieces.reshape(len(pieces), -1) if flat else pieces
        pieces = np.stack([_cut_shards(piece, ways) for piece in pieces])
    if current.owners:
        return _among_owners(pieces[0], leaf.shape, current)
    return pieces.reshape((*current.per.values(), *pieces.shape[1:]))


def _check_leaf(
    subject: str, saved: SavedLeaf, leaf: SavedLeaf, before: SavedLayout, current: SavedLayout, file: str
) -> None:
    """Raise CP0870 for another dtype or shape, and CP0871 for a layout that cannot be converted.

    `subject` is the beginning of messages. The other arguments are those of `is_as_saved`.
    """
    if saved.dtype != leaf.dtype:
        message = f"{subject} is {saved.dtype} in the checkpoint, and {leaf.dtype} in this run"
        fail("CP0870", message, "restore it with the saved dtype, then cast it", file=file)
    if saved.whole is not None and leaf.whole is not None and saved.whole != leaf.whole:
        message = (
            f"{subject} has the shape {list(saved.whole)} in the checkpoint, and {list(leaf.whole)} here"
        )
        fail("CP0870", message, "the shapes that the plan was compiled for differ", file=file)
    if is_as_saved(saved, leaf, before, current):
        return

    # The parts along `per` axes are different values: they cannot be joined or cut for other ranks.
    note = f"its layout was `{before}`, and is `{current}` now"
    lead, lead_now = ([] if layout.owners else list(layout.per.items()) for layout in (before, current))
    if lead != lead_now:
        remedy = "make it the same in a phase of the plan before it is saved (reduce, broadcast), or restore"
        remedy += " onto as many ranks and members"
        message = f"{subject} differs on each rank, and this run has other ranks"
        fail("CP0871", message, note, remedy, file=file)

    # With the whole shape, both shapes can be computed from the layouts.
    whole = saved.whole if saved.whole is not None else leaf.whole
    if whole is not None:
        if (
            _shape(whole, saved.shape, before) != saved.shape
            or _shape(whole, leaf.shape, current) != leaf.shape
        ):
            message = (
                f"{subject} has the shape {list(saved.shape)} in the checkpoint, and {list(leaf.shape)} here"
            )
            fail("CP0870", message, f"{note}: they do not both fit the whole shape {list(whole)}", file=file)
        return

    # Without it, only the padding at the end of one dimension may change.
    if not is_resized(saved, leaf, before, current):
        remedy = "compile the plan with its shapes, or name a value of the plan with the same placement"
        fail("CP0871", f"the shape of {subject} before sharding is unknown", note, remedy, file=file)
    dimension = len(current.per)  # The one that is cut.
    ways, ways_now = (math.prod(layout.split.values()) for layout in (before, current))
    fits = _overlap((saved.shape[dimension], ways), (leaf.shape[dimension], ways_now))
    if not fits or saved.shape[dimension + 1 :] != leaf.shape[dimension + 1 :]:
        message = (
            f"{subject} has the shape {list(saved.shape)} in the checkpoint, and {list(leaf.shape)} here"
        )
        fail("CP0870", message, f"{note}: no leaf can be cut into both", file=file)


def _shape(whole: Shape, shape: Shape, layout: SavedLayout) -> Shape:
    """The shape of a leaf's global array in a layout.

    Args:
        whole: The shape of the leaf before the cut.
        shape: The actual shape, which only determines whether the leaf was flattened before the cut.
        layout: The layout.
    """
    lead = tuple(layout.per.values())
    ways = [len(layout.owners)] if layout.owners else list(layout.split.values())
    if not whole or not ways:
        return (*lead, *whole)
    flat = len(shape) - len(lead) == 1  # Leaves of trees are flattened before they are cut.
    rows, tail = (math.prod(whole), ()) if flat else (whole[0], whole[1:])
    for parts in ways:
        rows = -(-rows // parts)
    return (*lead, rows if layout.owners else rows * math.prod(ways), *tail)


def _overlap(*rows: tuple[int, int]) -> bool:
    """Whether one number of rows can be padded to each of several numbers of rows.

    Args:
        rows: Pairs (n, ways): n rows with padding, in `ways` parts. They had n - ways + 1 to n rows before.
    """
    least = max(n - ways for n, ways in rows) + 1
    most = min(n for n, _ in rows)
    return least <= most and all(n % ways == 0 for n, ways in rows)


def _join_shards(piece: Host, rows: int, ways: Sequence[int]) -> Host:
    """The first `rows` rows of a piece, without the padding of each cut.

    Args:
        piece: An array that was cut into `ways[0]` parts, each of these into `ways[1]` parts, and so on.
        rows: The number of rows before the first cut.
        ways: The number of parts of each cut, major first.
    """
    if not ways:
        return piece[:rows]
    rows_per_part = -(-rows // ways[0])
    parts = np.split(piece, ways[0])
    return np.concatenate([_join_shards(part, rows_per_part, ways[1:]) for part in parts])[:rows]


def _cut_shards(piece: Host, ways: Sequence[int]) -> Host:
    """Cut `piece` repeatedly into `ways` parts padded with zeros, the inverse of `_join_shards`."""
    if not ways:
        return piece
    rows_per_part = -(-piece.shape[0] // ways[0])
    padding = np.zeros((rows_per_part * ways[0] - piece.shape[0], *piece.shape[1:]), piece.dtype)
    parts = np.split(np.concatenate([piece, padding]), ways[0])
    return np.concatenate([_cut_shards(part, ways[1:]) for part in parts])


def _join_rows(array: Host, layout: SavedLayout) -> Host:
    """The owners' rows in order; for a leaf without dimensions, that of the first owner."""
    lead = len(layout.per)
    flat = array.reshape(-1, *array.shape[lead:])
    rows = flat[list(layout.owners)]
    return rows[0] if rows.ndim == 1 else rows.reshape(-1, *rows.shape[2:])


def _among_owners(rows: Host, shape: Shape, layout: SavedLayout) -> Host:
    """Each owner's rows at its place and zeros elsewhere; a scalar is copied to all places."""
    lead = tuple(layout.per.values())
    if not rows.ndim:
        return np.broadcast_to(rows, lead).copy()
    whole = np.zeros((math.prod(lead), *shape[len(lead) :]), rows.dtype)
    for owner, part in zip(layout.owners, np.split(rows, len(layout.owners)), strict=True):
        whole[owner] = part
    return whole.reshape(shape)


def _at(name: str, path: str) -> str:
    return f"`{name}` at `{path}`" if path else f"`{name}`"


def _paths(paths: Sequence[str]) -> str:
    some = ", ".join(f"`{path or 'an array'}`" for path in itertools.islice(paths, _LISTED_PATHS))
    return some if len(paths) <= _LISTED_PATHS else f"{some} and {len(paths) - _LISTED_PATHS} more"
