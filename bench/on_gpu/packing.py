"""The memory traffic of a bucketed reduction on the device, in bytes for each byte of gradients.

The step of one of eight ranks without its collectives: with gradients packed into buffers (`jax.jit`), with
unpacked arrays (`run.jit` on GPUs), and with a 16-bit wire, compared with the division of the mean alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from bench.compiled.models import Transformer
from bench.on_gpu.findings import Findings
from bench.on_gpu.scale import Scale
from bench.on_gpu.timing import Seconds, in_turns, median, spread
from bench.on_gpu.unconnected import RANKS, nbytes, phases, random_tree, with_dtype

COPY, MEAN = "copy", "mean alone"


def measure(scale: Scale, findings: Findings) -> None:
    """Seconds, and bytes of traffic for each byte, by dtype of the gradients and way."""
    model = Transformer(scale.pick(1, 12), scale.pick(128, 2048))
    block = random_tree(jax.ShapeDtypeStruct((scale.pick(2**20, 2**28),), jnp.float32))
    copy = jax.jit(increased)
    ways: dict[str, Any] = {}
    for dtype in ("bfloat16", "float32"):
        like = with_dtype(model.shapes(), dtype)
        grads = random_tree(like)
        functions: dict[str, Callable[[Any], Any]] = {MEAN: mean} | phases(like, dtype)
        calls = {name: partial(jax.jit(function), grads) for name, function in functions.items()}
        calls[COPY] = partial(copy, block)
        lines = partial(_lines, dtype, nbytes(grads), 2 * block.nbytes)

        def progress(times: Seconds, lines: Any = lines) -> None:
            findings.progress(lines(times))

        times = in_turns(calls, scale.rounds, progress=progress)
        ways[dtype] = _figures(nbytes(grads), 2 * block.nbytes, times)
        findings.add(*lines(times), ways=ways)


def increased(x: Any) -> Any:
    return x + 1


def mean(grads: Any) -> Any:
    def divided(x: Any) -> Any:
        return x / RANKS

    return jax.tree.map(divided, grads)


def _figures(size: int, copied: int, times: Seconds) -> dict[str, Any]:
    rate = copied / median(times[COPY])
    traffic = {name: median(each) * rate / size for name, each in times.items() if name != COPY}
    return {"seconds": times, "memory": rate, "nbytes": size, "traffic": traffic}


def _lines(dtype: str, size: int, copied: int, times: Seconds) -> list[str]:
    if not all(times.values()):
        return [f"{dtype}: {len(times)} function(s) compiled"]
    figures = _figures(size, copied, times)
    first = f"{dtype}: {size / 1e6:.0f} MB of gradients; memory {figures['memory'] / 1e9:.0f} GB/s"
    return [first] + [
        f"{dtype}, {name:20} {spread(times[name])}, {traffic:.2f} bytes of traffic a byte"
        for name, traffic in figures["traffic"].items()
    ]
