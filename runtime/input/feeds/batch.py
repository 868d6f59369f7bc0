"""What a feed hands out: arrays by name, and the same as tensors of PyTorch or arrays of JAX."""

from __future__ import annotations

from typing import Any

import numpy as np

from commplan.runtime.input.layout import Array, Bools
from commplan.runtime.input.named import NamedArrays, refuse_mask
from commplan.runtime.input.packages import package


class Batch(NamedArrays[Array]):
    """The arrays of one batch by the names of the plan, as NumPy sees them: read-only, in memory that all
    members of the feed see, and good for as long as anything shows them. epoch, step: where it stands."""

    __slots__ = ("_mask", "epoch", "step")
    epoch: int
    step: int
    _mask: Bools | None

    def place(self, epoch: int, step: int, mask: Bools | None) -> Batch:
        """Set where the batch stands, and which rows are records; None if its loads differ in rows."""
        self.epoch, self.step, self._mask = epoch, step, mask
        return self

    @property
    def mask(self) -> Bools:
        """bool [rows]: False for a row that only fills the batch, and repeats a record: of the last batch of
        an epoch with `tail pad`, or in the place of one that `on_error = skip` left out. Raises CP0911 if
        loads of the phase have batches of different sizes."""
        return refuse_mask() if self._mask is None else self._mask

    def torch(self) -> dict[str, Any]:
        """The same memory as tensors of PyTorch, which do not know that others read it: do not write to
        them. Errors: CP0918 where PyTorch is not installed."""
        torch: Any = package("torch", "tensors of PyTorch", "torch")
        return {name: _tensor(torch, array) for name, array in self.items()}

    def jax(self, device: Any = None) -> dict[str, Any]:
        """As arrays of JAX, on `device`: on a CPU the same memory, where it starts at a multiple of 64
        bytes. Errors: CP0918 where JAX is not installed."""
        jax: Any = package("jax", "arrays of JAX", "'commplan[jax]'")
        return {name: jax.device_put(array, device, may_alias=True) for name, array in self.items()}


def _tensor(torch: Any, array: Array) -> Any:
    """PyTorch warns of arrays that are marked as read-only, and does not know NumPy's bfloat16."""
    view = array.view()
    try:
        view.flags.writeable = True
    except ValueError:  # a number beside the batch, which is not in the memory of the feed
        view = array.copy()
    if view.dtype.name == "bfloat16":
        return torch.from_numpy(view.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(view)
