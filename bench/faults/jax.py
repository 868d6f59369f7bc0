"""Faults of processes under `jax.distributed`: three with one CPU device each, connected by Gloo.

The faults of `bench.faults.mpi`, for a program with a plan (`jax`), or of plain JAX under `commplan.guard`
(`guard`). Faults before `bind` do not end the job: the missing process must be reported.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
from typing import Any

from bench.faults.campaign import (
    Fault,
    Outcome,
    Place,
    begin,
    blamed,
    fault_of,
    happen,
    observed,
    without_memory,
)
from bench.faults.mpi import BOUND_S, BUSY_S, EARLY, FLAG, LINES, RANKS, STEPS, differs, plan_of, refused
from bench.faults.mpi import KINDS as OF_RANKS
from bench.faults.mpi import draw as drawn_rank

BEFORE = "before "  # of what happens before the program is bound
KINDS = (*OF_RANKS, BEFORE + "stop", BEFORE + "sleep")
GUARDED = ("stop", "kill", "exit", "raise", "sleep", "skip", "order", "lock", "shape")
AWAITED = re.compile(
    r"commplan: process(?:es)? ([\d, ]+) ha\w+ not arrived within .*\nnote: .* waits in `program\.bind`"
)


def process(fault: Fault, port: int, index: int) -> None:
    """The program of one process."""
    culprit = index == fault.culprit
    if culprit and fault.kind == "flag":
        os.environ["XLA_FLAGS"] = FLAG
    import jax  # noqa: PLC0415
    import jax.numpy as jnp  # noqa: PLC0415

    jax.distributed.initialize(f"localhost:{port}", RANKS, index)
    mesh = jax.make_mesh((RANKS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    early = fault.kind.startswith(BEFORE) or fault.kind in EARLY
    if culprit and early:
        begin()
        happen(fault.kind.removeprefix(BEFORE))
    train, look, state = (guarded if fault.place == "guard" else planned)(fault, mesh, culprit=culprit)
    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    ones = jax.jit(lambda: jnp.ones(RANKS), out_shardings=sharding)()
    for number in range(STEPS):
        wrong = culprit and number == fault.step and not early
        if wrong:
            begin()
        if wrong and fault.kind == "order":
            jax.block_until_ready(look(state, ones))
        if not (wrong and fault.kind in ("order", "skip")):
            if wrong and fault.kind == "shape":
                ones = ones.astype(jnp.float16)
            elif wrong:
                happen(fault.kind)
            jax.block_until_ready(train(state, ones))
        jax.block_until_ready((train if wrong and fault.kind == "order" else look)(state, ones))
    print(f"process {index} has made all steps", flush=True)


def planned(fault: Fault, mesh: Any, *, culprit: bool) -> tuple[Any, Any, Any]:
    """The steps of a program with a plan, and its state."""
    import jax.numpy as jnp  # noqa: PLC0415

    import commplan  # noqa: PLC0415

    program = commplan.loads(plan_of(fault, culprit=culprit)).compile(mesh)
    run = program.bind(mesh, watchdog_s=BOUND_S, busy_s=BUSY_S)

    @run.jit
    @run.spmd(scale="per data", returns="same")
    def train(state: Any, scale: Any) -> Any:
        out, state = run.step(state, grads=scale * jnp.ones(fault.elements))
        return state, out.grads

    @run.jit
    @run.spmd(scale="per data", returns="same")
    def look(state: Any, scale: Any) -> Any:
        out, state = run.evaluate(state, loss=scale * jnp.ones(8))
        return state, out.loss

    return train, look, run.init()


def guarded(fault: Fault, mesh: Any, *, culprit: bool) -> tuple[Any, Any, Any]:
    """The steps of a program of plain JAX."""
    del culprit
    import jax.numpy as jnp  # noqa: PLC0415

    import commplan  # noqa: PLC0415

    guard = commplan.guard.jit(mesh=mesh, watchdog_s=BOUND_S, busy_s=BUSY_S)

    @guard
    def train(state: Any, scale: Any) -> Any:
        return state, jnp.sum(scale[:, None] * jnp.ones(fault.elements), axis=0)

    @guard
    def look(state: Any, scale: Any) -> Any:
        return state, jnp.sum(scale[:, None] * jnp.ones(8), axis=0)

    return train, look, {}


def draw(drawn: random.Random, kind: str) -> Fault:
    return drawn_rank(drawn, kind)


def judged(fault: Fault) -> Outcome:
    """Run a job, and judge its output."""
    from tests.support.ports import free_port  # noqa: PLC0415

    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", __name__, *fault.words, str(free_port())]
    with tempfile.TemporaryDirectory() as records, tempfile.TemporaryFile("w+") as output:
        if fault.kind == "memory":
            command = without_memory(command)
        else:
            environment["COMMPLAN_RECORDS"] = records
        jobs = [
            subprocess.Popen(
                [*command, str(index)], env=environment, stdout=output, stderr=output, start_new_session=True
            )
            for index in range(RANKS)
        ]
        others = [job for index, job in enumerate(jobs) if index != fault.culprit]
        awaited = others if fault.kind in ("stop", "sleep", "lock") else jobs

        def over(text: str) -> bool:
            early = fault.kind.startswith(BEFORE) and AWAITED.search(text) is not None
            return early or all(job.poll() is not None for job in awaited)

        seen = observed(jobs, output, over)
    return Outcome(fault, seen.seconds, seen.ended, seen.ended and right(fault, seen.text), seen.text)


def right(fault: Fault, text: str) -> bool:
    """Whether the culprit and the waiting line are named, and nothing else."""
    if fault.kind == "memory":
        return "this run is not recorded" in text and text.count("has made all steps") == RANKS
    if fault.kind.startswith(BEFORE):
        return set(AWAITED.findall(text)) == {str(fault.culprit)}
    if fault.kind in ("plan", "flag"):
        return differs(fault, text, "process")
    if fault.kind == "shape":
        return refused(fault, text, "process")
    heads = re.findall(r"error\[CP0834\]: (.*)", text)
    if not heads:
        return False
    if fault.kind in ("order", "skip"):
        named = {
            int(number) for head in heads for number in re.findall(r"in another order: process (\d) `", head)
        }
        return named == {fault.culprit} and not blamed(text) and "`evaluate`" not in text and "`look`" in text
    reason = "loss is not finite" in text if fault.kind == "raise" else True
    line = r"jax\.py:\d+, in `train`" if fault.place == "guard" else f"line {LINES['step']} of"
    return blamed(text) == {fault.culprit} and reason and re.search(line, text) is not None


PLACE, GUARD = Place(KINDS, BOUND_S, draw, judged), Place(GUARDED, BOUND_S, draw, judged)

if __name__ == "__main__":
    *words, port, index = sys.argv[1:]
    process(fault_of(words), int(port), int(index))
