"""Register host memory of batches with devices, which then copy from it directly, by DMA.

A thread of JAX copies an array to memory that the device can read, unless the array is in memory that is
registered with the device's runtime. The device then reads it directly. A registration holds for the pages
that are mapped when it is made. Before pages are unmapped or replaced, all copies from them must be complete
and the registration must be ended. Batches are returned after their copies are complete.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax

from commplan.lowering.jax import _compat
from commplan.runtime.input.observe.wait_log import log_warning


class DmaClient(Protocol):
    """The part of a JAX client that registers memory with its devices. The methods raise errors of JAX."""

    @property
    def dma_map(self) -> Callable[[int, int], object]:
        """Register memory, by address and number of bytes."""
        ...

    @property
    def dma_unmap(self) -> Callable[[int], object]:
        """End the registration of the memory at an address."""
        ...


@dataclass(eq=False)
class Pinning:
    """The memory of this process that is registered with `client`.

    If a registration fails, transfers from that memory are slower but correct. The logger `commplan.input`
    reports the first failure.

    Attributes:
        client: The JAX client of the devices.
    """

    client: DmaClient
    _nbytes: dict[int, int] = field(default_factory=dict[int, int])  # By address.
    _is_reported: bool = False  # Whether a failure was reported.
    # Reentrant, because a finalizer that calls `unpin` may run while its thread holds the lock.
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @property
    def nbytes(self) -> int:
        """Bytes that are registered now."""
        return sum(list(self._nbytes.values()))

    def pin(self, address: int, nbytes: int) -> None:
        """Register `nbytes` bytes at `address`: whole pages that stay mapped until `unpin`."""
        try:
            self.client.dma_map(address, nbytes)
        except Exception as error:  # noqa: BLE001  any error of the device's runtime
            with self._lock:
                first, self._is_reported = not self._is_reported, True
            if first:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                log_warning(
                    "batches are copied to the devices through an intermediate buffer, which is slower: %s",
                    reason,
                )
            return
        with self._lock:
            self._nbytes[address] = nbytes

    def unpin(self, address: int) -> None:
        """End the registration of the memory that begins at `address`, if it is registered."""
        with self._lock:
            nbytes = self._nbytes.pop(address, None)
        if nbytes is not None:
            with contextlib.suppress(Exception):  # The runtime may have ended before.
                self.client.dma_unmap(address)

    def unpin_all(self, addresses: Iterable[int]) -> None:
        """Call `unpin` for each address."""
        for address in addresses:
            self.unpin(address)

    def settle(self, arrays: Any) -> None:
        """Wait until the copies to the arrays of a pytree are complete. Raises their errors."""
        jax.block_until_ready(arrays)
        _compat.collect_garbage()  # JAX frees its references to the copied host memory.

    def end(self, batches: Iterable[Any]) -> None:
        """Wait for the copies of batches that are discarded. Errors of the copies are ignored."""
        with contextlib.suppress(Exception):
            self.settle(list(batches))


def pinning_of(devices: Sequence[Any]) -> Pinning | None:
    """The registrations with the client of `devices`, one object per client.

    Args:
        devices: Devices of this process, all of one client.

    Returns:
        The registrations, or None in three cases: `devices` is empty, they are CPUs, or JAX's client cannot
        register memory, as in JAX 0.10.0.
    """
    is_offered = devices and devices[0].platform != "cpu" and hasattr(devices[0].client, "dma_map")
    return _pinning(devices[0].client) if is_offered else None


@functools.cache
def _pinning(client: Any) -> Pinning:
    return Pinning(client)
