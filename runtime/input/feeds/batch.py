"""What a feed hands out: arrays by name, and the same as tensors of PyTorch or arrays of JAX."""

from __future__ import annotations

import importlib
from typing import Any

from commplan.runtime.input.layout import Array


class Batch(dict[str, Array]):
    """The arrays of one batch by the names of the plan, as NumPy sees them: read-only, in memory that all
    members of the feed see, and good for as long as anything shows them. epoch, step: where it stands."""

    __slots__ = ("epoch", "step")

    def __init__(self, arrays: dict[str, Array], epoch: int, step: int) -> None:
        super().__init__(arrays)
        self.epoch, self.step = epoch, step

    def torch(self) -> dict[str, Any]:
        """The same memory as tensors of PyTorch, which do not know that others read it: do not write to
        them."""
        torch: Any = importlib.import_module("torch")
        return {name: torch.from_numpy(_writable(array)) for name, array in self.items()}

    def jax(self, device: Any = None) -> dict[str, Any]:
        """As arrays of JAX, on `device`: on a CPU the same memory, where it starts at a multiple of 64
        bytes."""
        jax: Any = importlib.import_module("jax")
        return {name: jax.device_put(array, device, may_alias=True) for name, array in self.items()}


def _writable(array: Array) -> Array:
    """`array` without its mark, of which PyTorch would warn."""
    view = array.view()
    if not view.flags.writeable:
        view.flags.writeable = True
    return view
