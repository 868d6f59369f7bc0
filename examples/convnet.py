"""A small convolutional network over u8[..., 224, 224, 3] pixels, in plain JAX."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from photos import CLASSES

Params = dict[str, dict[str, Any]]

WIDTHS = (8, 12, 16)


def init(key: Any) -> Params:
    """Parameters from a PRNG key: He's initialisation for the filters, a small last layer."""
    shapes = {
        "conv1": (4, 4, 3, WIDTHS[0]),
        "conv2": (3, 3, WIDTHS[0], WIDTHS[1]),
        "conv3": (3, 3, WIDTHS[1], WIDTHS[2]),
        "dense": (7 * 7 * WIDTHS[2], CLASSES),
    }
    params: Params = {}
    for name, key_of in zip(shapes, jax.random.split(key, len(shapes)), strict=True):
        shape = shapes[name]
        scale = math.sqrt(2 / math.prod(shape[:-1])) * (0.3 if name == "dense" else 1.0)
        params[name] = {"w": jax.random.normal(key_of, shape) * scale, "b": np.zeros(shape[-1], np.float32)}
    return params


def logits(params: Params, pixels: Any) -> Any:
    """u8[n, 224, 224, 3] -> f32[n, classes]."""
    x = (pixels.astype(jnp.float32) - 110.0) / 60.0
    x = x.reshape(x.shape[0], 112, 2, 112, 2, 3).mean((2, 4))
    for name, stride in (("conv1", 4), ("conv2", 2), ("conv3", 2)):
        x = jax.lax.conv_general_dilated(
            x, params[name]["w"], (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.leaky_relu(_normal(x) + params[name]["b"])
    return x.reshape(x.shape[0], -1) @ params["dense"]["w"] + params["dense"]["b"]


def loss(params: Params, pixels: Any, labels: Any) -> Any:
    """Mean cross-entropy of a batch."""
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, pixels), labels).mean()


def _normal(x: Any) -> Any:
    """Each image to mean 0 and variance 1: no statistics across a batch, so cutting it changes nothing."""
    mean = x.mean((1, 2, 3), keepdims=True)
    variance = ((x - mean) ** 2).mean((1, 2, 3), keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-3)
