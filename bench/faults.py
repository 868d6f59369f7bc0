"""Faults under MPI, one a job: who is blamed, in which line, and how soon.

    python -m bench.faults --count 100 --seed 1 [--ulfm | --jax] [--jobs 2] [--resume FILE]

Each job has three ranks, a watchdog of two seconds and a plan with two phases; a random rank does one thing
wrong in a random step. Right is a job that ends with the rank that did it and the line that waited for it,
and no other rank named as the culprit. Exit 1 where a job hangs, or fewer than 95% are right.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import functools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bench.servers.mpirun import command, environment

PLAN = """
plan faulty
axis data = ?
input grads : f32[{elements}] partial data
input loss : f32[8] partial data
each step {{
    grads = reduce grads over data by mean{via}
    output grads
}}
phase evaluate {{
    loss = reduce loss over data by mean{via}
    output loss
}}
"""
LINES = {"step": 7, "evaluate": 11}
FAULTS = ("stop", "kill", "exit", "raise", "sleep", "skip", "order")
RANKS, STEPS, BOUND_S, DEADLINE_S = 3, 12, 2.0, 90.0
RING = " via ring"
ULFM = ("--with-ft", "ulfm", "--mca", "async_mpi_finalize", "1")


class Fault(NamedTuple):
    """What `culprit` does in step `step`. via: how the plan's collectives are carried out."""

    kind: str
    culprit: int
    step: int
    elements: int
    via: str

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(map(str, self))


class Outcome(NamedTuple):
    """seconds: from the fault to the first message about it; None where there was none in time."""

    fault: Fault
    seconds: float | None
    right: bool
    text: str


def rank(fault: Fault) -> None:
    """What one rank does."""
    import commplan  # noqa: PLC0415
    from commplan.lowering.jax.typing_shim import jax, jnp  # noqa: PLC0415
    from commplan.lowering.mpi.typing_shim import MPI  # noqa: PLC0415

    comm = MPI.COMM_WORLD
    plan = commplan.loads(PLAN.format(elements=fault.elements, via=fault.via))
    run = plan.compile(comm).bind(comm, watchdog_s=BOUND_S)

    def train(state: Any, grads: Any) -> Any:
        return run.step(state, grads=grads)

    def look(state: Any, loss: Any) -> Any:
        return run.evaluate(state, loss=loss)

    step, evaluate = jax.jit(train), jax.jit(look)
    state, grads, loss = run.init(), jnp.ones(fault.elements), jnp.ones(8)
    for number in range(STEPS):
        wrong = comm.rank == fault.culprit and number == fault.step
        if wrong:
            print(f"fault at {time.time():.3f}", flush=True)
        if wrong and fault.kind == "order":
            jax.block_until_ready(evaluate(state, loss))
        if not (wrong and fault.kind in ("order", "skip")):
            if wrong:
                happen(fault.kind)
            jax.block_until_ready(step(state, grads))
        if wrong and fault.kind == "order":
            jax.block_until_ready(step(state, grads))
        else:
            jax.block_until_ready(evaluate(state, loss))


def happen(kind: str) -> None:
    """Raises, ends, or holds this process up."""
    if kind in ("stop", "kill"):
        os.kill(os.getpid(), signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
    elif kind == "exit":
        sys.exit(0)
    elif kind == "raise":
        raise ArithmeticError("loss is not finite")
    elif kind == "sleep":
        time.sleep(DEADLINE_S * 2)


def judged(fault: Fault, *, ulfm: bool) -> Outcome:
    """Run a job, and look at what it said."""
    options = ULFM if ulfm else ()
    words = command(RANKS, "bench.faults", "--rank", *fault.words, options=options)
    with tempfile.TemporaryDirectory() as records, tempfile.TemporaryFile("w+") as output:
        env = dict(environment()) | {"COMMPLAN_RECORDS": records}
        with subprocess.Popen(words, env=env, stdout=output, stderr=subprocess.STDOUT, text=True) as job:
            ended = True
            try:
                job.wait(DEADLINE_S)
            except subprocess.TimeoutExpired:
                ended = False
                job.terminate()
        finished = time.time()
        output.seek(0)
        text = output.read()
    began = re.search(r"fault at ([\d.]+)", text)
    seconds = finished - float(began[1]) if began and ended else None
    return Outcome(fault, seconds, seconds is not None and _right(fault, text), text)


def _right(fault: Fault, text: str) -> bool:
    """Whether the culprit is named, in the line that waited for it, and nobody else."""
    if fault.kind == "raise":
        return "loss is not finite" in text
    if fault.kind == "kill" and "has died" not in text:  # an MPI that ends the job itself says so
        return bool(re.search(rf"rank {fault.culprit}\b.*|signal 9|Killed", text))
    if fault.kind in ("order", "skip"):
        lines = re.findall(r"rank (\d) waits in line (\d+)", text)
        return (str(fault.culprit), str(LINES["evaluate"])) in lines and f"line {LINES['step']} " in text
    blamed = re.findall(
        r"rank (\d) (?:is stopped|has died|has not come|does not answer)|program has ended on rank (\d)", text
    )
    named = {int(first or second) for first, second in blamed}
    return named == {fault.culprit} and f"line {LINES['step']} of" in text


def faults(count: int, seed: int, kinds: Sequence[str] = FAULTS) -> list[Fault]:
    """All kinds in turn, at random places."""
    draw = random.Random(seed)
    vias = ("", RING, " via native")
    return [
        Fault(
            kinds[number % len(kinds)], draw.randrange(RANKS), draw.randrange(4, STEPS - 2),
            draw.choice((100, 10_000, 1_000_000)),
            # Where MPI's own collectives come in another order it is MPI that mixes them up.
            RING if kinds[number % len(kinds)] in ("order", "skip") else draw.choice(vias),
        )
        for number in range(count)
    ]  # fmt: skip


def resumed(file: Path | None, judge: Callable[[Fault], Outcome], fault: Fault) -> Outcome:
    """The outcome in `file`, a line of JSON each; else that of a new job, which is added there."""
    if file is not None and file.exists():
        for line in file.read_text("utf-8").splitlines():
            words, *result = json.loads(line)
            if words == list(fault):
                return Outcome(fault, *result)
    outcome = judge(fault)
    if file is not None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps([list(fault), *outcome[1:]]) + "\n")
    return outcome


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--count", type=int, default=42)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--ulfm", action="store_true", help="under an MPI that outlives its dead")
    parser.add_argument("--jax", action="store_true", help="processes under jax.distributed")
    parser.add_argument("--resume", type=Path, help="a file of outcomes: those in it are taken from it")
    options = parser.parse_args(arguments)
    judge, kinds = functools.partial(judged, ulfm=options.ulfm), FAULTS
    if options.jax:
        from bench import faults_jax  # noqa: PLC0415

        judge, kinds = faults_jax.judged, faults_jax.KINDS
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        known = functools.partial(resumed, options.resume, judge)
        outcomes = list(pool.map(known, faults(options.count, options.seed, kinds)))
    by_kind: dict[str, list[Outcome]] = collections.defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome.fault.kind].append(outcome)
    print(f"{'fault':14}{'jobs':>6}{'ended':>7}{'right':>7}{'median s':>10}{'longest s':>11}")
    for kind, own in by_kind.items():
        seconds = sorted(outcome.seconds for outcome in own if outcome.seconds is not None)
        middle, longest = (seconds[len(seconds) // 2], seconds[-1]) if seconds else (0.0, 0.0)
        right = sum(outcome.right for outcome in own)
        print(f"{kind:14}{len(own):6}{len(seconds):7}{right:7}{middle:10.1f}{longest:11.1f}")
    for outcome in outcomes:
        if not outcome.right:
            print(f"--- {outcome.fault}: {outcome.seconds}\n{outcome.text.strip()[-1500:]}")
    hung = sum(outcome.seconds is None for outcome in outcomes)
    right = sum(outcome.right for outcome in outcomes)
    print(f"{right} of {len(outcomes)} right, {hung} hang")
    return int(hung > 0 or right < 0.95 * len(outcomes))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        kind, culprit, step, elements, via = sys.argv[2:]
        rank(Fault(kind, int(culprit), int(step), int(elements), via))
    elif sys.argv[1:2] == ["--process"]:
        from bench import faults_jax

        kind, culprit, step, elements, via, port, index = sys.argv[2:]
        fault = Fault(kind, int(culprit), int(step), int(elements), via)
        faults_jax.process(fault, int(port), int(index))
    else:
        sys.exit(main())
