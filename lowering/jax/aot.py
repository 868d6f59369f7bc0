"""Devices to compile for ahead of time, on a machine without GPUs.

It needs no GPU, driver or CUDA library: the wheels `jax-cuda12-plugin` and `jax-cuda12-pjrt` of
JAX's own version (installed with `--no-deps`) and `nvidia-cuda-nvcc-cu12` are enough. There is no
autotuning: collectives, their order, groups and bytes are what a cluster would get; the choice of
matrix kernels is indicative.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, cast

import numpy as np
from jax.experimental import topologies

from commplan.diagnostics import fail
from commplan.lowering.audit.targets import Target

Devices = Any  # numpy object array of jax devices


def devices(target: Target) -> Devices:
    """The devices of `target`, an array [hosts, devices per host], for a `jax.sharding.Mesh`.

    Raises `CommplanError` CP0850 where the compiler for GPUs is not installed.
    """
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        message = f"compiling for {target.name} needs JAX's compiler for GPUs, which is not installed"
        note = "a GPU, a driver or CUDA is not needed: pip install --no-deps jax-cuda12-plugin "
        note += "jax-cuda12-pjrt nvidia-cuda-nvcc-cu12, the first two of the same version as jax"
        fail("CP0850", message, note)
    describe = cast("Callable[..., Any]", topologies.get_topology_desc)  # pyright: ignore[reportUnknownMemberType]
    how = {"platform": target.platform, "topology": target.topology, "target_config": target.config}
    topology = describe(target.name, **how)
    return np.array(topology.devices).reshape(target.hosts, target.per_host)
