"""`Item`: one batch, as `run.batches` returns it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax

from commplan.runtime.input.named import NamedArrays


@jax.tree_util.register_pytree_with_keys_class
class Item(NamedArrays[Any]):
    """The arrays of one batch by their names in the plan, as a dictionary and a pytree, and `mask`.

    The leaves of the pytree are the arrays, in the order of their sorted names. A name that the batch lacks
    raises CP0919, which lists the names of the batch.
    """

    __slots__ = ("_mask",)
    _mask: Callable[[], Any] | None

    @classmethod
    def from_arrays(cls, arrays: dict[str, Any], mask: Callable[[], Any]) -> Item:
        """A batch of `arrays`. `mask` returns the value of the property on each access."""
        item = cls(arrays)
        item._mask = mask
        return item

    @property
    def mask(self) -> Any:
        """bool [rows], laid out like the rows of the batch: False for a row that only fills the batch.

        Such rows repeat records: in the last batch of an epoch with `tail pad`, or in place of records that
        `on_error = skip` left out. In a step, `run.spmd(mask="x")` passes each rank the mask of its rows of
        `x`. If all arrays have a dimension for the members of an ensemble, the mask has it as well.

        Raises:
            CommplanError: CP0911 if loads of the phase have batches of different sizes.
            AttributeError: for a batch that was unpickled, or that `jax.tree` functions rebuilt: the mask is
                not one of its leaves.
        """
        mask = getattr(self, "_mask", None)
        if mask is None:
            raise AttributeError(
                "this batch passed through JAX, which keeps its arrays and drops its mask:"
                " pass `item.mask` as a separate argument"
            )
        return mask()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arrays without the mask."""
        return Item, (dict(self),)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
        names = tuple(sorted(self))
        return [(jax.tree_util.DictKey(name), self[name]) for name in names], names

    @classmethod
    def tree_unflatten(cls, names: tuple[str, ...], values: Iterable[Any]) -> Item:
        return cls(zip(names, values, strict=True))
