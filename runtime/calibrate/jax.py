"""The devices of a JAX job as a fabric, in one process or in several."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from commplan.ir.schedule import Axis, Backend, Collective, Form
from commplan.lowering.jax.collectives.lax_backend import LaxBackend
from commplan.runtime.calibrate.calibrate import AXIS, Call, Pairs, host_gamma

_NAME = 256  # The most bytes of a host name.
_LEAST_S = 1e-9  # Seconds that a duration has at least: differences of noisy durations may be negative.


class JaxFabric:
    """The devices of a JAX job, in the order of ranks. `calibrate.Fabric` documents the methods.

    Attributes:
        hosts: The host of each device.
    """

    backend: Backend = "jax"
    forms: tuple[Form, ...] = ("rounds",)

    def __init__(self) -> None:
        devices: list[Any] = jax.devices()
        self._mesh = Mesh(np.array(devices, object), (AXIS,), axis_types=(AxisType.Auto,))
        self._platform = "gpu" if devices[0].platform in ("cuda", "rocm") else devices[0].platform
        names = _host_names()
        self.hosts: tuple[str, ...] = tuple(names[int(device.process_index)] for device in devices)

    @property
    def longest(self) -> int:
        # 16 MiB, or 256 MiB on GPUs: at 450 GB/s 16 MiB take less time than a call.
        return 2**24 if self._platform == "cpu" else 2**28

    def gamma(self) -> float:
        return host_gamma() if self._platform == "cpu" else device_gamma()

    def slowest(self, seconds: float) -> float:
        if jax.process_count() == 1:
            return seconds
        return float(np.max(multihost_utils.process_allgather(np.float64(seconds))))

    def barrier(self) -> None:
        """Do nothing: the measured calls are collectives, which wait for all processes."""

    def exchange(self, pairs: Pairs, nbytes: int, times: int) -> Call:
        both = [*pairs, *((b, a) for a, b in pairs)]

        def body(x: Any) -> Any:
            for _ in range(times):
                x = lax.ppermute(x, AXIS, both)
            return x

        return self._call(body, nbytes)

    def burst(self, pair: tuple[int, int], count: int) -> float | None:
        del pair, count  # The cost of a message on a device is part of its latency.
        return None

    def empty(self) -> Call:
        return self._call(lambda x: x + 1, 4)

    def collective(self, op: Collective, axis: Axis, size: int) -> Call:
        backend = LaxBackend(self._platform, {axis.name: axis.size}, "", {axis.name: axis.levels})
        return self._call(lambda x: backend.move(x, op), 4 * size, jnp.float32)

    def _call(self, body: Callable[[Any], Any], nbytes: int, dtype: Any = jnp.uint8) -> Call:
        """Jit `body` for an array of `nbytes` on each device; the call waits for the result."""
        spec = PartitionSpec(AXIS)
        size = nbytes // jnp.dtype(dtype).itemsize
        sharding = NamedSharding(self._mesh, spec)
        shape = (size * self._mesh.size,)

        def zeros(_: object) -> Any:
            return np.zeros(size, jnp.dtype(dtype))

        x = jax.make_array_from_callback(shape, sharding, zeros)
        mapped = jax.shard_map(body, mesh=self._mesh, in_specs=spec, out_specs=spec, check_vma=False)
        jitted = jax.jit(mapped)
        return lambda: jax.block_until_ready(jitted(x))


def device_gamma(nbytes: int = 2**28, times: int = 20) -> float:
    """Measure an addition in device memory.

    Args:
        nbytes: The bytes of each array, f32.
        times: The number of additions in one call. The duration of a call without additions is subtracted.

    Returns:
        The seconds per byte of one operand.
    """
    x = jnp.ones(nbytes // 4, jnp.float32)

    @jax.jit
    def added(a: Any, b: Any, count: Any) -> Any:
        def add(_: Any, total: Any) -> Any:
            return total + b

        return lax.fori_loop(0, count, add, a)

    def duration(count: int) -> float:
        start = time.perf_counter()
        jax.block_until_ready(added(x, x, count))
        return time.perf_counter() - start

    duration(1)  # Compiles.
    durations = [duration(times) - duration(0) for _ in range(7)]
    return max(statistics.median(durations), _LEAST_S) / times / nbytes


def _host_names() -> list[str]:
    """The host name of each process, by its number; all processes call this."""
    name = socket.gethostname().encode()[:_NAME]
    if jax.process_count() == 1:
        return [name.decode(errors="replace")]
    padded = np.frombuffer(name.ljust(_NAME, b"\0"), np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(padded)).reshape(-1, _NAME)
    return [row.tobytes().rstrip(b"\0").decode(errors="replace") for row in rows]
