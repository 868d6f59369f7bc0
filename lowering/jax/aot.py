"""Compiles a step ahead of time, for devices that are not present.

No GPU, driver or CUDA library is needed. For CUDA 12 install the wheels `jax-cuda12-plugin` and
`jax-cuda12-pjrt` of the installed JAX version (with `--no-deps`), and `nvidia-cuda-nvcc-cu12`. For CUDA 13
install `jax-cuda13-plugin`, `jax-cuda13-pjrt`, `nvidia-cuda-nvcc` and `nvidia-nvvm`. XLA does not autotune:
collectives, their order, groups and sizes are those of a real cluster, but the choice of matrix kernels is
not.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from commplan.diagnostics import fail, plural
from commplan.lowering.gpu.estimate import Machine
from commplan.lowering.gpu.profile import profile
from commplan.lowering.gpu.targets import Target
from commplan.lowering.hlo.step import Memory, StepText
from commplan.lowering.jax._jit import has_profile
from commplan.lowering.jax.device_topology import name_devices
from commplan.lowering.jax.phase import layer_schedules, traced_schedules

Devices = Any  # NumPy object array of JAX devices
# The note of errors about steps that are compiled for CPUs.
GPUS_ONLY = "compile for GPUs, for example `h100:4x8`; they do not have to be present"


def devices(target: Target) -> Devices:
    """The devices of `target`, an array [hosts, devices per host] for a `jax.sharding.Mesh`.

    Raises:
        CommplanError: CP0850 if the GPU compiler is not installed.
    """
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        message = f"compiling for {target.name} needs JAX's compiler for GPUs, which is not installed"
        note = "no GPU, driver or CUDA is needed: pip install --no-deps jax-cuda12-plugin "
        note += "jax-cuda12-pjrt nvidia-cuda-nvcc-cu12, the first two in the version of jax"
        fail("CP0850", message, note)
    describe = cast("Callable[..., Any]", topologies.get_topology_desc)  # pyright: ignore[reportUnknownMemberType]
    options = {"platform": target.platform, "topology": target.topology, "target_config": target.config}
    topology = describe(target.name, **options)
    name_devices(topology.devices, target.name)
    return np.array(topology.devices).reshape(target.hosts, target.per_host)


def mesh_on(target: Target, sizes: Mapping[str, int]) -> Mesh:
    """A mesh with axes of `sizes` on the devices of `target`, the first axis major.

    Without axes, the mesh has one axis `alone` of one device.

    Raises:
        CommplanError: CP1152 if the number of devices differs, CP0850 if the GPU compiler is not installed.
    """
    count, ranks = target.hosts * target.per_host, math.prod(sizes.values())
    if count != ranks:
        axes = ", ".join(f"{name} = {size}" for name, size in sizes.items()) or "no axes"
        message = (
            f"target {target} has {plural(count, 'device')}, the plan has {plural(ranks, 'rank')} ({axes})"
        )
        fail("CP1152", message, f"hosts x devices per host are the ranks: `{target.name}:1x{ranks}`")
    shape = tuple(sizes.values()) or (1,)
    names = tuple(sizes) or ("alone",)
    return Mesh(devices(target).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def compile_step(step: Callable[..., Any], *args: Any, profiled_for: Machine | None = None) -> StepText:
    """Compile `step`, jitted or not, without running it.

    Args:
        step: A function, jitted or not.
        *args: Arrays, or values with their shapes and shardings, which also determine the platform.
        profiled_for: Also compile with a profile that is estimated for this machine; None to omit this.

    Raises:
        CommplanError: CP1156 if a profile is requested for a step on CPU devices.
    """
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
    with traced_schedules() as programs:
        lowered = jitted.lower(*args)
    traced = lowered.compiler_ir(dialect="hlo").as_hlo_module().to_string()
    compiled = lowered.compile()
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    platforms = {device.platform for sharding in shardings for device in sharding.device_set}
    platform = "cpu" if (platforms or {jax.default_backend()}) == {"cpu"} else "gpu"
    memory, with_pgle = _memory(compiled), has_profile(lowered)
    layers = layer_schedules()
    other_programs = tuple(program for program in programs if not any(program is layer for layer in layers))
    text = StepText(compiled.as_text(), traced, platform, None, memory, layers, with_pgle, other_programs)
    if profiled_for is None:
        return text
    if text.platform == "cpu":
        fail("CP1156", "the step is compiled for CPU devices, whose scheduler uses no profile", GPUS_ONLY)
    times = profile(text.compiled, profiled_for)
    return text._replace(profiled=lowered.compile(compiler_options={"fdo_profile": times}).as_text())


def _memory(compiled: Any) -> Memory | None:
    counts = compiled.memory_analysis()
    if counts is None:
        return None
    return Memory(
        counts.argument_size_in_bytes,
        counts.output_size_in_bytes,
        counts.alias_size_in_bytes,
        counts.temp_size_in_bytes,
    )
