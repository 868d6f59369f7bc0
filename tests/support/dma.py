"""A client of devices that registers memory, without devices."""

from __future__ import annotations

from typing import Any


class Registrar:
    """The current registrations, by address; refuses the same calls as the runtime of a GPU."""

    def __init__(self) -> None:
        self.ranges: dict[int, int] = {}
        self.count = 0

    def dma_map(self, address: int, nbytes: int) -> None:
        assert address % 4096 == 0 and nbytes > 0
        assert all(address + nbytes <= low or low + size <= address for low, size in self.ranges.items())
        self.ranges[address] = nbytes
        self.count += 1

    def dma_unmap(self, address: int) -> None:
        del self.ranges[address]

    def holds(self, array: Any) -> bool:
        """Whether a device could read all of `array` in place."""
        low = array.__array_interface__["data"][0]
        return any(start <= low and low + array.nbytes <= start + size for start, size in self.ranges.items())
