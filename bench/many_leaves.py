"""Processor seconds to compile a phase of many small leaves, compared with one `psum` of the tree.

python -m bench.many_leaves
python -m bench.many_leaves --leaves 300 1200 --runs 5
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("JAX_NUM_CPU_DEVICES", "4")

import commplan
from commplan.lowering.jax.typing_shim import jax, jnp, lax

PLAN = """plan many
axis data = ?
input grads : tree partial data
input start : tree per data
each step {
    grads = reduce grads over data by sum
    output grads
}
phase cuts {
    cut  = scatter grads over data by sum
    back = gather cut over data
    output back
}
phase begins {
    start = broadcast start over data from 0
    output start
}
phase buckets {
    packed = reduce grads over data by sum { bucket = 25 MiB }
    output packed
}
"""
Step = Callable[[], Any]


def psum_scattered(x: Any) -> Any:
    """`x`, f32[n], summed over `data` as an expert would by parts: scattered, and gathered again."""
    padded = jnp.pad(x, (0, -x.size % lax.axis_size("data")))
    part = lax.psum_scatter(padded, "data", tiled=True)
    return lax.all_gather(part, "data", tiled=True)[: x.size] if x.size else x


def from_first(x: Any) -> Any:
    """`x` of rank 0, as an expert would broadcast it."""
    return lax.psum(jnp.where(lax.axis_index("data") == 0, x, jnp.zeros_like(x)), "data")


def steps(count: int, mesh: Any) -> dict[str, Callable[[], Any]]:
    """Functions without arguments over `mesh`: each phase, followed by the same by hand."""
    shapes = {f"leaf{i:05}": jax.ShapeDtypeStruct((i % 7,), jnp.float32) for i in range(count)}
    run = commplan.loads(PLAN).compile(mesh, shapes={"grads": shapes, "start": shapes}).bind(mesh)

    def terms() -> Any:
        rank = lax.axis_index("data")
        return {name: jnp.arange(s.size, dtype=s.dtype) + rank for name, s in shapes.items()}

    def planned(phase: str, name: str, output: str) -> Step:
        def step(state: Any) -> Any:
            return state, run.phases[phase](state, **{name: terms()})[0][output]

        return lambda: run.spmd(returns="same")(step)({})

    def by_hand(reduce: Callable[[Any], Any]) -> Step:
        def body() -> Any:
            return jax.tree.map(reduce, terms())

        return jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=jax.P(), check_vma=False)

    return {
        "reduce": planned("step", "grads", "grads"),
        "psum": by_hand(lambda x: lax.psum(x, "data")),
        "scatter, gather": planned("cuts", "grads", "back"),
        "psum_scatter, all_gather": by_hand(psum_scattered),
        "broadcast": planned("begins", "start", "start"),
        "masked psum": by_hand(from_first),
        "reduce { bucket = 25 MiB }": planned("buckets", "grads", "packed"),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--leaves", type=int, nargs="+", default=[300, 1200])
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args(arguments)
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    for count in options.leaves:
        calls = steps(count, mesh)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(options.runs):  # in turns
            for name, step in calls.items():
                lowered: Any = jax.jit(functools.partial(step)).lower()  # JAX keeps what it has traced
                begun = time.process_time()
                lowered.compile()
                seconds[name].append(time.process_time() - begun)
        for name, twin in zip(list(calls)[::2], [*list(calls)[1::2], "psum"], strict=True):
            ratios = [ours / theirs for ours, theirs in zip(seconds[name], seconds[twin], strict=True)]
            print(
                f"{count:6} {name:28} {statistics.median(seconds[name]):6.2f} s"
                f"   {twin:26} {statistics.median(seconds[twin]):6.2f} s"
                f"   ratios {' '.join(f'{ratio:.2f}' for ratio in ratios)}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
