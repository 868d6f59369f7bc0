"""What packing gradients into buckets costs, in passes over them at the rate of the device's memory.

The phase runs as it would on eight devices, but for its collectives, which give back what they get.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import commplan
from bench.compiled.models import Transformer
from bench.on_gpu.tax import PLAN
from bench.on_gpu.timing import Scale, in_turns, median, spread
from commplan.ir import schedule as ir
from commplan.lowering.jax.collectives.lax_backend import LaxBackend
from commplan.lowering.jax.phase import Lowered
from commplan.lowering.jax.pytree import flatten
from commplan.lowering.jax.typing_shim import jax, jnp, lax

DEVICES = 8


class Unconnected(LaxBackend):
    """One device that reduces with itself; a barrier stands where a collective would."""

    def move(self, x: Any, op: ir.Collective) -> Any:
        del op
        return lax.optimization_barrier(x)

    def tie(self, x: Any, previous: Any, axes: tuple[str, ...]) -> Any:
        del axes
        return lax.optimization_barrier((x, previous))[0]

    def varying(self, x: Any, axes: tuple[str, ...]) -> Any:
        del axes
        return x

    def same(self, x: Any, axes: tuple[str, ...]) -> Any:
        del axes
        return x


def ones(leaf: Any) -> Any:
    return jnp.ones(leaf.shape, leaf.dtype)


def increased(x: Any) -> Any:
    return x + 1


def measure(scale: Scale) -> dict[str, Any]:
    """Milliseconds, and GB/s counting every byte that is read or written."""
    like = Transformer(scale.pick(2, 12), scale.pick(128, 2048)).shapes()
    program = commplan.loads(PLAN).compile(axes={"data": DEVICES}, shapes={"grads": like})
    phase = program.schedule.phase("step")
    platform = "cpu" if jax.devices()[0].platform == "cpu" else "gpu"
    backend = Unconnected(platform, {"data": DEVICES}, "")
    lowered = Lowered(program.schedule, phase, {}, backend, {})
    grads = jax.tree.map(ones, like)
    nbytes = sum(leaf.nbytes for leaf in jax.tree.leaves(grads))

    def through(grads: Any) -> Any:
        out, _ = lowered.run({"grads": flatten(grads)[1]}, {}, None)
        return out["grads"].leaves

    def scaled(grads: Any) -> Any:
        return [leaf / DEVICES for leaf in jax.tree.leaves(grads)]

    block = jnp.ones(scale.pick(2**22, 2**30) // 4, jnp.float32)
    jitted: Mapping[str, Any] = {name: jax.jit(f) for name, f in (("phase", through), ("mean alone", scaled))}
    copy = jax.jit(increased)
    calls = {name: (lambda f=f: f(grads)) for name, f in jitted.items()} | {"copy": lambda: copy(block)}
    took = in_turns(calls, scale.rounds, repeat=scale.pick(1, 5))
    rate = 2 * block.nbytes / median(took["copy"])
    extra = median(took["phase"]) - median(took["mean alone"])
    buckets = sum(isinstance(op, ir.Pack) for op in phase.ops)
    size, traffic = f"{nbytes / 1e6:.0f} MB in {buckets} bucket(s)", extra * rate / nbytes
    return {
        "lines": [
            f"memory: {rate / 1e9:.0f} GB/s, read and written, copying {block.nbytes / 1e6:.0f} MB",
            f"phase but for its collectives: {spread(took['phase'])}, {size}",
            f"mean alone: {spread(took['mean alone'])}",
            f"packing and unpacking: {extra * 1e3:.3f} ms, {traffic:.2f} bytes of traffic a byte",
        ],
        "memory": rate, "nbytes": nbytes, "buckets": buckets, "extra_s": extra,
        "ms": {name: [t * 1e3 for t in times] for name, times in took.items()},
    }  # fmt: skip
