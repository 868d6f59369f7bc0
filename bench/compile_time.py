"""Seconds from a plan's text to its schedule: a tree of many leaves in one stage, many stages in one phase.

python -m bench.compile_time
python -m bench.compile_time --topology examples/topologies/h100_64.toml --backend mpi
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import commplan

HEAD = "plan many\naxis data = 8\n"
Case = tuple[str, dict[str, Any]]


def leaves(count: int) -> Case:
    """A plan, and its shapes: the leaves of one tree, in one reduction."""
    tree = {f"layer{i:05}": {"w": {"shape": [64 + i % 7, 32], "dtype": "f32"}} for i in range(count)}
    stages = "    grads = reduce grads over data by mean\n    output grads\n"
    return f"{HEAD}input grads : tree partial data\neach step {{\n{stages}}}\n", {"grads": tree}


def reduces(count: int) -> Case:
    """A plan with a reduction for each of its arrays."""
    inputs = "".join(f"input g{i} : f32[{64 + i % 7}, 32] partial data\n" for i in range(count))
    stages = "".join(f"    s{i} = reduce g{i} over data by sum\n    output s{i}\n" for i in range(count))
    return f"{HEAD}{inputs}each step {{\n{stages}}}\n", {}


COUNTS = {leaves: (2500, 5000, 10_000, 20_000), reduces: (1000, 2000, 5000, 10_000)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--topology", type=Path)
    parser.add_argument("--backend", choices=("jax", "mpi"), default="jax")
    options = parser.parse_args(arguments)
    commplan.loads(leaves(1)[0])  # the grammar is read once
    for case, counts in COUNTS.items():
        for count in counts:
            text, shapes = case(count)
            start = time.perf_counter()
            plan = commplan.loads(text)
            read = time.perf_counter()
            plan.compile(shapes=shapes, topology=options.topology, backend=options.backend)
            end = time.perf_counter()
            print(
                f"{count:6} {case.__name__:8} {read - start:6.2f} s read {end - read:6.2f} s compiled",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
