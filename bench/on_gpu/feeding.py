"""Batches from the host's memory to the device: the bus, a plan's batches, and these under a step.

With and without `device_prefetch`, which starts copies under the step before, from registered memory. The
bytes on the device are compared with the host's.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from bench.on_gpu.findings import Findings
from bench.on_gpu.rows import device_sums, host_sums, numbered, wrong_rows
from bench.on_gpu.scale import Scale
from bench.on_gpu.timing import in_turns, median

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


def measure(scale: Scale, findings: Findings) -> None:
    """Bytes a second of batches of 77 MB for each device: of 512 images, which cost the interpreter time to
    read, and of 16 blocks, for which only bytes count.

    Raises:
        AssertionError: if bytes on the device differ from the host's.
    """
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    images = scale.pick(32, 512) * mesh.size
    pixels = numbered(np.random.default_rng(0).integers(0, 256, (images, IMAGE), np.uint8))
    sharding = NamedSharding(mesh, P("data"))
    bus, wrong_copies = _bus(pixels, sharding, scale)
    step = _step(pixels, sharding, scale, pixels.nbytes / bus["pinned"])
    x = jax.device_put(pixels, sharding)
    alone = median(in_turns({"step": lambda: step(x)}, scale.rounds)["step"])
    best = max(bus.values())
    findings.add(
        *(f"bus, from {name} memory: {rate / 1e9:.2f} GB/s" for name, rate in bus.items()),
        f"step by itself: {alone * 1e3:.2f} ms; a batch on the bus: {pixels.nbytes / best * 1e3:.2f} ms",
        bus=bus, step_s=alone, nbytes=pixels.nbytes, wrong_copies=wrong_copies,
    )  # fmt: skip
    rates: dict[str, dict[str, float]] = {}
    for name, row in (("images", IMAGE), ("blocks", BLOCK)):
        for ahead in (0, 1, 2):
            rate = _fed(mesh, pixels.reshape(-1, row), ahead, step, scale)
            rates[f"{name} {ahead}"] = rate
            under, megabytes = rate["under"], rate["registered"] / 1e6
            findings.add(
                f"{name}, device_prefetch = {ahead}: alone {rate['alone'] / 1e9:.2f} GB/s, under the step"
                f" {under / 1e9:.2f}, {under / best:.0%} of the bus, {pixels.nbytes / under * 1e3:.2f} ms a"
                f" step; {megabytes:.0f} MB registered; {rate['wrong']:.0f} of {rate['rows']:.0f} rows wrong",
                rates=rates,
            )
    if wrong_copies or any(rate["wrong"] for rate in rates.values()):
        raise AssertionError("bytes on the device are not the host's")


def _fed(mesh: Mesh, rows: Any, ahead: int, step: Any, scale: Scale) -> dict[str, float]:
    """Bytes a second of the plan's batches, alone and under `step`, registered bytes, and the number of wrong
    rows in two more batches."""
    batches = scale.pick(4, 40)
    hint = f", device_prefetch = {ahead}" if ahead else ""
    text = PLAN.format(row=rows.shape[1], batch=len(rows), cores=scale.pick(1, 8), ahead=hint)
    program = commplan.loads(text).compile(mesh)
    run = program.bind(mesh, sources={"records": Records(rows, 2 * (batches + 2) * len(rows))})
    with run.batches() as batch_iterator:
        feed = iter(batch_iterator)
        alone, under = (_rate(feed, batches, rows.nbytes, work) for work in (None, step))
        sums = [device_sums(item["pixels"]) for item in feed]
        registered = registered_bytes(run, ahead)
    wrong, checked = wrong_rows(host_sums(rows), sums), sum(len(numbers) for numbers, _ in sums)
    return {"alone": alone, "under": under, "registered": registered, "wrong": wrong, "rows": checked}


def registered_bytes(run: Any, ahead: int) -> int:
    """Bytes of the host's memory that are registered with the device, for `device_prefetch = ahead`."""
    pinning = run.context.machine.input.pinning() if ahead else None
    return 0 if pinning is None else int(pinning.nbytes)


def _bus(source: Any, sharding: NamedSharding, scale: Scale) -> tuple[dict[str, float], int]:
    """Bytes a second of transfers of whole batches, four on their way at a time, and how many kinds of memory
    gave other bytes."""
    calls = {"pageable": lambda: jax.device_put(source, sharding, may_alias=False)}
    try:
        pinned = jax.block_until_ready(jax.device_put(source, sharding.with_memory_kind("pinned_host")))
        calls["pinned"] = lambda: jax.device_put(pinned, sharding.with_memory_kind("device"))
        jax.block_until_ready(calls["pinned"]())
    except Exception:  # noqa: BLE001  a version or device without it
        calls.pop("pinned", None)
    times = in_turns(calls, scale.rounds)
    wrong = sum(not np.array_equal(np.asarray(call()), source) for call in calls.values())
    rates = {name: source.nbytes / median(each) for name, each in times.items()}
    return {"pinned": rates["pageable"]} | rates, wrong


def _rate(feed: Iterator[Any], batches: int, nbytes: int, step: Any) -> float:
    """Bytes a second; with a step, which is run on each batch while the next one is made."""
    first = next(feed)["pixels"]
    jax.block_until_ready(step(first) if step else first)
    start, result = time.perf_counter(), None
    for item in itertools.islice(feed, batches):
        result = step(item["pixels"]) if step else jax.block_until_ready(item["pixels"])
    jax.block_until_ready(result)
    return batches * nbytes / (time.perf_counter() - start)


def _step(source: Any, sharding: NamedSharding, scale: Scale, transfer_s: float) -> Any:
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

    x = jax.device_put(source, sharding)
    probe = times(16)
    once = median(in_turns({"probe": lambda: probe(x)}, 3)["probe"]) / 16
    return times(max(1, int(transfer_s / once)))
