"""A pipeline of stages gives the weights that one device would: train both ways and compare.

The plan is plans/pipeline.plan. Each of two devices has half of the layers. A batch is cut into
micro-batches. In every tick each stage runs its layers on one of them and hands the result on, so that with M
micro-batches and S stages a batch takes M + S - 1 ticks (GPipe, Huang et al. 2019). The backward pass is that
of JAX: the gradient of a shift by 1 is a shift by -1. The same network is trained on one device with whole
batches.

    python examples/pipeline.py [--steps 30] [--micro 4] [--seed 0]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import commplan
import devices

PLAN = Path(__file__).parent / "plans" / "pipeline.plan"
STAGES, LAYERS, WIDTH, BATCH, RATE = 2, 2, 32, 64, 0.05
LIMIT = 1e-5


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare a pipeline of two stages with one device.")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--micro", type=int, default=4, help="micro-batches of a batch of 64 (4)")
    parser.add_argument("--seed", type=int, default=0)
    devices.add_option(parser)
    options = parser.parse_args(argv)
    if options.micro < 1 or BATCH % options.micro:
        parser.error(f"--micro is a divisor of {BATCH}, found {options.micro}")
    devices.exact_products()
    chosen = devices.choose(options.device, STAGES)

    weights = init(options.seed)
    batches = [batch(options.seed, step) for step in range(options.steps)]
    piped, piped_loss = in_stages(chosen, weights, batches, options.micro)
    single, single_loss = train_on_one_device(weights, batches)
    gap = float(np.abs(np.asarray(piped) - np.asarray(single)).max())
    print(f"{options.steps} steps, batch {BATCH} in {options.micro} micro-batches")
    print(f"{STAGES} stages through the plan: loss {piped_loss:.6f}")
    print(f"1 device:                  loss {single_loss:.6f}")
    print(f"largest difference between the weights: {gap:.2e} (limit {LIMIT:.0e})")
    if not gap <= LIMIT:
        sys.exit("the weights differ by more than that")


def init(seed: int) -> Any:
    """Weights of all layers, f32[STAGES, LAYERS, WIDTH, WIDTH]: one row of layers for each stage."""
    shape = (STAGES, LAYERS, WIDTH, WIDTH)
    return jax.random.normal(jax.random.key(seed), shape) / np.sqrt(WIDTH)


def batch(seed: int, step: int) -> tuple[Any, Any]:
    """Random inputs and the targets of the network, f32[BATCH, WIDTH] each."""
    x = jax.random.normal(jax.random.key(1000 * seed + step + 1), (BATCH, WIDTH))
    return x, jnp.sin(jnp.roll(x, 1, axis=1))


def layers(weights: Any, x: Any) -> Any:
    """One stage: f32[.., WIDTH] --> f32[.., WIDTH]."""
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return x


def in_stages(
    chosen: list[Any], weights: Any, batches: list[tuple[Any, Any]], micro: int
) -> tuple[Any, float]:
    """Final weights, f32[STAGES, LAYERS, WIDTH, WIDTH], and the last loss of training in stages."""
    mesh = jax.make_mesh((STAGES,), ("stage",), devices=chosen)
    shapes = {"activation": jax.ShapeDtypeStruct((BATCH // micro, WIDTH), jnp.float32)}
    run = commplan.load(PLAN).compile(mesh, shapes=shapes).bind(mesh)
    ticks = micro + STAGES - 1

    def loss(weights: Any, x: Any, target: Any) -> Any:
        """This rank's share of the loss: all of it on the last stage, nothing elsewhere."""
        stage = jax.lax.axis_index("stage")
        parts, targets = x.reshape(micro, -1, WIDTH), target.reshape(micro, -1, WIDTH)

        def tick(arrived: Any, now: Any) -> tuple[Any, Any]:
            new = parts[jnp.minimum(now, micro - 1)]
            outputs = layers(weights, jnp.where(stage == 0, new, arrived))
            out, _ = run.hand_on({}, activation=outputs)
            return out.activation, outputs

        first = run.varying(jnp.zeros((BATCH // micro, WIDTH)))
        _, outputs = jax.lax.scan(tick, first, jnp.arange(ticks))
        error = jnp.mean((outputs[STAGES - 1 :] - targets) ** 2)
        return jnp.where(stage == STAGES - 1, error, 0.0)

    @jax.jit
    @run.spmd(weights="per stage", x="same", target="same", returns=("per stage", "loss"))
    def train(state: Any, weights: Any, x: Any, target: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, run.varying(x), run.varying(target))
        out, _ = run.finish({}, loss=value)
        return state, weights - RATE * grads, out.loss

    state, value = run.init(), jnp.zeros(())
    for x, target in batches:
        state, weights, value = train(state, weights, x, target)
    return weights, float(value)


def train_on_one_device(weights: Any, batches: list[tuple[Any, Any]]) -> tuple[Any, float]:
    """The same on one device."""

    def loss(weights: Any, x: Any, target: Any) -> Any:
        for stage in weights:
            x = layers(stage, x)
        return jnp.mean((x - target) ** 2)

    @jax.jit
    def train(weights: Any, x: Any, target: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x, target)
        return weights - RATE * grads, value

    value = jnp.zeros(())
    for x, target in batches:
        weights, value = train(weights, x, target)
    return weights, float(value)


if __name__ == "__main__":
    main()
