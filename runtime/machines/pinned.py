"""Memory of the host that devices copy from directly, by DMA.

JAX copies what it is given to memory of its own that the device can read, in a thread of the host, unless the
memory is registered with the device's runtime: then the device reads it where it lies. Registered pages are
those that lie at an address now; so who exchanges pages, or unmaps them, first ends the registration, and
before that every copy from them must be over. Batches are handed out when their copies are.
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
from commplan.runtime.input.observe.wait_log import LOG


class DmaClient(Protocol):
    """A client of devices, as JAX has it: what registers memory with them. Both raise what JAX does."""

    @property
    def dma_map(self) -> Callable[[int, int], object]:
        """Address and bytes."""
        ...

    @property
    def dma_unmap(self) -> Callable[[int], object]:
        """The address that was given."""
        ...


@dataclass(eq=False)
class Pinning:
    """The memory of this process that is registered with `client`.

    If a registration fails, transfers from that memory are slower but correct. The logger `commplan.input`
    reports the first failure.
    """

    client: DmaClient
    _nbytes: dict[int, int] = field(default_factory=dict[int, int])  # by address
    _is_reported: bool = False
    _lock: threading.RLock = field(default_factory=threading.RLock)  # a finaliser may run inside

    @property
    def nbytes(self) -> int:
        """Bytes that are registered now."""
        return sum(list(self._nbytes.values()))

    def pin(self, address: int, nbytes: int) -> None:
        """Register memory: whole pages that stay mapped until `unpin`."""
        try:
            self.client.dma_map(address, nbytes)
        except Exception as error:  # noqa: BLE001  whatever the device's runtime raises
            with self._lock:
                first, self._is_reported = not self._is_reported, True
            if first:
                reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                LOG.warning("batches are copied to the devices through memory of JAX's own: %s", reason)
            return
        with self._lock:
            self._nbytes[address] = nbytes

    def unpin(self, address: int) -> None:
        """End the registration of the memory that begins at `address`, if it is registered."""
        with self._lock:
            nbytes = self._nbytes.pop(address, None)
        if nbytes is not None:
            with contextlib.suppress(Exception):  # the runtime may have ended before
                self.client.dma_unmap(address)

    def unpin_all(self, addresses: Iterable[int]) -> None:
        for address in addresses:
            self.unpin(address)

    def settle(self, arrays: Any) -> None:
        """Wait until the copies that made `arrays`, a pytree, are over. Raises what they do."""
        jax.block_until_ready(arrays)
        _compat.collect_garbage()  # the memory of the host that the copies held

    def end(self, batches: Iterable[Any]) -> None:
        """Wait for the copies of batches that are discarded."""
        with contextlib.suppress(Exception):
            self.settle(list(batches))


def pinning_of(devices: Sequence[Any]) -> Pinning | None:
    """Registers memory of the host with `devices` of this process; None if they are CPUs, or if JAX's client
    does not offer it, as in JAX 0.10.0."""
    is_offered = devices and devices[0].platform != "cpu" and hasattr(devices[0].client, "dma_map")
    return _known(devices[0].client) if is_offered else None


@functools.cache
def _known(client: Any) -> Pinning:
    return Pinning(client)
