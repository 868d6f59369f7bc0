"""The training step of one of eight devices without its network: the fusions of XLA that a plan prevents.

Each variant is the same transformer step with a barrier instead of every collective, compared with the step
that reduces nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.compiled import models
from bench.compiled.models import Transformer
from bench.compiled.ways import sgd
from bench.on_gpu import tax
from bench.on_gpu.findings import Findings
from bench.on_gpu.scale import Scale
from bench.on_gpu.timing import Seconds, in_turns, median, spread
from bench.on_gpu.unconnected import phases, random_tree

ALONE = "no reduction"


def measure(scale: Scale, findings: Findings) -> None:
    """Milliseconds a step, bf16, of 6 layers 2048 wide with 8 x 1024 tokens."""
    model = Transformer(scale.pick(1, 6), scale.pick(128, 2048), scale.pick(1, 8), scale.pick(32, 1024))
    like = model.shapes()
    rng = np.random.default_rng(1)
    tokens = jnp.asarray(rng.integers(0, models.VOCABULARY, (model.rows, model.length)), jnp.int32)
    reductions: dict[str, Callable[[Any], Any]] = {ALONE: lambda grads: grads}
    reductions |= {name: way for name, way in phases(like, "bfloat16").items() if name != "25 MiB, packed"}
    calls = {name: _training(model, reduced, like, tokens) for name, reduced in reductions.items()}
    times = in_turns(calls, scale.rounds, repeat=3, progress=lambda times: findings.progress(_lines(times)))
    findings.add(*_lines(times), seconds=times)


def _training(model: Transformer, reduced: Callable[[Any], Any], like: Any, tokens: Any) -> Callable[[], Any]:
    """A function that makes one step with donated weights."""

    def train(params: Any) -> Any:
        return sgd(params, reduced(tax.gradients(model, params, tokens)))

    step, held = jax.jit(train, donate_argnums=0), [random_tree(like)]

    def call() -> Any:
        held[0] = step(held[0])
        return held[0]

    return call


def _lines(times: Seconds) -> list[str]:
    if not all(times.values()):
        return [f"{len(times)} step(s) compiled"]
    base = median(times[ALONE])
    return [f"{name:24} {spread(each)}, {median(each) / base - 1:+.2%}" for name, each in times.items()]
