"""How much a part measures."""

from __future__ import annotations

import jax
import msgspec


class Scale(msgspec.Struct, frozen=True):
    """How much a part measures. `small`, on CPU devices, has smaller sizes and does everything else alike.

    seconds: the time limit of the part.
    """

    small: bool
    rounds: int
    seconds: float = 60.0

    def pick(self, small: int, large: int) -> int:
        """The size of arrays, layers or batches: never which calls are made."""
        return small if self.small else large


def scale_of(rounds: int, seconds: float = 60.0) -> Scale:
    """The scale for the devices of this process. If it is small, XLA does not optimize either."""
    small = jax.devices()[0].platform == "cpu"
    if small:
        jax.config.update("jax_disable_most_optimizations", True)
    return Scale(small, min(rounds, 3) if small else rounds, seconds)
