"""Faults of processes under `jax.distributed`, one a job: who is blamed, in which line, and how soon.

    python -m bench.faults --jax --count 100 --seed 1 [--resume FILE]

As `bench.faults` does under MPI: three processes of one CPU device each, which Gloo connects.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

from bench import faults

BEFORE = "before "  # of what happens before the program is bound
KINDS = (*faults.FAULTS, BEFORE + "stop", BEFORE + "sleep")
AWAITED = re.compile(r"commplan: process(?:es)? ([\d, ]+) ha\w+ not come for .* waits in `program\.bind`")


def process(fault: faults.Fault, port: int, index: int) -> None:
    """What one process does."""
    import commplan  # noqa: PLC0415
    from commplan.lowering.jax.typing_shim import jax, jnp  # noqa: PLC0415

    jax.distributed.initialize(f"localhost:{port}", faults.RANKS, index)
    mesh = jax.make_mesh((faults.RANKS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    program = commplan.loads(faults.PLAN.format(elements=fault.elements, via=fault.via)).compile(mesh)
    if fault.kind.startswith(BEFORE) and index == fault.culprit:
        began()
        faults.happen(fault.kind.removeprefix(BEFORE))
    run = program.bind(mesh, watchdog_s=faults.BOUND_S)

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

    sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
    ones = jax.jit(lambda: jnp.ones(faults.RANKS), out_shardings=sharding)()
    state = run.init()
    for number in range(faults.STEPS):
        wrong = index == fault.culprit and number == fault.step
        if wrong:
            began()
        if wrong and fault.kind == "order":
            jax.block_until_ready(look(state, ones))
        if not (wrong and fault.kind in ("order", "skip")):
            if wrong:
                faults.happen(fault.kind)
            jax.block_until_ready(train(state, ones))
        jax.block_until_ready((train if wrong and fault.kind == "order" else look)(state, ones))


def began() -> None:
    print(f"fault at {time.time():.3f}", flush=True)


def judged(fault: faults.Fault) -> faults.Outcome:
    """Run a job, and look at what it said. Faults before `bind` end nothing: who is awaited must be said."""
    port = str(free_port())
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "bench.faults", "--process", *fault.words, port]
    with tempfile.TemporaryDirectory() as records, tempfile.TemporaryFile("w+") as output:
        environment["COMMPLAN_RECORDS"] = records
        jobs = [
            subprocess.Popen([*command, str(index)], env=environment, stdout=output, stderr=output)
            for index in range(faults.RANKS)
        ]
        others = [job for index, job in enumerate(jobs) if index != fault.culprit]
        awaited = others if fault.kind in ("stop", "sleep") else jobs
        until, said, finished = time.time() + faults.DEADLINE_S, "", None
        while time.time() < until and finished is None:
            time.sleep(0.05)
            said = read(output)
            early = fault.kind.startswith(BEFORE) and len(AWAITED.findall(said)) == len(others)
            if early or all(job.poll() is not None for job in awaited):
                finished = time.time()
        for job in jobs:
            job.kill()
            job.wait()
    start = re.search(r"fault at ([\d.]+)", said)
    seconds = finished - float(start[1]) if start and finished else None
    return faults.Outcome(fault, seconds, seconds is not None and right(fault, said), said)


def read(output: Any) -> str:
    """What processes have written so far; they write where the file's end is."""
    return os.pread(output.fileno(), 1 << 20, 0).decode(errors="replace")


def free_port() -> int:
    import socket  # noqa: PLC0415

    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def right(fault: faults.Fault, text: str) -> bool:
    """Whether the culprit is named, in the line that waited for it, and nobody else."""
    if fault.kind.startswith(BEFORE):
        return set(AWAITED.findall(text)) == {str(fault.culprit)}
    heads = re.findall(r"error\[CP0834\]: (.*)", text)
    if not heads:
        return False
    if fault.kind in ("order", "skip"):
        named = {
            int(number) for head in heads for number in re.findall(r"in another order: process (\d) `", head)
        }
        return named == {fault.culprit} and "`evaluate`" not in text and "`look`" in text
    blamed = re.findall(
        r"process (\d) (?:is stopped|has died|has not come|does not answer|was aborted)"
        r"|program has ended on process (\d)",
        text,
    )
    reason = "loss is not finite" in text if fault.kind == "raise" else True
    named = {int(first or second) for first, second in blamed}
    return named == {fault.culprit} and reason and f"line {faults.LINES['step']} of" in text
