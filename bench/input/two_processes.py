"""What a batch costs two processes of one JAX job on CPU devices, by this tree and by another.

    python -m bench.input.two_processes [--before CHECKOUT] [--rounds 9] [--batches 100]

A batch is 64 images of 150 KB, half of them for the device of each process, out of memory. Both trees run at
the same time, and take turns by epoch: what one of them measures, the other waits. CPU is user and system
time of both processes, wall that of the slower one; medians of epochs, after one that is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

IMAGE, BATCH, PROCESSES = 224 * 224 * 3, 64, 2
PLAN = """plan feeding
axis data = 2
source images : u8[{image}]
each step {{
    pixels = load images batch {batch} split data visit exactly_once seed 3
    output pixels
}}
"""


def process(place: int, port: int, batches: int) -> None:
    """One process of the job: an epoch for each line of its input, then CPU and wall seconds of a batch."""
    import numpy as np  # noqa: PLC0415  the parent process needs none of them
    from jax.sharding import AxisType  # noqa: PLC0415

    import commplan  # noqa: PLC0415
    from commplan.lowering.jax.typing_shim import jax  # noqa: PLC0415

    jax.distributed.initialize(f"localhost:{port}", PROCESSES, place)
    mesh = jax.make_mesh((PROCESSES,), ("data",), axis_types=(AxisType.Auto,))
    rows = np.random.default_rng(0).integers(0, 256, (batches * BATCH, IMAGE), np.uint8)
    run = commplan.loads(PLAN.format(image=IMAGE, batch=BATCH)).compile(mesh).bind(mesh, {"images": rows})
    with run.batches() as feed:
        for _ in sys.stdin:
            wall, cpu = time.perf_counter(), time.process_time()
            for batch in feed:
                jax.block_until_ready(batch["pixels"])
            took = (time.process_time() - cpu) / batches, (time.perf_counter() - wall) / batches
            print(json.dumps(took), flush=True)


class Job:
    """Both processes, by the sources in `tree`."""

    def __init__(self, tree: Path, batches: int) -> None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        file = str(Path(__file__).resolve())
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tree)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.processes = [
            subprocess.Popen(
                [sys.executable, file, "--place", f"{place}", "--port", f"{port}", "--batches", f"{batches}"],
                env=environment, cwd=tree, **pipes,
            )
            for place in range(PROCESSES)
        ]  # fmt: skip

    def epoch(self) -> tuple[float, float]:
        """CPU seconds of both processes and wall seconds, of a batch."""
        for each in self.processes:
            print(file=each.stdin, flush=True)
        took = [json.loads(each.stdout.readline()) for each in self.processes if each.stdout]
        return sum(cpu for cpu, _ in took), max(wall for _, wall in took)

    def close(self) -> None:
        for each in self.processes:
            if each.stdin:
                each.stdin.close()  # of both, since each waits for the other at its end
        for each in self.processes:
            each.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="another checkout")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--batches", type=int, default=100, help="of an epoch")
    parser.add_argument("--place", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.place is not None:
        process(options.place, options.port, options.batches)
        return
    trees = {"this tree": Path(__file__).resolve().parents[2]}
    trees |= {"before": options.before.resolve()} if options.before else {}
    jobs = {name: Job(tree, options.batches) for name, tree in trees.items()}
    took: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs}
    for number in range(options.rounds + 1):
        for name in sorted(jobs, reverse=bool(number % 2)):
            took[name] += [jobs[name].epoch()]
    for name, job in jobs.items():
        job.close()
        cpu, wall = (sorted(1e3 * value for value in values) for values in zip(*took[name][1:], strict=True))
        spread = f"{cpu[0]:.2f} to {cpu[-1]:.2f}; wall {median(wall):.2f}, {wall[0]:.2f} to {wall[-1]:.2f}"
        print(f"{name}: {median(cpu):.2f} ms CPU a batch, {spread}")


if __name__ == "__main__":
    main()
