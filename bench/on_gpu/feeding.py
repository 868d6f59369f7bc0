"""Batches from the host's memory to the device: the bus, a plan's batches, and these under a step."""

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

ROW = 224 * 224 * 3
PLAN = """plan feeding
axis data = ?
source images : u8[{row}]
each step {{
    pixels = load images batch {batch} split data visit exactly_once seed 3 {{ cores = {cores} }}
    output pixels
}}
"""


def measure(scale: Scale) -> dict[str, Any]:
    """Bytes a second of batches of u8 [rows, 150528], 77 MB each for a device."""
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    rows = scale.pick(16, 512) * mesh.size
    records = np.random.default_rng(0).integers(0, 256, (4 * rows, ROW), np.uint8)
    lay = NamedSharding(mesh, P("data"))
    bus = _bus(records, rows, lay, scale)
    batches = scale.pick(6, 40)
    with _plan(mesh, records, rows, scale).batches() as made:
        feed = itertools.chain.from_iterable(itertools.repeat(made))
        alone = _rate(feed, batches, rows, None)
        step = _step(rows, lay, scale, rows * ROW / bus["pinned"])
        x = next(iter(feed))["pixels"]
        alone_step = median(in_turns({"step": lambda: step(x)}, scale.rounds)["step"])
        under = _rate(feed, batches, rows, step)
    limit = max(alone_step, rows * ROW / max(bus.values()))
    took = rows * ROW / under
    lines = [f"bus, from {name} memory: {rate / 1e9:.2f} GB/s" for name, rate in bus.items()]
    lines += [
        f"plan's batches alone: {alone / 1e9:.2f} GB/s",
        f"step by itself: {alone_step * 1e3:.2f} ms; the longer of it and the bus: {limit * 1e3:.2f} ms",
        f"step fed by the plan: {took * 1e3:.2f} ms, {under / 1e9:.2f} GB/s meanwhile",
    ]
    return {"lines": lines, "bus": bus, "alone": alone, "under": under, "step_s": alone_step, "fed_s": took}


def _bus(records: Any, rows: int, lay: NamedSharding, scale: Scale) -> dict[str, float]:
    """Transfers of whole batches, one after another, and two at a time from pinned memory."""
    source = records[:rows]
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


def _plan(mesh: Mesh, records: Any, rows: int, scale: Scale) -> Any:
    text = PLAN.format(row=ROW, batch=rows, cores=scale.pick(1, 4))
    return commplan.loads(text).compile(mesh).bind(mesh, sources={"images": records})


def _rate(feed: Iterator[Any], batches: int, rows: int, step: Any) -> float:
    """Bytes a second; with a step, which is run on each batch while the next one is made."""
    jax.block_until_ready(next(feed)["pixels"])
    start, result = time.perf_counter(), None
    for item in itertools.islice(feed, batches):
        result = step(item["pixels"]) if step else jax.block_until_ready(item["pixels"])
    jax.block_until_ready(result)
    return batches * rows * ROW / (time.perf_counter() - start)


def _step(rows: int, lay: NamedSharding, scale: Scale, transfer_s: float) -> Any:
    """A jitted step on a batch that takes about as long as the bus takes to bring one."""
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

    x = jax.device_put(np.zeros((rows, ROW), np.uint8), lay)
    probe = times(16)
    once = median(in_turns({"probe": lambda: probe(x)}, 3)["probe"]) / 16
    return times(max(1, int(transfer_s / once)))
