"""Peak memory and collectives of steps with sharded weights: by hand, by GSPMD, and through a plan.

    JAX_PLATFORMS=cpu python -m bench.compiled.sharded
    JAX_PLATFORMS=cpu python -m bench.compiled.sharded --on h100 --layers 12 --width 2048 --length 1024

A transformer (bf16, tied embedding, Adam) on eight devices, compiled and not run: for CPU devices, or ahead
of time for 8 H100, which needs no GPU, only JAX's compiler for them (the environment that `make audit`
makes).

- data parallel: every rank has all weights and all of Adam's state, and sums gradients leaf by leaf.
- GSPMD: `jit` of the same model with weights, state and batch cut along `data`, and activations held to that.
- by hand: `lax.all_gather` of each leaf before a layer uses it, in a `shard_map`; JAX's derivative.
- by hand, again: the same under a `jax.checkpoint` that does not keep the gathered weights.
- plan: `run.layers`, one and two layers ahead. plan, scanned: `run.scan_layers`; again: of a
  `jax.checkpoint(block)`.

Columns: megabytes of temporary memory and of arguments (weights and state); the sum of both, against the sum
of arguments, the shards' gradient, activations and the two largest layers gathered one after the other;
collectives in the text of the compiled step (a loop's body once), instructions. Activations are the temporary
memory of the loss and its gradient on one device, without a stored gradient. For H100 also milliseconds of
the step and of its waits for communication, as `commplan.lowering.gpu.estimate` estimates them for 600
Tflop/s, 2.5 TB/s of memory and a bus bandwidth of 300 GB/s. It does not know loop counts and cannot read
GSPMD's groups: those steps have no estimate.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from bench.compiled.models import HEAD, Transformer, attention, feed_forward, next_token_loss, norm
from bench.harness.arguments import program_parser
from commplan.lowering.audit import Machine, audit_text, target
from commplan.lowering.gpu.estimate import estimate
from commplan.lowering.jax.aot import devices

RANKS = 8
PLAN = """\
plan sharded_weights

axis data = 8

input weights : tree split data
input grads   : tree partial data

each step {{
    whole = gather weights over data {{ prefetch = {prefetch} }}
    grads = scatter grads over data by mean
    output whole, grads
}}
"""
KINDS = ("all-gather", "reduce-scatter", "all-reduce")
Tree = Any


def block(layer: Tree, given: tuple[Any, Any]) -> tuple[Any, Any]:
    x, tokens = given
    x = attention(x, layer)
    return x + feed_forward(norm(x, layer["d_norm"]), layer), tokens


def embedded(embed: Any, tokens: Any) -> tuple[Any, Any]:
    return embed[tokens], tokens


def head(embed: Any, given: tuple[Any, Any]) -> Any:
    return next_token_loss(given[0], embed, given[1])


def loss(params: Tree, tokens: Any) -> Any:
    x = embedded(params["embed"], tokens)
    for layer in params["blocks"]:
        x = block(layer, x)
    return head(params["embed"], x)


def adam(params: Tree, moments: Tree, grads: Tree) -> tuple[Tree, Tree]:
    """Adam without its corrections of the first steps; moments in the dtype of the weights."""

    def mean(m: Any, g: Any) -> Any:
        return (0.9 * m + 0.1 * g).astype(m.dtype)

    def square(v: Any, g: Any) -> Any:
        return (0.999 * v + 0.001 * g * g).astype(v.dtype)

    def update(p: Any, m: Any, v: Any) -> Any:
        return (p - 1e-3 * m / (jnp.sqrt(v) + 1e-8)).astype(p.dtype)

    first, second = jax.tree.map(mean, moments[0], grads), jax.tree.map(square, moments[1], grads)
    return jax.tree.map(update, params, first, second), (first, second)


def summed(params: Tree, tokens: Any) -> Any:
    """The loss and its gradient without storing them: the temporary memory is that of activations."""
    value, grads = jax.value_and_grad(loss)(params, tokens)
    return value, jax.tree.map(jnp.sum, grads)


def trained(gradient: Callable[[Tree, Any], Tree]) -> Callable[..., Any]:
    def train(params: Tree, moments: Tree, tokens: Any) -> Any:
        return adam(params, moments, gradient(params, tokens))

    return train


def data_parallel(mesh: Mesh) -> Callable[..., Any]:
    def gradient(params: Tree, tokens: Any) -> Tree:
        grads = jax.grad(loss)(jax.tree.map(varying, params), tokens)
        return jax.tree.map(mean, grads)

    def varying(p: Any) -> Any:
        return lax.pcast(p, "data", to="varying")

    def mean(g: Any) -> Any:
        return lax.pmean(g, "data")

    return jax.shard_map(trained(gradient), mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P())


def gspmd(mesh: Mesh) -> Callable[..., Any]:
    def held(given: tuple[Any, Any]) -> tuple[Any, Any]:
        cut = NamedSharding(mesh, P("data"))
        return lax.with_sharding_constraint(given[0], cut), given[1]

    def own(params: Tree, tokens: Any) -> Any:
        x = held(embedded(params["embed"], tokens))
        for layer in params["blocks"]:
            x = held(block(layer, x))
        return head(params["embed"], x)

    return trained(jax.grad(own))


def by_hand(mesh: Mesh, like: Tree, *, twice: bool) -> Callable[..., Any]:
    """`lax.all_gather` before a layer needs it; its derivative is a reduce-scatter."""

    def whole(shards: Tree, shape: Tree) -> Tree:
        def leaf(shard: Any, kind: Any) -> Any:
            return lax.all_gather(shard, "data", tiled=True)[: kind.size].reshape(kind.shape)

        return jax.tree.map(leaf, shards, shape)

    def kept(primitive: Any, *_: Any, **__: Any) -> bool:
        return str(primitive) not in ("all_gather", "reshape", "slice", "transpose", "convert_element_type")

    def layer(body: Callable[..., Any], shape: Tree) -> Callable[..., Any]:
        def run(shards: Tree, x: Any) -> Any:
            return body(whole(shards, shape), x)

        return jax.checkpoint(run, policy=kept) if twice else run

    def own(shards: Tree, tokens: Any) -> Any:
        x = layer(embedded, like["embed"])(shards["embed"], tokens)
        for shard, shape in zip(shards["blocks"], like["blocks"], strict=True):
            x = layer(block, shape)(shard, x)
        return layer(head, like["embed"])(shards["embed"], x) / RANKS

    return jax.shard_map(
        trained(jax.grad(own)), mesh=mesh, in_specs=(P("data"), P("data"), P("data")), out_specs=P("data")
    )


def planned(
    mesh: Mesh, like: Tree, prefetch: int, *, scanned: bool = False, body: Any = block
) -> Callable[..., Any]:
    program = commplan.loads(PLAN.format(prefetch=prefetch)).compile(
        mesh, shapes={"weights": like, "grads": like}
    )
    run = program.bind(mesh)

    def own(shards: Tree, tokens: Any) -> Any:
        if not scanned:
            bodies = [embedded, *(body for _ in shards["blocks"]), head]
            return run.layers(bodies, [shards["embed"], *shards["blocks"], shards["embed"]], tokens)
        x = run.layer(embedded, shards["embed"], tokens)
        return run.layer(head, shards["embed"], run.scan_layers(body, shards["blocks"], x))

    @run.spmd(params="split data", moments="split data", tokens="split data")
    def step(state: Tree, params: Tree, moments: Tree, tokens: Any) -> Any:
        return state, *trained(jax.grad(own))(params, moments, tokens)

    return lambda *args: step({}, *args)[1:]


def cut(tree: Tree, *, stacked: bool = False) -> Tree:
    """The shards of all ranks: flat, padded."""

    def leaf(kind: Any) -> Any:
        return jax.ShapeDtypeStruct((RANKS * -(-kind.size // RANKS),), kind.dtype)

    cuts = jax.tree.map(leaf, tree)
    if not stacked:
        return cuts
    rows = RANKS * len(cuts["blocks"])

    def stack(kind: Any) -> Any:
        return jax.ShapeDtypeStruct((rows, kind.shape[0] // RANKS), kind.dtype)

    return {"embed": cuts["embed"], "blocks": jax.tree.map(stack, cuts["blocks"][0])}


def nbytes(tree: Tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def compiled(step: Callable[..., Any], *arguments: Any, donate: Sequence[int] = (0, 1)) -> Any:
    return jax.jit(step, donate_argnums=tuple(donate)).lower(*arguments).compile()


def main() -> None:
    parser = program_parser("compiled.sharded", __doc__)
    parser.add_argument("--on", choices=("cpu", "h100"), default="cpu")
    defaults = {"layers": 4, "width": 256, "rows": 2, "length": 128}
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    if options.width % HEAD:
        parser.error(f"--width {options.width} is not a multiple of {HEAD}, the width of an attention head")
    if options.on == "cpu":
        jax.config.update("jax_num_cpu_devices", RANKS)
        own = np.array(jax.devices())
    else:
        own = np.array(devices(target("h100:1x8"))).reshape(-1)
    mesh = Mesh(own, ("data",), axis_types=(AxisType.Auto,))
    model = Transformer(options.layers, options.width, options.rows, options.length)
    embed, *blocks = model.shapes().values()
    like = {"embed": embed, "blocks": blocks}
    row = model.batch()["tokens"]
    tokens = jax.ShapeDtypeStruct((RANKS * options.rows, options.length), "int32")

    def placed(tree: Tree, spec: Any, where: Any = mesh) -> Tree:
        def leaf(kind: Any) -> Any:
            return jax.ShapeDtypeStruct(kind.shape, kind.dtype, sharding=NamedSharding(where, spec))

        return jax.tree.map(leaf, tree)

    def arguments(tree: Tree, spec: Any) -> tuple[Any, ...]:
        return placed(tree, spec), placed((tree, tree), spec), placed(tokens, P("data"))

    cuts, stack = arguments(cut(like), P("data")), arguments(cut(like, stacked=True), P("data"))
    steps: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "data parallel": (data_parallel(mesh), arguments(like, P())),
        "GSPMD": (gspmd(mesh), arguments(like, P("data"))),
        "by hand": (by_hand(mesh, like, twice=False), cuts),
        "by hand, again": (by_hand(mesh, like, twice=True), cuts),
        "plan": (planned(mesh, like, 1), cuts),
        "plan, 2 ahead": (planned(mesh, like, 2), cuts),
        "plan, scanned": (planned(mesh, like, 1, scanned=True), stack),
        "plan, scanned, again": (planned(mesh, like, 1, scanned=True, body=jax.checkpoint(block)), stack),
    }
    alone = Mesh(own[:1], ("data",), axis_types=(AxisType.Auto,))
    single = compiled(summed, placed(like, P(), alone), placed(row, P(), alone), donate=())
    activations = single.memory_analysis().temp_size_in_bytes
    whole, layer = nbytes(embed), nbytes(blocks[0])
    two = max(whole + layer, 2 * layer)
    print(f"activations {activations / 1e6:.1f} MB, embedding {whole / 1e6:.1f}, a layer {layer / 1e6:.1f}")
    heads = ("temp", "args", "of sum", "gathers", "scatters", "reduces", "ops", "ms", "waiting")
    print(f"{'':22}" + "".join(f"{name:>9}" for name in heads[: 7 if options.on == "cpu" else 9]))
    for name, (step, given) in steps.items():
        result = compiled(step, *given)
        memory, text = result.memory_analysis(), result.as_text()
        temp, args = memory.temp_size_in_bytes, memory.argument_size_in_bytes
        share = (temp + args) / (args + nbytes(cut(like)) / RANKS + activations + two)
        counts = [len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in KINDS]
        counts.append(len(re.findall(r"^  (?:ROOT )?%", text, re.MULTILINE)))
        line = f"{name:22}{temp / 1e6:9.1f}{args / 1e6:9.1f}{share:9.2f}" + "".join(f"{n:9}" for n in counts)
        if options.on == "h100" and "scanned" not in name and name != "GSPMD":
            guess = estimate(audit_text(text), Machine(flops=6e14, memory=2.5e12, bus=3e11))
            line += f"{guess.total * 1e3:9.2f}{guess.exposed * 1e3:9.2f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
