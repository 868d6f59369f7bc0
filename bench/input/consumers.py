"""The use of a batch by a member: read the numbers of its records, or run a jitted step on it."""

from __future__ import annotations

import importlib
import mmap
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.input.records import SHAPE, numbers

Batch = npt.NDArray[np.uint8]
Touch = Callable[[Any], Any]
KINDS = ("ids", "step")


class Consumer:
    """Counts the records of one member, epoch by epoch.

    `kind`: `ids` reads only the numbers, `step` is a jitted step.
    """

    def __init__(self, kind: str, rows: int) -> None:
        self._touch = _step(rows) if kind == "step" else None
        self._seen: list[npt.NDArray[np.uint32]] = []

    def __call__(self, batch: Any, ids: npt.NDArray[np.uint32] | None = None) -> None:
        """One batch u8 [rows, 224, 224, 3]; `ids` are the numbers of its records if the batch does not
        contain them."""
        self._seen.append(numbers(np.asarray(batch)) if ids is None else ids)
        if self._touch is not None:
            self._touch(batch)

    def epoch(self, wanted: int) -> dict[str, Any]:
        """The records since the last call, compared with `wanted` records once each."""
        seen = Counter(np.concatenate(self._seen).tolist() if self._seen else ())
        self._seen.clear()
        missing = sum(number not in seen for number in range(wanted))
        return {"records": seen.total(), "missing": missing, "again": seen.total() - len(seen)}


def _step(rows: int) -> Touch:
    """A jitted step: the batch is normalized from u8 to float32, averaged over patches of 16 x 16 and
    fitted by one linear layer. It is compiled here.
    """
    jax: Any = importlib.import_module("jax")
    jnp: Any = importlib.import_module("jax.numpy")
    mean, deviation = jnp.array([118.0, 112.0, 104.0]), jnp.array([70.0, 68.0, 70.0])

    def loss(weights: Any, pixels: Any) -> Any:
        normal = (pixels.astype(jnp.float32) - mean) / deviation
        patches = normal.reshape(-1, 14, 16, 14, 16, 3).mean((2, 4)).reshape(len(pixels), -1)
        return jnp.mean((patches @ weights) ** 2)

    @jax.jit
    def train(weights: Any, pixels: Any) -> Any:
        return weights - 0.01 * jax.grad(loss)(weights, pixels)

    state = {"weights": jnp.full((14 * 14 * 3, 10), 0.01)}

    def touch(batch: Any) -> None:
        state["weights"] = jax.block_until_ready(train(state["weights"], jax.device_put(batch)))

    warm = mmap.mmap(
        -1, rows * int(np.prod(SHAPE))
    )  # returned to the system at once, unlike memory of malloc
    touch(np.frombuffer(warm, np.uint8).reshape(rows, *SHAPE))
    return touch
