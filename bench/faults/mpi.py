"""Faults of ranks under MPI: one that ends a job when a rank dies (`mpi`), or one that survives it (`ulfm`).

Each job has three ranks, a watchdog of two seconds and a plan with two phases; a random rank has one fault in
a random step, or differs from the start (`plan`, `flag`). A full /dev/shm (`memory`) prevents only the
recording of a run, which is reported: that job is right if it runs to its end.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from bench.faults.campaign import (
    Fault,
    Job,
    Outcome,
    Place,
    begin,
    blamed,
    fault_of,
    happen,
    observed,
    without_memory,
)
from bench.harness.mpirun import ULFM, command, environment

PLAN = """
plan faulty
axis data = ?
input grads : f32[{elements}] partial data
input loss : f32[8] partial data
each step {{
    grads = reduce grads over data by {how}{via}
    output grads
}}
phase evaluate {{
    loss = reduce loss over data by mean{via}
    output loss
}}
"""
LINES = {"step": 7, "evaluate": 11}
EARLY = ("plan", "flag", "memory")  # faults from the start
KINDS = ("stop", "kill", "exit", "raise", "sleep", "lock", "skip", "order", "shape", *EARLY)
RANKS, STEPS, BOUND_S, BUSY_S = 3, 12, 2.0, 8.0
RING = " via ring"
FLAG = "--xla_cpu_enable_fast_math=true"


def rank(fault: Fault) -> None:
    """The program of one rank."""
    from mpi4py import MPI  # noqa: PLC0415

    comm = MPI.COMM_WORLD
    culprit = comm.rank == fault.culprit
    if fault.place == "cluster":  # the emulated hosts share /dev/shm, but not a sidecar
        os.environ["COMMPLAN_SIDECAR"] = f"{os.environ['COMMPLAN_RECORDS']}/host{comm.rank}"
    if culprit and fault.kind == "flag":
        os.environ["XLA_FLAGS"] = FLAG
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    import commplan  # noqa: PLC0415

    program = commplan.loads(plan_of(fault, culprit=culprit)).compile(comm)
    if culprit and fault.kind in EARLY:
        begin()
    run = program.bind(comm, watchdog_s=BOUND_S, busy_s=BUSY_S)

    def train(state: Any, grads: Any, scale: Any) -> Any:
        return run.step(state, grads=scale * grads)

    def look(state: Any, loss: Any) -> Any:
        return run.evaluate(state, loss=loss)

    # Arguments outside of the plan are compared under `run.jit`.
    step, evaluate = run.jit(train) if fault.kind == "shape" else jax.jit(train), jax.jit(look)
    state, grads, loss, scale = run.init(), jnp.ones(fault.elements), jnp.ones(8), jnp.ones(1)
    for number in range(STEPS):
        wrong = culprit and number == fault.step and fault.kind not in EARLY
        if wrong:
            begin()
        if wrong and fault.kind == "shape":
            scale = scale.astype(jnp.float16)
        if wrong and fault.kind == "order":
            jax.block_until_ready(evaluate(state, loss))
        if not (wrong and fault.kind in ("order", "skip")):
            if wrong:
                happen(fault.kind)
            jax.block_until_ready(step(state, grads, scale))
        if wrong and fault.kind == "order":
            jax.block_until_ready(step(state, grads, scale))
        else:
            jax.block_until_ready(evaluate(state, loss))
    print(f"rank {comm.rank} has made all steps", flush=True)


def plan_of(fault: Fault, *, culprit: bool) -> str:
    """The plan of a rank or process."""
    how = "sum" if culprit and fault.kind == "plan" else "mean"
    return PLAN.format(elements=fault.elements, via=fault.via, how=how)


def draw(drawn: random.Random, kind: str) -> Fault:
    # Where MPI's own collectives come in another order it is MPI that mixes them up.
    via = RING if kind in ("order", "skip", "shape") else drawn.choice(("", RING, " via native"))
    elements = drawn.choice((100, 10_000, 1_000_000))
    return Fault("mpi", kind, drawn.randrange(RANKS), drawn.randrange(4, STEPS - 2), elements, via)


def judged(fault: Fault) -> Outcome:
    """Run a job, and judge its output."""
    options = ULFM if fault.place == "ulfm" else ()
    seen = job(fault, command(RANKS, __name__, *fault.words, options=options))
    return Outcome(fault, seen.seconds, seen.ended, seen.ended and right(fault, seen.text), seen.text)


def job(fault: Fault, words: Sequence[str]) -> Job:
    """Run the command `words`, and observe it."""
    with tempfile.TemporaryDirectory() as records, tempfile.TemporaryFile("w+") as output:
        env = dict(environment())
        if fault.kind == "memory":  # the default folder of records; MPI uses another one
            words = without_memory(words)
            env["OMPI_MCA_btl_sm_backing_directory"] = records
        else:
            env["COMMPLAN_RECORDS"] = records
        launched = subprocess.Popen(words, env=env, stdout=output, stderr=output, start_new_session=True)
        return observed([launched], output)


def differs(fault: Fault, text: str, noun: str) -> bool:
    """Whether every CP0845 names the culprit (as `noun`), and its other program or flag."""
    subject = "the same program" if fault.kind == "plan" else "with the same XLA_FLAGS"
    heads = re.findall(r"error\[CP0845\]: (.*)", text)
    named = all(f"{subject}: {noun} {fault.culprit} differs" in head for head in heads)
    return bool(heads) and named and not blamed(text)


def refused(fault: Fault, text: str, noun: str) -> bool:
    """Whether every CP0854 names the culprit (as `noun`), and its argument of another type."""
    heads = re.findall(r"error\[CP0854\]: (.*)", text)
    named = all(f"{noun} {fault.culprit} calls `train` with argument" in head for head in heads)
    return bool(heads) and named and not blamed(text)


def right(fault: Fault, text: str) -> bool:
    """Whether the culprit and the waiting line are named, and nothing else."""
    if fault.kind == "memory":
        return "this run is not recorded" in text and text.count("has made all steps") == RANKS
    if fault.kind in ("plan", "flag"):
        return differs(fault, text, "rank")
    if fault.kind == "shape":
        return refused(fault, text, "rank")
    if fault.kind == "raise":  # the job ends with it, before anybody waits
        named = f"MPI_ABORT was invoked on rank {fault.culprit} " in text
        return named and "loss is not finite" in text and blamed(text) <= {fault.culprit}
    if fault.kind == "kill" and "has died" not in text:  # an MPI that ends the job itself says so
        named = re.search(rf"rank {fault.culprit}\b.{{0,300}}signal\s+9", text, re.DOTALL)
        return named is not None and blamed(text) <= {fault.culprit}
    if fault.kind in ("order", "skip"):
        waits = set(re.findall(r"rank (\d) waits in line (\d+)", text))
        lines = {n: LINES["evaluate" if n == fault.culprit else "step"] for n in range(RANKS)}
        return waits == {(str(n), str(line)) for n, line in lines.items()} and not blamed(text)
    ended = fault.kind != "exit" or "program has ended" in text  # which it says itself, before any bound
    return blamed(text) == {fault.culprit} and ended and f"line {LINES['step']} of" in text


PLACE = Place(KINDS, BOUND_S, draw, judged)

if __name__ == "__main__":
    rank(fault_of(sys.argv[1:]))
