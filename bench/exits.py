"""Ranks that end with steps in flight, again and again: every one must end well, and soon.

    python -m bench.exits --count 200 --elements 30000 [--ulfm]

Every run starts three ranks, which sum f32[elements] in twelve jitted steps and end without a look at the
results, in one of several ways in turn: each step takes the result of the one before, or all are kept, or
dropped, or what bound the program is gone as well. Exit 1 where a run hangs or dies.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from bench.servers.mpirun import command, environment

PLAN = """
plan sums
axis data = ?
input x : f32[{elements}] partial data
each step {{
    y = reduce x over data by sum
    output y
}}
"""
WAYS = ("chained", "kept", "dropped", "unbound")
RANKS, STEPS = 3, 12
DEADLINE_S = 60.0  # a run takes a few seconds
ULFM = ("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1")


def rank(elements: int, way: str) -> object:
    """What one rank does; what it returns is held until the interpreter ends."""
    import commplan  # noqa: PLC0415
    from commplan.lowering.jax.typing_shim import jax, jnp  # noqa: PLC0415
    from commplan.lowering.mpi.typing_shim import MPI  # noqa: PLC0415

    run = commplan.loads(PLAN.format(elements=elements)).compile(MPI.COMM_WORLD).bind(MPI.COMM_WORLD)
    state = run.init()

    def summed(x: Any) -> Any:
        return run.step(state, x=x)[0].y / RANKS

    step = jax.jit(summed)
    x = jnp.ones(elements, jnp.float32)
    if way == "chained":
        for _ in range(STEPS):
            x = step(x)
        return run, x
    results = [step(x) for _ in range(STEPS)]
    return {"kept": (run, results), "dropped": run, "unbound": None}[way]


def ended(elements: int, way: str, *, ulfm: bool) -> tuple[float, str]:
    """Seconds that a run took, and what was wrong."""
    words = command(RANKS, "bench.exits", elements, "--way", way, options=ULFM if ulfm else ())
    begin = time.perf_counter()
    with subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        try:
            output, _ = job.communicate(timeout=DEADLINE_S)
        except subprocess.TimeoutExpired:
            job.terminate()  # mpirun ends its ranks
            output, _ = job.communicate()
            return time.perf_counter() - begin, f"{way}: hangs {output}"
    wrong = f"{way}: exit code {job.returncode} {output}" if job.returncode or output.strip() else ""
    return time.perf_counter() - begin, wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--elements", type=int, default=30_000)
    parser.add_argument("--ulfm", action="store_true", help="under an MPI that outlives its dead")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    runs = [ended(options.elements, WAYS[i % len(WAYS)], ulfm=options.ulfm) for i in range(options.count)]
    problems = [wrong for _, wrong in runs if wrong]
    seconds = sorted(took for took, _ in runs)
    median, longest = seconds[len(seconds) // 2], seconds[-1]
    totals = {"runs": len(runs), "median_s": round(median, 1), "longest_s": round(longest, 1)}
    if options.json:
        print(json.dumps({**totals, "problems": problems}, indent=2))
    else:
        print(", ".join(f"{label} {number}" for label, number in totals.items()))
        print("\n".join(problems) or "all ended well")
    return 1 if problems else 0


if __name__ == "__main__":
    if "--way" in sys.argv:
        held = rank(int(sys.argv[1]), sys.argv[-1])
    else:
        sys.exit(main())
