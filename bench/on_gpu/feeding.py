"""Batches from the host's memory to the device: the bus, a plan's batches, and these under a step.

With and without `device_prefetch`, by which copies begin under the step before, from registered memory.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from bench.on_gpu.timing import Scale, in_turns, median
from commplan.lowering.jax.typing_shim import jax, jnp, lax

IMAGE = 224 * 224 * 3
BLOCK = 32 * IMAGE
PLAN = """plan feeding
axis data = ?
source records : u8[{row}]
each step {{
    pixels = load records batch {batch} split data visit exactly_once seed 3 {{ cores = {cores}{ahead} }}
    output pixels
}}
"""


class Records:
    """`count` records that repeat the rows of an array."""

    def __init__(self, rows: Any, count: int) -> None:
        self._rows, self._count = rows, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Any:
        return self._rows[number % len(self._rows)]


def measure(scale: Scale) -> dict[str, Any]:
    """Bytes a second of batches of 77 MB for each device: of 512 images, whose reading costs the interpreter
    something each, and of 16 blocks, where bytes alone count."""
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    images = scale.pick(32, 512) * mesh.size
    pixels = np.random.default_rng(0).integers(0, 256, (images, IMAGE), np.uint8)
    lay = NamedSharding(mesh, P("data"))
    bus = _bus(pixels, lay, scale)
    step = _step(pixels, lay, scale, pixels.nbytes / bus["pinned"])
    x = jax.device_put(pixels, lay)
    alone = median(in_turns({"step": lambda: step(x)}, scale.rounds)["step"])
    best = max(bus.values())
    lines = [f"bus, from {name} memory: {rate / 1e9:.2f} GB/s" for name, rate in bus.items()]
    lines.append(
        f"step by itself: {alone * 1e3:.2f} ms; a batch on the bus: {pixels.nbytes / best * 1e3:.2f} ms"
    )
    rates: dict[str, dict[str, float]] = {}
    for name, row in (("images", IMAGE), ("blocks", BLOCK)):
        for ahead in (0, 1, 2):
            rate = _fed(mesh, pixels.reshape(-1, row), ahead, step, scale)
            rates[f"{name} {ahead}"] = rate
            under, megabytes = rate["under"], rate["registered"] / 1e6
            lines.append(
                f"{name}, device_prefetch = {ahead}: alone {rate['alone'] / 1e9:.2f} GB/s, under the step"
                f" {under / 1e9:.2f}, {under / best:.0%} of the bus, {pixels.nbytes / under * 1e3:.2f} ms a"
                f" step; {megabytes:.0f} MB registered"
            )
    return {"lines": lines, "bus": bus, "rates": rates, "step_s": alone, "nbytes": pixels.nbytes}


def _fed(mesh: Mesh, rows: Any, ahead: int, step: Any, scale: Scale) -> dict[str, float]:
    """Bytes a second of the plan's batches, by themselves and under `step`, and bytes that are registered."""
    batches = scale.pick(4, 40)
    hint = f", device_prefetch = {ahead}" if ahead else ""
    text = PLAN.format(row=rows.shape[1], batch=len(rows), cores=scale.pick(1, 8), ahead=hint)
    program = commplan.loads(text).compile(mesh)
    run = program.bind(mesh, sources={"records": Records(rows, 2 * (batches + 2) * len(rows))})
    with run.batches() as batch_iterator:
        feed = iter(batch_iterator)
        alone, under = (_rate(feed, batches, rows.nbytes, work) for work in (None, step))
        pinning = run.context.machine.pinning()
        registered = pinning.nbytes if ahead and pinning is not None else 0
    return {"alone": alone, "under": under, "registered": float(registered)}


def _bus(source: Any, lay: NamedSharding, scale: Scale) -> dict[str, float]:
    """Bytes a second of transfers of whole batches, two on their way at a time."""
    calls = {"pageable": lambda: jax.device_put(source, lay, may_alias=False)}
    try:
        pinned = jax.block_until_ready(jax.device_put(source, lay.with_memory_kind("pinned_host")))
        calls["pinned"] = lambda: jax.device_put(pinned, lay.with_memory_kind("device"))
        jax.block_until_ready(calls["pinned"]())
    except Exception:  # noqa: BLE001  a version or device without it
        calls.pop("pinned", None)
    took = in_turns(calls, scale.rounds, repeat=2)
    rates = {name: source.nbytes / median(times) for name, times in took.items()}
    return {"pinned": rates["pageable"]} | rates


def _rate(feed: Iterator[Any], batches: int, nbytes: int, step: Any) -> float:
    """Bytes a second; with a step, which is run on each batch while the next one is made."""
    first = next(feed)["pixels"]
    jax.block_until_ready(step(first) if step else first)
    start, result = time.perf_counter(), None
    for item in itertools.islice(feed, batches):
        result = step(item["pixels"]) if step else jax.block_until_ready(item["pixels"])
    jax.block_until_ready(result)
    return batches * nbytes / (time.perf_counter() - start)


def _step(source: Any, lay: NamedSharding, scale: Scale, transfer_s: float) -> Any:
    """A jitted step on a batch like `source` that takes about as long as the bus takes to bring one."""
    width = scale.pick(64, 4096)
    weights = jnp.full((width, width), 1e-3, jnp.bfloat16)

    def layer(_: Any, h: Any) -> Any:
        return jnp.tanh(h @ weights)

    def times(count: int) -> Any:
        @jax.jit
        def step(pixels: Any) -> Any:
            x = jnp.full((width, width), pixels.astype(jnp.float32).mean(), jnp.bfloat16)
            return lax.fori_loop(0, count, layer, x)

        return step

    x = jax.device_put(source, lay)
    probe = times(16)
    once = median(in_turns({"probe": lambda: probe(x)}, 3)["probe"]) / 16
    return times(max(1, int(transfer_s / once)))
