"""GPU targets: descriptions for compiling ahead of time, and rates for estimates.

Descriptions are in the text form of XLA's `GpuTargetConfigProto`. Registers, shared memory and threads are
those of the compute capability in the CUDA programming guide; memory and clocks are from the data sheets of
the SXM boards.
"""

from __future__ import annotations

import re
from typing import Literal

import msgspec
from msgspec.structs import replace

from commplan.diagnostics import fail, type_of
from commplan.lowering.gpu.estimate import Machine
from commplan.topology import DEVICES, Level, Topology


class Target(msgspec.Struct, frozen=True):
    """A cluster of equal hosts with GPUs, to compile and estimate for.

    Attributes:
        name: Name of the GPU, such as `h100`.
        platform: Platform of JAX.
        hosts: Number of hosts.
        per_host: Number of GPUs in each host.
        config: Description of the GPU for XLA: a `GpuTargetConfigProto` in text form.
        machine: Rates for estimates.
    """

    name: str
    platform: Literal["cuda"]
    hosts: int
    per_host: int
    config: str
    machine: Machine

    @property
    def topology(self) -> str:
        """Partitions x hosts x devices per host, in XLA's syntax for topologies.

        A partition is an NVLink domain, which is one host. XLA assumes that networks within a partition are
        NVLink.
        """
        return f"{self.hosts}x1x{self.per_host}"

    def __str__(self) -> str:
        return f"{self.name}:{self.hosts}x{self.per_host}"


class _Gpu(msgspec.Struct, frozen=True):
    """The data of one GPU."""

    capability: tuple[int, int]  # compute capability: major and minor
    cores: int  # streaming multiprocessors
    shared_per_core: int  # bytes of shared memory of a multiprocessor
    shared_optin: int  # bytes of shared memory that one block can request
    bandwidth: int  # bytes per second of memory
    l2: int  # bytes of the L2 cache
    memory: int  # bytes of device memory
    clock_ghz: float  # boost clock
    tflops: float  # peak of dense products of 16-bit floats, in 1e12 operations per second
    nvlink: float  # bytes per second of a device in each direction, from the data sheet
    bus: float  # bytes per second that collectives reach in a host (`Machine.bus`), if there are no links
    network: float  # bytes per second of a device's link between hosts


_A100 = _Gpu(
    capability=(8, 0),
    cores=108,
    shared_per_core=167_936,
    shared_optin=166_912,
    bandwidth=2_039_000_000_000,
    l2=41_943_040,
    memory=85_899_345_920,
    clock_ghz=1.41,
    tflops=312,
    nvlink=300e9,
    bus=200e9,
    network=25e9,
)
_H100 = _Gpu(
    capability=(9, 0),
    cores=132,
    shared_per_core=233_472,
    shared_optin=232_448,
    bandwidth=3_350_000_000_000,
    l2=52_428_800,
    memory=85_899_345_920,
    clock_ghz=1.98,
    tflops=989,
    nvlink=450e9,
    bus=300e9,
    network=50e9,
)
_H200 = replace(_H100, bandwidth=4_800_000_000_000, memory=151_397_597_184)
_B200 = _Gpu(
    capability=(10, 0),
    cores=148,
    shared_per_core=233_472,
    shared_optin=232_448,
    bandwidth=8_000_000_000_000,
    l2=132_120_576,
    memory=193_273_528_320,
    clock_ghz=1.965,
    tflops=2250,
    nvlink=900e9,
    bus=600e9,
    network=50e9,
)
_GPUS = {"a100": _A100, "h100": _H100, "h200": _H200, "b200": _B200}
_FLOPS_REACHED = 0.6  # fraction of the peak operations per second that training achieves
_MEMORY_REACHED = 0.75  # fraction of the peak memory bandwidth that training achieves
# Latencies in seconds, as in `examples/topologies/h100_64.toml`. NCCL's own model starts a ring with 6.6 to
# 14 us.
_NVLINK_S = 3e-6  # of a message between GPUs of a host
_NETWORK_S = 6e-6  # of a message between hosts
_CALL_S = 8e-6  # to start a collective

_CONFIG = """\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {gpu.shared_per_core}
  shared_memory_per_block_optin: {gpu.shared_optin}
  threads_per_core_limit: 2048
  core_count: {gpu.cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {gpu.bandwidth}
  l2_cache_size: {gpu.l2}
  clock_rate_ghz: {gpu.clock_ghz}
  device_memory_size: {gpu.memory}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {gpu.capability[0]} minor: {gpu.capability[1]} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 patch: 0 }}
"""


def target(text: str) -> Target:
    """Parse a target: `h100:4x8` is four hosts with eight H100 each, `h100` is one device.

    Upper case and surrounding blanks are accepted.

    Raises:
        CommplanError: CP1150 if the GPU or the syntax is unknown.
    """
    match = re.fullmatch(r"(\w+)(?::([1-9]\d{0,5})x([1-9]\d{0,5}))?", text.strip().lower())
    gpu = _GPUS.get(match.group(1)) if match else None
    if match is None or gpu is None:
        fail("CP1150", f"`{text}` is not a target",
             f"targets are {', '.join(_GPUS)}, with hosts x devices per host: `h100:4x8`")  # fmt: skip
    fpus = 64 if gpu.capability[0] == 8 else 128  # f32 units of a multiprocessor: A100, or later GPUs
    config = _CONFIG.format(gpu=gpu, fpus=fpus)
    hosts, per_host = int(match.group(2) or 1), int(match.group(3) or 1)
    return Target(match.group(1), "cuda", hosts, per_host, config, _rates(gpu, hosts, per_host))


def _rates(gpu: _Gpu, hosts: int, per_host: int) -> Machine:
    flops, memory = gpu.tflops * 1e12 * _FLOPS_REACHED, gpu.bandwidth * _MEMORY_REACHED
    return Machine(flops, memory, gpu.bus, network=gpu.network if hosts > 1 else 0, per_host=per_host)


def name_of_kind(device_kind: str) -> str | None:
    """The name of the GPU of a JAX device kind: `h100` for `NVIDIA H100 80GB HBM3`; None if unknown."""
    words = re.split(r"[\W_]+", device_kind.lower())
    return next((name for name in _GPUS if name in words), None)


def rates_of_kind(device_kind: str, hosts: int, per_host: int) -> Machine | None:
    """The rates of a cluster of GPUs; None if the GPU is unknown.

    Args:
        device_kind: The kind of a JAX device, such as `NVIDIA H100 80GB HBM3`.
        hosts: The number of hosts.
        per_host: The number of GPUs in each host.
    """
    name = name_of_kind(device_kind)
    return None if name is None else _rates(_GPUS[name], hosts, per_host)


def machine_topology(name: str, hosts: int, per_host: int) -> Topology:
    """The topology of hosts with GPUs, from data sheets.

    Args:
        name: The name of the GPU, such as `h100`.
        hosts: The number of hosts. One host has no network level.
        per_host: The number of GPUs in each host. One GPU has no level within the host if there are several
            hosts.
    """
    gpu = _GPUS[name]
    levels = [Level("gpu", per_host, _NVLINK_S, gpu.nvlink)] if per_host > 1 or hosts == 1 else []
    levels += [Level("node", hosts, _NETWORK_S, per_host * gpu.network)] if hosts > 1 else []
    devices = name if name in DEVICES else None
    return Topology(f"{name}_{hosts}x{per_host}", tuple(levels), call=_CALL_S, devices=devices)


def rates(machine: Machine | str | None) -> Machine | None:
    """The rates for estimates: those of a target such as `h100:4x8`, or `machine` itself; None for None.

    Raises:
        CommplanError: CP1150 for an unknown target, and for values of other types.
    """
    if isinstance(machine, str):
        return target(machine).machine
    if machine is not None and not isinstance(machine, Machine):  # pyright: ignore[reportUnnecessaryIsInstance]
        expected = "expected a target, `h100:4x8`, or commplan.lowering.audit.Machine(flops, memory, bus)"
        fail("CP1150", f"cannot estimate for {type_of(machine)}", expected)
    return machine
