"""Seconds and memory from a plan's text to its schedule, and of proofs, as plans and machines grow.

The plans are a tree of many leaves in one stage, many stages in one phase, a chain of elastic stages with
different rates, one stage over many ranks of a machine of four levels, and rings of many ranks. Each line is
measured in a separate process.

python -m bench.compile_time
python -m bench.compile_time --topology examples/topologies/h100_64.toml --backend mpi
python -m bench.compile_time --only elastic ranks rings
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import commplan
from commplan.verify.programs.algorithm_proof import prove_algorithm

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


def elastic(count: int) -> Case:
    """A plan whose center is moved by elastic stages one after another, each with another rate."""
    stages = "".join(
        f"    p{i}, c = elastic x with c over data by sync(eta = 0.01, rho = {(i + 1) / 1000})\n"
        f"    output p{i}\n"
        for i in range(count)
    )
    start = "at start {\n    c = broadcast x over data from 0\n}\n"
    return f"{HEAD}input x : f32[64] per data\nstate c : f32[64]\n{start}each step {{\n{stages}}}\n", {}


def ranks(count: int) -> Case:
    """A reduction over many ranks."""
    stages = "    grads = reduce grads over data by mean\n    output grads\n"
    text = f"plan many\naxis data = {count}\ninput grads : f32[1000, 1000] partial data\n"
    return f"{text}each step {{\n{stages}}}\n", {}


COUNTS = {
    "leaves": (2500, 5000, 10_000, 20_000),
    "reduces": (1000, 2000, 5000, 10_000),
    "elastic": (10, 20, 40, 80),
    "ranks": (2**16, 2**18, 2**20),
    "rings": (1024, 2048, 4096),
}
PLANS = {"leaves": leaves, "reduces": reduces, "elastic": elastic, "ranks": ranks}


def machine(places: int) -> str:
    """A topology of four levels."""
    counts = (8, 32, 64, places // (8 * 32 * 64))
    levels = (
        f'[[level]]\nname = "{name}"\ncount = {count}\n'
        f'latency = "{latency}us"\nbandwidth = "{bandwidth}GB/s"\n'
        for name, count, latency, bandwidth in zip(
            ("gpu", "node", "pod", "hall"), counts, (3, 6, 12, 20), (450, 400, 6400, 50_000), strict=True
        )
    )
    return 'name = "machine"\n' + "".join(levels)


def measure(case: str, count: int, topology: Path | None, backend: Any) -> str:
    """One line: the seconds and the peak of memory of this process."""
    commplan.loads(leaves(1)[0])  # the grammar is read once
    start = time.perf_counter()
    if case == "rings":
        prove_algorithm("ring", "all_reduce", count)
        parts = f"{time.perf_counter() - start:6.2f} s proved"
    else:
        text, shapes = PLANS[case](count)
        plan = commplan.loads(text)
        read = time.perf_counter()
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
            if case == "ranks":
                file.write(machine(count))
                file.flush()
                topology, backend = Path(file.name), "mpi"
            plan.compile(shapes=shapes, topology=topology, backend=backend)
        parts = f"{read - start:6.2f} s read {time.perf_counter() - read:6.2f} s compiled"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return f"{count:8} {case:8} {parts} {peak:6.0f} MB"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--topology", type=Path)
    parser.add_argument("--backend", choices=("jax", "mpi"), default="jax")
    parser.add_argument("--only", nargs="+", choices=COUNTS, default=list(COUNTS))
    parser.add_argument("--count", type=int, help="measure this one case in this process")
    options = parser.parse_args(arguments)
    if options.count is not None:
        print(measure(options.only[0], options.count, options.topology, options.backend), flush=True)
        return 0
    own = sys.argv[1:] if arguments is None else list(arguments)
    for case in options.only:
        for count in COUNTS[case]:
            command = [
                sys.executable,
                "-m",
                "bench.compile_time",
                *own,
                "--only",
                case,
                "--count",
                str(count),
            ]
            subprocess.run(command, check=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
