"""XLA's CPU collectives, which go over Gloo: `shard_map` on a mesh of one device per process.

There is no broadcast for CPUs: `lax` programs use a sum whose terms are zero except on the root, and so does
this bench.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.harness.work import Floats, Operation, Work
from bench.harness.worker import operands
from bench.systems.jitted import Jitted

jax: Any = importlib.import_module("jax")
jnp: Any = importlib.import_module("jax.numpy")
lax: Any = importlib.import_module("jax.lax")
sharding: Any = importlib.import_module("jax.sharding")
Array = Any
PORT = 29_501
BUCKET = 25 << 20  # bytes: torch's default, which many have copied


class Xla:
    def __init__(self) -> None:
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        jax.distributed.initialize(f"{os.environ['MASTER_ADDR']}:{PORT}", self.ranks, self.rank)
        devices = sorted(jax.devices(), key=lambda device: device.process_index)
        self.mesh = sharding.Mesh(np.array(devices), ("r",), axis_types=(sharding.AxisType.Auto,))
        self.split = sharding.NamedSharding(self.mesh, sharding.PartitionSpec("r"))

    def prepare(self, work: Work) -> Operation:
        given = [[self._own(x) for x in xs] for xs in operands(work, self.rank, self.ranks)]
        collective = self._one(work.kind)
        match work.how:
            case "fused":
                call = self._jit(lambda xs: bucketed(collective, xs), work.kind)
            case "combined":  # left to XLA's combiner
                call = self._jit(lambda xs: [collective(x) for x in xs], work.kind)
            case _:
                single = self._jit(lambda xs: [collective(x) for x in xs], work.kind)

                def call(xs: list[Array]) -> list[Array]:
                    return [single([x])[0] for x in xs]

        return Jitted(call, given)

    def _one(self, kind: str) -> Callable[[Array], Array]:
        def from_root(x: Array) -> Array:
            return lax.psum(jnp.where(lax.axis_index("r") == 0, x, 0), "r")

        calls: dict[str, Callable[[Array], Array]] = {
            "all_reduce": lambda x: lax.psum(x, "r"),
            "broadcast": from_root,
            "reduce_scatter": lambda x: lax.psum_scatter(x, "r", tiled=True),
            "all_gather": lambda x: lax.all_gather(x, "r", tiled=True),
        }
        return calls[kind]

    def _jit(self, call: Callable[[list[Array]], list[Array]], kind: str) -> Callable[..., list[Array]]:
        spec = sharding.PartitionSpec
        same = kind in ("all_reduce", "broadcast")
        return jax.jit(
            jax.shard_map(call, mesh=self.mesh, in_specs=spec("r"), out_specs=spec() if same else spec("r"))
        )

    def _own(self, x: Floats) -> Array:
        """A global array; this process holds `x`."""
        array = jax.device_put(x, jax.local_devices()[0])
        return jax.make_array_from_single_device_arrays((x.size * self.ranks,), self.split, [array])


def bucketed(collective: Callable[[Array], Array], xs: list[Array]) -> list[Array]:
    """All tensors through buckets of at most 25 MiB, in order."""
    out: list[Array] = []
    bucket: list[Array] = []
    for x in xs:
        if bucket and 4 * (sum(y.size for y in bucket) + x.size) > BUCKET:
            out += _through(collective, bucket)
            bucket = []
        bucket.append(x)
    return out + _through(collective, bucket)


def _through(collective: Callable[[Array], Array], xs: list[Array]) -> list[Array]:
    return jnp.split(collective(jnp.concatenate(xs)), np.cumsum([x.size for x in xs])[:-1].tolist())


def connect() -> Xla:
    return Xla()
