"""Measure on one device how long one rank of a training step computes until its gradients are ready."""

from __future__ import annotations

import statistics
import time
from datetime import date
from typing import Any

import jax
import jax.numpy as jnp

from commplan.cost.schedule.step_profile import GradientTime, StepProfile
from commplan.lowering.jax.gradient_times import GradientTimes

FEWEST_RUNS = 3  # Runs that are measured even if no time remains.
_SCALE = 0.02  # The standard deviation of random arguments: small, like initial weights.


def measure_step(times: GradientTimes, *, seconds: float) -> StepProfile:
    """The profile of a step on JAX's default device.

    One rank runs without its peers, from its arguments to the gradients. Collectives, the optimizer and all
    other operations on which no gradient depends are omitted. Float arguments are small random numbers, keys
    are random, and other arguments are 0.

    Args:
        times: The step, with the share of its operations before each gradient.
        seconds: About how long to measure, after compilation.

    Returns:
        The measured profile, with times in seconds: the median duration, and the share of it for each
        gradient.
    """
    arguments = [_argument(aval, number) for number, aval in enumerate(times.arguments)]
    step = jax.jit(times.evaluate)
    jax.block_until_ready(step(*arguments))
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while len(durations) < FEWEST_RUNS or time.perf_counter() < end:
        started = time.perf_counter()
        jax.block_until_ready(step(*arguments))
        durations.append(time.perf_counter() - started)
    median = statistics.median(durations)
    leaves = tuple(GradientTime(name, path, share * median) for name, path, share in times.shares)
    method = f"median of {len(durations)} runs of one rank alone on one device, without collectives and "
    method += "optimizer; gradients in proportion to the operations of the products before them"
    device = jax.devices()[0].device_kind
    return StepProfile(date.today().isoformat(), device, median, 0.0, method, leaves)


def _argument(aval: Any, number: int) -> Any:
    """An array of the JAX type `aval`; `number` is the seed."""
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(number), aval.shape) if aval.shape else jax.random.key(number)
    if jnp.issubdtype(aval.dtype, jnp.floating):
        return _SCALE * jax.random.normal(jax.random.key(number), aval.shape, aval.dtype)
    return jnp.zeros(aval.shape, aval.dtype)
