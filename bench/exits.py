"""Processes that end with collectives in flight, repeatedly: every one must end correctly and soon.

    python -m bench.exits --count 1000 --elements 30000 [--ulfm] [--jobs 2] [--resume FILE]

Every launch has three ranks, so three exits. They sum f32[elements] in twelve jitted steps and end without
reading the results: each step takes the result of the one before, or all are kept, or dropped, or the bound
program is dropped as well. In every fourth launch one rank fails with steps in flight: it raises, exits with
a code, or is killed; then the job must end with that error, and with a code other than 0. If MPI survives a
killed rank, the others report the failure and may end with 0. Exit 1 if a launch hangs or ends otherwise.
FILE keeps a line of JSON for each launch, and launches in it are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.harness.arguments import program_parser
from bench.harness.mpirun import ULFM, command, environment

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
FAILURES = {  # and the expected messages
    "raises": "loss is not finite",
    "exits": "exit code: +3|MPI_ABORT was invoked",
    "killed": "signal 9|Killed|has died",
}
RANKS, STEPS = 3, 12
DEADLINE_S = 300.0  # a launch takes a few seconds, and half a minute on a busy machine


def rank(elements: int, way: str, culprit: int) -> object:
    """The program of one rank; its return value is kept until the interpreter ends."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415
    from mpi4py import MPI  # noqa: PLC0415

    import commplan  # noqa: PLC0415

    comm = MPI.COMM_WORLD
    run = commplan.loads(PLAN.format(elements=elements)).compile(comm).bind(comm)
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
    if comm.rank == culprit:
        fail(way)
    return {"dropped": run, "unbound": None}.get(way, (run, results))


def fail(way: str) -> None:
    """Ends this process, whatever is in flight."""
    if way == "raises":
        raise ArithmeticError("loss is not finite")
    if way == "exits":
        sys.exit(3)
    os.kill(os.getpid(), signal.SIGKILL)


def launched(number: int, elements: int, *, ulfm: bool) -> dict[str, Any]:
    """Launch `number` of a campaign: its exit, its duration in seconds, and its error."""
    turn, fails = divmod(number, 4)
    way = list(FAILURES)[turn % len(FAILURES)] if fails == 3 else WAYS[(turn * 3 + fails) % len(WAYS)]
    culprit = turn % RANKS if way in FAILURES else -1
    words = command(RANKS, "bench.exits", elements, "--way", way, culprit, options=ULFM if ulfm else ())
    begin = time.perf_counter()
    with subprocess.Popen(
        words, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as job:
        try:
            output, _ = job.communicate(timeout=DEADLINE_S)
            wrong = _wrong(way, job.returncode, output, ulfm=ulfm)
        except subprocess.TimeoutExpired:
            job.terminate()  # mpirun ends its ranks
            output, _ = job.communicate()
            wrong = "hangs"
    seconds = round(time.perf_counter() - begin, 2)
    problem = f"{way}: {wrong}: {output[-2000:]}" if wrong else ""
    how = {"number": number, "way": way, "culprit": culprit, "ulfm": ulfm, "elements": elements}
    return {**how, "seconds": seconds, "problem": problem}


def _wrong(way: str, code: int, output: str, *, ulfm: bool) -> str:
    if way not in FAILURES:
        return f"exit code {code}" if code or output.strip() else ""
    if code == 0 and not (ulfm and way == "killed"):  # the survivors exit normally, and report the failure
        return "exit code 0"
    return "" if re.search(FAILURES[way], output, re.IGNORECASE) else "it is not said why"


def campaign(options: argparse.Namespace) -> list[dict[str, Any]]:
    """All launches that `options.count` exits take; those in the file `options.resume` are done already."""
    kept = Path(options.resume) if options.resume else None
    lines = kept.read_text("utf-8").splitlines() if kept and kept.exists() else []
    own = (options.ulfm, options.elements)
    known = {e["number"]: e for e in map(json.loads, lines) if (e["ulfm"], e["elements"]) == own}

    def result_of(number: int) -> dict[str, Any]:
        if number in known:
            return known[number]
        result = launched(number, options.elements, ulfm=options.ulfm)
        if kept:
            with kept.open("a", encoding="utf-8") as file:
                file.write(json.dumps(result) + "\n")
        return result

    with ThreadPoolExecutor(options.jobs) as pool:
        return list(pool.map(result_of, range(-(-options.count // RANKS))))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = program_parser("exits", __doc__)
    parser.add_argument("--count", type=int, default=200, help="exits, of three processes a launch")
    parser.add_argument("--elements", type=int, default=30_000)
    parser.add_argument("--jobs", type=int, default=1, help="launches at a time")
    parser.add_argument("--ulfm", action="store_true", help="under an MPI that outlives its dead")
    parser.add_argument("--resume", metavar="FILE", help="launches that have ended, as JSON lines")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    results = campaign(options)
    problems = [result["problem"] for result in results if result["problem"]]
    seconds = sorted(result["seconds"] for result in results)
    totals = {
        "exits": RANKS * len(results),
        "launches": len(results),
        "with_a_failing_rank": sum(result["way"] in FAILURES for result in results),
        "median_s": seconds[len(seconds) // 2],
        "longest_s": seconds[-1],
    }
    if options.json:
        print(json.dumps({**totals, "problems": problems}, indent=2))
    else:
        print(", ".join(f"{label} {number}" for label, number in totals.items()))
        print("\n".join(problems) or "all ended well")
    return 1 if problems else 0


if __name__ == "__main__":
    if "--way" in sys.argv:
        held = rank(int(sys.argv[1]), sys.argv[-2], int(sys.argv[-1]))
    else:
        sys.exit(main())
