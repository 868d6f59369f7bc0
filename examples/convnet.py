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

WIDTHS = (4, 6, 8)  # so narrow that networks differ by their initial weights: averaging them pays


def init(key: Any) -> Params:
    """Parameters from a PRNG key: orthogonal filters (Saxe et al. 2014), a small last layer."""
    filters = jax.nn.initializers.orthogonal(math.sqrt(2))
    dense = jax.nn.initializers.normal(0.01)
    channels = (3, *WIDTHS)
    keys = jax.random.split(key, len(WIDTHS) + 1)
    params: Params = {
        f"conv{i + 1}": {
            "w": filters(keys[i], (3, 3, channels[i], channels[i + 1])),
            "b": np.zeros(channels[i + 1], np.float32),
        }
        for i in range(len(WIDTHS))
    }
    shape = (7 * 7 * WIDTHS[-1], CLASSES)
    params["dense"] = {"w": dense(keys[-1], shape), "b": np.zeros(CLASSES, np.float32)}
    return params


def logits(params: Params, pixels: Any) -> Any:
    """u8[n, 224, 224, 3] -> f32[n, classes]."""
    x = (pixels.astype(jnp.float32) - 110.0) / 60.0
    x = x.reshape(x.shape[0], 56, 4, 56, 4, 3).mean((2, 4))  # the crops are no sharper than that
    for name in ("conv1", "conv2", "conv3"):
        x = jax.lax.conv_general_dilated(
            x, params[name]["w"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jax.nn.leaky_relu(_normal(x) + params[name]["b"])
    return x.reshape(x.shape[0], -1) @ params["dense"]["w"] + params["dense"]["b"]


def loss(params: Params, pixels: Any, labels: Any, mask: Any = True) -> Any:
    """Mean cross-entropy of a batch. mask: bool [n], False for rows that are no records and count as zero, so
    that every record weighs the same in an epoch."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits(params, pixels), labels)
    return jnp.where(mask, losses, 0).mean()


def _normal(x: Any) -> Any:
    """Each image to mean 0 and variance 1: no statistics across a batch, so cutting it changes nothing."""
    mean = x.mean((1, 2, 3), keepdims=True)
    variance = ((x - mean) ** 2).mean((1, 2, 3), keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-3)
