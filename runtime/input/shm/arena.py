"""Memory for batches that worker processes fill: an anonymous file, in regions that are reused.

The file has no name, so it disappears with its processes. A region is free again when the last array over it
is gone, including JAX's aliases: every view keeps the owner of the memory alive, and a finalizer watches the
owner.
"""

from __future__ import annotations

import bisect
import ctypes
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np

from commplan.diagnostics import fail
from commplan.runtime.input.layout import Array, rounded

if TYPE_CHECKING:
    from commplan.runtime.machines.pinned import Pinning

HEADER = 1 << 16  # bytes before the first region, for the progress of workers
_PAGE = mmap.ALLOCATIONGRANULARITY  # bytes: offsets of mappings are multiples of it
_MOST_WASTE = 2  # a free region is used for an array if it is at most this many times as large


class Cells(NamedTuple):
    """An array in memory that several processes map.

    Attributes:
        memory: 0 for the arena, 1 for the slots of a ring.
        offset: the bytes of the file before its first element.
        shape: its shape.
        strides: its strides in bytes.
        dtype: its dtype.
    """

    memory: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: np.dtype[Any]

    def array(self, memory: mmap.mmap) -> Array:
        """The array as a view of `memory`, a mapping of the whole file."""
        return np.ndarray(self.shape, self.dtype, memory, self.offset, self.strides)


class _Region(NamedTuple):
    """Memory of the file, mapped in this process.

    Attributes:
        address: the address of its first byte.
        nbytes: its size, a multiple of the page size.
        offset: the offset of its first byte in the file.
        memory: the mapping.
    """

    address: int
    nbytes: int
    offset: int
    memory: mmap.mmap


class Arena:
    """Regions of one file. Other processes may map `descriptor`; its size only grows.

    Args:
        pinning: registers regions with devices, until the arena is collected; None without devices.

    Attributes:
        descriptor: the file; closed by `close`.
        header: a mapping of the first `HEADER` bytes.
        nbytes: the size of the file.
    """

    def __init__(self, pinning: Pinning | None = None) -> None:
        self._pinning = pinning
        self.descriptor = os.memfd_create("commplan-batches")
        os.ftruncate(self.descriptor, HEADER)
        self.header = mmap.mmap(self.descriptor, HEADER)
        self.nbytes = HEADER
        self._lock = threading.Lock()
        self._free: deque[_Region] = deque()  # finalizers only append to it, which needs no lock
        self._regions: list[_Region] = []
        self._closing = weakref.finalize(self, os.close, self.descriptor)
        if pinning is not None:
            weakref.finalize(self, _unpin, pinning, self._regions)

    def fresh(self, shape: Sequence[int], dtype: np.dtype[Any]) -> Array:
        """An uninitialized, page-aligned array. Its region is free again when all views of it are gone.

        Raises:
            CommplanError: CP0923 if memory is exhausted.
        """
        nbytes = max(1, int(np.prod(shape, dtype=np.int64)) * dtype.itemsize)
        region = self._region(rounded(nbytes, _PAGE))
        owner = (ctypes.c_ubyte * nbytes).from_buffer(region.memory)
        weakref.finalize(owner, self._give_back, region).atexit = False
        return np.ndarray(tuple(shape), dtype, cast("Any", owner))

    def _give_back(self, region: _Region) -> None:
        """Release a region. Finalizers hold this bound method, which keeps the arena alive."""
        self._free.append(region)

    def find(self, array: Array) -> int | None:
        """The offset in the file of the first element of `array`; None for other memory."""
        address = array.__array_interface__["data"][0]
        with self._lock:
            number = bisect.bisect_right(self._regions, address, key=lambda region: region.address) - 1
            region = self._regions[number] if number >= 0 else None
        if region is None or address >= region.address + region.nbytes:
            return None
        return region.offset + address - region.address

    def _region(self, nbytes: int) -> _Region:
        """Take a free region of at least `nbytes` and a similar size, or extend the file.

        Raises:
            CommplanError: CP0923 if memory is exhausted.
        """
        with self._lock:
            fitting = [
                region for region in list(self._free) if nbytes <= region.nbytes <= _MOST_WASTE * nbytes
            ]
            if fitting:
                best = min(fitting, key=lambda region: region.nbytes)
                self._free.remove(best)
                return best
            try:
                # Without allocated memory, a later write would end the process with SIGBUS.
                os.posix_fallocate(self.descriptor, self.nbytes, nbytes)
                memory = mmap.mmap(self.descriptor, nbytes, offset=self.nbytes)
            except OSError as error:
                fail(
                    "CP0923",
                    f"{nbytes} bytes of shared memory for a batch cannot be allocated: {error.strerror}",
                    "make the batch or `prefetch` smaller, release batches sooner, or use threads",
                )
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            region = _Region(address, nbytes, self.nbytes, memory)
            if self._pinning is not None:
                self._pinning.pin(address, nbytes)
            self.nbytes += nbytes
            bisect.insort(self._regions, region, key=lambda other: other.address)
            return region

    def close(self) -> None:
        """Close the file. Existing arrays stay valid."""
        self._closing()


def _unpin(pinning: Pinning, regions: list[_Region]) -> None:
    """End the registration of all regions, when the arena is collected: then no array uses them."""
    pinning.unpin_all(region.address for region in regions)
