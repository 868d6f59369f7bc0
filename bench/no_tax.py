"""What a plan costs and hides in a compiled H100 step, beside what XLA makes of the same step alone.

    python bench/no_tax.py [--layers 12] [--width 2048] [--rows 8] [--length 1024]

A transformer (bf16, tied embedding, unrolled) on 4 x 8 H100, compiled ahead of time: no GPU is
needed and nothing runs. It needs JAX's compiler for GPUs: the environment that `make audit` makes.
Columns: collectives; megabytes that one rank gives; their share with a matrix product between start
and done; products before the first start; all instructions; milliseconds of the step, and those in
which it waits for communication, as `commplan.lowering.audit.estimate` guesses them for 600 Tflop/s,
2.5 TB/s of memory and a bus bandwidth of 300 and of 100 GB/s.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import commplan
from commplan.lowering.audit import CompiledStep, Machine, audit_text, estimate, target
from commplan.lowering.jax.aot import devices
from commplan.lowering.jax.typing_shim import jax, jnp, lax

PLAN = """\
plan transformer

axis data = 32

input grads : tree partial data

each step {{
    grads = reduce grads over data by mean {{ bucket = {bucket} MiB, overlap = backward{more} }}
    output grads
}}
"""
Tree = Any


def shapes(layers: int, width: int) -> Tree:
    """The parameters: names sort in the order in which the forward pass uses them."""

    def leaf(*dims: int) -> Any:
        return jax.ShapeDtypeStruct(dims, "bfloat16")

    layer = {
        "a_norm": leaf(width), "b_qkv": leaf(width, 3 * width), "c_out": leaf(width, width),
        "d_norm": leaf(width), "e_up": leaf(width, 4 * width), "f_down": leaf(4 * width, width),
    }  # fmt: skip
    return {"embed": leaf(32_768, width)} | {f"layer{i:02}": layer for i in range(layers)}


def norm(x: Any, scale: Any) -> Any:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def loss(params: Tree, tokens: Any) -> Any:
    """Next-token cross-entropy of [rows, length] tokens."""
    x = params["embed"][tokens]
    rows, length, width = x.shape
    mask = jnp.tril(jnp.ones((length, length), bool))
    for name in sorted(set(params) - {"embed"}):
        layer = params[name]
        qkv = (norm(x, layer["a_norm"]) @ layer["b_qkv"]).reshape(rows, length, 3, width // 128, 128)
        q, k, v = (qkv[:, :, i] for i in range(3))
        weights = jnp.einsum("bqhd,bkhd->bhqk", q, k).astype(jnp.float32) / 128**0.5
        weights = jax.nn.softmax(jnp.where(mask, weights, -1e30)).astype(x.dtype)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(rows, length, width) @ layer["c_out"]
        x = x + jax.nn.gelu(norm(x, layer["d_norm"]) @ layer["e_up"]) @ layer["f_down"]
    logits = (x @ params["embed"].T).astype(jnp.float32)[:, :-1]
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


def sgd(params: Tree, grads: Tree) -> Tree:
    def update(p: Any, g: Any) -> Any:
        return p - jnp.asarray(0.1, p.dtype) * g.astype(p.dtype)

    return jax.tree.map(update, params, grads)


def alone(mesh: Mesh) -> Callable[..., Any]:
    """The step as it is written without a plan."""

    def varying(p: Any) -> Any:
        return lax.pcast(p, "data", to="varying")

    def mean(g: Any) -> Any:
        return lax.psum(g, "data") / 32

    def train(params: Tree, tokens: Any) -> Tree:
        grads = jax.grad(loss)(jax.tree.map(varying, params), tokens)
        return sgd(params, jax.tree.map(mean, grads))

    return jax.shard_map(train, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())


def planned(mesh: Mesh, like: Tree, bucket: int, more: str) -> Callable[..., Any]:
    """The step through a plan with buckets of at most `bucket` MiB."""
    program = commplan.loads(PLAN.format(bucket=bucket, more=more)).compile(mesh, shapes={"grads": like})
    run = program.bind(mesh)

    @run.spmd(params="same", tokens="split data")
    def train(state: Tree, params: Tree, tokens: Any) -> Any:
        grads = jax.grad(loss)(run.varying(params), tokens)
        out, state = run.step(state, grads=grads)
        return state, sgd(params, out.grads)

    def step(params: Tree, tokens: Any) -> Any:
        return train({}, params, tokens)

    return step


def audited(step: Callable[..., Any], *arguments: Any) -> CompiledStep:
    return audit_text(jax.jit(step, donate_argnums=0).lower(*arguments).compile().as_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name, default in (("layers", 12), ("width", 2048), ("rows", 8), ("length", 1024)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    mesh = Mesh(np.array(devices(target("h100:4x8"))).reshape(-1), ("data",), axis_types=(AxisType.Auto,))
    like = shapes(options.layers, options.width)

    def replicated(leaf: Any) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, P()))

    params = jax.tree.map(replicated, like)
    tokens = jax.ShapeDtypeStruct(
        (32 * options.rows, options.length), "int32", sharding=NamedSharding(mesh, P("data"))
    )
    steps = {"XLA alone": alone(mesh)}
    steps |= {f"plan, {size} MiB": planned(mesh, like, size, "") for size in (25, 64, 128)}
    steps["plan, 128 MiB, summed in f32"] = planned(mesh, like, 128, ", wire = bf16, accumulate = f32")
    machines = [Machine(flops=6e14, memory=2.5e12, bus=bus) for bus in (3e11, 1e11)]
    print(f"{'':30}{'colls':>6}{'MB':>7}{'covered':>9}{'before':>8}{'ops':>6}", end="")
    print("".join(f"{f'ms at {m.bus / 1e9:.0f}':>11}{'waiting':>9}" for m in machines))
    for name, step in steps.items():
        audit = audited(step, params, tokens)
        collectives = audit.collectives
        print(
            f"{name:30}{len(collectives):6}{sum(c.nbytes for c in collectives) / 1e6:7.0f}"
            f"{audit.covered:9.1%}{audit.before(collectives[0]):8}{sum(count for _, count in audit.ops):6}",
            end="",
        )
        guesses = [estimate(audit, machine) for machine in machines]
        print("".join(f"{guess.total * 1e3:11.2f}{guess.exposed * 1e3:9.2f}" for guess in guesses))


if __name__ == "__main__":
    main()
