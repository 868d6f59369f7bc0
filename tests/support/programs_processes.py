"""One of the processes of `test_jax_programs_processes`: programs_processes.py PORT INDEX COUNT OUT."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import commplan

PLAN = """plan spread
axis node = 2
axis gpu = 2
input x : tree per node, gpu
each step {
    ring = reduce x over node, gpu by sum via ring
    tree = reduce x over gpu, node by sum via double_tree
    both = reduce x over node, gpu by sum via hierarchical(gpu = ring, node = halving_doubling)
    mine = reduce x over node, gpu by sum via hierarchical(gpu, node = ring)
    most = reduce x over node, gpu by max via recursive_doubling
    root = broadcast x over node, gpu from 3 via chain
    output ring, tree, both, mine, most, root
}
"""


def inputs() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    return {
        "f": random.normal(size=(2, 2, 1001)).astype(np.float32),
        "i": random.integers(-(2**31), 2**31, (2, 2, 7)).astype(np.int32),
    }


def like() -> dict[str, np.ndarray]:
    return {name: x[0, 0] for name, x in inputs().items()}


def main(port: str, index: str, count: str, out: str) -> None:
    jax.distributed.initialize(f"localhost:{port}", int(count), int(index))
    mesh = jax.make_mesh((2, 2), ("node", "gpu"), (AxisType.Auto,) * 2)
    run = commplan.loads(PLAN).compile(mesh, shapes={"x": like()}).bind(mesh)
    sharding = NamedSharding(mesh, PartitionSpec("node", "gpu"))
    x = {
        name: jax.make_array_from_callback(each.shape, sharding, lambda at, each=each: each[at])
        for name, each in inputs().items()
    }
    outputs, _ = run.step({}, x=x)
    arrays = {f"{name} {leaf}": np.asarray(y) for name in outputs for leaf, y in outputs[name].items()}
    np.savez(Path(out) / f"{index}.npz", **arrays)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
