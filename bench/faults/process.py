"""Faults of one process whose host functions run in threads, or in worker processes (`via`).

A worker is stopped, killed, or its function does not return; a function raises; the program ends by
`sys.exit` while batches are made and a step runs; /dev/shm is full. The message names the function, its
record and its line; for a dead or stopped worker also its process. After `exit` there is no message, and the
status is 0. A full /dev/shm (`memory`) does not affect a single process: it completes all its steps.
"""

from __future__ import annotations

import functools
import os
import random
import re
import subprocess
import sys
import tempfile
from typing import Any

import numpy as np

from bench.faults.campaign import Fault, Outcome, Place, begin, fault_of, happen, observed, without_memory

PLAN = """
plan alone
axis data = ?
source numbers : i32
fn decode(i32) -> f32[{elements}] on host
input grads : f32[{elements}] partial data
each step {{
    raw = load numbers batch 8 visit exactly_once seed 5 {{ cores = 2 }}
    values = map decode(raw)
    output values
}}
phase train {{
    grads = reduce grads over data by mean
    output grads
}}
"""
LINE, RECORDS, BOUND_S = 9, 160, 5.0
KINDS = ("stop", "kill", "sleep", "raise", "exit", "memory")


def decode(number: Any, *, elements: int, kind: str, record: int) -> Any:
    """The host function, which does something wrong at one record."""
    if int(number) == record and kind in ("stop", "kill", "sleep", "raise"):
        begin()
        print(f"worker is {os.getpid()}", flush=True)
        happen(kind)
    return np.full(elements, number, np.float32)


def program(fault: Fault) -> None:
    """The program of the process."""
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    import commplan  # noqa: PLC0415
    from bench.faults import process  # noqa: PLC0415  where workers find the function

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    if fault.kind == "memory":
        begin()
    wrong = functools.partial(
        process.decode, elements=fault.elements, kind=fault.kind, record=8 * fault.step + 1
    )
    sources = {"numbers": np.arange(RECORDS, dtype=np.int32)}
    plan = commplan.loads(PLAN.format(elements=fault.elements), "alone.plan")
    run = plan.compile(mesh).bind(mesh, sources=sources, functions={"decode": wrong}, watchdog_s=2.0)

    @run.jit
    @run.spmd(grads="per data", returns="same")
    def train(state: Any, grads: Any) -> Any:
        out, state = run.train(state, grads=grads)
        return state, out.grads

    state = run.init()
    with run.batches("step", timeout=BOUND_S, workers=fault.via) as batches:
        for number, item in enumerate(batches):
            total = train(state, jnp.sum(item["values"], axis=0)[None])
            if fault.kind == "exit" and number == fault.step:
                begin()
                sys.exit(0)
            jax.block_until_ready(total)
    print("all steps are made", flush=True)


def draw(drawn: random.Random, kind: str) -> Fault:
    """Only worker processes are stopped or killed."""
    via = "processes" if kind in ("stop", "kill") else drawn.choice(("threads", "processes"))
    return Fault("process", kind, 0, drawn.randrange(2, 18), drawn.choice((16, 50_000)), via)


def judged(fault: Fault) -> Outcome:
    """Run a job, and judge its output."""
    words = [sys.executable, "-m", __name__, *fault.words]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1"}
    with tempfile.TemporaryFile("w+") as output:
        words = without_memory(words) if fault.kind == "memory" else words
        job = subprocess.Popen(words, env=env, stdout=output, stderr=output, start_new_session=True)
        seen = observed([job], output)
    fine = seen.ended and right(fault, seen.text) and (job.returncode == 0) == (fault.kind in WELL)
    return Outcome(fault, seen.seconds, seen.ended, fine, seen.text)


WELL = ("exit", "memory")  # after which the status is 0


def right(fault: Fault, text: str) -> bool:
    """Whether the fault is reported, with its record and its line."""
    if fault.kind in WELL:
        return "error" not in text.lower() and ("all steps are made" in text) == (fault.kind == "memory")
    record = 8 * fault.step + 1
    heads = re.findall(r"alone\.plan:(\d+):\d+: error\[CP09\d\d\]: (.*)", text)
    if [int(line) for line, _ in heads] != [LINE]:
        return False
    named = "`decode`" in heads[0][1] and f"record {record}" in heads[0][1]
    if fault.kind == "raise":
        return named and "loss is not finite" in text
    worker = re.findall(r"worker is (\d+)", text)[-1]
    state = {"stop": "is stopped", "kill": "SIGKILL", "sleep": "in happen"}[fault.kind]
    return (
        named
        and state in text
        and (fault.via == "threads" or re.search(rf"process {worker}\b", text) is not None)
    )


PLACE = Place(KINDS, BOUND_S, draw, judged)

if __name__ == "__main__":
    program(fault_of(sys.argv[1:]))
