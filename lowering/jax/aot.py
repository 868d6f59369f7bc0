"""Compiling a step ahead of time, for devices that need not be there.

It needs no GPU, driver or CUDA library: the wheels `jax-cuda12-plugin` and `jax-cuda12-pjrt` of
JAX's own version (installed with `--no-deps`) and `nvidia-cuda-nvcc-cu12` are enough; or for CUDA 13
`jax-cuda13-plugin`, `jax-cuda13-pjrt`, `nvidia-cuda-nvcc` and `nvidia-nvvm`. There is no
autotuning: collectives, their order, groups and bytes are what a cluster would get; the choice of
matrix kernels is indicative.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast

import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh

from commplan.diagnostics import fail, plural
from commplan.ir.schedule import Schedule
from commplan.lowering.audit.estimate import Machine
from commplan.lowering.audit.profile import profile
from commplan.lowering.audit.step import Memory
from commplan.lowering.audit.targets import Target
from commplan.lowering.device_topology import name_devices
from commplan.lowering.jax._jit import has_profile
from commplan.lowering.jax.layers.exchange import schedules_in_use
from commplan.lowering.jax.phase import traced_schedules
from commplan.lowering.jax.typing_shim import jax

Devices = Any  # numpy object array of jax devices
GPUS_ONLY = "compile for GPUs, which need not be there: `h100:4x8`"


def devices(target: Target) -> Devices:
    """The devices of `target`, an array [hosts, devices per host], for a `jax.sharding.Mesh`.

    Raises `CommplanError` CP0850 where the compiler for GPUs is not installed.
    """
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        message = f"compiling for {target.name} needs JAX's compiler for GPUs, which is not installed"
        note = "a GPU, a driver or CUDA is not needed: pip install --no-deps jax-cuda12-plugin "
        note += "jax-cuda12-pjrt nvidia-cuda-nvcc-cu12, the first two of the same version as jax"
        fail("CP0850", message, note)
    describe = cast("Callable[..., Any]", topologies.get_topology_desc)  # pyright: ignore[reportUnknownMemberType]
    how = {"platform": target.platform, "topology": target.topology, "target_config": target.config}
    topology = describe(target.name, **how)
    name_devices(topology.devices, target.name)
    return np.array(topology.devices).reshape(target.hosts, target.per_host)


def mesh_on(target: Target, sizes: Mapping[str, int]) -> Mesh:
    """A mesh of axes of `sizes` on the devices of `target`.

    Raises `CommplanError` CP1152 where it has more or fewer of them, and what `devices` raises.
    """
    count, ranks = target.hosts * target.per_host, math.prod(sizes.values())
    if count != ranks:
        axes = ", ".join(f"{name} = {size}" for name, size in sizes.items()) or "no axes"
        message = (
            f"target {target} has {plural(count, 'device')}, the plan has {plural(ranks, 'rank')} ({axes})"
        )
        fail("CP1152", message, f"hosts x devices per host are the ranks: `{target.name}:1x{ranks}`")
    shape, names = tuple(sizes.values()) or (1,), tuple(sizes) or ("alone",)
    return Mesh(devices(target).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


class StepText(NamedTuple):
    """A step as text, as XLA compiled it and as JAX handed it to XLA, and what it is compiled for.

    profiled: as XLA compiled it with a profile; None where it was given none. memory: of the step without
    one; None where XLA does not say. layers: the schedules of `run.layers` that the step may have. pgle: of
    `run.jit(.., pgle=..)`, whether what it compiled has a profile; None for another step. programs: the
    schedules whose phases JAX traced in the step, none if it had traced the step before.
    """

    compiled: str
    traced: str
    platform: Literal["cpu", "gpu"]
    profiled: str | None = None
    memory: Memory | None = None
    layers: tuple[Schedule, ...] = ()
    pgle: bool | None = None
    programs: tuple[Schedule, ...] = ()


def compile_step(step: Callable[..., Any], *args: Any, profiled_for: Machine | None = None) -> StepText:
    """Compile `step`, jitted or not, for arguments of the shapes and shardings of `args`. Nothing runs.

    profiled_for: compile it once more with a profile of what its instructions take on this machine.

    Raises `CommplanError` CP1156 where a profile is asked for a step of CPU devices.
    """
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
    with traced_schedules() as programs:
        lowered = jitted.lower(*args)
    traced = lowered.compiler_ir(dialect="hlo").as_hlo_module().to_string()
    compiled = lowered.compile()
    shardings = jax.tree.leaves((compiled.input_shardings, compiled.output_shardings))
    platforms = {device.platform for sharding in shardings for device in sharding.device_set}
    platform = "cpu" if (platforms or {jax.default_backend()}) == {"cpu"} else "gpu"
    counts, own = _memory(compiled), has_profile(lowered)
    layers = schedules_in_use()
    others = tuple(each for each in programs if not any(each is layer for layer in layers))
    text = StepText(compiled.as_text(), traced, platform, None, counts, layers, own, others)
    if profiled_for is None:
        return text
    if text.platform == "cpu":
        fail("CP1156", "the step is compiled for CPU devices, whose scheduler takes no profile", GPUS_ONLY)
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
