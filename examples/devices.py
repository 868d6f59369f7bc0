"""The option `--device` of the examples, and the devices that it chooses."""

from __future__ import annotations

import argparse
import sys
from typing import Any

import jax

DEFAULT = "default: the devices that JAX finds if there are enough of them, else CPU devices"


def add_option(parser: argparse.ArgumentParser, summary: str = DEFAULT, default: str | None = None) -> None:
    parser.add_argument("--device", choices=("cpu", "gpu"), default=default, help=summary)


def add_option_of_ranks(parser: argparse.ArgumentParser) -> None:
    """The option of a program that only runs under MPI."""
    summary = "ranks of MPI exchange arrays of the CPU, so there is no other choice"
    parser.add_argument("--device", choices=("cpu",), default="cpu", help=summary)


def choose(device: str | None, count: int) -> list[Any]:
    """Return `count` devices. Call it before anything else uses JAX if `count` is above 1.

    Args:
        device: `cpu`, `gpu`, or None: JAX's default devices if there are `count` of them, otherwise CPU
            devices, which are then also the default for new arrays.
        count: the number of devices.
    """
    if device == "cpu":
        jax.config.update("jax_platforms", "cpu")
    if count > 1:
        jax.config.update("jax_num_cpu_devices", count)
    try:
        devices = jax.devices(device)
        if device is None and len(devices) < count:
            devices = jax.devices("cpu")
            jax.config.update("jax_default_device", devices[0])
    except RuntimeError as error:
        sys.exit(f"{count} devices are needed; --device cpu makes them on any machine. JAX says: {error}")
    if len(devices) < count:
        kind = devices[0].platform.upper()
        sys.exit(f"{count} devices are needed, and JAX finds {len(devices)} of kind {kind}: use --device cpu")
    return devices[:count]


def exact_products() -> None:
    """Compute products of float32 as float32: by default GPUs round their operands to 10 bits of mantissa."""
    jax.config.update("jax_default_matmul_precision", "highest")
