"""The batches of a feed: NumPy arrays by name, convertible to PyTorch tensors and JAX arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from commplan.diagnostics import import_optional
from commplan.runtime.input.layout import Array, Bools
from commplan.runtime.input.named import NamedArrays, refuse_mask


class Batch(NamedArrays[Array]):
    """The NumPy arrays of one batch, by the names of the plan.

    The arrays are read-only views of memory that all members of the feed share. They stay valid as long as
    they are referenced.

    Attributes:
        epoch: the epoch of the batch.
        step: the step of the batch in its epoch.

    `place` sets them and the mask.
    """

    __slots__ = ("_mask", "epoch", "step")
    epoch: int
    step: int
    _mask: Bools | None

    def place(self, epoch: int, step: int, mask: Bools | None) -> Batch:
        """Set the position and the mask of the batch.

        Args:
            epoch: the epoch.
            step: the step.
            mask: bool [rows], whether each row is a record; None if the loads have different numbers of rows.

        Returns:
            The batch itself.
        """
        self.epoch, self.step, self._mask = epoch, step, mask
        return self

    @property
    def mask(self) -> Bools:
        """bool [rows]: False for padding rows, which repeat a record.

        Padding rows occur in the last batch of an epoch with `tail pad`, and in place of records that
        `on_error = skip` skipped.

        Raises:
            CommplanError: CP0911 if loads of the phase have batches of different sizes.
        """
        return refuse_mask() if self._mask is None else self._mask

    def torch(self) -> dict[str, Any]:
        """Return the arrays as PyTorch tensors that use the same memory.

        Do not write to the tensors: other members read the same memory.

        Raises:
            CommplanError: CP0918 if PyTorch is not installed.
        """
        torch: Any = import_optional("torch", "CP0918", "tensors of PyTorch", "torch")
        return {name: _tensor(torch, array) for name, array in self.items()}

    def jax(self, device: Any = None) -> dict[str, Any]:
        """Return the arrays as JAX arrays.

        Args:
            device: a `jax.Device` or a sharding; None for the default device. On a CPU there is no copy if
                the memory is aligned to 64 bytes.

        Raises:
            CommplanError: CP0918 if JAX is not installed.
        """
        jax: Any = import_optional("jax", "CP0918", "arrays of JAX", "'commplan[jax]'")
        return {name: jax.device_put(array, device, may_alias=True) for name, array in self.items()}


def _tensor(torch: Any, array: Array) -> Any:
    """The array as a tensor.

    PyTorch warns about read-only arrays and does not support NumPy's bfloat16.
    """
    view = array.view()
    try:
        view.flags.writeable = True
    except ValueError:  # a count, which is not in the memory of the feed
        view = array.copy()
    if view.dtype.name == "bfloat16":
        return torch.from_numpy(view.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(view)
