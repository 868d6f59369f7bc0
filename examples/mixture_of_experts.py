"""A mixture of experts on four devices gives the weights that one would: train both ways and compare.

The plan is plans/mixture_of_experts.plan. Each of four devices has one expert and a quarter of the tokens. A
router sends each token to its best expert, as long as that one has room for it (Switch Transformer, Fedus et
al. 2021): tokens are laid out in one block for each expert, swapped, worked on, and swapped back. The
backward pass is that of JAX: the gradient of a swap is a swap. The same network is trained on one device with
all tokens and all experts.

    python examples/mixture_of_experts.py [--steps 20] [--room 8] [--seed 0]
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

PLAN = Path(__file__).parent / "plans" / "mixture_of_experts.plan"
EXPERTS, WIDTH, TOKENS, RATE = 4, 16, 24, 0.1  # tokens of one rank
LIMIT = 1e-5


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare a mixture of four experts with one device.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--room", type=int, default=8, help="tokens of one rank that an expert takes (8)")
    parser.add_argument("--seed", type=int, default=0)
    devices.add_option(parser)
    options = parser.parse_args(argv)
    if options.room < 1:
        parser.error(f"--room is at least 1, found {options.room}")
    devices.exact_products()
    chosen = devices.choose(options.device, EXPERTS)

    weights = init(options.seed)
    batches = [batch(options.seed, step) for step in range(options.steps)]
    shared, shared_loss = on_devices(chosen, weights, batches, options.room)
    single, single_loss = train_on_one_device(weights, batches, options.room)
    pairs = zip(jax.tree.leaves(shared), jax.tree.leaves(single), strict=True)
    gap = max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in pairs)
    print(f"{options.steps} steps, {EXPERTS} x {TOKENS} tokens, room for {options.room} of each rank")
    print(f"{EXPERTS} experts through the plan: loss {shared_loss:.6f}")
    print(f"1 device:                   loss {single_loss:.6f}")
    print(f"largest difference between the weights: {gap:.2e} (limit {LIMIT:.0e})")
    if not gap <= LIMIT:
        sys.exit("the weights differ by more than that")


def init(seed: int) -> dict[str, Any]:
    """experts: f32[EXPERTS, WIDTH, WIDTH], one for each rank. router: f32[WIDTH, EXPERTS], everyone's."""
    experts, router = jax.random.split(jax.random.key(seed))
    shape = (EXPERTS, WIDTH, WIDTH)
    return {
        "experts": jax.random.normal(experts, shape) / np.sqrt(WIDTH),
        "router": jax.random.normal(router, (WIDTH, EXPERTS)) / np.sqrt(WIDTH),
    }


def batch(seed: int, step: int) -> tuple[Any, Any]:
    """Random tokens and their targets, f32[EXPERTS, TOKENS, WIDTH] each, one row for each rank."""
    x = jax.random.normal(jax.random.key(1000 * seed + step + 1), (EXPERTS, TOKENS, WIDTH))
    return x, jnp.where(x[..., :1] > 0, jnp.sin(x), jnp.cos(x))


def route(router: Any, x: Any, room: int) -> tuple[Any, Any]:
    """Choose an expert for each token of one rank, x: f32[TOKENS, WIDTH].

    Returns the assignment, bool[TOKENS, EXPERTS, room], and the gate of each token, f32[TOKENS]. A token
    whose expert is full is not assigned.
    """
    odds = jax.nn.softmax(x @ router)
    best = jax.nn.one_hot(jnp.argmax(odds, axis=1), EXPERTS)
    place = (jnp.cumsum(best, axis=0) - 1.0) * best  # how many tokens before it chose the same expert
    seat = jax.nn.one_hot(place.sum(axis=1).astype(jnp.int32), room)  # none beyond the room
    return best[:, :, None] * seat[:, None, :], (odds * best).sum(axis=1)


def expert(weight: Any, x: Any) -> Any:
    return jnp.tanh(x @ weight)


def error(answers: Any, x: Any, target: Any, gate: Any) -> Any:
    """Mean square error of x + gate * answer, over one rank's tokens."""
    return jnp.mean((x + gate[:, None] * answers - target) ** 2)


def on_devices(
    chosen: list[Any], weights: Any, batches: list[tuple[Any, Any]], room: int
) -> tuple[Any, float]:
    """Final weights and the last loss, with one expert per device."""
    mesh = jax.make_mesh((EXPERTS,), ("expert",), devices=chosen)
    block = jax.ShapeDtypeStruct((EXPERTS * room, WIDTH), jnp.float32)
    router = jax.ShapeDtypeStruct((WIDTH, EXPERTS), jnp.float32)
    shapes = {"tokens": block, "answers": block, "router": router}
    run = commplan.load(PLAN).compile(mesh, shapes=shapes).bind(mesh)

    def loss(weight: Any, router: Any, x: Any, target: Any) -> Any:
        """Of this rank's tokens; `weight` is this rank's expert."""
        where, gate = route(router, x, room)
        blocks = jnp.einsum("ter,tw->erw", where, x).reshape(EXPERTS * room, WIDTH)
        arrived = run.dispatch({}, tokens=blocks)[0].arrived
        returned = run.combine({}, answers=expert(weight, arrived))[0].returned
        answers = jnp.einsum("ter,erw->tw", where, returned.reshape(EXPERTS, room, WIDTH))
        return error(answers, x, target, gate)

    @jax.jit
    @run.spmd(weight="per expert", router="same", x="per expert", target="per expert",
              returns=("per expert", "same", "loss"))  # fmt: skip
    def train(state: Any, weight: Any, router: Any, x: Any, target: Any) -> Any:
        value, grads = jax.value_and_grad(loss, (0, 1))(weight, run.varying(router), x, target)
        out, state = run.step(state, router=grads[1], loss=value)
        return state, weight - RATE * grads[0] / EXPERTS, router - RATE * out.router, out.loss

    state, weight, router, value = run.init(), weights["experts"], weights["router"], jnp.zeros(())
    for x, target in batches:
        state, weight, router, value = train(state, weight, router, x, target)
    return {"experts": weight, "router": router}, float(value)


def train_on_one_device(weights: Any, batches: list[tuple[Any, Any]], room: int) -> tuple[Any, float]:
    """The same on one device."""

    def loss(weights: Any, x: Any, target: Any) -> Any:
        def of_rank(x: Any, target: Any) -> Any:
            where, gate = route(weights["router"], x, room)
            blocks = jnp.einsum("ter,tw->erw", where, x)
            answers = jnp.einsum("ter,erw->tw", where, jax.vmap(expert)(weights["experts"], blocks))
            return error(answers, x, target, gate)

        return jnp.mean(jax.vmap(of_rank)(x, target))

    @jax.jit
    def train(weights: Any, x: Any, target: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(weights, x, target)
        return {name: weight - RATE * grads[name] for name, weight in weights.items()}, value

    value = jnp.zeros(())
    for x, target in batches:
        weights, value = train(weights, x, target)
    return weights, float(value)


if __name__ == "__main__":
    main()
