"""A small network on real pictures, and its simulated device.

The pictures are noisy crops of photographs from scikit-learn and scikit-image (examples/photos.py), of 28 x
28 pixels; the label is the photograph. Many hosts of an emulated cluster share few cores, so the computation
of a step takes longer the more hosts compute at once. Therefore each host has a simulated device: its
gradients are ready `seconds` after the step began, whatever the processor took, and the processor is free
until then.
"""

from __future__ import annotations

import functools
import importlib
import operator
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

SIDE, CLASSES = 28, 15
Array = Any
jax: Any = importlib.import_module("jax")
jnp: Any = importlib.import_module("jax.numpy")
Params = dict[str, Array]


def pictures(count: int, *, seed: int, held_out: bool = False) -> tuple[Array, Array]:
    """u8[count, 28, 28, 3] and i32[count]."""
    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    import photos  # noqa: PLC0415  # pyright: ignore[reportMissingImports]

    images: Any = photos
    crops = images.Crops(count, seed=seed, held_out=held_out)
    pixels = np.empty((count, SIDE, SIDE, 3), np.uint8)
    labels = np.empty(count, np.int32)
    for number in range(count):
        full, labels[number] = images.decode(crops[number])
        step = full.shape[0] // SIDE
        pixels[number] = full.reshape(SIDE, step, SIDE, step, 3).mean((1, 3))
    return pixels, labels


def init(seed: int, width: int = 32) -> Params:
    """Eight leaves, 55,599 elements of f32 at the usual width."""
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> Array:
        fan = np.prod(shape[:-1])
        return (rng.standard_normal(shape) * np.sqrt(2 / fan)).astype(np.float32)

    return {
        "conv1": normal(3, 3, 3, 16), "bias1": np.zeros(16, np.float32),
        "conv2": normal(3, 3, 16, 32), "bias2": np.zeros(32, np.float32),
        "dense1": normal(7 * 7 * 32, width), "bias3": np.zeros(width, np.float32),
        "dense2": normal(width, CLASSES) * np.float32(0.1), "bias4": np.zeros(CLASSES, np.float32),
    }  # fmt: skip


def logits(params: Params, pixels: Array) -> Array:
    """u8[n, 28, 28, 3] -> f32[n, 15]."""
    x = (pixels.astype(jnp.float32) - 110.0) / 60.0
    for number in ("1", "2"):
        x = jax.lax.conv_general_dilated(
            x, params[f"conv{number}"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.leaky_relu(x + params[f"bias{number}"])
    x = jax.nn.leaky_relu(x.reshape(x.shape[0], -1) @ params["dense1"] + params["bias3"])
    return x @ params["dense2"] + params["bias4"]


def loss(params: Params, pixels: Array, labels: Array) -> Array:
    """Mean cross-entropy."""
    scores = jax.nn.log_softmax(logits(params, pixels))
    return -scores[jnp.arange(labels.shape[0]), labels].mean()


class Device:
    """The pretended device: a step's gradients are held back until `seconds` after it began."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.began, self.late = seconds, 0.0, 0
        self._ready = jax.ShapeDtypeStruct((), jnp.float32)

    def begin(self, pixels: Array, after: Array) -> Array:
        """Begin the step of the device and return `pixels`: now, or, inside jit, when `after`, f32[], is
        ready."""
        zero = jax.pure_callback(self._begin, jax.ShapeDtypeStruct((), jnp.uint8), after)
        return pixels + zero

    def _begin(self, after: Array) -> Array:
        del after
        self.began = time.perf_counter()
        return np.uint8(0)

    def held(self, grads: Params, value: Array) -> tuple[Params, Array]:
        """`grads` and the loss `value`, no sooner than the device has them; inside jit."""
        zero = jax.pure_callback(self._wait, self._ready, value + jnp.float32(0) * grads["bias1"][0])
        return jax.tree_util.tree_map(functools.partial(operator.add, zero), grads), value

    def _wait(self, value: Array) -> Array:
        del value
        left = self.began + self.seconds - time.perf_counter()
        if left > 0:
            time.sleep(left)
        else:
            self.late += 1
        return np.float32(0)
