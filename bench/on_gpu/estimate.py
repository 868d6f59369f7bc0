"""The audit's estimate of computation, compared with the time that the step takes."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.compiled.models import Moves, ResNet50, Transformer
from bench.compiled.ways import sgd
from bench.on_gpu.findings import Findings
from bench.on_gpu.scale import Scale
from bench.on_gpu.timing import in_turns, median, spread
from bench.on_gpu.unconnected import nbytes, random_tree
from commplan.lowering.audit import audit_text, target
from commplan.lowering.gpu.estimate import estimate
from commplan.lowering.gpu.targets import rates_of_kind

Model = Transformer | ResNet50


def measure(scale: Scale, findings: Findings) -> None:
    """Milliseconds of a step without communication: measured, and estimated from its compiled text."""
    kind = jax.devices()[0].device_kind
    rates = rates_of_kind(kind, 1, 1)
    if rates is None:
        findings.add(f"there are no rates for {kind}: estimated for an H100")
        rates = target("h100").machine
    transformer = Transformer(
        scale.pick(1, 12), scale.pick(128, 2048), scale.pick(1, 8), scale.pick(32, 1024)
    )
    steps: dict[str, Any] = {}
    for name, model in (
        ("transformer", transformer),
        ("ResNet-50", ResNet50(scale.pick(2, 64), scale.pick(32, 224), scale.pick(1, 4))),
    ):
        train, params = training(model), random_tree(model.shapes())
        begun = time.perf_counter()
        compiled = jax.jit(train).lower(params).compile()
        compile_s = time.perf_counter() - begun
        findings.progress([f"{name}: compiled in {compile_s:.0f} s"])
        times = in_turns({"step": partial(compiled, params)}, scale.rounds, repeat=2)["step"]
        estimated = estimate(audit_text(compiled.as_text() or ""), rates).total
        steps[name] = {"seconds": times, "estimate": estimated, "compile": compile_s}
        error = estimated / median(times) - 1
        line = f"{name}: {spread(times)}, estimated {estimated * 1e3:.3f} ms ({error:+.0%})"
        lines = [line, _memory(name, compiled, compile_s)]
        if isinstance(model, Transformer):
            rate = flops(model) / median(times) / 1e12
            steps[name]["tflops"] = rate
            lines.append(f"{name}: {rate:.3g} Tflop/s")
        findings.add(*lines, steps=steps)


def training(model: Model) -> Callable[[Any], Any]:
    """One step of gradient descent on a seeded batch, as a function of the parameters."""
    rng = np.random.default_rng(1)
    batch = {
        name: jnp.asarray(rng.integers(0, 1000, leaf.shape), leaf.dtype)
        if leaf.dtype == jnp.int32
        else random_tree(leaf)
        for name, leaf in model.batch().items()
    }

    def loss(params: Any) -> Any:
        return model.loss(params, {}, batch, Moves())

    def train(params: Any) -> Any:
        return sgd(params, jax.grad(loss)(params))

    return train


def flops(model: Transformer) -> float:
    """Operations of a step: 6 for each parameter and token (Kaplan et al. 2020, section 2.1)."""
    parameters = nbytes(model.shapes()) / 2  # bf16
    return 6.0 * parameters * model.rows * model.length


def _memory(name: str, compiled: Any, compile_s: float) -> str:
    analysis = compiled.memory_analysis()
    stats: dict[str, int] = jax.devices()[0].memory_stats() or {}
    temporary, peak = getattr(analysis, "temp_size_in_bytes", 0), stats.get("peak_bytes_in_use", 0)
    return (
        f"{name}: compiled in {compile_s:.0f} s, {temporary / 1e9:.2f} GB temporary by XLA's analysis,"
        f" {peak / 1e9:.2f} GB at the peak"
    )
